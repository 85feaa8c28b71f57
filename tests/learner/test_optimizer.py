"""AdamW: schedules, rates by group, clipping, masters, and a state that goes on bit for bit."""

import copy
from pathlib import Path

import pytest
import torch

from sensorium.learner.optimizer import Optimizer, rate_share, split
from sensorium.recipe.schema import AlgorithmSection, KLSection, LossSection, OptimizerSection
from sensorium.vocabulary.errors import CheckpointError, RecipeError

from .played import Player, make_learner, open_policy


def test_schedules() -> None:
    constant = OptimizerSection(warmup_steps=3)
    assert [rate_share(constant, step, 10) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = OptimizerSection(warmup_steps=2, schedule="linear", final_lr_share=0.1)
    assert [rate_share(linear, step, 10) for step in (2, 6, 10, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    cosine = OptimizerSection(schedule="cosine")
    assert [rate_share(cosine, step, 8) for step in (0, 4, 8)] == pytest.approx([1.0, 0.5, 0.0])


def test_groups_have_their_own_rate(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    section = OptimizerSection(lr=1e-3, group_lr={"vision": 1e-5}, clip_norm=1e9)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    make_learner(policy, optimizer=section).step([Player(policy).single_turn()])
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in policy.model.named_parameters()}
    groups = policy.groups()
    # The first step of Adam moves every weight by about the learning rate.
    assert max(moved[name] for name in groups["vision"]) == pytest.approx(1e-5, rel=0.05)
    assert max(moved[name] for name in groups["language"]) == pytest.approx(1e-3, rel=0.05)


def test_a_step_shows_in_torch_s_count_of_writes(checkpoints: dict[str, Path]) -> None:
    """By that count caches see that weights moved; the fused kernel does not keep it."""
    policy = open_policy(checkpoints["qwen2_5_vl"])
    learner = make_learner(policy, freeze=("vision",))
    before = {name: p._version for name, p in policy.model.named_parameters()}
    learner.step([Player(policy).single_turn()])
    frozen = policy.groups()["vision"]
    assert all((p._version == before[name]) == (name in frozen) for name, p in policy.model.named_parameters())


def test_equals_adamw_of_torch_with_decay_on_matrices_and_clipping(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    section = OptimizerSection(lr=1e-2, weight_decay=0.1, clip_norm=0.5, betas=(0.8, 0.95), warmup_steps=1)
    learner = make_learner(policy, optimizer=section)
    twin = copy.deepcopy(policy.model)
    named = dict(twin.named_parameters())
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.95),
        foreach=False,
    )
    optimizer = learner._optimizer
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        for name, parameter in policy.model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            named[name].grad = parameter.grad.clone()
        for group in plain.param_groups:
            group["lr"] = 1e-2 * (0.5 if step == 0 else 1.0)
        torch.nn.utils.clip_grad_norm_(named.values(), 0.5)
        plain.step()
        optimizer.step(rate_share(section, step, 10), optimizer.grad_norm())
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("norm", "used"), [(0.25, 0.25), (0.5, 0.5), (2.0, 0.5)])
def test_gradients_are_cut_down_to_the_norm_and_never_raised(norm: float, used: float) -> None:
    """By the first moment: AdamW's step is the same for gradients of every size."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = Optimizer({"language": {"weight": parameter}}, OptimizerSection(clip_norm=0.5, betas=(0.9, 0.99)))
    parameter.grad = norm * torch.tensor([[0.6, 0.0], [0.0, -0.8]])
    found = optimizer.grad_norm()
    assert float(found) == pytest.approx(norm)
    optimizer.step(1.0, found)
    first = optimizer.state_dict()["moments"]["weight"]["exp_avg"]
    torch.testing.assert_close(first, 0.1 * used * torch.tensor([[0.6, 0.0], [0.0, -0.8]]), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(("dtype", "moments"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "8-bit")])
def test_a_restored_state_goes_on_bit_for_bit(dtype: str, moments: str, smallest: Path, tmp_path: Path) -> None:
    settings = {"optimizer": OptimizerSection(lr=1e-3, warmup_steps=3, schedule="cosine", moments=moments)}
    policy = open_policy(smallest, dtype)
    groups = [Player(policy).single_turn(size=2, longest=4, side=28)]
    learner = make_learner(policy, **settings)
    learner.step(groups)
    policy.save(tmp_path / "model")
    torch.save(learner.state_dict(), tmp_path / "learner.pt")
    straight = [learner.step(groups) for _ in range(2)]

    resumed = open_policy(tmp_path / "model", dtype, policy.chat.store)
    later = make_learner(resumed, **settings)
    later.load_state_dict(torch.load(tmp_path / "learner.pt", weights_only=False))
    assert [later.step(groups) for _ in range(2)] == straight
    for (name, found), (_, expected) in zip(resumed.model.named_parameters(), policy.model.named_parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_a_state_of_other_parameters_is_refused(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    frozen = make_learner(policy, freeze=("vision",)).state_dict()
    with pytest.raises(CheckpointError, match=r"model\.visual"):
        make_learner(policy).load_state_dict(frozen)
    half = make_learner(open_policy(checkpoints["qwen2_5_vl"], "bfloat16")).state_dict()
    with pytest.raises(CheckpointError, match="precision"):
        make_learner(policy).load_state_dict(half)
    learner = make_learner(policy)
    learner.step([Player(policy).single_turn(size=2)])
    with pytest.raises(CheckpointError, match=r"saved as float32.*optimizer\.moments"):
        make_learner(policy, optimizer=OptimizerSection(moments="bfloat16")).load_state_dict(learner.state_dict())


def test_unknown_groups_are_refused_with_the_nearest_name(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    with pytest.raises(RecipeError, match=r"freeze.*'visoin'.*did you mean 'vision'"):
        make_learner(policy, freeze=("visoin",))
    with pytest.raises(RecipeError, match=r"group_lr.*'langauge'.*did you mean 'language'"):
        make_learner(policy, optimizer=OptimizerSection(group_lr={"langauge": 1e-4}))
    with pytest.raises(RecipeError, match="nothing to train"):
        make_learner(policy, freeze=("vision", "projector", "language", "head"))


def test_a_hundred_small_updates_in_bfloat16_track_float32(smallest: Path) -> None:
    moves, stored = {}, {}
    algorithm = AlgorithmSection(loss=LossSection(clip_low=1e9, clip_high=1e9), kl=KLSection())
    for dtype in ("float32", "bfloat16"):
        policy = open_policy(smallest, dtype)
        groups = [Player(policy).single_turn(size=3, longest=6, side=28)]
        learner = make_learner(policy, optimizer=OptimizerSection(lr=1e-6), algorithm=algorithm, total_steps=100)
        before = {name: master.clone() for name, master in learner._optimizer.masters().items()}
        kept = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
        for _ in range(100):
            learner.step(groups)
        masters = learner._optimizer.masters()
        moves[dtype] = torch.cat([(master - before[name]).flatten() for name, master in masters.items()]).detach()
        stored[dtype] = sum(int((p != kept[name]).sum()) for name, p in policy.model.named_parameters())
        for name, parameter in policy.model.named_parameters():
            assert torch.equal(parameter, masters[name] if dtype == "float32" else split(masters[name])[0]), name
    single, half = moves["float32"], moves["bfloat16"]
    assert float(half.norm() / single.norm()) == pytest.approx(1, abs=0.05)
    assert float(torch.nn.functional.cosine_similarity(single, half, dim=0)) > 0.95
    assert stored["bfloat16"] > 0
