"""Whole runs that sample with vLLM: they learn from it, end without leaving processes behind, and are resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sensorium.cluster.python_process import any_alive
from sensorium.models.tiny import make_tiny

from ..engines.test_vllm import CLOSE_TO_POLICY, NEEDS_VLLM, engine_core, general_bench
from ..models.test_general_families import play

pytestmark = NEEDS_VLLM
RUN = [
    "shapes", "rollout.engine={name: vllm, options: {max_context: 512, max_rows: 64}}", "rollout.schedule=eager",
    "rollout.max_context_tokens=512",
    "threads=1", "batch.prompts_per_step=2", "batch.group_size=2", "evaluation.every=0", "evaluation.at_start=false",
    "health.sight_tasks=0", "checkpoint.every=1", "steps=400",
]  # fmt: skip
LIMIT_S = 900.0


def trained(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "sensorium.cli.main", "train", *RUN, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def wait_for(what: Callable[[], object], driver: "subprocess.Popen[str] | None" = None) -> None:
    until = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < until
        assert driver is None or driver.poll() is None, driver.communicate()[0]
        time.sleep(0.1)


def actor_of(driver: int) -> int:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent, command = stat.read_text().rpartition(")")[2].split()[1], (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(parent) == driver and "engines.vllm.actor" in command:
            return int(stat.parent.name)
    raise AssertionError("the run has an actor")


def steps_of(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_run_leaves_no_process_and_a_killed_engine_ends_it_in_a_paragraph(tmp_path: Path) -> None:
    run = tmp_path / "run"
    driver = trained(f"run_dir={run}")
    wait_for(lambda: len(steps_of(run)) >= 2 and any((run / "checkpoints").glob("step_*")), driver)
    actor = actor_of(driver.pid)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    wait_for(lambda: not any_alive(actor))

    again = trained(f"run_dir={run}", "--resume")
    done = max(steps_of(run))
    wait_for(lambda: max(steps_of(run)) > done + 1, again)
    actor = actor_of(again.pid)
    os.kill(engine_core(actor), signal.SIGKILL)
    told, _ = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 2, told
    assert "nothing more can be sampled" in " ".join(told.split())
    assert "Traceback" not in told
    assert not any_alive(actor)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "every step once"
    assert max(row.get("mismatch/max", 0.0) for row in rows) < 2e-5


@pytest.mark.parametrize(("name", "kind"), [("qwen2_audio", "audio"), ("llava_next", "image"), ("olmo2", "")])
def test_two_turns_with_media_of_two_sizes_are_sampled_and_trained(name: str, kind: str, tmp_path: Path) -> None:
    """Two steps, each with a push; the learner computes what was sampled."""
    if name == "qwen2_audio":
        make_tiny(name, tmp_path / "model")
    else:
        general_bench(name, tmp_path / "model")
    engine = {"name": "vllm", "options": {"max_context": 512, "max_rows": 8}}
    rollout = {"engine": engine, "schedule": "eager", "max_new_tokens": 5, "max_turns": 2, "max_context_tokens": 512}
    run = play(tmp_path / "model", tmp_path / "run", kind, 2, rollout=rollout)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["mismatch/max"] for row in rows) < CLOSE_TO_POLICY
    assert all(row["policy/grad_norm"] > 0 and row["engine/parity_max/text"] < CLOSE_TO_POLICY for row in rows)
