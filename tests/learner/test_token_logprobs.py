"""Log-probs and entropies are those of a plain log-softmax, values and gradients."""

import pytest
import torch

from sensorium.learner.forward import FORBIDDEN, TokenLogprobs


@pytest.mark.parametrize("vocab", [2, 15, 448, 1003])
@pytest.mark.parametrize(("temperature", "forbidden"), [(1.0, 0), (0.7, 1)])
def test_values_and_gradients(vocab: int, temperature: float, forbidden: int) -> None:
    logits = 6 * torch.randn(70, vocab, generator=torch.Generator().manual_seed(vocab))
    bias, targets = torch.zeros(vocab), torch.arange(70) % (vocab - forbidden)
    bias[vocab - forbidden :] = FORBIDDEN
    results = []
    for plain in (False, True):
        entered = logits.double().requires_grad_() if plain else logits.clone().requires_grad_()
        if plain:
            allowed = (entered[:, : vocab - forbidden] / temperature).log_softmax(1)
            logprobs, entropies = allowed.gather(1, targets[:, None])[:, 0], -(allowed * allowed.exp()).sum(1)
        else:
            logprobs, entropies = TokenLogprobs.apply(entered, targets, bias, temperature)
        pull = torch.linspace(-1, 2, 70)
        (gradient,) = torch.autograd.grad((logprobs * pull + 0.3 * entropies).sum(), entered)
        results.append([logprobs.detach().float(), entropies.detach().float(), gradient.float()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6)


def test_a_large_vocabulary_loses_no_digits() -> None:
    logits = 3 * torch.randn(4, 151_936, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(4) * 37_000
    logprobs, entropies = TokenLogprobs.apply(logits, targets, torch.zeros(logits.shape[1]), 1.0)
    expected = logits.double().log_softmax(1)
    assert (logprobs - expected.gather(1, targets[:, None])[:, 0]).abs().max() <= 4e-6
    assert (entropies + (expected * expected.exp()).sum(1)).abs().max() <= 4e-6


def test_what_is_not_a_number_stays_so_in_its_row_alone() -> None:
    logits = torch.zeros(3, 40)
    logits[1, 7] = torch.nan
    logprobs, entropies = TokenLogprobs.apply(logits, torch.zeros(3, dtype=torch.int64), torch.zeros(40), 1.0)
    assert logprobs.isnan().tolist() == entropies.isnan().tolist() == [False, True, False]
