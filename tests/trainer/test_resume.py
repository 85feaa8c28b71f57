"""A run of three steps equals two steps, an end in the middle of the next, and a resume: bit for bit."""

import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sensorium.runs.metrics import read_metrics
from studies.fork_server import ROOT, ForkServer
from studies.kills import KILLED, TRAIN, kill_and_resume
from studies.recipes import RESUMED, STEPS
from studies.resumed_runs import differences, moved

from ..cpu_budget import count

MOMENTS = {"rounds and early stop": "3:rollout:2"}
FRESH = "single turn, with KL"


def run(server: ForkServer, folder: Path, *given: str) -> int:
    ended = server.run(TRAIN, *given, log=folder / "log.txt")
    count(ended.cpu_s)
    return ended.code


def run_afresh(*given: str) -> int:
    """In a new interpreter, with another seed of hashes."""
    code = "import sys; from studies.resumed_runs import train_recipe; train_recipe(*sys.argv[1:])"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONHASHSEED": "random", "PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", code, *given], env=environment, check=False).returncode


@pytest.mark.parametrize("name", sorted(RESUMED))
def test_a_killed_and_resumed_run_repeats_the_uninterrupted_one(name: str, tmp_path: Path, fork_server: ForkServer) -> None:
    """A copy is taken at the moment, and goes on: that of one recipe in a new interpreter."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RESUMED[name])
    whole, broken, moment = tmp_path / "whole", tmp_path / "broken", MOMENTS.get(name, "3:update")
    assert run(fork_server, tmp_path, str(recipe), str(whole), moment, str(broken)) == 0, said(tmp_path)
    again = run_afresh if name == FRESH else partial(run, fork_server, tmp_path)
    assert not (broken / "checkpoints" / f"step_{STEPS:06d}").exists()
    assert again(str(recipe), str(broken), "resume") == 0, said(tmp_path)
    assert [row["step"] for row in read_metrics(whole / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert differences(whole, broken) == []
    assert moved(whole), "training moved the weights"


def said(folder: Path) -> str:
    return (folder / "log.txt").read_text()[-2000:]


def test_a_kill_at_a_random_moment_leaves_no_trace(tmp_path: Path, fork_server: ForkServer) -> None:
    """The short form of studies/kills.py, which holds two hundred kills of four recipes."""
    name = "LoRA"
    found = kill_and_resume(name, RESUMED[KILLED[name]], tmp_path, fork_server, random.Random(name), kills=1)
    count(found.cpu_s)
    assert len(found.kills) == 1
    assert found.differences == []
