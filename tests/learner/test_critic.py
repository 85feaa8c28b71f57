"""The critic: its values are those of a plain forward; its loss moves what it should, and nothing depends on packing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sensorium.learner.credited_episode import CreditedEpisode, CriticValues
from sensorium.learner.critic import Critic
from sensorium.learner.learner import Learner
from sensorium.models.policy import Policy
from sensorium.recipe.schema import AdvantageSection, AlgorithmSection, BatchSection, CriticSection, OptimizerSection
from sensorium.vocabulary import Status
from sensorium.vocabulary.errors import NonFiniteUpdate

from .played import Groups, Player, make_learner, open_policy, stock_hidden, stock_model

OWN = CriticSection(optimizer=OptimizerSection(lr=2e-4), value_clip=0.2)
SHARED = CriticSection(trunk="shared", trunk_coef=0.5, optimizer=OptimizerSection(lr=1e-2), value_clip=0.2)
SLOW = {"value_clip": None, "optimizer": OptimizerSection(lr=2e-5)}


def with_critic(policy: Policy, section: CriticSection = OWN, estimator: str = "masked_gae", **given: Any) -> Learner:
    critic = Critic(policy if section.trunk == "shared" else policy.copy(), section, total_steps=10)
    torch.nn.init.normal_(critic.head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    algorithm = AlgorithmSection(advantage=AdvantageSection(name=estimator), critic=section)
    return make_learner(policy, algorithm=algorithm, critic=critic, **given)


def play(policy: Policy) -> Groups:
    """Single turns, conversations and windows; every third episode was cut short."""
    player = Player(policy)
    groups = [player.single_turn(size=4), player.conversation(), player.windowed(), player.single_turn(pictures=2)]
    return [[_cut(sample) if i % 3 == 2 else sample for i, sample in enumerate(group)] for group in groups]


def _cut(sample: CreditedEpisode) -> CreditedEpisode:
    return replace(sample, episode=replace(sample.episode, status=Status.TRUNCATED))


def taught(learner: Learner, groups: Groups) -> Groups:
    """The groups with what the critic says of them, and targets drawn around it, some of them not asked."""
    found = learner.assess([[sample.episode for sample in group] for group in groups])
    random = torch.Generator().manual_seed(1)
    lengths = [sum(stretch.length for stretch in several) for several in found.positions.stretches]
    values = iter(found.values_P.split(lengths))

    def one(sample: CreditedEpisode) -> CreditedEpisode:
        values_P = next(values)
        targets_P = values_P + torch.randn(len(values_P), generator=random)
        targets_P[torch.rand(len(values_P), generator=random) < 0.2] = float("nan")
        return replace(sample, critic_values=CriticValues(values_P, targets_P))

    return [[one(sample) for sample in group] for group in groups]


@pytest.mark.parametrize(("family", "limit"), [("qwen2_5_vl", 16384), ("qwen3_vl", 60)])
def test_values_are_those_of_a_plain_forward_over_the_home_thread(
    family: str, limit: int, checkpoints: dict[str, Path]
) -> None:
    policy = open_policy(checkpoints[family])
    groups = play(policy)
    learner = with_critic(policy, batch=BatchSection(tokens_per_microbatch=limit))
    found = learner.assess([[sample.episode for sample in group] for group in groups])
    head, stock = learner.critic.head, stock_model(checkpoints[family])
    expected, after = [], []
    for sample in (sample for group in groups for sample in group):
        for turn in sample.episode.turns:
            hidden_TH = stock_hidden(stock, policy, sample, turn.index)
            values_T = head(hidden_TH)[:, 0].detach()
            expected.append(values_T[-len(turn.response.tokens) - 1 : -1])
        after.append(float(values_T[-1]) if sample.episode.status == Status.TRUNCATED else 0.0)
    assert torch.allclose(found.values_P, torch.cat(expected), atol=2e-5)
    assert found.after_S.tolist() == pytest.approx(after, abs=2e-5)
    assert any(after)


def test_gae_also_values_the_observations_between_turns(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen3_vl"])
    groups = [Player(policy).conversation(size=2)]
    learner = with_critic(policy, estimator="gae")
    found = learner.assess([[sample.episode for sample in group] for group in groups])
    model = stock_model(checkpoints["qwen3_vl"])
    expected = []
    for sample in groups[0]:
        segments = sample.episode.threads[0].segments
        values_T = learner.critic.head(stock_hidden(model, policy, sample, sample.episode.turns[-1].index))[:, 0].detach()
        expected.append(values_T[len(policy.chat.layout(segments[0])) - 1 : -1])
    assert torch.allclose(found.values_P, torch.cat(expected), atol=2e-5)
    observed = (~found.positions.written_P).sum()
    assert observed == sum(len(policy.chat.layout(s)) for x in groups[0] for s in x.episode.threads[0].segments[2::2])
    assert found.positions.written_P.sum() == sum(sample.episode.sampled_tokens for sample in groups[0])


@pytest.mark.parametrize("section", [OWN, SHARED, SHARED.model_copy(update={"trunk_coef": 0.0})])
def test_metrics_and_weights_do_not_depend_on_packing(section: CriticSection, checkpoints: dict[str, Path]) -> None:
    def run(limit: int) -> tuple[dict[str, float], dict[str, Tensor]]:
        policy = open_policy(checkpoints["qwen3_vl"])
        batch = BatchSection(tokens_per_microbatch=limit, epochs_per_step=2, updates_per_epoch=2)
        learner = with_critic(policy, section, batch=batch, optimizer=OptimizerSection(lr=1e-4))
        groups = taught(learner, play(policy))
        groups[0] = [replace(s, advantages=tuple(a * 0 for a in s.advantages)) for s in groups[0]]
        row = learner.step(groups)
        return row, {**policy.model.state_dict(), "head": learner.critic.head.weight.detach()}

    one, one_weights = run(16384)
    many, many_weights = run(60)
    assert many["packing/splits"] > 0 == one["packing/splits"]
    for name in one:
        if name not in ("packing/splits", "packing/tokens"):
            assert many[name] == pytest.approx(one[name], rel=5e-4, abs=1e-6), name
    assert one["value/loss"] > 0.1
    assert one["value/clip_fraction"] > 0
    moved = (one_weights["head"] - many_weights["head"]).abs().max()
    assert moved < 1e-4


def test_a_shared_trunk_that_sees_no_value_loss_moves_as_without_a_critic(checkpoints: dict[str, Path]) -> None:
    def run(coef: float | None) -> dict[str, Tensor]:
        policy = open_policy(checkpoints["qwen3_vl"])
        groups = [Player(policy).conversation(), Player(policy).single_turn()]  # all finished: the same tokens are computed
        if coef is None:
            learner = make_learner(policy)
            learner.step(groups)
        else:
            section = SHARED.model_copy(update={"trunk_coef": coef})
            learner = with_critic(policy, section)
            before = learner.critic.head.weight.detach().clone()
            learner.step(taught(learner, groups))
            assert not torch.equal(before, learner.critic.head.weight)
        return policy.model.state_dict()

    without, blind, seeing = run(None), run(0.0), run(0.5)
    assert all(torch.equal(without[name], blind[name]) for name in without)
    assert not all(torch.equal(without[name], seeing[name]) for name in without)


@pytest.mark.parametrize("section", [OWN, SHARED])
def test_while_the_critic_warms_up_the_policy_stays(section: CriticSection, checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    learner = with_critic(policy, section.model_copy(update={"warmup_steps": 2, **SLOW}))
    groups = taught(learner, play(policy))
    before = {name: p.clone() for name, p in policy.model.state_dict().items()}
    rows = [learner.step(groups) for _ in range(2)]
    assert all(torch.equal(before[name], p) for name, p in policy.model.state_dict().items())
    assert (policy.version, rows[0]["policy/lr"], rows[0]["policy/grad_norm"]) == (0, 0, 0)
    assert rows[1]["value/loss"] < rows[0]["value/loss"]
    assert rows[0]["mismatch/prob_error"] > 1
    learner.step(groups)
    assert policy.version == 1


@pytest.mark.parametrize("section", [OWN, SHARED])
def test_a_critic_learns_what_it_is_taught(section: CriticSection, checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    learner = with_critic(policy, section.model_copy(update={"value_clip": None}), optimizer=OptimizerSection(lr=1e-4))
    groups = taught(learner, play(policy))
    rows = [learner.step(groups) for _ in range(12)]
    assert rows[-1]["value/loss"] < 0.6 * rows[0]["value/loss"]
    assert rows[-1]["value/explained_variance"] > rows[0]["value/explained_variance"]


@pytest.mark.parametrize("section", [OWN, SHARED])
def test_a_restored_critic_goes_on_bit_for_bit(section: CriticSection, checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen3_vl"])
    learner = with_critic(policy, section)
    groups = taught(learner, play(policy))
    learner.step(groups)
    weights, state = policy.copy().model.state_dict(), _kept(learner.state_dict())
    straight = learner.step(groups)
    again = open_policy(checkpoints["qwen3_vl"], store=policy.chat.store)
    again.model.load_state_dict(weights)
    resumed = with_critic(again, section)
    resumed.load_state_dict(state)
    assert resumed.step(groups)["value/loss"] == straight["value/loss"]
    values = [one.assess([[s.episode for s in g] for g in groups]).values_P for one in (learner, resumed)]
    assert torch.equal(*values)


def _kept(state: Any) -> Any:
    """As a checkpoint would keep it: apart from what goes on moving."""
    from io import BytesIO

    data = BytesIO()
    torch.save(state, data)
    data.seek(0)
    return torch.load(data, weights_only=False)


@pytest.mark.parametrize("section", [OWN, SHARED])
def test_a_value_that_is_not_finite_stops_before_anything_moves(
    section: CriticSection, checkpoints: dict[str, Path]
) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    learner = with_critic(policy, section)
    groups = taught(learner, play(policy))
    critic_values = groups[0][0].critic_values
    groups[0][0] = replace(
        groups[0][0],
        critic_values=CriticValues(critic_values.values_P, torch.full_like(critic_values.targets_P, float("inf"))),
    )
    before = {name: p.clone() for name, p in policy.model.state_dict().items()}
    head = learner.critic.head.weight.detach().clone()
    with pytest.raises(NonFiniteUpdate, match="not finite"):
        learner.step(groups)
    assert all(torch.equal(before[name], p) for name, p in policy.model.state_dict().items())
    assert torch.equal(head, learner.critic.head.weight)
