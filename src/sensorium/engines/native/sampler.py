"""Random numbers keyed by what they are for, not by the order they are drawn in.

A response has a 64-bit key; its token t draws ``hash(key, t)``. The hash is integer arithmetic on the tensor's device, so
CPU and GPU give the same bits, and it can be captured in a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sensorium.engines.protocol import Sampling
from sensorium.kernels.matched_ops import integer_weights, log_probs
from sensorium.models.segment_layout import sent_to

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BITS = 52  # with half a unit added, 52 bits stay strictly inside (0, 1) in float64; 53 would round up to 1


def signed64(value: int) -> int:
    """The low 64 bits of an integer, as the signed number that an int64 tensor holds."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def uniforms(keys_B: Tensor, token_index_B: Tensor) -> Tensor:
    """One float64 in the open interval (0, 1) per row: a function of (key, token index) alone."""
    state_B = _mix(keys_B) + (token_index_B + 1) * signed64(_GOLDEN)
    return (_logical_shift(_mix(state_B), 64 - _BITS).to(torch.float64) + 0.5) * 2.0**-_BITS


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 products wrap as unsigned ones do."""
    z = (z ^ _logical_shift(z, 30)) * signed64(_MIX_1)
    z = (z ^ _logical_shift(z, 27)) * signed64(_MIX_2)
    return z ^ _logical_shift(z, 31)


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


# The policy is softmax(logits / temperature) with forbidden ids masked. Probabilities become integers before they are
# summed: an integer sum is exact in any order, so the running sum never falls, a token of probability zero owns no part
# of it and cannot be sampled, and CPU and GPU agree on where a uniform lands. What a row gets depends on that row
# alone. Example. A row of three tokens with probabilities 1/2, 1/4, 1/4, in integer units of the most likely one:
# weights 2 1 1 running sum 2 3 4 uniform 0.6: target = floor(0.6 * 4) = 2 sampled: token 1, the first with a running
# sum above 2; its log-prob is log(1/4) top_k 2: weights 2 1 0, running sum 2 3 3, target floor(0.6 * 3) = 1: token 0,
# log(1/2) as policy, log(2/3) as sampled


@dataclass(frozen=True)
class SamplerOutput:
    """A token per row, its log-prob under the policy, and under the distribution it was drawn from."""

    tokens_B: Tensor
    logprobs_B: Tensor
    sampled_logprobs_B: Tensor


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of a batch on the device. ``None`` where no row needs it, so that it costs nothing."""

    forbidden_F: Tensor
    stop_S: Tensor
    temperature_B1: Tensor | None
    greedy_B: Tensor | None
    stop_masked_B1: Tensor | None
    top_k_B1: Tensor | None
    top_p_B1: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[Sampling], forbidden_F: Tensor, stop_S: Tensor, vocab_size: int) -> "SamplingRows":
        """Lay out the rows' parameters; ``forbidden_F`` and ``stop_S`` are token ids on the device."""
        device = forbidden_F.device

        def column(values: list[float] | list[int] | list[bool], dtype: torch.dtype, used: bool) -> Tensor | None:
            return sent_to(device, torch.tensor(values, dtype=dtype))[:, None] if used else None

        temperatures = [row.temperature or 1.0 for row in rows]
        greedy = [row.temperature == 0 for row in rows]
        top_k = [min(row.top_k, vocab_size) or vocab_size for row in rows]
        truncated = any(row.top_p < 1 or k < vocab_size for row, k in zip(rows, top_k, strict=True))
        greedy_B1 = column(greedy, torch.bool, any(greedy))
        return cls(
            forbidden_F=forbidden_F,
            stop_S=stop_S,
            temperature_B1=column(temperatures, torch.float32, any(t != 1 for t in temperatures)),
            greedy_B=None if greedy_B1 is None else greedy_B1[:, 0],
            stop_masked_B1=column([not r.stop_tokens for r in rows], torch.bool, not all(r.stop_tokens for r in rows)),
            top_k_B1=column(top_k, torch.int64, truncated),
            top_p_B1=column([row.top_p for row in rows], torch.float64, truncated),
        )

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order of the fields: ``SamplingRows(*rows.tensors())`` is the same again."""
        return (
            self.forbidden_F,
            self.stop_S,
            self.temperature_B1,
            self.greedy_B,
            self.stop_masked_B1,
            self.top_k_B1,
            self.top_p_B1,
        )


def sample(logits_BV: Tensor, rows: SamplingRows, uniforms_B: Tensor) -> SamplerOutput:
    """Draw one token per row from one uniform per row."""
    vocab_size = int(logits_BV.shape[-1])  # a plain number also while it is being recorded
    scaled_BV = policy_logits(logits_BV, rows)
    shifted_BV, weights_BV = integer_weights(scaled_BV)
    cumulative_BV = (weights_BV if rows.top_k_B1 is None else _truncated(weights_BV, rows)).cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    target_B1 = torch.minimum((uniforms_B[:, None] * total_B1).long(), total_B1 - 1)
    # logits that are not finite give a log-prob that is not either; the token only has to be a valid index then
    tokens_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=vocab_size - 1)
    if rows.greedy_B is not None:
        tokens_B1 = torch.where(rows.greedy_B[:, None], scaled_BV.argmax(-1, keepdim=True), tokens_B1)
    chosen_B = shifted_BV.gather(1, tokens_B1)[:, 0]
    sampled_B = logprobs_B = log_probs(chosen_B, total_B1[:, 0], vocab_size)
    if rows.top_k_B1 is not None:
        logprobs_B = log_probs(chosen_B, weights_BV.sum(-1), vocab_size)
    if rows.greedy_B is not None:
        sampled_B = sampled_B.masked_fill(rows.greedy_B, 0.0)
    return SamplerOutput(tokens_B1[:, 0], logprobs_B, sampled_B)


def policy_logits(logits_BV: Tensor, rows: SamplingRows) -> Tensor:
    """Logits of the policy: divided by the temperature, forbidden ids (and stop ids of rows that ignore them) at -inf."""
    scaled_BV = logits_BV.float()
    scaled_BV = scaled_BV.clone() if rows.temperature_B1 is None else scaled_BV / rows.temperature_B1
    scaled_BV.index_fill_(1, rows.forbidden_F, -torch.inf)
    if rows.stop_masked_B1 is not None:
        stops_BS = scaled_BV.index_select(1, rows.stop_S).masked_fill(rows.stop_masked_B1, -torch.inf)
        scaled_BV.index_copy_(1, rows.stop_S, stops_BS)
    return scaled_BV


def _truncated(weights_BV: Tensor, rows: SamplingRows) -> Tensor:
    """Weights with top-k, then top-p within it; ties in weight are broken by token id. Other rows stay as they are."""
    assert rows.top_k_B1 is not None
    assert rows.top_p_B1 is not None
    sorted_BV, order_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(weights_BV.shape[-1], device=weights_BV.device)
    sorted_BV = sorted_BV.masked_fill(rank_V >= rows.top_k_B1, 0)
    cumulative_BV = sorted_BV.cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    mass_B1 = torch.where(rows.top_p_B1 < 1, (total_B1 * rows.top_p_B1).ceil().long().clamp(min=1), total_B1)
    keep_BV = (cumulative_BV - sorted_BV < mass_B1) & (sorted_BV > 0)
    return torch.zeros_like(weights_BV).scatter_(1, order_BV, sorted_BV * keep_BV)
