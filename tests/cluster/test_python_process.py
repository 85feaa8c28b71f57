"""Processes that work for this one end for certain, with whatever they have started."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from sensorium.cluster.python_process import any_alive, mapped_segments

LEADER = """
import subprocess, sys, tempfile, time
from sensorium.cluster.python_process import guard_group
guard_group()
with tempfile.NamedTemporaryFile(prefix="psm_", dir="/dev/shm", delete=False) as segment:
    segment.write(b"shared")
holding = "import mmap, sys, time; file = open(sys.argv[1], 'r+b'); held = mmap.mmap(file.fileno(), 0); "
holding += "print(sys.argv[1], flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", holding, segment.name])
time.sleep(600)
"""


def test_a_group_and_its_shared_memory_end_with_its_leader_however_that_is_killed() -> None:
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, env=os.environ | path, start_new_session=True
    )
    try:
        assert leader.stdout is not None
        segment = Path(leader.stdout.readline().decode().strip())
        assert segment.exists()
        assert any_alive(leader.pid)
        os.kill(leader.pid, signal.SIGKILL)
        leader.wait()
        until = time.monotonic() + 60
        while any_alive(leader.pid):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert not segment.exists()
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


HANGING = """
import sys, time
from sensorium.cluster.python_process import PipedProcess
hanging = [sys.executable, "-S", "-c", "import time; print('0', end='', flush=True); time.sleep(600)"]
kept = PipedProcess(hanging, {}, silent=True)
kept.read(1, time.monotonic() + 60)
print(kept.pid, PipedProcess(hanging, {}, silent=True).pid)
"""


def test_a_piped_process_that_hangs_ends_with_who_started_it_and_leaves_no_open_pipe() -> None:
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", HANGING]
    ended = subprocess.run(command, capture_output=True, env=os.environ | path, text=True)
    assert ended.stderr == ""
    assert [pid for pid in ended.stdout.split() if Path("/proc", pid).exists()] == []
    assert len(ended.stdout.split()) == 2
