"""The stock vision towers, made fast over many small pictures, with the same numbers.

A tower runs once over a whole batch of pictures and videos, laid end to end, and attends within segments (a picture, a
temporal patch of a video, or a window of either). The library loops over the segments, works out its index tables per
picture, and embeds patches with a convolution whose kernel covers the whole patch. Here segments of one length attend as
one batch, tables are remembered by the batch's grids, and the convolution is the matrix product that it is.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from transformers import AttentionInterface

from sensorium.models.prepared_media import Grid, TowerInput
from sensorium.models.segment_layout import Features

# The towers hand over the whole batch with the ends of its segments to any implementation with "flash" in its name.
SEGMENTS = "sensorium_flash_segments"


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
        """[P, channels, time, height, width] to [P, size]."""
        return linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class AlignedMLP(nn.Module):
    """The gated MLP of a tower's block. Takes over its layers, so checkpoints stay the same.

    Qwen2.5-VL's inner size is 3420: rows of 6,840 bytes, which the fast matrix kernels of a GPU do not take. There it is
    padded with zeros to a multiple of 8, which changes no number: silu(0) · 0 = 0, and what it is multiplied with is 0 too.
    """

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn

    def forward(self, hidden: Tensor) -> Tensor:
        """[P, size] to [P, size]."""
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        more = -self.gate_proj.out_features % 8
        if not hidden.is_cuda or not more or any(type(layer) is not nn.Linear for layer in layers):
            return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return self.padded(hidden, more)

    def padded(self, hidden: Tensor, more: int) -> Tensor:
        """The same with the inner size so much larger."""
        gate, up = (_widened(layer, hidden, more) for layer in (self.gate_proj, self.up_proj))
        return linear(self.act_fn(gate) * up, pad(self.down_proj.weight, (0, more)), self.down_proj.bias)


def _widened(layer: nn.Linear, hidden: Tensor, more: int) -> Tensor:
    """A linear layer with so many outputs more, which are zero."""
    bias = None if layer.bias is None else pad(layer.bias, (0, more))
    return linear(hidden, pad(layer.weight, (0, 0, 0, more)), bias)


class VisionTower:
    """A stock Qwen vision tower over pictures and videos alike, with the shortcuts of this module.

    ``tables`` gives the index tables that the tower would work out for a batch of grids [M, 3].
    """

    def __init__(self, visual: Any, tables: Callable[[Tensor], dict[str, Tensor]]) -> None:
        if isinstance(visual.patch_embed.proj, nn.Conv3d):
            visual.patch_embed.proj = PatchProjection(visual.patch_embed.proj)
        for block in visual.blocks:
            if {name for name, _ in block.mlp.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
                block.mlp = AlignedMLP(block.mlp)
        visual.config._attn_implementation = SEGMENTS
        self.module = visual
        self._tables = Tables(tables)

    def __call__(self, prepared: Sequence[TowerInput]) -> list[Features]:
        """Embeddings, and deepstack levels where the tower has them; both come whole and are split per item."""
        weight = self.module.patch_embed.proj.weight
        patches_PC = torch.cat([item.patches_PC for item in prepared]).to(weight.device, weight.dtype)
        grids = [item.extent.grid for item in prepared]
        grids_M3 = torch.tensor(grids, device=weight.device)
        seen = self.module(patches_PC, grid_thw=grids_M3, **self._tables(grids, weight.device))
        merged = self.module.spatial_merge_size**2
        sizes = [time * height * width // merged for time, height, width in grids]
        levels = [torch.split(level, sizes) for level in getattr(seen, "deepstack_features", None) or ()]
        embeds = torch.split(seen.pooler_output, sizes)
        return [Features(embeds_NH, tuple(level[i] for level in levels)) for i, embeds_NH in enumerate(embeds)]


class Tables:
    """Index tables of a batch of grids, made on the CPU and kept on the tower's device for batches that come again."""

    def __init__(self, make: Callable[[Tensor], dict[str, Tensor]]) -> None:
        @lru_cache(maxsize=64)
        @torch.inference_mode(False)  # cached tensors must also serve training
        def tables(grids: tuple[Grid, ...], device: torch.device) -> dict[str, Tensor]:
            return {name: table.to(device) for name, table in make(torch.tensor(grids)).items()}

        self._tables = tables

    def __call__(self, grids: Sequence[Grid], device: torch.device) -> dict[str, Tensor]:
        return self._tables(tuple(grids), device)


def _attend_in_segments(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    assert cu_seq_lens_q is not None
    ends = cu_seq_lens_q.tolist()
    lengths = tuple(end - start for start, end in pairwise(ends))
    heads = [tensor[0].transpose(0, 1) for tensor in (query_1HND, key_1HND, value_1HND)]
    order, back, runs = _runs(lengths, query_1HND.device)
    if order is not None:
        heads = [tensor[order] for tensor in heads]
    outs, start = [], 0
    for length, count in runs:
        query, key, value = (
            tensor[start : start + length * count].unflatten(0, (count, length)).transpose(1, 2) for tensor in heads
        )
        outs.append(scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2).flatten(0, 1))
        start += length * count
    out_NHD = outs[0] if len(outs) == 1 else torch.cat(outs)
    return (out_NHD if back is None else out_NHD[back])[None], None


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # cached tensors must also serve training
def _runs(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor | None, Tensor | None, list[tuple[int, int]]]:
    """Tokens sorted by the length of their segment, and back (None: as they stand); (length, how many) of each run."""
    runs = [(length, lengths.count(length)) for length in sorted(set(lengths))]
    if len(runs) == 1:
        return None, None, runs
    of_token = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
    order = torch.argsort(of_token, stable=True)
    return order.to(device), torch.argsort(order).to(device), runs


AttentionInterface.register(SEGMENTS, _attend_in_segments)
