"""A run whose environments are played through the service computes what the same run computes with them in this process."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import train
from tests.recipes import parsed, quick

from .running import make_table, serving

OPTIONS = {"max_turns": 3, "max_solution": 2, "cell": 16}
MEASURED_ANEW = ("time/", "wait/", "throughput/", "memory/", "media/", "latency/", "environment/hung", "environment/places")
"""Metrics of the machine and of the threads in which environments are called, not of what was played and learned."""


def learned(folder: Path, environment: str, options: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Two steps of play and training: metrics, and weights."""
    played = {"environment": environment, "size": 8, "options": options}
    tasks = {
        split: [{"source": "environments", "options": {**played, "split": side}}]
        for split, side in (("train", "train"), ("evaluate", "test"))
    }
    recipe = quick(
        "alike", model={"path": "package:frozen_lake"}, tasks=tasks, rewards={"terms": [{"name": "environment"}]}
    )
    rollout = {"max_turns": 3, "max_new_tokens": 6, "window": 1}
    evaluation = {"every": 1}
    directory = train(parsed(recipe, folder, rollout=rollout, evaluation=evaluation, health={"sight_tasks": 0}))
    run = RunDirectory(directory)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if not key.startswith(MEASURED_ANEW)} for row in rows]
    return kept, load_file(sorted(run.checkpoints.glob("step_*"))[-1] / "model.safetensors")


def test_the_same_seed_gives_the_same_numbers_and_weights_here_and_through_the_service(tmp_path: Path) -> None:
    here, weights = learned(tmp_path / "here", "sokoban", OPTIONS)
    with serving(make_table(capacity=64)) as address:
        remote = {"servers": [address], "environment": "sokoban", "options": OPTIONS}
        there, others = learned(tmp_path / "there", "remote", remote)
    assert len(here) == 2
    assert here == there
    assert any(row["policy/grad_norm"] > 0 for row in here), "something was learned"
    assert all(weights[name].equal(others[name]) for name in weights)
