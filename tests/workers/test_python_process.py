"""Processes that work for this one end for certain, with whatever they have started."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from sensorium.workers.python_process import any_alive, mapped_segments

LEADER = """
import subprocess, sys, time
from sensorium.workers.python_process import guard_group
guard_group()
subprocess.Popen(["sleep", "600"])
print("started", flush=True)
time.sleep(600)
"""


def test_a_group_ends_with_its_leader_however_that_is_killed() -> None:
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, env=os.environ | path, start_new_session=True
    )
    try:
        assert leader.stdout is not None
        assert leader.stdout.readline() == b"started\n"
        assert any_alive(leader.pid)
        os.kill(leader.pid, signal.SIGKILL)
        leader.wait()
        until = time.monotonic() + 60
        while any_alive(leader.pid):
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        leader.kill()
        if any_alive(leader.pid):
            os.killpg(leader.pid, signal.SIGKILL)


def test_shared_memory_that_a_group_has_mapped_is_found_until_it_is_removed() -> None:
    memory = SharedMemory(create=True, size=100)
    segment = Path("/dev/shm") / memory.name.lstrip("/")
    try:
        assert segment in mapped_segments(os.getpgrp())
    finally:
        memory.unlink()
    assert segment not in mapped_segments(os.getpgrp()), "it is mapped still, and has no name"
    memory.close()
