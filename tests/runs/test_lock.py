"""A run directory has one process at a time; who holds it is said, and death lets go."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sensorium.runs.run_directory import lock_run, refuse_moved
from sensorium.vocabulary.errors import RecordError

HOLDER = """
import os, sys, time
from pathlib import Path
from sensorium.runs.run_directory import lock_run
with lock_run(Path(sys.argv[1])):
    if len(sys.argv) > 2:
        heard, told = os.pipe()
        if not os.fork():
            os.write(told, b"!")  # the child runs, so what it does at a fork is done
            time.sleep(600)
        os.read(heard, 1)
    print("held", flush=True)
    time.sleep(600)
"""


def hold(folder: Path, *more: str) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *more], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_second_process_is_refused_with_who_holds_it_and_may_start_after_a_kill(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        holds = rf"process {holder.pid} on \S+ since 20\S+ \(-c {tmp_path}\)"
        with pytest.raises(RecordError, match=holds), lock_run(tmp_path):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with lock_run(tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / "run.lock").read_text()
    assert (tmp_path / "run.lock").read_text() == ""


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    holder = hold(tmp_path, "fork")
    try:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with lock_run(tmp_path):
            pass
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_the_same_process_cannot_take_it_twice(tmp_path: Path) -> None:
    with lock_run(tmp_path), pytest.raises(RecordError, match=f"process {os.getpid()}"), lock_run(tmp_path):
        pass


def test_a_file_system_without_locks_is_said_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with (
        pytest.warns(UserWarning, match=f"{re.escape(str(tmp_path))}.*does not support locks.*second process"),
        lock_run(tmp_path),
    ):
        pass


def test_a_directory_that_cannot_be_made_is_one_paragraph(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="choose another place"), lock_run(tmp_path / "file" / "run"):
        pass
    with pytest.raises(RecordError, match="choose another place"), lock_run(tmp_path / "file"):
        pass


def test_a_deleted_lock_file_and_a_moved_folder_let_nobody_in(tmp_path: Path) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    holder = hold(folder)
    try:
        (folder / "run.lock").unlink()
        with pytest.raises(RecordError, match="in use"), lock_run(folder):
            pass
        folder.rename(moved)
        with pytest.raises(RecordError, match="in use"), lock_run(moved):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with lock_run(moved):
        pass


def test_who_holds_a_folder_hears_that_it_was_moved_removed_or_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with lock_run(folder):
        refuse_moved(folder)
        folder.rename(tmp_path / "moved")
        with pytest.raises(RecordError, match=r"moved or removed.*--resume"):
            refuse_moved(folder)
        folder.mkdir()
        with pytest.raises(RecordError, match="another folder"):
            refuse_moved(folder)
    refuse_moved(folder)
