"""The router's loss of a mixture of experts is over the whole update, and no number of it depends on packing."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import AlgorithmSection, BatchSection, OptimizerSection
from sensorium.vocabulary.errors import RecipeError

from .played import Groups, Player, make_learner, open_policy


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make_tiny(family, tmp_path_factory.mktemp(family), initializer_range=0.15))


@pytest.fixture
def experts(mixtures: Callable[[str], Path]) -> Path:
    return mixtures("qwen3_vl_moe")


def play(policy: Policy) -> Groups:
    player = Player(policy)
    groups = [player.single_turn(size=3), player.conversation(size=2, turns=2), player.windowed(size=2, turns=3)]
    silent = [type(s)(s.episode, tuple(a * 0 for a in s.advantages)) for s in player.single_turn(size=2)]
    return [*groups, silent]


def run(folder: Path, limit: int, coef: float, steps: int = 1, lr: float = 1e-4) -> tuple[list[dict], dict[str, Tensor]]:
    policy = open_policy(folder)
    learner = make_learner(
        policy,
        algorithm=AlgorithmSection(router_coef=coef),
        batch=BatchSection(tokens_per_microbatch=limit),
        optimizer=OptimizerSection(lr=lr),
    )
    groups = play(policy)
    before = {name: p.clone() for name, p in policy.model.state_dict().items()}
    rows = [learner.step(groups) for _ in range(steps)]
    return rows, {name: p - before[name] for name, p in policy.model.state_dict().items()}


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe", "qwen3_omni_moe"])
def test_loads_and_gradients_do_not_depend_on_packing(family: str, mixtures: Callable[[str], Path]) -> None:
    (one,), one_moved = run(mixtures(family), 16384, 0.5)
    (many,), many_moved = run(mixtures(family), 60, 0.5)
    assert many["packing/splits"] > 0 == one["packing/splits"]
    for name in one:
        if name not in ("packing/splits", "packing/tokens", "packing/tower_items"):
            assert many[name] == pytest.approx(one[name], rel=1e-3, abs=2e-6), name
    assert one["router/balance_loss"] > 1.0
    assert one["router/busiest_expert"] >= 1.0 >= one["router/idlest_expert"]
    (gate,) = (name for name in one_moved if name.endswith("layers.0.mlp.gate.weight"))
    assert torch.nn.functional.cosine_similarity(one_moved[gate].flatten(), many_moved[gate].flatten(), 0) > 0.98


def test_the_loss_spreads_the_tokens(experts: Path) -> None:
    rows, _ = run(experts, 16384, 10.0, steps=12, lr=3e-4)
    assert rows[-1]["router/balance_loss"] < rows[0]["router/balance_loss"]


def test_loads_are_measured_without_the_loss_too_and_only_where_there_are_experts(
    experts: Path, checkpoints: dict[str, Path]
) -> None:
    (row,), _ = run(experts, 16384, 0.0)
    assert "router/busiest_expert" in row
    (dense,), _ = run(checkpoints["qwen3_vl"], 16384, 0.0)
    assert not any(name.startswith("router/") for name in dense)
    with pytest.raises(RecipeError, match="mixture of experts"):
        run(checkpoints["qwen3_vl"], 16384, 0.1)
