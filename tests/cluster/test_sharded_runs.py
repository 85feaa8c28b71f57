"""Runs whose learner is spread over ranks: the run of one process, resumed by any number of ranks, ended by a death.

Ranks are forks of a server that has imported everything; ``python -m studies.sharded_learners`` starts real ones.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sensorium.assembly.ranks import Ranks
from sensorium.recipe.schema import Recipe
from sensorium.runs.process_table import read_processes
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import LearnerLost

from ..trainer.small import small

pytestmark = pytest.mark.usefixtures("forked_python")
CRITIC: dict[str, Any] = {
    "model": {"path": "tiny:qwen2", "device": "cpu"},
    "algorithm": {"advantage": {"name": "gae"}, "critic": {"trunk": "own"}, "kl": {"coef": 0.1}},
    "warm_start": {"steps": 1, "prompts_per_step": 2},
}
UNLIKE = ("time/", "wait/", "throughput/", "memory/", "media/", "health/", "latency/")


def rows_of(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(UNLIKE)} for row in rows]


def recipe(folder: Path, *overrides: str, **changes: Any) -> Recipe:
    return small(folder, "threads=1", *overrides, **(CRITIC | changes))


def assert_alike(one: Path, other: Path) -> None:
    """The same rows and weights, but for what rounding makes of three updates."""
    for expected, found in zip(rows_of(one), rows_of(other), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    ends = [max((run / "checkpoints").glob("step_*")) for run in (one, other)]
    weights, resumed = (load_file(end / "model.safetensors") for end in ends)
    for name, weight in weights.items():
        assert torch.allclose(resumed[name], weight, atol=1e-4), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of one process."""
    return train(recipe(tmp_path_factory.mktemp("one process") / "alone", "steps=2"))


def test_two_ranks_make_the_run_of_one_process_which_goes_on_from_their_checkpoint(tmp_path: Path, alone: Path) -> None:
    """With a warm start, a reference and a critic of its own, whose moments and weights are spread over the ranks."""
    run = train(recipe(tmp_path / "ranks", "cluster.learners=2", "steps=1"))
    train(recipe(tmp_path / "ranks", "steps=2"), resume=True)
    assert list(run.glob("checkpoints/*/trainer/shards/*.safetensors"))
    assert_alike(alone, run)


def test_two_ranks_that_share_tokens_make_the_run_of_one_process_which_goes_on(tmp_path: Path) -> None:
    """With adapters, a KL in the reward and a warm start."""
    changes: dict[str, Any] = {
        "model": {"path": "tiny:qwen2", "device": "cpu", "lora": {"rank": 2}},
        "algorithm": {"kl": {"coef": 0.1, "place": "reward"}},
    }
    expected = train(recipe(tmp_path / "alone", "steps=2", **changes))
    run = train(recipe(tmp_path / "ranks", "cluster.learners=2", "cluster.sequence_parallel=2", "steps=1", **changes))
    train(recipe(tmp_path / "ranks", "steps=2", **changes), resume=True)
    assert_alike(expected, run)


def test_a_dead_rank_ends_the_run_and_ranks_go_on_from_the_last_checkpoint(
    tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is that of one process, so its whole state is given out to the ranks."""
    run = train(recipe(tmp_path / "ranks", "steps=1"))
    ask, killed = Ranks.ask, []

    def kill_at_step(self: Ranks, name: str, *given: Any) -> Any:
        if name == "step" and not killed:
            killed.extend(self.pids)
            os.kill(self.pids[1], signal.SIGKILL)
        return ask(self, name, *given)

    monkeypatch.setattr(Ranks, "ask", kill_at_step)
    resumed = recipe(tmp_path / "ranks", "cluster.learners=2", "steps=2")
    with pytest.raises(LearnerLost, match=r"rank 1 .* was killed by SIGKILL.* step 2: go on from it with --resume"):
        train(resumed, resume=True)
    assert not any(Path(f"/proc/{pid}").exists() for pid in killed)
    told = read_processes(run)
    assert told is not None
    assert told.end is not None
    assert (told.end.how, "was killed by SIGKILL" in told.end.cause) == ("failed", True)
    train(resumed, resume=True)
    assert_alike(alone, run)
