"""The budget of CPU time is kept by counting every process once, and breaking it fails the test command."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BURN = """\
import subprocess, sys, time
CODE = "import time\\nwhile time.process_time() < 0.5: pass"

def test_in_a_child():
    subprocess.run([sys.executable, "-c", CODE], check=True)

def test_here():
    until = time.process_time() + 0.5
    while time.process_time() < until: pass
"""
CONFTEST = "from tests.cpu_budget import *  # noqa\n"


def children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def test_every_process_counts_once_and_a_broken_budget_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_burn.py").write_text(BURN)
    (tmp_path / "pytest.ini").write_text("[pytest]\ncpu_budget_s = 0.5\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "xdist.plugin",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    before = children_s()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    spent = children_s() - before
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert "CPU BUDGET BROKEN: all tests took" in done.stdout
    costs = {name: float(cost) for cost, name in re.findall(r"^ +([\d.]+)  \S*::(\w+)$", done.stdout, re.M)}
    assert costs.keys() == {"test_in_a_child", "test_here"}
    assert min(costs.values()) >= 0.5
    (whole,) = re.findall(r"^ +([\d.]+)  all, collection and workers included$", done.stdout, re.M)
    assert sum(costs.values()) < float(whole) <= spent + 0.1
