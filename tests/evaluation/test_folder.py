"""The folder of an evaluation keeps whole chunks only, whatever a kill or a crash left of the last one."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.evaluation.folder import EvaluationFolder, Key
from sensorium.runs.durable import to_line
from sensorium.vocabulary.errors import CheckpointError

KEYS: list[list[Key]] = [[(f"t{p}", p, s) for p in places for s in (0, 1)] for places in ((0, 1), (2, 3), (4,))]
ROWS = [[{"task": t, "position": p, "sample": s, "response": "wörds\n" * p} for t, p, s in chunk] for chunk in KEYS]
WHOLE = "".join(to_line(row) for chunk in ROWS for row in chunk).encode()
ENDS = [0, *(sum(len(to_line(row).encode()) for chunk in ROWS[: i + 1] for row in chunk) for i in range(3))]
CLAIM: dict[str, Any] = {
    "settings": {"temperature": 0.0, "samples": 2},
    "weights": "abc",
    "model": "here",
    "surroundings": {"threads": "1"},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> EvaluationFolder:
    folder = EvaluationFolder(tmp_path_factory.mktemp("evaluation"))
    folder.take(CLAIM)
    return folder


@given(kept=st.integers(0, len(WHOLE)), damage=st.sampled_from([b"", b"{", b"\0\0\n", b'{"task": "t9"}\n', b"[1]\n"]))
def test_after_any_kill_the_rest_is_played_and_the_bytes_are_the_same(
    shared: EvaluationFolder, kept: int, damage: bytes
) -> None:
    shared.samples.write_bytes(WHOLE[:kept] + damage)
    with shared.journal() as journal:
        done = journal.recover(KEYS)
        assert done == sum(end <= kept for end in ENDS[1:]), "a chunk is kept as a whole or not at all"
        assert shared.samples.stat().st_size == ENDS[done]
        for chunk in ROWS[done:]:
            journal.append(chunk)
    assert shared.samples.read_bytes() == WHOLE


def test_lines_that_belong_elsewhere_are_not_taken_for_samples(shared: EvaluationFolder) -> None:
    shared.samples.write_bytes(WHOLE[ENDS[1] :])
    with shared.journal() as journal:
        assert journal.recover(KEYS) == 0


def test_an_evaluation_of_something_else_is_refused_and_says_what_differs(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path / "e")
    assert folder.take(CLAIM) == CLAIM
    assert folder.take({**CLAIM, "model": "moved", "surroundings": {}}) == CLAIM, "the same weights may lie elsewhere"
    other = {**CLAIM, "settings": {"temperature": 1.0, "samples": 2}}
    with pytest.raises(CheckpointError, match=r"settings\.temperature is 0\.0 there and 1\.0 here.*--out.*--fresh"):
        folder.take(other)
    with pytest.raises(CheckpointError, match='weights is "abc" there and "abd" here'):
        folder.refuse_other({"weights": "abd"})
    folder.clear()
    assert folder.take(other) == other


def test_clearing_takes_away_only_what_an_evaluation_wrote(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    folder.take(CLAIM)
    with folder.journal() as journal:
        journal.append(ROWS[0])
    folder.finish({"name": "x"}, "# x\n")
    folder.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_samples_of_nobody_are_refused(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointError, match=r"evaluation.json.*--fresh"):
        EvaluationFolder(tmp_path).take(CLAIM)


def test_two_processes_do_not_write_into_one_folder(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    folder.take(CLAIM)
    with folder.journal(), pytest.raises(CheckpointError, match="another process"), folder.journal():
        pass
    with folder.journal(), pytest.raises(CheckpointError, match="another process"):
        folder.clear()
    assert folder.samples.exists()


def test_an_unfinished_evaluation_is_not_read_as_a_finished_one(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    with pytest.raises(CheckpointError, match="holds no evaluation"):
        folder.read()
    folder.take(CLAIM)
    with pytest.raises(CheckpointError, match="not finished"):
        folder.read()


def test_a_chunk_is_on_the_disk_when_it_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = EvaluationFolder(tmp_path)
    folder.take(CLAIM)
    sizes, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (real(file), sizes.append(folder.samples.stat().st_size)))
    with folder.journal() as journal:
        for chunk in ROWS:
            journal.append(chunk)
            assert sizes[-1] == folder.samples.stat().st_size
