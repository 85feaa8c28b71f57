"""What holds for every loss of the table: its settings, its independence from micro-batching, its first update."""

import inspect
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sensorium.algorithms.losses import sequence_weights
from sensorium.recipe.estimators_and_losses import LOSSES
from sensorium.recipe.registry import resolve, table
from sensorium.recipe.schema import LossSection
from tests.algorithms.updates import Token, Update, counts, cuts, flat, part, slopes, updates, whole

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")
SETTINGS: dict[str, dict[str, Any]] = {
    "clip": {"dual_clip": 3.0},
    "clip_cov": {"cov_share": 0.3, "cov_low": 0.05},
    "kl_cov": {"cov_share": 0.3},
}
"""So that what they switch on is met by a few tokens."""

ALLOWED = [(name, how) for name, traits in LOSSES.items() for how in traits.aggregations or AGGREGATIONS]


def test_names_and_traits_are_of_the_same_losses() -> None:
    assert set(table("loss")) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_parameters_are_the_settings_of_the_traits_with_the_recipes_defaults(name: str) -> None:
    parameters = inspect.signature(resolve("loss", name)).parameters
    settings = {key: p.default for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert set(parameters) - set(settings) == {"tokens"}
    assert settings == {key: getattr(LossSection(name=name), key) for key in LOSSES[name].settings}


@pytest.mark.parametrize(("name", "aggregation"), ALLOWED)
@given(updates(), st.integers(0, 2**32))
def test_a_loss_does_not_depend_on_micro_batches(name: str, aggregation: str, update: Update, seed: int) -> None:
    tokens, loss = whole(update), resolve("loss", name)
    weights_N = sequence_weights(aggregation, counts(update), constant=7.0)[tokens.sequences_N]
    settings = SETTINGS.get(name, {})
    out = loss(tokens, **settings)
    total = (weights_N * out.loss_N).sum()
    (gradient_N,) = torch.autograd.grad(total, tokens.logprobs_N)

    pieces, clipped_N = torch.zeros((), dtype=torch.float64), torch.zeros_like(out.clipped_N)
    for places_M in cuts(len(flat(update)), Random(seed)):
        given = part(tokens, places_M, LOSSES[name].over)
        piece = loss(given, **settings)
        pieces = pieces + (weights_N[places_M] * piece.loss_N).sum()
        clipped_N[places_M] = piece.clipped_N
    (again_N,) = torch.autograd.grad(pieces, tokens.logprobs_N)
    torch.testing.assert_close(pieces, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again_N, gradient_N, rtol=1e-12, atol=1e-12)
    assert clipped_N.equal(out.clipped_N)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "likelihood"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(updates())
def test_a_first_update_is_not_clipped_and_has_the_policy_gradient(name: str, dtype: torch.dtype, update: Update) -> None:
    """At old = current the ratio is 1 and every loss has the gradient of -A·logp; for clip_cov, where no token is drawn."""
    unmoved = [[Token(t.logp, t.logp, t.advantage, t.uniform) for t in sequence] for sequence in update]
    settings = {"cov_low": 1e6, "cov_high": 1e7} if name == "clip_cov" else {}
    tokens = whole(unmoved, dtype)
    out = resolve("loss", name)(tokens, **settings)
    assert not out.clipped_N.any()
    if name == "sapo":
        torch.testing.assert_close(slopes(out, tokens), -tokens.advantages_N)
    else:
        assert slopes(out, tokens).equal(-tokens.advantages_N)


def test_all_losses_but_two_move_credited_tokens_only() -> None:
    assert {name for name, traits in LOSSES.items() if not traits.credited_only} == {"kl_cov", "likelihood"}


@pytest.mark.parametrize("name", [name for name, traits in LOSSES.items() if traits.credited_only])
@given(updates())
def test_a_token_without_advantage_has_no_gradient(name: str, update: Update) -> None:
    """So groups without signal may run forward only; kl_cov may hold such a token, likelihood knows no advantages."""
    tokens = whole(update)
    idle_N = tokens.advantages_N == 0
    assume(bool(idle_N.any()))
    assert not slopes(resolve("loss", name)(tokens, **SETTINGS.get(name, {})), tokens)[idle_N].any()
