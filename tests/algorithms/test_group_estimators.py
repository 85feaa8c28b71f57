"""Estimators that compare episodes, and ReMax, against the formulas written out."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sensorium.algorithms import advantages, losses
from sensorium.algorithms.losses import Tokens
from tests.algorithms import plain
from tests.algorithms.batches import Batch, batches, float64, of_rewards, per_episode

COMPARING = {
    "grpo": advantages.grpo,
    "grpo without std": lambda e: advantages.grpo(e, std=False),
    "grpo leave one out": lambda e: advantages.grpo(e, leave_one_out=True),
    "rloo": advantages.rloo,
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "pass_at_k": advantages.pass_at_k,
    "gdpo": advantages.gdpo,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
}
comparing = pytest.mark.parametrize("estimate", COMPARING.values(), ids=COMPARING.keys())


def close(got: torch.Tensor, expected: list[float]) -> None:
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def plain_grpo(with_std: bool, leave_one_out: bool) -> plain.Compare:
    def member(i: int, scores: list[float], lengths: list[int]) -> float:
        base = scores[:i] + scores[i + 1 :] if leave_one_out else scores
        centred = scores[i] - plain.mean(base)
        value = centred / (plain.std(base) + 1e-6) if with_std and plain.vary(base) else centred
        bound = math.sqrt(len(scores)) if with_std and leave_one_out else math.inf
        return min(max(value, -bound), bound)

    return plain.by_group(member)


varies = plain.by_group(lambda i, scores, lengths: 1.0)


@given(batches(), st.booleans(), st.booleans())
def test_grpo(batch: Batch, std: bool, leave_one_out: bool) -> None:
    got = advantages.grpo(batch.episodes(), std=std, leave_one_out=leave_one_out)
    close(got.advantages_P, plain.compared(batch, plain_grpo(std, leave_one_out)))
    assert got.targets_P is None


@given(batches())
def test_rloo(batch: Batch) -> None:
    compare = plain.by_group(lambda i, scores, _: scores[i] - plain.mean(scores[:i] + scores[i + 1 :]))
    close(advantages.rloo(batch.episodes()).advantages_P, plain.compared(batch, compare))


@given(batches())
def test_opo(batch: Batch) -> None:
    def member(i: int, scores: list[float], lengths: list[int]) -> float:
        return scores[i] - math.fsum(n * s for n, s in zip(lengths, scores, strict=True)) / max(sum(lengths), 1)

    close(advantages.opo(batch.episodes()).advantages_P, plain.compared(batch, plain.by_group(member)))


@given(batches())
def test_gpg_scales_by_the_share_of_the_step_that_was_paid(batch: Batch) -> None:
    centred = plain.by_group(lambda i, scores, _: scores[i] - plain.mean(scores))

    def compare(scores, groups, lengths) -> list[float]:
        paid = max(sum(abs(s) > 1e-12 for s in scores), 1)
        return [len(scores) / paid * v for v in centred(scores, groups, lengths)]

    close(advantages.gpg(batch.episodes()).advantages_P, plain.compared(batch, compare))


def test_gpg_counts_over_all_groups() -> None:
    batch = of_rewards([1.0, 0.0], [0.0, 0.0, 0.0], [2.0, 2.0, 2.0])
    got = per_episode(batch, advantages.gpg(batch.episodes()).advantages_P)
    assert got == [2 * 0.5, 2 * -0.5, 0, 0, 0, 0, 0, 0]


@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-3, 3)), min_size=1, max_size=8))
def test_gpg_loss_is_the_plain_policy_gradient(rows: list[tuple[float, float]]) -> None:
    logprobs, advantages = torch.tensor(rows, dtype=torch.float64).T
    logprobs = logprobs.clone().requires_grad_()
    out = losses.gpg(Tokens(logprobs, logprobs.detach() - 1, advantages, torch.zeros(len(rows), dtype=torch.long)))
    out.loss_N.sum().backward()
    assert out.loss_N.tolist() == [-a * logp for logp, a in rows]
    assert logprobs.grad.tolist() == [-a for _, a in rows]
    assert not out.clipped_N.any()


@given(batches())
def test_pass_at_k(batch: Batch) -> None:
    def member(i: int, scores: list[float], lengths: list[int]) -> float:
        lead = scores[i] - max(scores[:i] + scores[i + 1 :])
        return lead / (plain.std(scores) + 1e-6) if lead > 1e-12 else 0.0

    close(advantages.pass_at_k(batch.episodes()).advantages_P, plain.compared(batch, plain.by_group(member)))


def test_pass_at_k_credits_nobody_when_the_best_is_shared() -> None:
    batch = of_rewards([1.0, 0.0, 1.0], [0.0, 3.0, 1.0])
    got = per_episode(batch, advantages.pass_at_k(batch.episodes()).advantages_P)
    assert got == pytest.approx([0, 0, 0, 0, 2 / (math.sqrt(7 / 3) + 1e-6), 0], rel=1e-12)


@given(batches(), st.booleans(), st.booleans())
def test_gdpo(batch: Batch, std: bool, leave_one_out: bool) -> None:
    compare = plain_grpo(std, leave_one_out)
    lengths = [len(p.written) for p in batch.played]

    def over_the_step(values: list[float], signal: list[float]) -> list[float]:
        return [v if loud else 0.0 for v, loud in zip(plain.standardised(values), signal, strict=True)]

    def compare_span(scores, groups, lengths) -> list[float]:
        return over_the_step(compare(scores, groups, lengths), varies(scores, groups, lengths))

    summed = [0.0] * len(batch.played)
    for weight, scores in batch.terms:
        summed = [s + weight * v for s, v in zip(summed, compare(scores, batch.groups, lengths), strict=True)]
    signal = varies(summed, batch.groups, lengths)
    expected = plain.with_spans(batch, plain.everywhere(batch, over_the_step(summed, signal)), compare_span)
    close(advantages.gdpo(batch.episodes(), std=std, leave_one_out=leave_one_out).advantages_P, expected)


def test_gdpo_leaves_out_who_a_term_did_not_judge() -> None:
    batch = of_rewards([0.0, 0.0, 0.0], [0.0, 0.0])
    nan = float("nan")
    judged = Batch(batch.played, terms=((1.0, (1.0, nan, 0.0, 0.5, 0.5)),))
    got = per_episode(judged, advantages.gdpo(judged.episodes()).advantages_P)
    assert got == pytest.approx([got[0], 0, -got[0], 0, 0], abs=1e-12)
    assert got[0] > 1


def test_gdpo_gives_nothing_to_a_group_whose_terms_cancel() -> None:
    """Others in the step that were paid unevenly would shift it by the step's mean."""
    batch = of_rewards([1.0, 1.0], [1.0, 0.0, 0.0])
    crossed = replace(batch, terms=((1.0, (1.0, 0.0, 1.0, 0.0, 0.0)), (1.0, (0.0, 1.0, 0.0, 0.0, 0.0))))
    got = per_episode(crossed, advantages.gdpo(crossed.episodes(), leave_one_out=True).advantages_P)
    assert got[:2] == [0.0, 0.0]
    assert all(got[2:])


def test_gdpo_takes_no_signal_from_a_term_that_is_only_watched() -> None:
    batch = of_rewards([1.0, 0.0, 0.2], [0.5, 0.5])
    watched = replace(batch, terms=(*batch.terms, (0.0, (0.0, 1.0, 3.0, 0.0, 1.0))))
    one, other = (advantages.gdpo(b.episodes(), leave_one_out=True).advantages_P for b in (batch, watched))
    assert torch.equal(one, other)
    assert other[3:].tolist() == [0.0, 0.0]


@given(batches())
def test_remax(batch: Batch) -> None:
    main = plain.everywhere(batch, [p.reward - p.greedy for p in batch.played])
    close(advantages.remax(batch.episodes()).advantages_P, plain.with_spans(batch, main, plain.over_the_step))


def test_remax_gives_exactly_zero_for_the_same_pay_summed_otherwise() -> None:
    episodes = replace(of_rewards([0.1 + 0.2]).episodes(), greedy_S=float64([0.3]))
    assert advantages.remax(episodes).advantages_P.tolist() == [0.0]
    unknown = replace(episodes, greedy_S=float64([float("nan")]))
    assert advantages.remax(unknown).advantages_P.isnan().all()


@given(batches())
def test_reinforce_plus_plus_with_baseline(batch: Batch) -> None:
    rewards, lengths = [p.reward for p in batch.played], [len(p.written) for p in batch.played]
    values = plain_grpo(False, False)(rewards, batch.groups, lengths)
    signal = varies(rewards, batch.groups, lengths)
    white = iter(plain.whitened([values[i] for i, p in batch.positions if p.written]))
    spread = [next(white) if p.written else 0.0 for _, p in batch.positions]
    main = [v if signal[i] else 0.0 for v, (i, _) in zip(spread, batch.positions, strict=True)]
    got = advantages.reinforce_plus_plus_baseline(batch.episodes())
    close(got.advantages_P, plain.with_spans(batch, main, plain.over_the_step))


@comparing
@given(st.floats(-1e6, 1e6), st.integers(1, 40), st.integers(0, 2**32))
def test_a_group_without_variance_gives_exactly_zero_beside_one_that_has_it(estimate, value, size, seed) -> None:
    noise = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).sub(0.5).mul(2e-13)
    alike = (value + noise * max(1.0, abs(value))).tolist()
    batch = of_rewards(alike, [0.0, 1.0, 3.0], [2.0], tokens=2)
    got = per_episode(batch, estimate(batch.episodes()).advantages_P)
    assert got[:size] == [0.0] * size
    assert got[-1] == 0.0
    assert any(got[size:-1])


@comparing
def test_the_same_terms_in_another_order_are_no_variance(estimate) -> None:
    batch = of_rewards([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6, 0.1 + (0.2 + 0.3)])
    assert len({p.reward for p in batch.played}) > 1
    assert estimate(batch.episodes()).advantages_P.tolist() == [0.0] * 4


@comparing
def test_a_difference_of_one_in_a_billion_is_variance(estimate) -> None:
    batch = of_rewards([1.0, 1.0 + 1e-9])
    assert estimate(batch.episodes()).advantages_P[1] > 0


@comparing
def test_a_missing_reward_is_not_taken_for_zero(estimate) -> None:
    batch = of_rewards([float("nan"), 1.0, 0.0])
    got = estimate(batch.episodes()).advantages_P
    assert got.isnan().any() if estimate is not advantages.gdpo else got[0] == 0 and got[1] > 0  # a term may not apply


@comparing
def test_groups_may_come_in_any_order(estimate) -> None:
    batch = of_rewards([1.0, 0.0, 0.5], [0.0, 2.0])
    order = (3, 0, 4, 2, 1)
    (weight, scores), *_ = batch.terms
    mixed = Batch(tuple(batch.played[i] for i in order), terms=((weight, tuple(scores[i] for i in order)),))
    got = per_episode(batch, estimate(batch.episodes()).advantages_P)
    assert per_episode(mixed, estimate(mixed.episodes()).advantages_P) == pytest.approx([got[i] for i in order])
