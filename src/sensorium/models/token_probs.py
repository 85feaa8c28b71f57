"""Probabilities of tokens as integers, whose sum is the same in any order: what engine and learner may both compute.

Example. Scaled logits whose largest is 3.0, in a vocabulary of three, with 4 bits for the most likely token:

    3.0  2.3  -inf    shifted  0.0 -0.7 -inf    weights 16 7 0    total 23
    log-prob of token 1: -0.7 + 4 · log 2 - log 23
"""

from torch import Tensor

LOG_2 = 0.6931471805599453


def unit_bits(vocab_size: int) -> int:
    """The most likely token weighs 2**bits: as fine as fits when every token of the vocabulary weighs that much."""
    return min(52, 62 - vocab_size.bit_length())


def integer_weights(scaled_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled logits below the largest of their row, and their exponentials as integers of ``unit_bits``."""
    shifted_BV = scaled_BV - scaled_BV.amax(-1, keepdim=True)
    # A plain number also while it is being recorded; a power of two scales exactly.
    weights_BV = (shifted_BV.exp() * 2.0 ** unit_bits(int(scaled_BV.shape[-1]))).long()
    return shifted_BV, weights_BV


def log_probs(chosen_B: Tensor, total_B: Tensor, vocab_size: int) -> Tensor:
    """Float64 log-probs of tokens: their shifted logits, and the sum of all weights of their row."""
    return chosen_B.double() + unit_bits(vocab_size) * LOG_2 - total_B.double().log()
