"""Ranks that share an update compute what one process computes: metrics, gradients and weights.

Ranks are forks of a server that has imported everything. One set of them computes all scenarios. Four ranks, and one, are
run by ``python -m studies.sharded_learners``.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from studies.fork_server import ForkServer

from ...forked import forked_python
from .scenarios import SCENARIOS, Outcome, compute, make_checkpoints


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
        for rank in start_ranks(folder, 2, list(SCENARIOS)):
            rank.wait()
    return folder


def assert_equal(expected: Outcome, found: Outcome) -> None:
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        # One process takes the norm of the gradients in float32, which is itself off by more than 1e-6.
        # The mean of exponentials of differences of log-probs, which here are up to 10, magnifies their rounding.
        bound = 1e-5 if name.endswith(("grad_norm", "prob_error")) else 1e-6
        assert found.metrics[name] == pytest.approx(value, rel=bound, abs=1e-6), name
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
    alone = outcome(folder, 1, 0, "bfloat16")
    found = outcome(folder, 2, 0, "bfloat16")
    assert found.metrics["policy/entropy"] == pytest.approx(alone.metrics["policy/entropy"], rel=1e-2)
    assert relative_error(alone.gradients[0], found.gradients[0]) <= 3e-2
    assert {gradient.dtype for gradient in found.gradients[0].values()} == {torch.float32}


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.dtype == "float32"])
def test_two_ranks_compute_what_one_process_does(name: str, folder: Path) -> None:
    alone = compute(SCENARIOS[name], folder)
    found = [outcome(folder, 2, rank, name) for rank in range(2)]
    assert found[0].metrics == found[1].metrics  # every rank knows the same
    assert_equal(alone, found[0])
