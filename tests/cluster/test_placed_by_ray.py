"""Engines and workers that Ray places: one that is killed is replaced, and a cluster that does not fit is told."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sensorium.assembly.ranks import Ranks
from sensorium.cluster.ray_host import ProcessActor, RayHost
from sensorium.envs.remote.client import PlacedEnvironment
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.runs.ledger import Ledger
from sensorium.runs.metrics import read_metrics
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import EngineLost, LearnerLost, RecipeError, WorkersLost
from tests.cluster.killed_engine import kill_an_engine
from tests.cluster.test_workers import NUMBERS, answers_though_one_hangs, fates_of, killing
from tests.engines.test_vllm import engine_core
from tests.trainer.small import small

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here: pip install 'sensorium[ray]'"),
    pytest.mark.timeout(1800),
]
NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")
TWO = ("cluster.engines=2", "cluster.placement=ray", "rollout.schedule=eager")
VLLM = (
    "rollout.engine={name: vllm, options: {max_context: 512, max_rows: 16}}", "rollout.max_context_tokens=512", "threads=1",
    "batch.prompts_per_step=2",
    "batch.group_size=2", "evaluation.every=0", "evaluation.at_start=false", "health.sight_tasks=0", "checkpoint.every=0",
    "steps=4", "schedule={name: asynchronous, max_staleness: 1}", "algorithm.correction.weights=token",
)  # fmt: skip


def trained_with_a_kill(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, process_of: Callable[[int], int] = lambda pid: pid
) -> list[dict[str, float]]:
    """Train with one kill; the metrics. Each episode is trained once."""
    kill_an_engine(monkeypatch, process_of)
    run = train(recipe)
    ledger = Ledger(run / "ledger.sqlite")
    fates = [fate for step in range(1, recipe.steps + 1) for fate in ledger.fates(step).values()]
    ledger.close()
    trained = recipe.steps * recipe.batch.prompts_per_step * recipe.batch.group_size
    assert fates.count("trained") == trained, "each episode once"
    return read_metrics(run / "metrics.jsonl")


def test_a_killed_engine_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = trained_with_a_kill(small(tmp_path / "run", "rollout.engine.name=process", *TWO), monkeypatch)
    assert rows[-1]["engine/replaced"] == 1
    assert rows[-1]["engine/sampled_again"] >= 1


def test_a_killed_worker_of_environments_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killing(monkeypatch, PlacedEnvironment, "step", 2)
    terms = [{"name": "environment"}, {"name": "tests.cluster.slow_term:SlowParity"}]
    placed = ("cluster.environments=2", "cluster.rewards=1", "cluster.placement=ray", "rollout.schedule=eager", "steps=2")
    run = train(small(tmp_path / "run", *placed, **NUMBERS | {"rewards": {"terms": terms}}))
    rows = read_metrics(run / "metrics.jsonl")
    assert rows[-1]["worker/environment_replaced"] == 1
    assert rows[-1]["worker/rolled_again"] >= 1
    assert rows[-1]["worker/reward_ready"] == 1
    assert fates_of(run, 2) == ["trained"] * 8


def test_a_worker_that_hangs_is_ended_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    host = RayHost("", {"CPU": {"cluster.rewards": 2.0}}, None, "a parrot", WorkersLost)
    try:
        said = answers_though_one_hangs(host, monkeypatch)
    finally:
        host.close()
    assert any("parrot 0" in one and "gave no sign of life for 1 s" in one and "It is replaced" in one for one in said)


def test_ranks_are_placed_and_a_killed_one_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute what processes of this machine compute, to the bit."""
    ranks = ("threads=2", "cluster.learners=2", "checkpoint.every=1")
    expected = train(small(tmp_path / "processes", *ranks, "steps=2"))
    placed = small(tmp_path / "actors", *ranks, "cluster.placement=ray", "steps=2")
    ask = Ranks.ask

    def kill_at_the_second_step(self: Ranks, name: str, *given: Any) -> Any:
        if name == "step" and any((tmp_path / "actors/checkpoints").glob("step_*")):
            os.kill(self.pids[1], signal.SIGKILL)
        return ask(self, name, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Ranks, "ask", kill_at_the_second_step)
        with pytest.raises(LearnerLost, match=r"rank 1 .* was killed by SIGKILL.* step 1: go on from it with --resume"):
            train(placed)
    found = train(placed, resume=True)
    ends = [max((run / "checkpoints").glob("step_*")) for run in (expected, found)]
    weights, resumed = (load_file(end / "model.safetensors") for end in ends)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@NEEDS_VLLM
def test_two_vllm_engines_sample_across_updates_and_one_that_dies_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("shapes", [f"run_dir={tmp_path / 'run'}", *VLLM, *TWO])
    rows = trained_with_a_kill(recipe, monkeypatch, engine_core)
    assert rows[-1]["engine/replaced"] == 1
    assert all(row["staleness/max"] <= 1 for row in rows)
    assert all(row["mismatch/effective_share"] > 0.5 for row in rows)


@pytest.fixture
def busy_cluster() -> Iterator[Any]:
    """A cluster of two CPUs that somebody else uses."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    holder = ray.remote(ProcessActor).options(num_cpus=2).remote()
    ray.get(holder.versions.remote())
    until = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) and time.monotonic() < until:
        time.sleep(0.1)  # what is free is told with a delay
    yield ray
    ray.shutdown()


def test_a_cluster_that_is_too_small_busy_or_of_another_version_is_told_in_time(
    busy_cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs = {"CPU": {"cluster.engines": 2.0}}
    with pytest.raises(RecipeError, match=r"has 2 CPUs, and the recipe's cluster section needs 3"):
        RayHost("", {"CPU": {"cluster.engines": 3.0}}, None, "an engine", EngineLost)
    host = RayHost("", needs, None, "an engine", EngineLost, start_s=2.0)
    with pytest.raises(EngineLost, match=r"did not place an engine within 2 s \(cluster.start_s\).*Free now"):
        host.start("sensorium.engines.process_child", 1, tmp_path / "log.txt")
    host = RayHost("", needs, None, "an engine", EngineLost, cpus=0.0)
    monkeypatch.setattr("sensorium.cluster.ray_host.versions", lambda: {"sensorium": "9", "torch": "9", "python": "9"})
    with pytest.raises(EngineLost, match=r"an engine runs sensorium .*, and the driver 9"):
        host.start("sensorium.engines.process_child", 1, tmp_path / "log.txt")
