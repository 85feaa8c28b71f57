"""A test that hangs fails by what its processes do, not by the clock: a slow one goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = {
    "waits for an event of its own loop": "asyncio.run(asyncio.Event().wait())",
    "waits for a thread": "threading.Event().wait()",
    "waits for a child that waits": 'subprocess.run([sys.executable, "-c", "import threading; threading.Event().wait()"])',
    "computes without end": "while True: pass",
}
SLOW = """\
CODE = '''import threading, time
for _ in range(20):
    threading.Event().wait(0.3)
    until = time.process_time() + 0.03
    while time.process_time() < until: pass
'''

def test_works_a_little_now_and_then():
    exec(CODE)

def test_waits_for_a_child_that_works():
    subprocess.run([sys.executable, "-c", CODE], check=True)
"""
HEAD = "import asyncio, subprocess, sys, threading, time\n\n"


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """A test run in which two seconds without work are a hang, and two CPU seconds of its own too many."""
    (folder / "conftest.py").write_text("from tests.cpu_budget import *\nfrom tests.standstill import *\n")
    (folder / "test_it.py").write_text(HEAD + text)
    (folder / "pytest.ini").write_text("[pytest]\nstandstill_s = 2\ncpu_budget_of_a_test_s = 2\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("text", TESTS.values(), ids=TESTS.keys())
def test_a_test_that_hangs_fails_and_the_next_one_runs(text: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"def test_hangs():\n    {text}\n\ndef test_next(): pass\n")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert ("CPU seconds and goes on" if "while" in text else "the test hangs") in done.stdout
    assert "test_it.py" in done.stdout + done.stderr


def test_a_slow_test_that_works_passes(tmp_path: Path) -> None:
    done = run(tmp_path, SLOW)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
