"""The general path's learner: log-probs and gradients are those of the family's own adapter."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sensorium.data.media_store import MediaStore
from sensorium.learner.learner import CreditedEpisode, Learner
from sensorium.models.load import load_policy
from sensorium.models.policy import FrozenCopy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import (
    AlgorithmSection,
    BatchSection,
    CriticSection,
    KLSection,
    LoraSection,
    LossSection,
    OptimizerSection,
)
from tests.families import FAMILY_ROWS, make_short, wide_weights

from .played import Groups, Player, make_learner
from .test_critic import OWN, SHARED, play, taught, with_critic

NATIVE = ("qwen2_5_vl", "qwen3_5", "qwen2_audio", "internvl")
ALGORITHM = AlgorithmSection(
    loss=LossSection(aggregation="sequence_mean_token_mean", entropy_coef=0.01), kl=KLSection(coef=0.1, estimator="k3")
)


def learner_of(folder: Path, store: MediaStore, family: str, **given: object) -> Learner:
    policy = load_policy(str(folder), store=store, family=family)
    return make_learner(policy, temperature=0.8, batch=BatchSection(tokens_per_microbatch=400), **given)


def played(learner: Learner) -> list[list[CreditedEpisode]]:
    """A question about a medium, a conversation with a medium in turn 2, and windows of several threads."""
    player = Player(learner.policy)
    return [player.single_turn(), player.conversation(), player.windowed(), player.single_turn(pictures=0)]


def gradients(learner: Learner, groups: Groups) -> dict[str, Tensor | None]:
    """The gradients of one update, taken where the optimizer would step."""
    taken: dict[str, Tensor | None] = {}

    def keep(share: float, norm: Tensor) -> None:
        for name, parameter in learner.policy.model.named_parameters():
            taken[name] = None if parameter.grad is None else parameter.grad.clone()
        learner._optimizer.forget()

    learner._optimizer.step = keep  # type: ignore[method-assign]
    learner.step(groups)
    return taken


@pytest.mark.parametrize("family", NATIVE)
def test_logprobs_and_gradients_equal_those_of_the_familys_own_adapter(family: str, tmp_path: Path) -> None:
    folder = make_short(family, tmp_path / "tiny", **wide_weights(family, 0.15, "", "vision"))
    store, rounding = MediaStore(), FAMILY_ROWS[family].rounding
    found, pulled = [], []
    for name in ("general", "auto"):
        learner = learner_of(folder, store, name, algorithm=ALGORITHM)
        learner.policy.family = learner.policy.chat.family = family
        learner.reference = FrozenCopy(learner.policy.copy())
        groups = played(learner)
        logprobs = learner.logprobs(groups)
        found.append(torch.cat([one for group in logprobs for sample in group for one in sample]))
        pulled.append(gradients(learner, groups))
    assert (found[0] - found[1]).abs().max() <= 8 * rounding
    largest = max(float(gradient.abs().max()) for gradient in pulled[1].values() if gradient is not None)
    for name, own in pulled[1].items():
        mine = pulled[0][name]
        if own is None or mine is None:
            assert mine is None or not mine.any(), name
            assert own is None or not own.any(), name
        else:
            assert (mine - own).abs().max() <= 10 * rounding * largest, name


@pytest.mark.parametrize(("section", "estimator"), [(OWN, "gae"), (SHARED, "masked_gae")])
def test_a_critic_reads_and_learns_what_it_does_beside_the_familys_own_adapter(
    section: CriticSection, estimator: str, tmp_path: Path
) -> None:
    folder = make_tiny("qwen3_vl", tmp_path / "tiny", **wide_weights("qwen3_vl", 0.15, ""))
    found, rows, weights = [], [], []
    for family in ("general", "auto"):
        policy = load_policy(str(folder), store=MediaStore(), family=family)
        policy.family = policy.chat.family = "qwen3_vl"
        batch = BatchSection(tokens_per_microbatch=400, epochs_per_step=2)
        learner = with_critic(policy, section, estimator, batch=batch, optimizer=OptimizerSection(lr=1e-4))
        groups = play(policy) if estimator == "masked_gae" else [Player(policy).conversation(size=3)]
        groups[0] = [replace(sample, advantages=tuple(0 * one for one in sample.advantages)) for sample in groups[0]]
        assessed = learner.assess([[sample.episode for sample in group] for group in groups])
        assert assessed.values_P is not None
        assert assessed.after_S is not None
        found.append(torch.cat([assessed.values_P, assessed.after_S]))
        rows.append(learner.step(taught(learner, groups)))
        assert learner.critic is not None
        weights.append({**learner.critic.trunk.model.state_dict(), "head": learner.critic.head.weight.detach()})
    assert found[0].abs().max() > 0.1
    assert torch.allclose(found[0], found[1], atol=1e-4)
    for name in ("value/loss", "value/mean", "value/clip_fraction", "policy/grad_norm", "policy/loss"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-3, abs=1e-5), name
    far = {name: float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[1]}
    assert max(far.values()) < 2e-4, max(far.items(), key=lambda item: item[1])


def test_recomputing_layers_changes_no_gradient(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_vl", tmp_path / "tiny", **wide_weights("qwen3_vl", 0.15, ""))
    found = []
    for wanted in (False, True):
        learner = learner_of(folder, MediaStore(), "general")
        learner.policy.checkpoint_gradients(wanted)
        learner.policy.family = "qwen3_vl"
        found.append(gradients(learner, played(learner)))
        assert not learner.policy.model.training
    for name, gradient in found[0].items():
        other = found[1][name]
        assert (gradient is None) == (other is None)
        assert gradient is None or other is None or torch.equal(gradient, other)


def test_adapters_sit_on_the_decoders_linear_layers_alone(tmp_path: Path) -> None:
    folder = make_tiny("qwen2_5_vl", tmp_path / "tiny")
    policy = load_policy(str(folder), store=MediaStore(), family="general", lora=LoraSection(rank=2))
    own = load_policy(str(folder), store=MediaStore(), lora=LoraSection(rank=2))
    assert policy.adapters is not None
    assert own.adapters is not None
    assert policy.adapters.layers.keys() == own.adapters.layers.keys()
    assert all(name.startswith("model.language_model.") for name in policy.adapters.layers)
    learner = make_learner(policy)
    found = gradients(learner, [Player(policy).single_turn()])
    assert {name for name, gradient in found.items() if gradient is not None} == policy.adapters.parameters.keys()
