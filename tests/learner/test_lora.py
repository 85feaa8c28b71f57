"""Training with adapters: only they move, at their group's rate; the former self is the reference; states go on exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.models.load import load_policy
from sensorium.models.policy import FormerSelf, FrozenCopy, Policy, Reference
from sensorium.recipe.schema import AlgorithmSection, BatchSection, KLSection, LoraSection, LossSection, OptimizerSection
from sensorium.vocabulary.errors import RecipeError

from .played import Player, make_learner

LORA = LoraSection(rank=2, alpha=4, groups=("vision", "language"))
PLAIN = AlgorithmSection(loss=LossSection(aggregation="token_mean"))
WITH_KL = AlgorithmSection(loss=PLAIN.loss, kl=KLSection(coef=0.1))


def adapted(folder: Path, dtype: str = "float32", store: MediaStore | None = None) -> Policy:
    return load_policy(str(folder), store=store or MediaStore(), dtype=dtype, device="cpu", lora=LORA, seed=1)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_only_adapters_move_each_at_the_rate_of_its_group(family: str, checkpoints: dict[str, Path]) -> None:
    policy = adapted(checkpoints[family])
    section = OptimizerSection(lr=1e-3, group_lr={"vision": 1e-5}, clip_norm=1e9)
    learner = make_learner(policy, optimizer=section, algorithm=PLAIN)
    groups = [Player(policy).single_turn()]
    learner.step(groups)  # B moves first: while it is zero, A has no gradient
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    learner.step(groups)
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in policy.model.named_parameters()}
    assert policy.adapters is not None
    assert {name for name, far in moved.items() if far} == set(policy.adapters.parameters)
    trainable = policy.trainable()
    assert not trainable["projector"]
    for group, rate in (("vision", 1e-5), ("language", 1e-3)):
        assert 0.1 * rate < max(moved[name] for name in trainable[group]) < 1.1 * rate
    assert {name for name, p in policy.model.named_parameters() if p.requires_grad} == set(policy.adapters.parameters)


@pytest.mark.parametrize("warm", [False, True], ids=["fresh adapters", "after a warm start"])
def test_the_former_self_serves_as_a_copy_would(warm: bool, checkpoints: dict[str, Path]) -> None:
    rows: list[list[dict[str, float]]] = []
    for copied in (True, False):
        policy = adapted(checkpoints["qwen3_vl"])
        groups = [Player(policy).single_turn(), Player(policy).single_turn()]
        assert policy.adapters is not None
        if warm:
            make_learner(policy, algorithm=PLAIN).step(groups)
        former = policy.adapters.snapshot() if warm else None
        reference: Reference = FrozenCopy(policy.frozen_copy()) if copied else FormerSelf(policy, former)
        batch = BatchSection(updates_per_epoch=2)
        learner = make_learner(policy, algorithm=WITH_KL, batch=batch, reference=reference)
        rows.append([learner.step(groups) for _ in range(2)])
    assert rows[0] == rows[1]
    assert rows[0][1]["policy/kl_ref"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_and_saved_adapters_go_on_bit_for_bit(dtype: str, smallest: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": OptimizerSection(lr=1e-3), "algorithm": PLAIN}
    policy = adapted(smallest, dtype)
    groups = [Player(policy).single_turn(size=2, longest=4, side=28)]
    learner = make_learner(policy, **settings)
    learner.step(groups)
    policy.save(tmp_path)
    state = learner.state_dict()
    torch.save(state, tmp_path / "learner.pt")
    straight = [learner.step(groups) for _ in range(2)]

    resumed = adapted(smallest, dtype, policy.chat.store)
    assert resumed.adapters is not None
    assert policy.adapters is not None
    assert set(state["optimizer"]["moments"]) == set(policy.adapters.parameters)
    resumed.adapters.load(tmp_path / "adapter")
    later = make_learner(resumed, **settings)
    later.load_state_dict(torch.load(tmp_path / "learner.pt", weights_only=False))
    assert [later.step(groups) for _ in range(2)] == straight
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name


def test_gradient_checkpointing_gives_the_same_update(checkpoints: dict[str, Path]) -> None:
    rows = []
    for on in (False, True):
        policy = adapted(checkpoints["qwen2_5_vl"])
        policy.checkpoint_gradients(on)
        learner, groups = make_learner(policy, algorithm=PLAIN), [Player(policy).single_turn()]
        rows.append([learner.step(groups) for _ in range(2)])
    assert rows[0] == rows[1]


def test_frozen_adapters_and_rates_without_any_are_refused(checkpoints: dict[str, Path]) -> None:
    policy = adapted(checkpoints["qwen2_5_vl"])
    with pytest.raises(RecipeError, match=r"freeze: 'language' is adapted"):
        make_learner(policy, freeze=("projector", "language"))
    with pytest.raises(RecipeError, match=r"group_lr: 'projector' has no adapters.*vision, language"):
        make_learner(policy, optimizer=OptimizerSection(group_lr={"projector": 1e-4}))
    make_learner(policy, freeze=("projector",))
