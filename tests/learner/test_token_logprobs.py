"""Log-probs and entropies are those of a plain log-softmax, values and gradients."""

import pytest
import torch

from sensorium.learner import forward
from sensorium.learner.forward import FORBIDDEN, TiledLogprobs, TokenLogprobs


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("asked", ["log-probs", "entropies", "both"])
def test_tiles_of_the_head_give_what_whole_logits_give(
    temperature: float, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "TILE", 7)
    generator = torch.Generator().manual_seed(3)
    hidden_MH = torch.randn(17, 8, generator=generator)
    weight_VH = 3 * torch.randn(40, 8, generator=generator)
    targets_M = torch.randint(9, 40, (17,), generator=generator)
    pull_2M = torch.randn(2, 17, generator=generator)
    bias_V = torch.zeros(40)
    bias_V[:8] = FORBIDDEN  # the first tile is forbidden whole
    results = []
    for tiled in (False, True):
        hidden, weight = hidden_MH.clone().requires_grad_(), weight_VH.clone().requires_grad_()
        if tiled:
            *found, scale = TiledLogprobs.apply(hidden, weight, targets_M, bias_V, temperature)
            assert float(scale) == pytest.approx(float((hidden_MH @ weight_VH.T).abs().max() / temperature))
        else:
            found = list(TokenLogprobs.apply(hidden @ weight.T, targets_M, bias_V, temperature))
        pulls = [pull for pull, name in zip(pull_2M, ("log-probs", "entropies"), strict=True) if asked in (name, "both")]
        chosen = found if asked == "both" else [found[asked == "entropies"]]
        gradients = torch.autograd.grad(chosen, [hidden, weight], pulls)
        results.append([*(x.detach() for x in found), *gradients])
    for plain, tile in zip(*results, strict=True):
        torch.testing.assert_close(tile, plain, rtol=1e-5, atol=1e-5)
