"""The stock vision towers, made fast over many small pictures, with the same numbers.

A tower runs once over a batch of pictures and videos, laid end to end, and attends within segments (a picture, a temporal
patch of a video, or a window of either). The library loops over the segments, computes its index tables per picture, and
embeds patches by a convolution whose kernel covers the whole patch. Here segments of one length attend as one batch,
tables are cached by the batch's grids, and the convolution is a matrix product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AttentionInterface

from sensorium.data.lru import LRU
from sensorium.models.prepared_media import Grid, TowerInput
from sensorium.models.segment_layout import Features, sent_to
from sensorium.models.tower_blocks import attend_in_segments, choose, taken_over

# The towers hand over the whole batch with the ends of its segments to any implementation with "flash" in its name.
SEGMENTS = "sensorium_flash_segments"
RECENT_BYTES = 1 << 29
LONGEST = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}


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

    ``tables`` computes the tower's index tables for a batch of grids [M, 3].
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
        grids_M3 = sent_to(weight.device, torch.tensor(grids))
        seen = self.module(patches_PC, grid_thw=grids_M3, **self._tables(tuple(grids), weight.device))
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
        made = make(torch.tensor(grids))
        # The longest segments too: the library would read them from the device.
        longest = {LONGEST[name]: int(made[name].diff().max()) for name in LONGEST if name in made}
        return {name: table.to(device) for name, table in made.items()} | longest

    return tables


AttentionInterface.register(SEGMENTS, attend_in_segments)
