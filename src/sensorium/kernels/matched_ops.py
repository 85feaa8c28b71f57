"""What a decoder layer computes, so that a token's result depends on its own context alone: ``model.precision: matched``.

A library's matrix product picks its order of summation by the number of rows, and attention kernels split keys by batch.
So sampling 64 tokens and training on 5,000 round differently. Here every sum has an order that the model's sizes and the
token's own context fix:

    product      along the inner size from its first element to its last (tensor cores), or as a binary tree (plain torch)
    attention    keys in blocks of 64, counted from the start of the context: entries 0-63, 64-127, …
    norm         one row at a time

``matched_triton`` computes this on CUDA, ``TorchMatched`` anywhere; their results differ, so both sides use one of them.
Axes: N rows, K inner size, M outputs, T queries, H heads, D head size, X tiles.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from sensorium.kernels.first_use import fall_back
from sensorium.kernels.layer_ops import Gate, Norm, NormWeights, Rotate, UnknownLayer

BLOCK = 64
CHUNK_ELEMENTS = 1 << 22  # numbers that a product in plain torch holds at once
CHUNK_QUERIES = 64


@dataclass(frozen=True)
class QueryTiles:
    """Queries and where their keys are. Tile x: queries ``first`` … ``first + count``, in one context, one after the other.

    Entry i of their context is the key ``entries[base + i]``; query j of the tile sees entries 0 … ``place + j``. Example:
    a prompt of 100 tokens at rows 0-99, two responses at rows 100-104 and 105-107, tiles of at most 4 queries:

        entries  0 … 99, 100 … 104 | 0 … 99, 105 … 107
        tiles    (100, 4, base 0, place 100), (104, 1, 0, 104), (105, 3, 105, 100), and those of the prompt
    """

    first_X: Tensor
    count_X: Tensor
    base_X: Tensor
    place_X: Tensor
    entries: Tensor


@dataclass(frozen=True)
class KeyStore:
    """Keys and values; entry e of head k begins at ``e · entry_stride + k · head_stride``."""

    keys: Tensor
    values: Tensor
    kv_heads: int
    entry_stride: int
    head_stride: int


class MatchedOps(Protocol):
    """The operations; gradients are those of the plain ones."""

    def product(self, x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None, kind: torch.dtype) -> Tensor: ...

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor: ...

    def rotate(self, x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor: ...

    def gate(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def attend(self, query_THD: Tensor, store: KeyStore, tiles: QueryTiles, scaling: float) -> Tensor: ...


class TorchMatched:
    """In plain torch on any device: sums are binary trees of additions. Slow: for tiny models and for tests."""

    def product(self, x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None, kind: torch.dtype) -> Tensor:
        """x · weightᵀ + bias, computed in float32."""
        wide_MK = weight_MK.float()
        rows = max(1, CHUNK_ELEMENTS // wide_MK.numel())
        parts = [tree_sum(part[:, None] * wide_MK) for part in x_NK.float().split(rows)]
        summed_NM = torch.cat(parts) if parts else x_NK.new_zeros(0, len(weight_MK), dtype=torch.float32)
        return (summed_NM if bias_M is None else summed_NM + bias_M.float()).to(kind)

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """RMSNorm in the kind of its weight."""
        wide = x.float()
        scale = torch.rsqrt(tree_sum(wide * wide)[..., None] / wide.shape[-1] + norm.eps)
        return (norm.weight.float() * (wide * scale).to(x.dtype).float()).to(norm.weight.dtype)

    def rotate(self, x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        """Rotary positions."""
        first, second = x_BTHD.chunk(2, -1)
        return x_BTHD * cos_BTD[:, :, None] + torch.cat((-second, first), -1) * sin_BTD[:, :, None]

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU."""
        return silu(gate) * up

    def attend(self, query_THD: Tensor, store: KeyStore, tiles: QueryTiles, scaling: float) -> Tensor:
        """Attention of the tiles' queries; others get zeros."""
        out_THD = torch.zeros_like(query_THD)
        counts_X = tiles.count_X
        within_Q = torch.cat([torch.arange(count) for count in counts_X.tolist()]).to(counts_X)
        query_Q = tiles.first_X.repeat_interleave(counts_X) + within_Q
        base_Q = tiles.base_X.repeat_interleave(counts_X)
        last_Q = tiles.place_X.repeat_interleave(counts_X) + within_Q
        for part in torch.arange(len(query_Q), device=query_Q.device).split(CHUNK_QUERIES):
            found = self._attend(query_THD[query_Q[part]], store, base_Q[part], last_Q[part], tiles.entries, scaling)
            out_THD[query_Q[part]] = found
        return out_THD

    def _attend(
        self, query_QHD: Tensor, store: KeyStore, base_Q: Tensor, last_Q: Tensor, entries: Tensor, scaling: float
    ) -> Tensor:
        queries, _, size = query_QHD.shape
        query = query_QHD.float().view(queries, store.kv_heads, -1, 1, size)
        place_B = torch.arange(BLOCK, device=base_Q.device)
        heads_K = torch.arange(store.kv_heads, device=base_Q.device) * store.head_stride
        top = query.new_full(query.shape[:3], -torch.inf)
        weight, summed = torch.zeros_like(top), torch.zeros_like(query[:, :, :, 0])
        for start in range(0, int(last_Q.max()) + 1, BLOCK):
            seen_QB = start + place_B <= last_Q[:, None]
            entry_QB = entries[torch.where(seen_QB, base_Q[:, None] + start + place_B, 0)]
            where = (entry_QB * store.entry_stride)[:, None] + heads_K[:, None]
            where = where[..., None] + torch.arange(size, device=base_Q.device)
            unseen = ~seen_QB[:, None, :, None]
            key, value = (x.flatten()[where].float().masked_fill(unseen, 0) for x in (store.keys, store.values))
            score = (tree_sum(query * key[:, :, None]) * scaling).masked_fill(~seen_QB[:, None, None], -torch.inf)
            higher = torch.maximum(top, score.amax(-1))
            kept, part = (top - higher).exp(), (score - higher[..., None]).exp()
            weight = weight * kept + tree_sum(part)
            summed = summed * kept[..., None] + tree_sum((part[..., None] * value[:, :, None]).transpose(-1, -2))
            top = higher
        return (summed / weight[..., None]).to(query_QHD.dtype).view_as(query_QHD)


class TritonMatched:
    """On CUDA. Tiles for many rows are used where they give the bits that tiles for few give."""

    def __init__(self) -> None:
        from sensorium.kernels import matched_triton

        self._kernels = matched_triton
        self._few: dict[torch.dtype, bool | None] = {}

    def product(self, x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None, kind: torch.dtype) -> Tensor:
        """x · weightᵀ + bias, computed in float32."""
        given = x_NK.dtype
        if given not in self._few:
            alike = self._kernels.sums_alike(x_NK.device, given)
            self._few[given] = None if alike else True
            if not alike:
                fall_back(
                    "matched precision uses tiles for few rows alone, which is slower: others sum in another order here"
                )
        return self._kernels.product(x_NK, weight_MK, bias_M, kind, self._few[given])

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """RMSNorm in the kind of its weight."""
        normed: Tensor = Norm.apply(x, norm.weight, norm.eps)
        return normed

    def rotate(self, x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        """Rotary positions."""
        rotated: Tensor = Rotate.apply(x_BTHD, cos_BTD, sin_BTD)
        return rotated

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU."""
        gated: Tensor = Gate.apply(gate, up)
        return gated

    def attend(self, query_THD: Tensor, store: KeyStore, tiles: QueryTiles, scaling: float) -> Tensor:
        """Attention of the tiles' queries; others get zeros."""
        return self._kernels.attend(query_THD, store, tiles, scaling)


def matched_ops(device: torch.device) -> MatchedOps:
    """Kernels on CUDA, where Triton is installed; plain torch elsewhere."""
    return TritonMatched() if device.type == "cuda" and find_spec("triton") is not None else TorchMatched()


def queries_of_tile(heads: int, kv_heads: int) -> int:
    """How many queries stand in one tile: the heads that share a key head fill it."""
    share = 1 << (heads // kv_heads - 1).bit_length()
    return max(1, BLOCK // share)


def tree_sum(x: Tensor) -> Tensor:
    """The sum along the last axis as a binary tree of additions: its order depends on the axis' size alone."""
    while x.shape[-1] > 1:
        half, odd = divmod(x.shape[-1], 2)
        summed = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((summed, x[..., -1:]), -1) if odd else summed
    return x[..., 0]


class MatchedProduct(torch.autograd.Function):
    """(x, weight, bias, kind, operations) → x · weightᵀ + bias in ``kind``; gradients by plain products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_MK: Tensor, bias_M: Tensor | None, kind: torch.dtype, ops: MatchedOps
    ) -> Tensor:
        ctx.save_for_backward(x, weight_MK)
        if x.dim() == 2:  # not a view: a tower rotates its queries in place
            return ops.product(x, weight_MK, bias_M, kind)
        return ops.product(x.flatten(0, -2), weight_MK, bias_M, kind).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_MK = ctx.saved_tensors
        gradient_NM = gradients[0].to(x.dtype).flatten(0, -2)
        inner = (gradient_NM @ weight_MK).view_as(x) if ctx.needs_input_grad[0] else None
        weight = gradient_NM.T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        bias = gradient_NM.sum(0) if ctx.needs_input_grad[2] else None
        return inner, weight, bias, None, None


def matched_linear(layer: nn.Module, x: Tensor, ops: MatchedOps, kind: torch.dtype | None = None) -> Tensor:
    """What a linear layer gives, with or without an adapter, in ``kind`` (by default that of x)."""
    kind = kind or x.dtype
    if isinstance(layer, nn.Linear):
        plain: Tensor = MatchedProduct.apply(x, layer.weight, layer.bias, kind, ops)
        return plain
    adapted: Any = layer
    if adapted.disable_adapters:
        return matched_linear(adapted.base_layer, x, ops, kind)
    wide = matched_linear(adapted.base_layer, x, ops, torch.float32)
    for name in adapted.active_adapters:
        down = matched_linear(adapted.lora_A[name], x, ops)
        wide = wide + matched_linear(adapted.lora_B[name], down, ops, torch.float32) * adapted.scaling[name]
    return wide.to(kind)


def refuse_unknown(layer: nn.Module) -> None:
    """``UnknownLayer`` for what is neither a plain linear layer nor one with an adapter."""
    base = getattr(layer, "base_layer", layer)
    adapted = base is not layer and hasattr(layer, "lora_A")
    if type(base) is not nn.Linear or (base is not layer and not adapted):
        raise UnknownLayer(f"{type(layer).__name__} is no linear layer")


def with_gradient_of(exact: Tensor, plain: Tensor) -> Tensor:
    """The value of one tensor with the gradient of another that approximates it."""
    return exact.detach() + (plain - plain.detach()) if plain.requires_grad else exact


# Example. Scaled logits whose largest is 3.0, in a vocabulary of three, with 4 bits for the most likely token:
#
#     3.0  2.3  -inf    shifted  0.0 -0.7 -inf    weights 16 7 0    total 23
#     log-prob of token 1: -0.7 + 4 · log 2 - log 23


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
