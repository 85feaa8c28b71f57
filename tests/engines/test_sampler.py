"""One uniform picks one token by the inverse CDF of exactly the distribution that is reported."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sensorium.engines.native.sampler import SamplingRows, sample
from sensorium.engines.protocol import Sampling
from sensorium.vocabulary.errors import EngineError

FORBIDDEN, STOP = [2, 5], [3]


def rows(*samplings: Sampling, vocab: int = 12) -> SamplingRows:
    return SamplingRows.of(samplings, torch.tensor(FORBIDDEN), torch.tensor(STOP), vocab)


def policy_probabilities(logits_V: Tensor, sampling: Sampling) -> np.ndarray:
    scaled = logits_V.double() / (sampling.temperature or 1.0)
    scaled[FORBIDDEN + ([] if sampling.stop_tokens else STOP)] = -torch.inf
    return scaled.softmax(-1).numpy()


def kept_probabilities(p: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Top-k, then top-p of what is left, written the slow way."""
    ranked = sorted(range(len(p)), key=lambda i: (-p[i], i))
    ranked = [i for i in ranked[: sampling.top_k or None] if p[i] > 0]
    total, mass, keep = sum(p[i] for i in ranked), 0.0, []
    for i in ranked:
        if keep and mass >= sampling.top_p * total:
            break
        keep.append(i)
        mass += p[i]
    q = np.zeros_like(p)
    q[keep] = p[keep] / p[keep].sum()
    return q


some_logits = st.lists(st.floats(-20, 20, width=32), min_size=12, max_size=12).map(torch.tensor)
no_ties = st.lists(st.integers(-100, 100), min_size=12, max_size=12, unique=True).map(
    lambda tenths: torch.tensor(tenths) / 10
)
some_uniform = st.floats(0, 1, exclude_min=True, exclude_max=True)
whole = st.builds(Sampling, temperature=st.sampled_from([0.3, 1.0, 1.7]), stop_tokens=st.booleans())
cut = st.builds(Sampling, top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]), top_k=st.sampled_from([0, 1, 3, 50]))


@settings(max_examples=200)
@given(some_logits, whole, some_uniform)
def test_the_token_is_the_inverse_cdf_at_the_uniform(logits_V: Tensor, sampling: Sampling, uniform: float) -> None:
    drawn = sample(logits_V[None], rows(sampling), torch.tensor([uniform], dtype=torch.float64))
    token = int(drawn.tokens_B)
    p = policy_probabilities(logits_V, sampling)
    edges = np.concatenate([[0], p.cumsum()])
    assert edges[token] - 1e-6 <= uniform <= edges[token + 1] + 1e-6
    assert p[token] > 0
    assert float(drawn.logprobs_B) == pytest.approx(np.log(p[token]), abs=1e-5)
    assert float(drawn.sampled_logprobs_B) == float(drawn.logprobs_B)


@settings(max_examples=200)
@given(no_ties, cut, some_uniform)
def test_truncation_keeps_top_k_then_top_p(logits_V: Tensor, sampling: Sampling, uniform: float) -> None:
    p = policy_probabilities(logits_V, sampling)
    ranked = np.sort(p[p > 0])[::-1]
    within = ranked[: sampling.top_k or None]
    assume(sampling.top_p == 1 or np.abs(within.cumsum() / within.sum() - sampling.top_p).min() > 1e-6)
    drawn = sample(logits_V[None], rows(sampling), torch.tensor([uniform], dtype=torch.float64))
    q = kept_probabilities(p, sampling)
    edges = np.concatenate([[0], q.cumsum()])
    token = int(drawn.tokens_B)
    assert edges[token] - 1e-6 <= uniform <= edges[token + 1] + 1e-6
    assert q[token] > 0
    assert float(drawn.logprobs_B) == pytest.approx(np.log(p[token]), abs=1e-5)
    assert float(drawn.sampled_logprobs_B) == pytest.approx(np.log(q[token]), abs=1e-5)


@pytest.mark.parametrize("sampling", [
    Sampling(), Sampling(temperature=0.5), Sampling(top_k=3), Sampling(top_p=0.6),
    Sampling(top_k=6, top_p=0.8, temperature=2.0), Sampling(stop_tokens=False),
])  # fmt: skip
def test_frequencies_match_the_distribution(sampling: Sampling) -> None:
    logits_V = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    drawn = sample(logits_V.expand(20_000, -1), rows(*[sampling] * 20_000), uniforms)
    q = kept_probabilities(policy_probabilities(logits_V, sampling), sampling)
    counts = torch.bincount(drawn.tokens_B, minlength=12).numpy()
    assert np.abs(counts / 20_000 - q).max() < 1e-4  # an even grid of uniforms misses each share by a point at most
    told = drawn.sampled_logprobs_B.exp().numpy()
    assert told == pytest.approx(q[drawn.tokens_B.numpy()], abs=1e-6)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits_V = torch.full((12,), -torch.inf)
    logits_V[[1, 7]] = 0.0
    logits_V[FORBIDDEN] = 1e30  # a forbidden id stays forbidden, however sure the model is
    edge = torch.tensor([2.0**-53, 0.5 - 2.0**-53, 0.5, 0.5 + 2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    drawn = sample(logits_V.expand(5, -1), rows(*[Sampling()] * 5), edge)
    assert drawn.tokens_B.tolist() == [1, 1, 7, 7, 7]
    assert drawn.logprobs_B.tolist() == pytest.approx([np.log(0.5)] * 5)


def test_greedy_takes_the_best_with_the_policys_logprob_at_temperature_one() -> None:
    logits_BV = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    logits_BV[:, FORBIDDEN] = 50.0
    drawn = sample(logits_BV, rows(*[Sampling(temperature=0.0)] * 3), torch.full((3,), 0.9, dtype=torch.float64))
    for b in range(3):
        p = policy_probabilities(logits_BV[b], Sampling())
        assert int(drawn.tokens_B[b]) == p.argmax()
        assert float(drawn.logprobs_B[b]) == pytest.approx(np.log(p.max()), abs=1e-6)
    assert drawn.sampled_logprobs_B.tolist() == [0.0] * 3


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """A plain row gives the same bits alone and beside rows that truncate, cool or are greedy."""
    kinds = [Sampling(), Sampling(temperature=0.7), Sampling(top_p=0.5), Sampling(top_k=2), Sampling(temperature=0.0),
             Sampling(stop_tokens=False)]  # fmt: skip
    logits_BV = torch.randn(len(kinds) * 50, 12, generator=torch.Generator().manual_seed(1)) * 3
    uniforms = torch.rand(len(kinds) * 50, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    together = sample(logits_BV, rows(*kinds * 50), uniforms)
    for i, kind in enumerate(kinds):
        alone = sample(logits_BV[i :: len(kinds)], rows(*[kind] * 50), uniforms[i :: len(kinds)])
        assert torch.equal(alone.tokens_B, together.tokens_B[i :: len(kinds)])
        assert torch.equal(alone.logprobs_B, together.logprobs_B[i :: len(kinds)])
        assert torch.equal(alone.sampled_logprobs_B, together.sampled_logprobs_B[i :: len(kinds)])


def test_a_large_vocabulary_keeps_its_tail() -> None:
    """With 152 k tokens nothing overflows, and logprobs stay those of log_softmax."""
    logits_BV = torch.randn(4, 151_936, generator=torch.Generator().manual_seed(5)) * 2
    table = SamplingRows.of([Sampling()] * 4, torch.tensor([0]), torch.tensor([1]), 151_936)
    drawn = sample(logits_BV, table, torch.tensor([1e-9, 0.3, 0.7, 1 - 1e-9], dtype=torch.float64))
    logits_BV[:, 0] = -torch.inf
    expected = logits_BV.double().log_softmax(-1).gather(1, drawn.tokens_B[:, None])[:, 0]
    assert torch.allclose(drawn.logprobs_B, expected, atol=1e-6)
    assert int(drawn.tokens_B[0]) == 1
    assert int(drawn.tokens_B[3]) == 151_935


def test_logits_that_are_not_finite_are_told_not_hidden() -> None:
    logits_BV = torch.zeros(2, 12)
    logits_BV[1, 4] = torch.nan
    drawn = sample(logits_BV, rows(Sampling(), Sampling()), torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert drawn.logprobs_B.isnan().tolist() == [False, True]
    assert int(drawn.tokens_B[1]) < 12


@pytest.mark.parametrize(
    "given",
    [{"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": 1.5},
     {"top_k": -1}, {"top_k": 2.5}, {"max_new_tokens": 0}],
)  # fmt: skip
def test_what_no_distribution_has_is_refused_where_sampling_is_made(given: dict[str, float]) -> None:
    (name,) = given
    with pytest.raises(EngineError, match=rf"sampling: {name} must be "):
        Sampling(**given)  # type: ignore[arg-type]
