"""The stock vision towers, made fast over many small pictures, with the same numbers.

A tower runs once over a batch of pictures and videos, laid end to end, and attends within segments (a picture, a
temporal patch of a video, or a window of either). The library loops over the segments, computes its index tables per
picture, and embeds patches by a convolution whose kernel covers the whole patch. Here segments of one length attend as
one batch, tables are cached by the batch's grids, and the convolution is a matrix product.

In blocks, norm, rotation and gate are one kernel each, on CUDA in 16 bits; a CPU runs the stock blocks. The modules
here take over the layers and settings of the stock ones, so checkpoints stay the same, and compute as the stock ones do
until ``fused`` is set. ``choose`` sets it once a block's values and gradients agree with its stock form. On CUDA blocks
of Qwen2.5's kind (RMSNorm, gated MLP) are then one function each with its gradient (``GatedTowerBlock``), unless their
layers have adapters:

    x ─ norm ─ q, k, v ─ rotation ─ attention ─ out ─ + x ─ norm ─ gate, up ─ silu · ─ down ─ + ─▶

Autograd over the parts would keep 41 kB a patch of Qwen2.5-VL-3B's tower, and for few pictures the host would take
longer than the GPU. Here norms and the gate are recomputed in the backward pass: 29 kB a patch are kept. Axes: P
patches, W width, F inner size, H heads, D head size; weights are [out, in].
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from sensorium.data.lru import LRU
from sensorium.kernels.first_use import fall_back
from sensorium.kernels.layer_ops import Gate, Norm, RotateSlots, ops_of
from sensorium.kernels.layer_torch import column_sums
from sensorium.models.attention import one_row
from sensorium.models.prepared_media import Grid, TowerInput
from sensorium.models.segment_layout import Features

# Inner sizes are padded to multiples of this. Of 3,424, 3,456 and 3,584 for Qwen2.5-VL's 3,420 the first is the fastest.
ALIGNED = 32


@dataclass(frozen=True)
class BlockSettings:
    """Inputs of a block beside its weights: ends of the segments, the longest, rotation, heads, eps of the norms."""

    ends: Tensor
    longest: int
    cos_PD: Tensor
    sin_PD: Tensor
    heads: int
    scaling: float
    eps: tuple[float, float]


class JoinedMLP:
    """Weights of a gated MLP for two products: gate and up in one, the inner size a multiple of ``ALIGNED``.

    Fast matrix kernels want such sizes. Padding changes no number: silu(0) · 0 = 0, and the weights there are 0 too. Made
    again when weights change.
    """

    def __init__(self) -> None:
        self._made_of: tuple[tuple[int, int], ...] = ()
        self._joined: tuple[Tensor, ...] = ()

    @torch.no_grad()
    @torch.inference_mode(False)  # what is cached must also serve training
    def __call__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> tuple[Tensor, ...]:
        """(gate over up, their biases, down)."""
        weights = (gate.weight, gate.bias, up.weight, up.bias, down.weight)
        made_of = tuple((weight.data_ptr(), weight._version) for weight in weights)
        if made_of != self._made_of:
            more = -gate.out_features % ALIGNED
            wider = [pad(weight, (0, 0) * (weight.dim() - 1) + (0, more)) for weight in weights[:4]]
            self._joined = (torch.cat(wider[::2]), torch.cat(wider[1::2]), pad(weights[4], (0, more)))
            self._made_of = made_of
        return self._joined


class GatedTowerBlock(torch.autograd.Function):
    """(x, settings, joined MLP, gain, qkv, bias, out, bias, gain, gate, bias, up, bias, down, bias) → x after the block."""

    @staticmethod
    def forward(ctx: Any, x_PW: Tensor, settings: BlockSettings, joined: Sequence[Tensor], *weights: Tensor) -> Tensor:
        first_gain, qkv, qkv_bias, out, out_bias, second_gain, *_, down_bias = weights
        pair, pair_bias, down = joined
        x_PW = x_PW.contiguous()
        ops = ops_of(x_PW)
        normed_PW, first_scale = ops.normed(x_PW, first_gain, settings.eps[0])
        rotated = linear(normed_PW, qkv, qkv_bias)
        ops.rotate_into(rotated, rotated, settings.cos_PD, settings.sin_PD, 3, 2, back=False)
        seen_PHD, lse = attended(rotated, settings)
        projected_PW = linear(seen_PHD.flatten(1), out, out_bias)
        normed_PW, summed_PW, second_scale = ops.add_normed(projected_PW, x_PW, second_gain, settings.eps[1])
        both_PF = linear(normed_PW, pair, pair_bias)
        result_PW = linear(ops.gated_pair(both_PF), down, down_bias).add_(summed_PW)
        ctx.settings = settings
        kept = (x_PW, first_scale, rotated, seen_PHD, lse, summed_PW, second_scale, both_PF)
        ctx.save_for_backward(*kept, first_gain, qkv, out, second_gain, pair, down)
        ctx.inner = len(weights[6])
        return result_PW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_PW, first_scale, rotated, seen_PHD, lse, summed_PW, second_scale, both_PF, *weights = ctx.saved_tensors
        first_gain, qkv, out, second_gain, pair, down = weights
        settings, inner, given_PW = ctx.settings, ctx.inner, gradients[0].contiguous()
        ops = ops_of(given_PW)
        both_given, both_bias, gated_PF = ops.gate_pair_gradients(both_PF, given_PW @ down)
        second = ops.norm_gradients(
            summed_PW, second_gain, second_scale, both_given @ pair, given_PW, again=second_gain.dtype
        )
        between_PW = second.input
        gate, up = (both_given.T @ second.result).chunk(2)
        gate_bias, up_bias = both_bias.chunk(2)
        mlp = [
            gate[:inner], gate_bias[:inner], up[:inner], up_bias[:inner],
            (given_PW.T @ gated_PF)[:, :inner], column_sums(given_PW),
        ]  # fmt: skip
        seen_given = (between_PW @ out).view_as(seen_PHD)
        turned = attention_gradients(seen_given, rotated, seen_PHD, lse, settings)
        ops.rotate_into(turned, turned, settings.cos_PD, settings.sin_PD, 3, 2, back=True)
        first = ops.norm_gradients(x_PW, first_gain, first_scale, turned @ qkv, between_PW, again=first_gain.dtype)
        attention = [
            turned.T @ first.result, column_sums(turned),
            between_PW.T @ seen_PHD.flatten(1), column_sums(between_PW),
        ]  # fmt: skip
        return first.input, None, None, first.weight, *attention, second.weight, *mlp


def attended(rotated: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
    """Attention within segments by torch's flash attention, 16 bits on CUDA, with its log-sum-exp."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_three(rotated, settings), settings.ends, settings.ends, settings.longest, settings.longest, 0.0, False, False,
        scale=settings.scaling,
    )  # fmt: skip
    return out, lse


def attention_gradients(
    given_PHD: Tensor, rotated: Tensor, seen_PHD: Tensor, lse: Tensor, settings: BlockSettings
) -> Tensor:
    """The gradient of queries, keys and values side by side."""
    no_dropout = torch.empty(2, dtype=torch.uint64, device=given_PHD.device)  # required, but not read
    found = torch.ops.aten._flash_attention_backward(
        given_PHD, *_three(rotated, settings), seen_PHD, lse, settings.ends, settings.ends, settings.longest,
        settings.longest, 0.0, False, no_dropout, no_dropout, scale=settings.scaling,
    )  # fmt: skip
    return torch.stack(tuple(found), 1).view_as(rotated)


def _three(rotated: Tensor, settings: BlockSettings) -> tuple[Tensor, ...]:
    return rotated.view(len(rotated), 3, settings.heads, -1).unbind(1)


# The towers hand over the whole batch with the ends of its segments to any implementation with "flash" in its name.
SEGMENTS = "sensorium_flash_segments"
RECENT_BYTES = 1 << 29
LONGEST = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}
# Largest relative deviation of a block's values and gradients from the stock one's.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


def by_flash(query_PHD: Tensor, key_PHD: Tensor, value_PHD: Tensor, ends: Tensor, longest: int, scaling: float) -> Tensor:
    """Attention within segments by torch's flash attention (16 bits, CUDA); no length is read on the host."""
    ends = ends.to(torch.int32)
    return torch.ops.aten._flash_attention_forward(
        query_PHD, key_PHD, value_PHD, ends, ends, max(2, longest), max(2, longest), 0.0, False, False, scale=scaling
    )[0]


def attend_in_segments(
    module: nn.Module,
    query_1HPD: Tensor,
    key_1HPD: Tensor,
    value_1HPD: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention within segments, with the signature of transformers' attention functions."""
    assert cu_seq_lens_q is not None
    query_PHD, key_PHD, value_PHD = map(one_row, (query_1HPD, key_1HPD, value_1HPD))
    return by_length(query_PHD, key_PHD, value_PHD, cu_seq_lens_q, scaling)[None], None


def by_length(query_PHD: Tensor, key_PHD: Tensor, value_PHD: Tensor, ends: Tensor, scaling: float | None) -> Tensor:
    """Attention within segments, those of one length as one batch."""
    lengths = tuple(end - start for start, end in pairwise(ends.tolist()))
    heads = [query_PHD, key_PHD, value_PHD]
    order, back, runs = _runs(lengths, query_PHD.device)
    if order is not None:
        heads = [tensor[order] for tensor in heads]
    outs, start = [], 0
    for length, count in runs:
        query, key, value = (
            tensor[start : start + length * count].unflatten(0, (count, length)).transpose(1, 2) for tensor in heads
        )
        outs.append(scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2).flatten(0, 1))
        start += length * count
    out_PHD = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out_PHD if back is None else out_PHD[back]


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # cached tensors must also serve training
def _runs(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor | None, Tensor | None, list[tuple[int, int]]]:
    """The order of tokens by segment length, its inverse (None: already sorted), and (length, count) of each run."""
    runs = [(length, lengths.count(length)) for length in sorted(set(lengths))]
    if len(runs) == 1:
        return None, None, runs
    of_token = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
    order = torch.argsort(of_token, stable=True)
    return order.to(device), torch.argsort(order).to(device), runs


class AlignedMLP(nn.Module):
    """The gated MLP of a tower's block.

    Qwen2.5-VL's inner size is 3420: rows of 6,840 bytes, which the fast matrix kernels of a GPU do not take. There it is
    padded with zeros to a multiple of 8, which changes no number: silu(0) · 0 = 0, and the weights there are 0 too.
    """

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn
        self.fused = False

    def forward(self, hidden: Tensor) -> Tensor:
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        more = -self.gate_proj.out_features % 8
        if not hidden.is_cuda or not more or any(type(layer) is not nn.Linear for layer in layers):
            return self.down_proj(self._gated(self.gate_proj(hidden), self.up_proj(hidden)))
        return self.padded(hidden, more)

    def padded(self, hidden: Tensor, more: int) -> Tensor:
        """The same with an inner size that is ``more`` larger."""
        gate, up = (_widened(layer, hidden, more) for layer in (self.gate_proj, self.up_proj))
        return linear(self._gated(gate, up), pad(self.down_proj.weight, (0, more)), self.down_proj.bias)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if not self.fused:
            return self.act_fn(gate) * up
        return Gate.apply(gate, up)


def _widened(layer: nn.Linear, hidden: Tensor, more: int) -> Tensor:
    """A linear layer with ``more`` further outputs, which are zero."""
    bias = None if layer.bias is None else pad(layer.bias, (0, more))
    return linear(hidden, pad(layer.weight, (0, 0, 0, more)), bias)


class TowerNorm(nn.Module):
    """A stock RMSNorm, as one kernel where ``fused``."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon
        self.stock = type(norm).forward
        self.fused = False

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.fused:
            return self.stock(self, hidden)
        return Norm.apply(hidden, self.weight, self.variance_epsilon)


class TowerAttention(nn.Module):
    """A stock tower's attention; where ``fused``, rotation is one kernel and all segments are one call."""

    qkv: nn.Module
    q: nn.Module
    k: nn.Module
    v: nn.Module
    proj: nn.Module
    num_heads: int
    head_dim: int
    scaling: float

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(attention.__dict__)  # its layers and its settings
        self.stock = type(attention).forward
        self.fused = False

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        max_seqlen: int | None = None,
        **rest: Any,
    ) -> Tensor:
        if not self.fused or max_seqlen is None:
            given = {"position_embeddings": position_embeddings, "max_seqlen": max_seqlen}
            return self.stock(self, hidden_states, cu_seqlens, **given, **rest)
        query, key, value = self._rotated(hidden_states, position_embeddings)
        seen_PHD = by_flash(query, key, value, cu_seqlens, max_seqlen, self.scaling)
        return self.proj(seen_PHD.flatten(1))

    def _rotated(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
        """Queries and keys rotated in place, and values, [P, heads, D]."""
        if hasattr(self, "qkv"):
            slots = RotateSlots.apply(self.qkv(hidden), *angles, 3, 2)
            return slots.view(len(slots), 3, self.num_heads, -1).unbind(1)
        rotated = [RotateSlots.apply(part(hidden), *angles, 1, 1) for part in (self.q, self.k)]
        return [part.view(len(part), self.num_heads, -1) for part in (*rotated, self.v(hidden))]


class TowerBlock(GradientCheckpointingLayer):
    """A stock block; where ``fused``, it is one function, as long as its layers are plain."""

    norm1: "TowerNorm"
    norm2: "TowerNorm"
    attn: TowerAttention
    mlp: AlignedMLP

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(block.__dict__)  # its parts
        self.stock = type(block).forward
        self.fused = False
        self._joined = JoinedMLP()

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        max_seqlen: int | None = None,
        **rest: Any,
    ) -> Tensor:
        weights = self._plain_weights() if self.fused and max_seqlen is not None else None
        if weights is None or max_seqlen is None:
            given = {"position_embeddings": position_embeddings, "max_seqlen": max_seqlen}
            return self.stock(self, hidden_states, cu_seqlens, **given, **rest)
        attn, mlp, (cos_PD, sin_PD) = self.attn, self.mlp, position_embeddings
        settings = BlockSettings(
            cu_seqlens.to(torch.int32), max(2, max_seqlen), cos_PD.contiguous(), sin_PD.contiguous(), attn.num_heads,
            attn.scaling, (self.norm1.variance_epsilon, self.norm2.variance_epsilon),
        )  # fmt: skip
        joined = self._joined(mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        return GatedTowerBlock.apply(hidden_states, settings, joined, *weights)

    def _plain_weights(self) -> list[Tensor] | None:
        """Weights for the function; None where a layer has adapters or hooks, or is trained while another is not."""
        attn, mlp = self.attn, self.mlp
        layers: list[Any] = [attn.qkv, attn.proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if not all(type(one) is nn.Linear and not one._forward_hooks and not one._forward_pre_hooks for one in layers):
            return None
        qkv, proj, *three = ([one.weight, one.bias] for one in layers)
        weights = [self.norm1.weight, *qkv, *proj, self.norm2.weight, *(weight for pair in three for weight in pair)]
        learning = not torch.is_grad_enabled() or len({weight.requires_grad for weight in weights}) == 1
        return weights if learning else None


def taken_over(block: Any) -> Any:
    """A stock block whose known parts are replaced: gated MLPs, RMSNorms, attention with rotated queries and keys."""
    if isinstance(block.attn, TowerAttention):
        return block  # a copy of a model whose parts were replaced
    if {name for name, _ in block.mlp.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        block.mlp = AlignedMLP(block.mlp)
    if all(hasattr(norm, "variance_epsilon") for norm in (block.norm1, block.norm2)):
        block.norm1, block.norm2 = TowerNorm(block.norm1), TowerNorm(block.norm2)
    if {name for name, _ in block.attn.named_children()} in ({"qkv", "proj"}, {"q", "k", "v", "proj"}):
        block.attn = TowerAttention(block.attn)
    # Qwen2.5's kind of block, with biases.
    known = isinstance(block.norm1, TowerNorm) and isinstance(block.mlp, AlignedMLP) and hasattr(block.attn, "qkv")
    layers = (block.attn.qkv, block.attn.proj, *block.mlp.children()) if known else ()
    whole = known and all(layer.bias is not None for layer in layers if isinstance(layer, nn.Linear))
    return TowerBlock(block) if whole else block


def choose(tower: Any) -> None:
    """Let the blocks of a tower use kernels if a block gives the same with them as without."""
    block = tower.blocks[0]
    weight = block.norm1.weight
    if not isinstance(block.attn, TowerAttention):
        return
    for each in tower.blocks:
        _set(each, False, False)  # reset a choice made for another dtype or device
    if not weight.is_cuda or weight.dtype == torch.float32:
        return  # flash attention takes 16 bits; on CUDA a tower in float32 is for checks
    try:
        if find_spec("triton") is None:
            raise ValueError("Triton is not installed")
        if block.attn.head_dim % 8:
            raise ValueError(f"heads of {block.attn.head_dim} are not taken by flash attention")
        _check(block, whole=False)
    except Exception as error:  # a kernel that this GPU or Triton cannot build is a reason to be slow, not to stop
        fall_back(f"the vision tower runs through its stock blocks, which is slower: {_reason(error)}")
        return
    whole = isinstance(block, TowerBlock)
    try:
        if whole:
            _check(block, whole=True)
    except Exception as error:
        whole = False
        fall_back(f"blocks of the vision tower run part by part, which is slower: {_reason(error)}")
    for each in tower.blocks:
        _set(each, True, whole)


def _check(block: Any, whole: bool) -> None:
    """Compare a fused block, part by part or as one function, with the stock one; it is left as a stock one."""
    dtype = block.norm1.weight.dtype
    try:
        error = trial(block, whole)
    finally:
        _set(block, False, False)
    if not error <= BOUNDS[dtype]:
        raise ValueError(f"a fused block is {error:.2g} off the stock one (bound {BOUNDS[dtype]:g})")


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _set(block: Any, fused: bool, whole: bool) -> None:
    for part in (block.norm1, block.norm2, block.attn, block.mlp):
        if isinstance(part, TowerNorm | TowerAttention | AlignedMLP):
            part.fused = fused
    if isinstance(block, TowerBlock):
        block.fused = whole


@torch.enable_grad()
@torch.inference_mode(False)
def trial(block: Any, whole: bool) -> float:
    """The largest relative deviation of a fused block from the stock one on random patches, values and gradients.

    ``whole``: as one function, where it is of that kind.
    """
    ends = [0, 64, 80, 112]
    weight, size = block.norm1.weight, block.attn.head_dim
    generator = torch.Generator().manual_seed(0)
    hidden, gradient = torch.randn(2, ends[-1], len(weight), generator=generator).to(weight.device, weight.dtype)
    angles = torch.rand(ends[-1], size, generator=generator).to(weight.device) * 6
    given = {
        "cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=weight.device),
        "max_seqlen": max(end - start for start, end in pairwise(ends)),
        "position_embeddings": (angles.cos(), angles.sin()),
    }
    learning = [parameter for parameter in block.parameters() if parameter.requires_grad]
    results = []
    for fused in (False, True):
        _set(block, fused, fused and whole)
        entered = hidden.clone().requires_grad_()
        out = block.forward(entered, **given)
        found = torch.autograd.grad(out, [entered, *learning], gradient, allow_unused=True)
        results.append([out.detach(), *found])
    _set(block, False, False)
    errors = [
        float((found.float() - right.float()).abs().max() / right.float().abs().max().clamp(min=1e-20))
        for right, found in zip(*results, strict=True)
        if right is not None
    ]
    return max(errors) if all(error == error for error in errors) else float("inf")


def recompute_blocks(module: nn.Module, on: bool, inside: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """Let transformers recompute every block of a module that supports it, ``inside`` the context of its first pass.

    A tower's graph lives through a whole update: for 16 pictures of 448 × 448 the tower of Qwen2.5-VL-3B keeps 24 GiB of
    activations, and 1.3 GiB where its blocks are recomputed.
    """
    for block in module.modules():
        if isinstance(block, GradientCheckpointingLayer):
            # The library recomputes a block whose own training flag is set; the flags of its parts stay unchanged.
            block.gradient_checkpointing = block.training = on
            function: Any = partial(
                checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (nullcontext(), inside())
            )
            block._gradient_checkpointing_func = function


@contextmanager
def keeping_blocks(module: nn.Module) -> Iterator[None]:
    """Inside, blocks that are one function keep their activations for the backward pass; others are recomputed."""
    blocks = [block for block in module.modules() if isinstance(block, TowerBlock) and block.fused]
    before = [block.gradient_checkpointing for block in blocks]
    for block in blocks:
        block.gradient_checkpointing = False
    try:
        yield
    finally:
        for block, recomputed in zip(blocks, before, strict=True):
            block.gradient_checkpointing = recomputed


class PatchProjection(nn.Module):
    """A convolution over inputs of exactly one kernel each. Takes over the parameters, so checkpoints stay the same.

    On an Arm CPU the library's Conv3d over 512 patches takes 34 ms forward, the product 1.3 ms, bit for bit the same.
    """

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        assert (convolution.stride, convolution.groups) == (convolution.kernel_size, 1), "the kernel is the patch"
        self.weight = convolution.weight
        self.bias = convolution.bias

    def forward(self, patches: Tensor) -> Tensor:
        return linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class VisionTower:
    """A stock Qwen vision tower over pictures and videos alike, with the shortcuts of this module.

    ``tables`` computes the tower's index tables for a batch of grids [M, 3], and other grids where it takes others.
    """

    def __init__(self, visual: Any, tables: Callable[[Tensor], dict[str, Tensor]]) -> None:
        if isinstance(visual.patch_embed.proj, nn.Conv3d):
            visual.patch_embed.proj = PatchProjection(visual.patch_embed.proj)
        for i, block in enumerate(visual.blocks):
            visual.blocks[i] = taken_over(block)
        visual.config._attn_implementation = SEGMENTS
        self.module = visual
        self._tables = _cached_tables(tables)
        self._patches = RecentPatches()
        self._chosen: tuple[str, torch.dtype] | None = None  # device and dtype that blocks were chosen for

    def __call__(self, prepared: Sequence[TowerInput]) -> list[Features]:
        weight = self.module.patch_embed.proj.weight
        if self._chosen != (weight.device.type, weight.dtype):
            choose(self.module)
            self._chosen = weight.device.type, weight.dtype
        patches_PC = self._patches([item.patches_PC for item in prepared], weight.device, weight.dtype)
        grids = [item.extent.grid for item in prepared]
        seen = self.module(patches_PC, **self._tables(tuple(grids), weight.device))
        merged = self.module.spatial_merge_size**2
        sizes = [time * height * width // merged for time, height, width in grids]
        levels = [torch.split(level, sizes) for level in getattr(seen, "deepstack_features", None) or ()]
        embeds = torch.split(seen.pooler_output, sizes)
        return [Features(embeds_NH, tuple(level[i] for level in levels)) for i, embeds_NH in enumerate(embeds)]


class RecentPatches:
    """Patches on the tower's device. On CUDA recent ones are cached there, each by itself.

    An update encodes what its rollout has just encoded; without this the host would copy 5 MB of every picture again.
    """

    def __init__(self) -> None:
        self._held: LRU[tuple[int, torch.dtype], _OnDevice] = LRU(RECENT_BYTES, lambda held: held.patches.nbytes)

    def __call__(self, parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
        if device.type != "cuda" or any(part.is_cuda for part in parts):
            return _joined(parts, device).to(dtype)
        held = [self._found(part, dtype) for part in parts]
        missing = [part for part, patches in zip(parts, held, strict=True) if patches is None]
        with torch.inference_mode(False), torch.no_grad():  # cached tensors must also serve training
            fresh = _joined(missing, device).to(dtype).split([len(part) for part in missing]) if missing else ()
            for part, patches in zip(missing, fresh, strict=True):
                self._held.put((id(part), dtype), _OnDevice(ref(part), patches.clone()))
            new = iter(fresh)
            return torch.cat([next(new) if patches is None else patches for patches in held])

    def _found(self, part: Tensor, dtype: torch.dtype) -> Tensor | None:
        held = self._held.get((id(part), dtype))
        return held.patches if held is not None and held.source() is part else None


@dataclass(frozen=True)
class _OnDevice:
    """Patches on the device, and a weak reference to their source, since its id may be reused."""

    source: "ref[Tensor]"
    patches: Tensor


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Parts one after the other on the device; through pinned memory, which a GPU reads ten times as fast."""
    if device.type != "cuda" or any(part.is_cuda for part in parts):
        return torch.cat([*parts]).to(device)
    rows = sum(len(part) for part in parts)
    pinned = torch.empty(rows, *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=True)
    return torch.cat([*parts], out=pinned).to(device, non_blocking=True)


def _cached_tables(
    make: Callable[[Tensor], dict[str, Tensor]],
) -> Callable[[tuple[Grid, ...], torch.device], dict[str, Any]]:
    """Index tables of a batch of grids, made on the CPU and cached on the tower's device."""

    @lru_cache(maxsize=64)
    @torch.inference_mode(False)  # cached tensors must also serve training
    def tables(grids: tuple[Grid, ...], device: torch.device) -> dict[str, Any]:
        made = {"grid_thw": torch.tensor(grids)} | make(torch.tensor(grids))
        # The longest segments too: the library would read them from the device.
        longest = {LONGEST[name]: int(made[name].diff().max()) for name in LONGEST if name in made}
        return {name: table.to(device) for name, table in made.items()} | longest

    return tables


AttentionInterface.register(SEGMENTS, attend_in_segments)
