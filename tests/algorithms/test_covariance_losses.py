"""Clip-Cov and KL-Cov against plain loops that look at the whole update."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sensorium.algorithms import losses
from sensorium.algorithms.losses import Tokens, first_share
from tests.algorithms.test_losses import plain_clip
from tests.algorithms.updates import Token, Update, differences, flat, ranges, ratio, slopes, updates, whole

shares = st.sampled_from([2e-4, 0.1, 0.5, 1.0])


def plain_covariances(update: Update) -> list[float]:
    tokens = flat(update)
    advantage = math.fsum(t.advantage for t in tokens) / len(tokens)
    logp = math.fsum(t.logp for t in tokens) / len(tokens)
    return [(t.advantage - advantage) * (t.logp - logp) for t in tokens]


@given(updates(), ranges, ranges, shares, st.floats(0.01, 1), st.floats(1.5, 6))
def test_clip_cov_equals_a_plain_loop(
    update: Update, low: float, high: float, share: float, cov_low: float, cov_high: float
) -> None:
    tokens, cov = flat(update), plain_covariances(update)
    assume(all(min(abs(c - cov_low), abs(c - cov_high)) > 1e-9 for c in cov))
    assume(all(min(abs(ratio(t) - 1 + low), abs(ratio(t) - 1 - high)) > 1e-9 for t in tokens))
    expected = [plain_clip(token, low, high, 10.0) for token in tokens]
    candidates = [i for i, c in enumerate(cov) if cov_low < c < cov_high and not expected[i][2]]
    candidates.sort(key=lambda i: (tokens[i].uniform, i))
    for i in candidates[: max(int(share * len(tokens)), 1)]:
        expected[i] = (0.0, 0.0, True)
    given = whole(update)
    out = losses.clip_cov(given, cov_share=share, clip_low=low, clip_high=high, cov_low=cov_low, cov_high=cov_high)
    assert out.loss_N.tolist() == pytest.approx([value for value, _, _ in expected], rel=1e-9, abs=1e-12)
    assert slopes(out, given).tolist() == pytest.approx([slope for _, slope, _ in expected], rel=1e-9, abs=1e-12)
    assert out.clipped_N.tolist() == [clipped for _, _, clipped in expected]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@given(updates(), st.data())
def test_rejected_tokens_count_in_no_mean_and_no_share(name: str, update: Update, data: st.DataObject) -> None:
    """What is kept is treated as if the rejected sequences had never been there."""
    rejected = data.draw(st.lists(st.booleans(), min_size=len(update), max_size=len(update)))
    left = [sequence for sequence, out in zip(update, rejected, strict=True) if not out]
    assume(any(left))
    settings = {"cov_share": data.draw(shares)} | ({"cov_low": 0.01} if name == "clip_cov" else {})
    function = {"clip_cov": losses.clip_cov, "kl_cov": losses.kl_cov}[name]
    given, alone = whole(update), whole(left)
    kept_N = ~torch.tensor(rejected)[given.sequences_N]
    found = function(replace(given, update=replace(given.update, kept_U=kept_N)), **settings)
    expected = function(alone, **settings)
    assert found.clipped_N[kept_N].equal(expected.clipped_N)
    torch.testing.assert_close(found.loss_N[kept_N], expected.loss_N)
    torch.testing.assert_close(slopes(found, given)[kept_N], slopes(expected, alone))


def test_an_update_with_everything_rejected_holds_nobody() -> None:
    tokens = whole([[Token(-i / 25, -i / 25 - 0.1, 1.0 if i < 50 else -1.0, i / 100) for i in range(100)]])
    nobody = replace(tokens, update=replace(tokens.update, kept_U=torch.zeros(100, dtype=torch.bool)))
    assert losses.kl_cov(nobody, cov_share=1.0).loss_N.equal(losses.kl_cov(nobody, cov_kl_coef=0.0).loss_N)
    assert not losses.clip_cov(nobody, cov_share=1.0).clipped_N.any()


def plain_kl_cov(token: Token, held: bool, coef: float) -> tuple[float, float]:
    over = ratio(token) > 20
    value = -token.advantage * min(ratio(token), 20)
    slope = 0.0 if over else value
    if not held:
        return value, slope
    return value + coef * abs(token.gap), slope + coef * ((token.gap > 0) - (token.gap < 0))


@given(updates(), shares, st.floats(0, 3))
def test_kl_cov_equals_a_plain_loop(update: Update, share: float, coef: float) -> None:
    tokens, cov = flat(update), plain_covariances(update)
    order = sorted(range(len(tokens)), key=lambda i: (-cov[i], i))
    number = max(int(share * len(tokens)), 1)
    held, rest = order[:number], order[number:]
    # A sum in another order must not change who is chosen: either the covariances are apart, or the tokens are alike.
    assume(all(cov[i] - cov[j] > 1e-9 or alike(tokens[i], tokens[j]) for i in held for j in rest))
    expected = [plain_kl_cov(token, i in held, coef) for i, token in enumerate(tokens)]
    given = whole(update)
    out = losses.kl_cov(given, cov_share=share, cov_kl_coef=coef)
    assert out.loss_N.tolist() == pytest.approx([value for value, _ in expected], rel=1e-9, abs=1e-12)
    assert slopes(out, given).tolist() == pytest.approx([slope for _, slope in expected], rel=1e-9, abs=1e-12)
    assert out.clipped_N.tolist() == [ratio(token) > 20 and token.advantage != 0 for token in tokens]


def alike(one: Token, other: Token) -> bool:
    return (one.advantage, one.logp) == (other.advantage, other.logp)


@given(updates(), st.floats(0, 3))
def test_slopes_of_kl_cov_are_those_of_the_plain_value(update: Update, coef: float) -> None:
    """With every token held; who is held is a constant of the update, so it does not move with one token's log-prob."""
    given = whole(update)
    out = losses.kl_cov(given, cov_share=1.0, cov_kl_coef=coef)
    for token, slope in zip(flat(update), slopes(out, given).tolist(), strict=True):
        if 0 < abs(token.gap) < 1e-3:
            continue
        expected = differences(
            lambda at, t=token: plain_kl_cov(Token(at[0], t.old, t.advantage, 0), True, coef)[0], [token.logp]
        )
        assert [slope] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def spread() -> Tokens:
    """An update of 100 tokens without movement, whose covariances reach from 0 to 2."""
    sequence = [Token(-i / 25, -i / 25, 1.0 if i < 50 else -1.0, (i * 37 % 100) / 100) for i in range(100)]
    return whole([sequence])


def test_a_larger_share_leaves_out_more_and_keeps_who_was_out() -> None:
    before = torch.zeros(100, dtype=torch.bool)
    for share, number in [(1e-4, 1), (0.05, 5), (0.2, 20), (1.0, 50)]:
        out = losses.clip_cov(spread(), cov_share=share, cov_low=1.0, cov_high=5.0)
        assert int(out.clipped_N.sum()) == number
        assert bool((before <= out.clipped_N).all())
        assert not out.loss_N[out.clipped_N].any()
        before = out.clipped_N


def test_equal_keys_are_taken_in_order() -> None:
    assert first_share(torch.tensor([3.0, 1.0, 1.0, 1.0, 2.0]), 0.4).tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("function", [losses.clip_cov, losses.kl_cov])
def test_gradcheck_with_the_choice_held_still(function) -> None:
    tokens = whole([[Token(-1.0, -1.1, 1.0, 0.3), Token(-2.0, -1.9, -2.0, 0.1)], [Token(-4.0, -3.2, -1.5, 0.7)]])

    def of(logprobs_N: torch.Tensor) -> torch.Tensor:
        moved = Tokens(logprobs_N, tokens.old_N, tokens.advantages_N, tokens.sequences_N, tokens.places_N, tokens.update)
        return function(moved, cov_share=0.5).loss_N

    torch.autograd.gradcheck(of, tokens.logprobs_N)


@pytest.mark.parametrize("function", [losses.clip_cov, losses.kl_cov])
def test_without_the_update_it_refuses_to_run(function) -> None:
    tokens = spread()
    with pytest.raises(AssertionError, match="whole update"):
        function(Tokens(tokens.logprobs_N, tokens.old_N, tokens.advantages_N, tokens.sequences_N))
