"""One changed byte in any file of a folder is noticed and named."""

import os
from pathlib import Path

import pytest

from sensorium.runs import checkpoint_layout
from sensorium.runs.checkpoint_layout import FileContent, contents_of, differences, digests_of


def test_every_kind_of_damage_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "deep" / "b").write_bytes(b"")
    recorded = contents_of(tmp_path)
    assert list(recorded) == ["a", "deep/b"]
    assert differences(tmp_path, recorded) == []
    (tmp_path / "a").write_bytes(b"abd")
    assert differences(tmp_path, recorded) == ["a has other bytes than were written"]
    (tmp_path / "a").write_bytes(b"ab")
    assert differences(tmp_path, recorded) == ["a has 2 bytes instead of 3"]
    (tmp_path / "a").unlink()
    assert differences(tmp_path, recorded) == ["a is missing"]


def test_a_record_without_digests_is_compared_by_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert differences(tmp_path, {"a": FileContent(3)}) == []
    assert differences(tmp_path, {"a": FileContent(4)}) == ["a has 3 bytes instead of 4"]


def test_the_digest_sees_every_piece_and_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_layout, "PIECE", 1000)
    whole = os.urandom(3_500)
    path = tmp_path / "file"
    path.write_bytes(whole)
    before = digests_of([path])[path]
    assert digests_of([path])[path] == before
    for at in (0, 999, 1000, 2500, 3499):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert digests_of([path])[path] != before
    path.write_bytes(whole[1000:2000] + whole[:1000] + whole[2000:])
    assert digests_of([path])[path] != before
