"""Every kind of loss through the learner: nothing that it measures or moves depends on packing; its first ratios are 1."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sensorium.algorithms import losses
from sensorium.algorithms.losses import TokenLoss, Tokens
from sensorium.data.media_store import MediaStore
from sensorium.learner.update import corrections
from sensorium.models.policy import FrozenCopy, Policy
from sensorium.recipe.estimators_and_losses import LOSSES
from sensorium.recipe.schema import (
    AlgorithmSection,
    BatchSection,
    CorrectionSection,
    KLSection,
    LossSection,
    OptimizerSection,
)

from .played import Groups, Player, make_learner, open_policy

# What the learner does for a loss depends on these traits; test_loss_table.py holds every loss against micro-batching.
KINDS = {(traits.over, traits.credited_only): name for name, traits in reversed(LOSSES.items()) if name != "likelihood"}
SEQUENCES = CorrectionSection(weights="geometric", mode="band", low=0.01, high=20.0)
TOKENS = CorrectionSection(weights="token", mode="truncate", high=1.5)
REJECTING = CorrectionSection(reject="mean", estimator="k2", reject_above=9.0)
COV = {"cov_share": 0.05, "cov_low": 0.01, "cov_high": 50.0}


def play(policy: Policy) -> Groups:
    player = Player(policy)
    return [player.single_turn(size=3), player.windowed(size=2, turns=3), player.conversation(size=2, turns=2)]


@cache
def played(folder: Path) -> tuple[MediaStore, Groups, FrozenCopy]:
    """Groups that a checkpoint plays, with their media, and the checkpoint as a reference."""
    policy = open_policy(folder)
    return policy.chat.store, play(policy), FrozenCopy(policy)


def run(
    folder: Path, loss: str, limit: int, correction: CorrectionSection, **settings: object
) -> tuple[dict[str, float], dict[str, Tensor]]:
    store, groups, reference = played(folder)
    policy = open_policy(folder, store=store)
    wanted = {"clip_low": 0.02, "clip_high": 0.03, "entropy_coef": 0.01} | COV | settings
    algorithm = AlgorithmSection(loss=LossSection(name=loss, **wanted), correction=correction, kl=KLSection(coef=0.05))
    learner = make_learner(
        policy,
        algorithm=algorithm,
        batch=BatchSection(tokens_per_microbatch=limit, epochs_per_step=2, updates_per_epoch=2),
        optimizer=OptimizerSection(lr=2e-4),
        temperature=0.9,
        reference=reference,
        seed=3,
    )
    before = {name: p.clone() for name, p in policy.model.state_dict().items()}
    row = learner.step(groups)
    return row, {name: p - before[name] for name, p in policy.model.state_dict().items()}


PAIRS = [(loss, CorrectionSection()) for loss in KINDS.values()]
PAIRS += [(loss, correction) for loss in ("clip", "gspo") for correction in (TOKENS, SEQUENCES, REJECTING)]


@pytest.mark.parametrize(("loss", "correction"), PAIRS, ids=[f"{loss}-{c.weights}-{c.reject}" for loss, c in PAIRS])
def test_no_loss_and_no_metric_depends_on_packing(
    loss: str, correction: CorrectionSection, checkpoints: dict[str, Path]
) -> None:
    one, one_moved = run(checkpoints["qwen3_vl"], loss, 16384, correction)
    many, many_moved = run(checkpoints["qwen3_vl"], loss, 60, correction)
    assert many["packing/splits"] > 0 == one["packing/splits"]
    for name in one:
        if name not in ("packing/splits", "packing/tokens", "packing/tower_items"):
            assert many[name] == pytest.approx(one[name], rel=1e-3, abs=2e-6), name
    for name, moved in one_moved.items():
        # Adam's first steps are as large as the rate whatever the gradient, so compare where it is not all rounding.
        assert torch.nn.functional.cosine_similarity(moved.flatten(), many_moved[name].flatten(), 0) > 0.98, name
    assert one["policy/kl_old"] > 0
    if correction.weights == "token":
        assert 0 < one["correction/weight"] < 1.5
    if correction.weights == "geometric":
        assert one["correction/weight"] > 0
    if correction.reject != "none":
        assert 0 < one["correction/rejected"] < 1


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_sum", "constant"])
def test_no_aggregation_depends_on_packing(aggregation: str, checkpoints: dict[str, Path]) -> None:
    constant = 9.0 if aggregation == "constant" else 1.0
    settings = {"aggregation": aggregation, "aggregation_constant": constant}
    one, many = (run(checkpoints["qwen2_5_vl"], "clip", n, CorrectionSection(), **settings)[0] for n in (16384, 60))
    for name in ("policy/loss", "policy/grad_norm", "policy/clip_fraction"):
        assert many[name] == pytest.approx(one[name], rel=1e-3), name


class Watched:
    """The clip loss, remembering the log-ratios it was given."""

    seen: list[Tensor] = []  # noqa: RUF012  (one list for the whole class is the point)

    @classmethod
    def loss(cls, tokens: Tokens) -> TokenLoss:
        cls.seen.append((tokens.logprobs_N - tokens.old_N).detach())
        return losses.clip(tokens)


def watched(tokens: Tokens) -> TokenLoss:
    return Watched.loss(tokens)


@pytest.mark.parametrize("correction", [CorrectionSection(), SEQUENCES], ids=["none", "sequences"])
def test_until_something_moves_every_ratio_is_exactly_one(
    correction: CorrectionSection, checkpoints: dict[str, Path]
) -> None:
    policy = open_policy(checkpoints["qwen3_vl"])
    algorithm = AlgorithmSection(loss=LossSection(name="tests.learner.test_every_loss:watched"), correction=correction)
    batch = BatchSection(tokens_per_microbatch=100, epochs_per_step=2, updates_per_epoch=2)
    learner = make_learner(policy, algorithm=algorithm, batch=batch, optimizer=OptimizerSection(lr=1e-4))
    groups = play(policy)
    learner.step(groups)
    Watched.seen.clear()
    row = learner.step(groups)
    first = sum(sample.episode.sampled_tokens for group in groups[:2] for sample in group)
    ratios = torch.cat(Watched.seen)
    assert not ratios[:first].any()
    assert ratios[first:].any()
    assert row["policy/ratio_max"] == pytest.approx(float(ratios.max().exp()), rel=1e-6), "of all updates, not their mean"


def test_a_band_zeroes_what_lies_outside_it() -> None:
    section = CorrectionSection(weights="token", mode="band", low=0.5, high=2.0)
    old_N, engine_N = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -3.0, 0.0])
    found = corrections(section, old_N, engine_N, torch.zeros(3, dtype=torch.long), torch.tensor([3]))
    assert found.tolist() == [1.0, 0.0, 0.0]
