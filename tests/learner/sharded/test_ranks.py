"""Ranks that share an update compute what one process computes: metrics, gradients and weights.

Ranks are forks of a server that has imported everything. One set of them computes all scenarios. Four ranks, and one, are
run by ``python -m studies.sharded_learners``.
"""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from studies.fork_server import ForkServer

from ...forked import forked_python
from .scenarios import SCENARIOS, SHAREABLE, Outcome, compute, make_checkpoints

EXACT = [name for name, scenario in SCENARIOS.items() if scenario.dtype == "float32"]
PLAIN = [name for name in SCENARIOS if name != "long video"]
SHARED = [f"{name}@2" for name in SHAREABLE if name != "pictures"]  # experts and critic show the same pictures


def start_ranks(folder: Path, size: int, names: list[str]) -> list[subprocess.Popen]:
    """The ranks of a team, each with its log in ``folder``."""
    ranks = []
    for rank in range(size):
        command = [sys.executable, "-m", "tests.learner.sharded.scenarios", str(rank), str(size), str(folder), *names]
        with (folder / f"log-{size}-{rank}").open("w") as log:
            ranks.append(subprocess.Popen(command, stdout=log, stderr=log))
    return ranks


def outcome(folder: Path, size: int, rank: int, name: str) -> Outcome:
    path = folder / f"{size}-{rank}-{name}.pt"
    assert path.exists(), (folder / f"log-{size}-{rank}").read_text()
    return Outcome(**torch.load(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    """The results of two ranks, and the checkpoints they started from."""
    folder = tmp_path_factory.mktemp("ranks")
    make_checkpoints(folder)
    with forked_python(fork_server):
        for rank in start_ranks(folder, 2, [*PLAIN, *SHARED]):
            rank.wait()
    return folder


def assert_equal(expected: Outcome, found: Outcome) -> None:
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        # The last bit of a log-prob here is 5e-7. The largest ratio shows the most that any two of them are off.
        bound = 2e-6 if name == "policy/ratio_max" else 1e-6
        assert found.metrics[name] == pytest.approx(value, rel=bound, abs=bound), name
    assert len(found.gradients) == len(expected.gradients)
    for i, (one, other) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        # After an update weights differ by what AdamW makes of gradients near zero: their sign decides.
        assert relative_error(one, other) <= (1e-5 if i == 0 or "value/loss" in expected.metrics else 1e-4)


def relative_error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """‖Δ‖/‖g‖ over all parameters."""
    assert one.keys() == other.keys()
    gap = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    whole = sum(float(one[name].double().square().sum()) for name in one)
    return (gap / whole) ** 0.5


def test_in_bfloat16_two_ranks_differ_by_rounding_alone(folder: Path) -> None:
    """Gradients are summed in float32, and the masters that they move are those of one process."""
    single = outcome(folder, 1, 0, "bfloat16")
    found = outcome(folder, 2, 0, "bfloat16")
    assert found.metrics["policy/entropy"] == pytest.approx(single.metrics["policy/entropy"], rel=1e-2)
    assert relative_error(single.gradients[0], found.gradients[0]) <= 3e-2
    assert {gradient.dtype for gradient in found.gradients[0].values()} == {torch.float32}


@cache
def alone(name: str, folder: Path) -> Outcome:
    """What one process computes."""
    return compute(SCENARIOS[name], folder)


@pytest.mark.parametrize("name", [name for name in EXACT if name in PLAIN])
def test_two_ranks_compute_what_one_process_does(name: str, folder: Path) -> None:
    found = [outcome(folder, 2, rank, name) for rank in range(2)]
    assert found[0].metrics == found[1].metrics  # every rank knows the same
    assert_equal(alone(name, folder), found[0])


@pytest.mark.parametrize("name", SHARED)
def test_two_ranks_that_share_tokens_compute_what_one_process_does(name: str, folder: Path) -> None:
    """A sequence that ranks share is looked at ahead of a loss over sequences, which shows the tower its media again."""
    found = [outcome(folder, 2, rank, name) for rank in range(2)]
    assert found[0].metrics == found[1].metrics
    expected = alone(name.partition("@")[0], folder)
    if SCENARIOS[name.partition("@")[0]].algorithm.loss.name == "gspo":
        items = {"packing/tower_items": expected.metrics["packing/tower_items"] + 1}
        expected = replace(expected, metrics=expected.metrics | items)
    assert_equal(expected, found[0])


def test_ranks_that_share_a_long_video_keep_half_of_its_activations_each(folder: Path) -> None:
    """Layers a little less: one process keeps the prefixes of responses too. Towers half: the video is cut in time."""
    whole = compute(SCENARIOS["long video"], folder)
    for rank in range(2):
        found = outcome(folder, 2, rank, "long video@2")
        assert found.kept <= 0.51 * whole.kept
        assert found.kept_by_towers <= 0.51 * whole.kept_by_towers
