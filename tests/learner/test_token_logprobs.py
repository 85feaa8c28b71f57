"""Log-probs and entropies in C are those of torch, and those of a plain log-softmax."""

import pytest
import torch
from torch import Tensor

from sensorium.compiled.library import NoLibrary
from sensorium.learner import token_logprobs
from sensorium.learner.token_logprobs import FORBIDDEN, CompiledLogprobs, TokenLogprobs, compiled_logprobs_are_right
from sensorium.models.fast_paths import fallbacks, without_compiled_parts


def results(way: type[torch.autograd.Function], logits: Tensor, temperature: float, forbidden: int) -> list[Tensor]:
    """Log-probs, entropies, and the gradient of a mix of both."""
    bias, targets = torch.zeros(logits.shape[1]), torch.arange(len(logits)) % (logits.shape[1] - forbidden)
    bias[logits.shape[1] - forbidden :] = FORBIDDEN
    entered = logits.clone().requires_grad_()
    logprobs, entropies, *_ = way.apply(entered, targets, bias, temperature)
    pull = torch.linspace(-1, 2, len(logits))
    (gradient,) = torch.autograd.grad((logprobs * pull + 0.3 * entropies).sum(), entered)
    return [logprobs.detach(), entropies.detach(), gradient]


@pytest.mark.parametrize("vocab", [2, 15, 16, 17, 448, 1003])
@pytest.mark.parametrize(("temperature", "forbidden"), [(1.0, 0), (0.7, 1)])
def test_values_and_gradients(vocab: int, temperature: float, forbidden: int) -> None:
    logits = 6 * torch.randn(70, vocab, generator=torch.Generator().manual_seed(vocab))
    expected, found = (results(way, logits, temperature, forbidden) for way in (TokenLogprobs, CompiledLogprobs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=3e-6)
    allowed = logits[:, : vocab - forbidden].double() / temperature
    plain = allowed.log_softmax(1)[torch.arange(70), torch.arange(70) % (vocab - forbidden)]
    torch.testing.assert_close(found[0].double(), plain, rtol=1e-5, atol=3e-6)


def test_a_large_vocabulary_loses_no_digits() -> None:
    logits = 3 * torch.randn(4, 151_936, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(4) * 37_000
    logprobs, entropies, _ = CompiledLogprobs.apply(logits, targets, torch.zeros(logits.shape[1]), 1.0)
    expected = logits.double().log_softmax(1)
    assert (logprobs - expected.gather(1, targets[:, None])[:, 0]).abs().max() <= 4e-6
    assert (entropies + (expected * expected.exp()).sum(1)).abs().max() <= 4e-6


def test_no_bit_depends_on_threads_or_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(61, 131, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(token_logprobs, "NUMBERS_OF_A_THREAD", 1)
    before = torch.get_num_threads()
    try:
        alone = results(CompiledLogprobs, logits, 0.9, 3)
        torch.set_num_threads(4)
        assert all(torch.equal(*pair) for pair in zip(alone, results(CompiledLogprobs, logits, 0.9, 3), strict=True))
    finally:
        torch.set_num_threads(before)
    first = CompiledLogprobs.apply(logits[:1], torch.zeros(1, dtype=torch.int64), torch.zeros(131), 0.9)
    many = CompiledLogprobs.apply(logits, torch.zeros(61, dtype=torch.int64), torch.zeros(131), 0.9)
    assert all(torch.equal(one[:1], other[:1]) for one, other in zip(first, many, strict=True))


def test_what_is_not_a_number_stays_so_in_its_row_alone() -> None:
    logits = torch.zeros(3, 40)
    logits[1, 7] = torch.nan
    logprobs, entropies, _ = CompiledLogprobs.apply(logits, torch.zeros(3, dtype=torch.int64), torch.zeros(40), 1.0)
    assert logprobs.isnan().tolist() == entropies.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_beyond_the_vocabulary_is_refused(target: int) -> None:
    with pytest.raises(IndexError, match="none of the 7 ids"):
        CompiledLogprobs.apply(torch.zeros(1, 7), torch.tensor([target]), torch.zeros(7), 1.0)


def test_where_it_cannot_be_had_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*given: object) -> None:
        raise NoLibrary("no C compiler was found (cc)")

    monkeypatch.setattr(token_logprobs, "call", nothing)
    compiled_logprobs_are_right.cache_clear()
    without_compiled_parts.cache_clear()
    before = fallbacks()
    try:
        with pytest.warns(UserWarning, match="compiled parts.*No C compiler was found"):
            assert not compiled_logprobs_are_right()
        assert not compiled_logprobs_are_right()
    finally:
        compiled_logprobs_are_right.cache_clear()
    assert fallbacks() == before + 1
