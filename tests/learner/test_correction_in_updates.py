"""What the mismatch correction does to an update: weights count, and rejected sequences are as if they were not there."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sensorium.algorithms import correction
from sensorium.learner.credited_episode import sampled_tokens
from sensorium.learner.learner import CreditedEpisode
from sensorium.models.policy import Policy
from sensorium.recipe.schema import AlgorithmSection, BatchSection, CorrectionSection, LossSection, OptimizerSection

from .played import Groups, Player, make_learner, open_policy

TOKENS = CorrectionSection(weights="token", mode="truncate", high=1.5)
SEQUENCES = CorrectionSection(weights="geometric", mode="band", low=0.005, high=20.0)
REJECTING = CorrectionSection(reject="mean", estimator="k2", reject_above=13.0)
DESCENT = OptimizerSection(lr=1.0, eps=100.0, clip_norm=1e9)
"""As near to plain gradient descent as AdamW comes: a step is in proportion to the gradient."""

ONE_UPDATE = BatchSection(tokens_per_microbatch=60)


def play(policy: Policy) -> Groups:
    player = Player(policy)
    return [player.single_turn(size=3), player.conversation(size=3, turns=2), player.single_turn(size=2)]


def step(
    folder: Path, groups: Groups | None, correction: CorrectionSection, batch: BatchSection = ONE_UPDATE, **loss: object
) -> tuple[dict[str, float], Tensor]:
    """One step on the given groups or those a fresh player plays: its metrics, and how far all weights moved."""
    policy = open_policy(folder)
    played = play(policy)
    algorithm = AlgorithmSection(loss=LossSection(**loss), correction=correction)  # type: ignore[arg-type]
    learner = make_learner(policy, algorithm=algorithm, batch=batch, optimizer=DESCENT)
    before = [p.detach().clone() for p in policy.model.parameters()]
    row = learner.step(played if groups is None else groups)
    moved = [(p.detach() - old).flatten() for p, old in zip(policy.model.parameters(), before, strict=True)]
    return row, torch.cat(moved)


def same(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) < 1e-4 * float(other.norm())


def ratios(folder: Path, section: CorrectionSection) -> tuple[Groups, Tensor, Tensor]:
    """What a fresh player plays, the correction's weights of its tokens, and which of its sequences are rejected."""
    policy = open_policy(folder)
    groups = play(policy)
    tokens = sampled_tokens(groups, policy.device)
    old = make_learner(policy).logprobs(groups)
    old_N = torch.cat([turn for group in old for sample in group for turn in sample])
    known = (old_N, tokens.engine_N, tokens.sequences_N, tokens.counts_S)
    weights_N = torch.ones_like(old_N)
    if section.weights != "none":
        settings = {"weights": section.weights, "mode": section.mode, "low": section.low, "high": section.high}
        weights_N = correction.weights(*known, **settings)
    rejected_S = torch.zeros(len(tokens.counts_S), dtype=torch.bool)
    if section.reject != "none":
        rejected_S = correction.rejected(*known, by=section.reject, estimator=section.estimator, above=section.reject_above)
    return groups, weights_N, rejected_S


def weighted(groups: Groups, weights_N: Tensor) -> Groups:
    """The same samples with advantages multiplied by the weights."""
    parts = iter(weights_N.split([len(a) for group in groups for sample in group for a in sample.advantages]))
    return [
        [replace(sample, advantages=tuple(a * next(parts) for a in sample.advantages)) for sample in group]
        for group in groups
    ]


@pytest.mark.parametrize("section", [TOKENS, SEQUENCES], ids=["token", "sequence"])
def test_weights_multiply_the_policy_loss(section: CorrectionSection, checkpoints: dict[str, Path]) -> None:
    """In a first update every ratio is 1, so a weight on the loss is a weight on the advantage."""
    folder = checkpoints["qwen2_5_vl"]
    groups, weights_N, _ = ratios(folder, section)
    assert float(weights_N.std()) > 0.2 * float(weights_N.mean())
    row, found = step(folder, None, section)
    _, expected = step(folder, weighted(groups, weights_N), CorrectionSection())
    _, uncorrected = step(folder, None, CorrectionSection())
    assert same(found, expected)
    assert not same(found, uncorrected)
    assert row["correction/weight"] == pytest.approx(float(weights_N.double().mean()), rel=1e-5)
    assert row["correction/zeroed"] == pytest.approx(float((weights_N == 0).double().mean()))
    share = float(weights_N.double().sum() ** 2 / (len(weights_N) * weights_N.double().square().sum()))
    assert row["correction/effective_share"] == pytest.approx(share, rel=1e-5)
    assert 0 < share < 0.99


@pytest.mark.parametrize("section", [TOKENS, SEQUENCES], ids=["token", "sequence"])
@pytest.mark.parametrize("updates", [{"epochs_per_step": 3}, {"updates_per_epoch": 3}], ids=["epochs", "updates"])
def test_weights_are_of_the_log_probs_before_the_step_in_every_update(
    updates: dict[str, int], section: CorrectionSection, checkpoints: dict[str, Path]
) -> None:
    folder = checkpoints["qwen2_5_vl"]
    groups, weights_N, _ = ratios(folder, section)
    row, _ = step(folder, None, section, BatchSection(tokens_per_microbatch=60, **updates))
    assert row["policy/kl_old"] > 5e-6, "the policy has moved between the updates"
    lengths = [sum(len(a) for sample in group for a in sample.advantages) for group in groups]
    of_updates = weights_N.double().split(lengths) if "updates_per_epoch" in updates else [weights_N.double()]
    expected = sum(float(part.mean()) for part in of_updates) / len(of_updates)
    assert row["correction/weight"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"])
def test_a_rejected_sequence_is_as_if_it_were_not_there(aggregation: str, checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["qwen2_5_vl"]
    groups, _, rejected_S = ratios(folder, REJECTING)
    assert 0 < int(rejected_S.sum()) < len(rejected_S)
    row, found = step(folder, None, REJECTING, aggregation=aggregation)
    marks = iter(rejected_S.tolist())
    left = [[sample for sample in group if not next(marks)] for group in groups]
    expected_row, expected = step(folder, [group for group in left if group], CorrectionSection(), aggregation=aggregation)
    assert same(found, expected)
    assert row["policy/loss"] == pytest.approx(expected_row["policy/loss"], rel=1e-5)
    assert row["policy/grad_norm"] == pytest.approx(expected_row["policy/grad_norm"], rel=1e-5)
    assert row["correction/rejected"] == pytest.approx(float(rejected_S.double().mean()))


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_a_rejected_sequence_is_nobody_for_losses_over_the_update(loss: str, checkpoints: dict[str, Path]) -> None:
    """Two epochs, so that ratios move. A share of 1 leaves nothing to the random choice."""
    folder, batch = checkpoints["qwen2_5_vl"], BatchSection(epochs_per_step=2)
    groups, _, rejected_S = ratios(folder, REJECTING)
    marks = iter(rejected_S.tolist())
    left = [group for group in ([s for s in group if not next(marks)] for group in groups) if group]
    # kl_cov holds the half of highest covariance, so who is counted decides who is held
    settings = {"cov_share": 1.0, "cov_low": 0.5, "cov_high": 5.0} if loss == "clip_cov" else {"cov_share": 0.5}
    row, found = step(folder, None, REJECTING, batch, name=loss, **settings)
    expected_row, expected = step(folder, left, CorrectionSection(), batch, name=loss, **settings)
    assert same(found, expected)
    assert row["policy/loss"] == pytest.approx(expected_row["policy/loss"], rel=1e-4)


def test_where_everything_is_rejected_the_metrics_say_so(checkpoints: dict[str, Path]) -> None:
    strict = CorrectionSection(reject="mean", estimator="k2", reject_above=1e-6)
    row, moved = step(checkpoints["qwen2_5_vl"], None, strict)
    assert (row["correction/rejected"], row["policy/learning_share"], row["policy/grad_norm"]) == (1, 0, 0)
    assert not moved.any()


def test_where_every_weight_is_zero_the_metrics_say_so(checkpoints: dict[str, Path]) -> None:
    narrow = CorrectionSection(weights="sequence", mode="band", low=1e6, high=2e6)
    row, _ = step(checkpoints["qwen2_5_vl"], None, narrow)
    found = [row[f"correction/{name}"] for name in ("zeroed", "weight", "effective_share")]
    assert found == [1, 0, 0]
    assert row["policy/learning_share"] == 0


def test_where_nobody_has_an_advantage_the_metrics_say_so(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    groups = play(policy)
    learner = make_learner(policy)
    assert learner.step(groups)["policy/learning_share"] == 1
    first, *others = groups[0]
    quiet = [
        [CreditedEpisode(s.episode, tuple(torch.zeros_like(a) for a in s.advantages)) for s in group] for group in groups
    ]
    row = learner.step(quiet)
    assert (row["policy/learning_share"], row["policy/loss"]) == (0, 0)
    one = learner.step([[first, *quiet[0][1:]], *quiet[1:]])
    tokens = sum(s.episode.sampled_tokens for group in groups for s in group)
    assert one["policy/learning_share"] == pytest.approx(first.episode.sampled_tokens / tokens)
    assert others
    assert one["policy/ratio_max"] == 1
