"""``sensorium cluster status``: who is there, who is gone, and what a run of one process is told."""

import os
from pathlib import Path

import pytest

from sensorium.cli.main import main
from sensorium.record.processes import ProcessRow, write_processes

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


def test_a_run_of_one_process_and_no_run_at_all(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = status(run, capsys)
    assert code == 0
    assert "a run of one process" in told
    code, told = status(tmp_path / "none", capsys)
    assert code == 2
    assert "holds no run" in told
