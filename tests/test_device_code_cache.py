"""Compiled code in the user's cache is used only if it is whole and nobody else could have written it."""

import itertools
import threading
from pathlib import Path

import pytest

from sensorium.kernels.device_code import cache_folder, keep, read_kept


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder() / "one.cubin"


def test_code_that_is_cut_off_or_changed_is_not_used(file: Path) -> None:
    assert read_kept(file) is None
    keep(b"code", file)
    assert read_kept(file) == b"code"
    whole = file.read_bytes()
    for broken in (whole[:10], b"", whole[:-1] + b"x", b"x" + whole[1:]):
        file.write_bytes(broken)
        assert read_kept(file) is None
    keep(b"other", file)
    assert read_kept(file) == b"other"


@pytest.mark.parametrize("folder", [False, True])
def test_what_others_could_have_written_is_not_used(file: Path, folder: bool) -> None:
    keep(b"code", file)
    (file.parent if folder else file).chmod(0o777)
    assert read_kept(file) is None


def test_a_cache_that_cannot_be_written_keeps_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep(b"code", cache_folder() / "one.cubin")
    assert read_kept(cache_folder() / "one.cubin") is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", _no_home)
    keep(b"code", cache_folder() / "one.cubin")
    assert read_kept(cache_folder() / "one.cubin") is None


def test_kept_code_is_read_from_the_folder_that_was_checked(tmp_path: Path) -> None:
    """A link on the way to the cache is switched all the time between our folder and one that anybody can write to."""
    ours, theirs, link, over = tmp_path / "ours", tmp_path / "theirs", tmp_path / "link", threading.Event()
    for folder in (ours, theirs):
        folder.mkdir()
        keep(folder.name.encode(), folder / "code")
    theirs.chmod(0o777)
    assert read_kept(theirs / "code") is None
    keep(b"more", theirs / "more")
    assert not (theirs / "more").exists(), "nothing is written where others may replace it"
    link.symlink_to(ours)

    def switch() -> None:
        for turn in itertools.cycle((theirs, ours)):
            (tmp_path / "new").symlink_to(turn)
            (tmp_path / "new").rename(link)
            if over.is_set():
                return

    attacker = threading.Thread(target=switch)
    attacker.start()
    try:
        found = {read_kept(link / "code") for _ in range(20_000)}
    finally:
        over.set()
        attacker.join()
    assert found <= {b"ours", None}


def test_a_cache_folder_is_named_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is switched later leads nowhere else."""
    (tmp_path / "own").mkdir()
    (tmp_path / "sensorium").symlink_to("own")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path.resolve() / "own"


def _no_home(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")
