"""Decode layers of few rows: what follows attention, up to the next layer's projections or the head, as one launch.

A step of few rows takes as long as its weights are read. Here they are read in 12 bits instead of 16, in one stream that
does not pause between products (``kernels/cuda/half_layer.cu``, which says what 12 bits keep). The packed weights are a
second copy, three quarters of the size of the first; it is made when a batch first has few rows, and again when weights
change.
"""

import os
from collections.abc import Callable, Sequence
from ctypes import Structure, c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from sensorium.kernels.device_code import (
    DeviceCode,
    NoDeviceCode,
    Start,
    addresses,
    compile_ahead,
    launch,
    pointers,
    shared_bytes,
)
from sensorium.kernels.layer_parts import GatedMLP, LayerParts, NormWeights
from sensorium.recipe.plan import LEAST_PACKED, PACKED_ROWS, PACKED_SHARE

MOST_ROWS = PACKED_ROWS
"""µs of half a layer of Qwen2.5-VL-3B's shape on an H200, one by one and in one launch: 54.5 and 40.7 at 1 row, 59.1 and
43.5 at 16, 51.6 and 45.3 at 24, 52.1 and 48.0 at 32, 56.2 and 55.3 at 48, 57.3 and 67.5 at 64."""
THREADS, PACKING_THREADS, TILE_BYTES, BLOCK, MOST_PARTS, COUNTERS = 384, 256, 1536, 64, 12, 80  # as half_layer.cu has them
BOUND = 0.02  # of the largest value: how far a trial may be from products one by one


class CPacked(Structure):
    """``struct packed`` of half_layer.cu."""

    _fields_: ClassVar = pointers("tiles scales")


class CHalfLayer(Structure):
    """``struct half_layer`` of half_layer.cu."""

    _fields_: ClassVar = [
        *((name, CPacked) for name in ("out", "gated", "down", "projection")),
        *pointers("seen between_gain next_gain residual sum parts normed inner projected arrived"),
        ("between_eps", c_float), ("next_eps", c_float), ("rows", c_int),
    ]  # fmt: skip


class CPacking(Structure):
    """``struct packing`` of half_layer.cu."""

    _fields_: ClassVar = [*pointers("low high tiles scales"), ("stride", c_longlong), ("inner", c_int)]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a half layer, and of the GPU that computes it."""

    seen: int
    width: int
    inner: int
    projected: int
    multiprocessors: int
    shared_bytes: int

    def numbers(self, row_tiles: int, fine: bool, last: bool) -> dict[str, int]:
        """What the source is compiled with, for so many times eight rows."""
        return {
            "ROW_TILES": row_tiles, "FINE": int(fine), "LAST": int(last), "CTAS": self.multiprocessors,
            "SHARED_BYTES": self.shared_bytes, "SEEN": self.seen,
            "WIDTH": self.width, "INNER": self.inner, "PROJECTED": self.projected,
        }  # fmt: skip

    @property
    def parts(self) -> int:
        """Parts in which the projections come: four tiles to a group of blocks."""
        return min(self.multiprocessors // -(-self.projected // BLOCK), MOST_PARTS, self.width // BLOCK)

    @property
    def weights(self) -> int:
        """Weights that one launch reads."""
        return self.width * (self.seen + 3 * self.inner + self.projected)

    @property
    def fit(self) -> bool:
        """Whether the kernel can be compiled for them."""
        even = all(size % BLOCK == 0 for size in (self.seen, self.width, self.inner)) and self.projected % 16 == 0
        groups = max(self.width, self.projected) / BLOCK
        return even and MOST_ROWS <= self.multiprocessors >= groups and self.weights >= LEAST_PACKED


@dataclass(frozen=True)
class Packed:
    """A weight in 12 bits: tiles of 16 outputs × 64, and for each 16 outputs the scale of its exponents."""

    tiles: Tensor
    scales: Tensor

    def fields(self) -> CPacked:
        """As the kernel takes it."""
        return CPacked(*addresses(self.tiles, self.scales))


@dataclass(frozen=True)
class Half:
    """What follows a layer's attention: the rest of it, the norm after it, and the next layer's projections, if any."""

    layer: LayerParts
    inner: GatedMLP
    fine: bool
    norm: NormWeights
    projections: tuple[nn.Module, ...]


class HalfLayers:
    """The half layers of a decoder that one launch computes. ``last`` is the norm before the head."""

    def __init__(self, layers: Sequence[LayerParts], last: NormWeights, noted: Callable[[str], None]) -> None:
        self._noted = noted
        halves = [half for half in _halves(layers, last) if _plain(half)]
        self._sizes = _sizes(halves[0]) if halves else None
        self._halves = {half.layer.index: half for half in halves if _sizes(half) == self._sizes}
        self._packed: dict[int, tuple[Packed, Packed, Packed, Packed | None]] = {}
        self._kernels: dict[tuple[int, bool, bool], tuple[DeviceCode, c_void_p]] = {}
        self._scratch: dict[int, tuple[Tensor, ...]] = {}
        self._tried: set[tuple[int, int]] = set()
        self._stale = False
        self._captured = False
        self._usable = self._sizes is not None and self._sizes.fit

    def renew(self) -> None:
        """Weights changed in place: those that are packed are packed again before a step of few rows."""
        self._stale = bool(self._packed)

    def ready(self, rows: int) -> None:
        """A step of so many rows follows: what it reads is packed anew, at the same addresses, if weights changed."""
        if rows <= MOST_ROWS:
            self._pack_changed()

    def _pack_changed(self) -> None:
        for index in self._packed if self._stale else ():
            self._pack(index)
        self._stale = False

    def run(
        self, index: int, seen_BN: Tensor, sum_BW: Tensor, plain: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Of what a layer's attention gave: the next layer's projections in parts [P, B, N], and the residual stream.

        Of the last layer, what the head takes [B, W] instead of projections. None where kernels one by one must do.
        ``plain`` is how they find either; it is called on a trial, when a layer is first met with so many rows.
        """
        rows = seen_BN.shape[0]
        if not self._usable or rows > MOST_ROWS or index not in self._halves or seen_BN.dtype != torch.bfloat16:
            return None
        capturing = torch.cuda.is_current_stream_capturing()
        if (index, rows) not in self._tried and (capturing or not self._works(index, rows, plain)):
            return None
        self._captured |= capturing
        return self._launched(index, seen_BN.contiguous(), sum_BW)

    def _works(self, index: int, rows: int, plain: Callable[[Tensor, Tensor], Tensor]) -> bool:
        """Compile and pack what is missing, and hold a trial against products one by one."""
        assert self._sizes is not None
        try:
            self._pack_changed()
            self._prepare(index, rows)
            device = self._packed[index][0].tiles.device
            seen_BN = torch.sin(torch.arange(rows * self._sizes.seen, device=device) * 1.7).view(rows, -1).bfloat16()
            sum_BW = torch.cos(torch.arange(rows * self._sizes.width, device=device) * 2.3).view(rows, -1)
            result, expected = self._launched(index, seen_BN, sum_BW)[0], plain(seen_BN, sum_BW)
            found = result.sum(0) if self._halves[index].projections else result.float()
            error = float((found - expected).abs().max() / expected.abs().max())
            wrong = "" if error <= BOUND else f"a trial of {rows} rows was {error:.2g} off (bound {BOUND:g} of the largest)"
        except (NoDeviceCode, torch.OutOfMemoryError) as failure:
            wrong = str(failure).strip().split("\n")[0]
        if wrong:
            self._usable = False
            if not self._captured:  # graphs that read them stay
                self._packed.clear()
            self._noted(
                f"steps of at most {MOST_ROWS} rows do not read their weights in 12 bits, so they take longer, by a sixth "
                f"or more: {wrong}."
            )
            return False
        self._tried.add((index, rows))
        return True

    def _prepare(self, index: int, rows: int) -> None:
        sizes = self._sizes
        assert sizes is not None
        half = self._halves[index]
        device = half.norm.weight.device
        if not self._packed:
            needed = len(self._halves) * sizes.weights * 3 // 2
            total = torch.cuda.get_device_properties(device).total_memory
            if needed > PACKED_SHARE * total:
                raise NoDeviceCode(
                    f"they would take {needed / 2**30:.1f} GiB, more than a sixteenth of the GPU's {total / 2**30:.0f} GiB"
                )
        key = _kind(rows, half)
        if not self._kernels:
            kinds = {_kind(tiles * 8, other) for tiles in range(1, MOST_ROWS // 8 + 1) for other in self._halves.values()}
            compile_ahead("half_layer.cu", [sizes.numbers(*kind) for kind in sorted(kinds)])
        if key not in self._kernels:
            code = DeviceCode("half_layer.cu", sizes.numbers(*key))
            self._kernels[key] = (code, code.kernel("half_layer_kernel", sizes.shared_bytes))
        if index not in self._packed:
            self._pack(index)
        if rows not in self._scratch:
            empty = partial(torch.empty, device=device)
            self._scratch[rows] = (
                empty(MOST_PARTS, rows, sizes.width),
                empty(rows, sizes.width, dtype=torch.bfloat16),
                empty(rows, sizes.inner, dtype=torch.bfloat16),
                torch.zeros(COUNTERS, dtype=torch.int64, device=device),
            )

    def _pack(self, index: int) -> None:
        half = self._halves[index]
        inner = half.inner
        out, gate, up, down = (_weight(part) for part in (half.layer.out, inner.gate, inner.up, inner.down))
        projections = [_weight(part) for part in half.projections]
        if index not in self._packed:
            after = _empty(*projections) if projections else None
            self._packed[index] = (_empty(out), _empty(gate, up), _empty(down), after)
        first, gated, second, projected = self._packed[index]
        self._pack_rows(out, first)
        self._pack_tiles(gate, up, gated.tiles, gated.scales, 8)
        self._pack_rows(down, second)
        begin = 0
        for weight in projections:
            assert projected is not None
            end = begin + weight.shape[0] // 16
            self._pack_rows(weight, Packed(projected.tiles[begin:end], projected.scales[begin:end]))
            begin = end

    def _pack_rows(self, weight: Tensor, packed: Packed) -> None:
        self._pack_tiles(weight, weight[8:], packed.tiles, packed.scales, 16)

    def _pack_tiles(self, low: Tensor, high: Tensor, tiles: Tensor, scales: Tensor, rows: int) -> None:
        """Pack tiles of eight rows of two tensors; those of the next tile are ``rows`` rows on."""
        given = CPacking(*addresses(low, high, tiles, scales), rows * low.shape[1], low.shape[1])
        code, _ = next(iter(self._kernels.values()))
        kernel = code.kernel("pack_kernel")
        launch(kernel, tiles.shape[0], PACKING_THREADS, given)

    def _launched(self, index: int, seen_BN: Tensor, sum_BW: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self._sizes
        assert sizes is not None
        half = self._halves[index]
        rows = seen_BN.shape[0]
        parts_PBW, normed_BW, inner_BF, arrived = self._scratch[rows]
        if half.projections:
            found = projected_PBN = sum_BW.new_empty(sizes.parts, rows, sizes.projected)
        else:
            found = normed_BW = torch.empty_like(normed_BW)
            projected_PBN = parts_PBW
        result_BW = torch.empty_like(sum_BW)
        given = CHalfLayer(
            *(CPacked() if packed is None else packed.fields() for packed in self._packed[index]),
            *addresses(
                seen_BN, half.layer.between.weight, half.norm.weight, sum_BW, result_BW, parts_PBW, normed_BW, inner_BF,
                projected_PBN, arrived,
            ),
            half.layer.between.eps, half.norm.eps, rows,
        )  # fmt: skip
        _, kernel = self._kernels[_kind(rows, half)]
        launch(kernel, sizes.multiprocessors, THREADS, given, sizes.shared_bytes, _start(self))
        return found, result_BW


_ALONE: "WeakSet[HalfLayers]" = WeakSet()  # at most one


def _start(layers: HalfLayers) -> Start:
    """How a half layer is launched, whose blocks wait for each other: all of them must come to run.

    A launch alone on its GPU gets there block by block as the kernel before it ends. Two of them could each hold half of
    the GPU and wait for the other half for ever. So all but those of the first engine of a process start together, which
    takes 1 to 3 % of a step, and everyone's where processes share a GPU by MPS. (Without it they take turns.)
    """
    if not _ALONE:
        _ALONE.add(layers)
    shared = "CUDA_MPS_PIPE_DIRECTORY" in os.environ or Path("/tmp/nvidia-mps/control").exists()
    return Start.AHEAD if layers in _ALONE and not shared else Start.AHEAD | Start.TOGETHER


def _halves(layers: Sequence[LayerParts], last: NormWeights) -> list[Half]:
    """The second halves of gated layers, in order."""
    found = []
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        projections = () if following is None else (following.query, following.key, following.value)
        if isinstance(layer.inner, GatedMLP):
            norm = last if following is None else following.before
            found.append(Half(layer, layer.inner, layer.fine, norm, projections))
    return found


def _kind(rows: int, half: Half) -> tuple[int, bool, bool]:
    """What kernels differ in: rows in eights, whether the layer computes finely, whether it is the last."""
    return -(-rows // 8), half.fine, not half.projections


def _plain(half: Half) -> bool:
    """Whether these are linear layers of bfloat16 weights on a GPU that the kernel knows."""
    unbiased = (half.layer.out, half.inner.gate, half.inner.up, half.inner.down)
    parts = (*unbiased, *half.projections)
    if not all(type(part) is nn.Linear for part in parts) or any(_bias(part) for part in unbiased):
        return False
    weights = [_weight(part) for part in parts]
    gains = (half.layer.between.weight, half.norm.weight)
    if not all(each.is_cuda and each.dtype == torch.bfloat16 and each.is_contiguous() for each in (*weights, *gains)):
        return False
    if any(weight.shape[0] % 16 for weight in weights):
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(weights[0].device)[0] >= 9


def _sizes(half: Half) -> Sizes:
    width, seen = _weight(half.layer.out).shape
    own = (half.layer.query, half.layer.key, half.layer.value)
    projected = sum(_weight(part).shape[0] for part in half.projections or own if isinstance(part, nn.Linear))
    told = torch.cuda.get_device_properties(half.norm.weight.device)
    return Sizes(
        seen, width, _weight(half.inner.gate).shape[0], projected, told.multi_processor_count, shared_bytes()
    )  # fmt: skip


def _weight(part: nn.Module) -> Tensor:
    assert isinstance(part, nn.Linear)
    return part.weight


def _bias(part: nn.Module) -> bool:
    assert isinstance(part, nn.Linear)
    return part.bias is not None


def _empty(*weights: Tensor) -> Packed:
    """Room for weights of one inner size, packed together."""
    tiles = sum(weight.shape[0] for weight in weights) // 16
    blocks, device = weights[0].shape[1] // BLOCK, weights[0].device
    return Packed(
        torch.empty(tiles, blocks, TILE_BYTES, dtype=torch.uint8, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
    )
