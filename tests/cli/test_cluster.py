"""``sensorium cluster status``: who is there, who is gone, and what a run of one process is told."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from sensorium.cli.main import main
from sensorium.record.processes import ProcessRow, read_processes, write_processes
from sensorium.trainer.heartbeat import Heartbeat

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
    write_processes(run, 5, rows, ended=True)
    assert status(run, capsys)[0] == 0, "of a run that is over nobody is missed"


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


def test_a_run_whose_processes_are_not_up_yet_is_told_to_start(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "recipe.yaml").write_text("name: x\ncluster: {learners: 2, engines: 2}\nrollout: {engine: vllm}\n")
    held_by(run, os.getpid())
    code, told = status(run, capsys)
    assert code == 0
    assert f"starts: process {os.getpid()}" in told
    assert "2 learner ranks, 2 engines (vllm)" in told
    held_by(run, GONE)
    assert "ended before its processes were up" in status(run, capsys)[1]


def test_what_the_run_said_before_it_was_resumed_is_not_told_as_now(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "recipe.yaml").write_text("name: x\ncluster: {learners: 2}\n")
    write_processes(run, 5, (ProcessRow("driver", GONE, "update"), ProcessRow("learner rank 0", GONE, "trains")))
    assert status(run, capsys)[0] == 1, "killed, and nobody went on with it"
    held_by(run, os.getpid())
    code, told = status(run, capsys)
    assert code == 0
    assert "starts" in told


def test_a_run_that_goes_on_as_one_process_forgets_those_it_had(run: Path) -> None:
    write_processes(run, 5, (ProcessRow("driver", GONE, "update"), ProcessRow("learner rank 0", GONE, "trains")))
    Heartbeat(run, lambda: ()).close()
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
