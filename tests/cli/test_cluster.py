"""``sensorium cluster status``: who is there, who is gone, and what a run of one process is told."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from sensorium.cli.main import main
from sensorium.runs.process_table import Heartbeat, ProcessRow, RunEnd, read_processes, run_end, write_processes
from sensorium.vocabulary.errors import LearnerLost

GONE = 2**22 + 1  # above any process id


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    return tmp_path


def status(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["cluster", "status", str(run)])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_every_process_is_told_with_its_state(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (ProcessRow("driver", os.getpid(), "update"), ProcessRow("engine 0", GONE, "3 threads open", 2, 7))
    write_processes(run, 5, rows)
    code, told = status(run, capsys)
    assert code == 1, "one that should live is gone"
    assert "step 5" in told
    assert "last heartbeat" in told
    lines = {part: line for line in told.splitlines() for part in ("driver", "engine 0") if part in line}
    assert "alive" in lines["driver"]
    assert "gone" in lines["engine 0"]
    write_processes(run, 5, rows, end=RunEnd("finished"))
    assert status(run, capsys)[0] == 0, "of a run that is over nobody is missed"


@pytest.mark.parametrize(
    ("error", "step", "code", "told"),
    [
        (None, 52, 0, ["step 52 of 52", "finished"]),
        (None, 38, 1, ["step 38 of 52", "stopped before its end", "--resume"]),
        (KeyboardInterrupt(), 38, 1, ["step 38 of 52", "stopped before its end", "--resume"]),
        (LearnerLost("rank 1 was killed [SIGKILL]"), 35, 1, ["failed: rank 1 was killed [SIGKILL]\n", "--resume"]),
        (ValueError("two\nlines"), 35, 1, ["step 35 of 52", "failed: ValueError: two lines\n", "--resume"]),
    ],
)
def test_how_a_run_ended_is_told_with_the_way_out(
    error: BaseException | None, step: int, code: int, told: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step_30").mkdir(parents=True)
    heartbeat = Heartbeat(run, lambda: (ProcessRow("driver", os.getpid(), "update"),), 52)
    heartbeat.at(step)
    heartbeat.close(run_end(error, finished=step == 52))
    found, text = status(run, capsys)
    assert found == code
    assert [part for part in told if part not in text] == []
    assert ("--resume" in text) == bool(code)


def test_one_that_is_stopped_is_not_called_alive(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            sleeper.send_signal(signal.SIGSTOP)
            os.waitpid(sleeper.pid, os.WUNTRACED)  # until it is
            write_processes(run, 5, (ProcessRow("engine 0", sleeper.pid, "samples"),))
            assert "stopped" in status(run, capsys)[1]
        finally:
            sleeper.kill()


def test_one_that_is_lost_is_told_from_one_that_is_being_replaced(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replaced = ProcessRow("engine 0", None, "is being replaced", 1, 7)
    write_processes(run, 5, (ProcessRow("driver", os.getpid(), "update"), replaced))
    code, told = status(run, capsys)
    assert code == 0
    assert "starts" in told
    lost = ProcessRow("engine 0", None, "is lost: cluster.restarts are used up", 1, 7, lost=True)
    write_processes(run, 5, (ProcessRow("driver", os.getpid(), "update"), lost))
    code, told = status(run, capsys)
    assert code == 1
    assert "gone" in told


def test_a_run_of_one_process_and_no_run_at_all(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = status(run, capsys)
    assert code == 0
    assert "a run of one process" in told
    code, told = status(tmp_path / "none", capsys)
    assert code == 2
    assert "holds no run" in told


def held_by(run: Path, pid: int) -> None:
    (run / "run.lock").write_text(json.dumps({"pid": pid, "host": socket.gethostname()}))


def test_a_run_of_one_process_goes_on_or_was_killed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_by(run, os.getpid())
    code, told = status(run, capsys)
    assert code == 0
    assert f"It goes on: process {os.getpid()}" in told
    with subprocess.Popen(["sleep", "0"]) as ended:
        pass
    held_by(run, ended.pid)
    code, told = status(run, capsys)
    assert code == 1
    assert "is gone and did not record how the run ended: it was killed" in told
    assert "the same command" in told


def test_a_run_whose_processes_are_not_up_yet_is_told_to_start(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "recipe.yaml").write_text("name: x\ncluster: {learners: 2, engines: 2}\nrollout: {engine: vllm}\n")
    held_by(run, os.getpid())
    code, told = status(run, capsys)
    assert code == 0
    assert f"starts: process {os.getpid()}" in told
    assert "2 learner ranks, 2 engines (vllm)" in told
    held_by(run, GONE)
    code, told = status(run, capsys)
    assert code == 1
    assert "ended before its processes were up" in told


def test_what_the_run_said_before_it_was_resumed_is_not_told_as_now(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "recipe.yaml").write_text("name: x\ncluster: {learners: 2}\n")
    write_processes(run, 5, (ProcessRow("driver", GONE, "update"), ProcessRow("learner rank 0", GONE, "trains")))
    code, told = status(run, capsys)
    assert code == 1
    assert f"The driver, process {GONE}, is gone" in told, "killed, and nobody went on with it"
    assert "the same command starts over" in told
    held_by(run, os.getpid())
    code, told = status(run, capsys)
    assert code == 0
    assert "starts" in told


def test_a_run_that_goes_on_as_one_process_forgets_those_it_had(run: Path) -> None:
    write_processes(run, 5, (ProcessRow("driver", GONE, "update"), ProcessRow("learner rank 0", GONE, "trains")))
    Heartbeat(run, lambda: (), 9).close(RunEnd("finished"))
    assert read_processes(run) is None


@pytest.mark.parametrize(
    "garbage",
    ["[]", "{", "{}", '{"written": 1, "host": "h", "step": 1, "rows": [3]}', '{"written": "x", "host": 1, "rows": null}',
     '{"written": 1, "host": "h", "step": 1, "rows": [{"part": "p", "pid": "../../etc", "does": ""}]}'],
)  # fmt: skip
def test_a_damaged_file_is_one_paragraph(garbage: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "cluster.json").write_text(garbage)
    code, told = status(run, capsys)
    assert code == 2
    assert "cluster.json" in told
