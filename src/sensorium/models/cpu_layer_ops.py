"""``LayerOps`` for float32 on a CPU, in C (``compiled/c/layer.c``): one pass over memory where torch takes five to fifteen.

No bit depends on threads. Raises ``NoLibrary`` where nothing can be compiled.
"""

from ctypes import Structure, c_double
from typing import ClassVar

import torch
from torch import Tensor

from sensorium.compiled.calls import addresses, call, pointers, sizes, threads_for
from sensorium.compiled.library import load_library
from sensorium.models.layer_ops import NormGradients

NUMBERS_OF_A_THREAD = 1 << 14
"""Numbers that are worth a thread."""


class _Norms(Structure):
    """``struct norms`` of layer.c."""

    _fields_: ClassVar = [
        *sizes("rows width"),
        ("eps", c_double),
        *pointers("x residual weight out summed scales"),
    ]


class _NormGradients(Structure):
    """``struct norm_gradients``."""

    _fields_: ClassVar = [
        *sizes("rows width"),
        *pointers("x weight scales gradient more out result sums"),
    ]


class _Gates(Structure):
    """``struct gates``."""

    _fields_: ClassVar = [
        *sizes("count"),
        *pointers("gate up gradient out gate_gradient up_gradient"),
    ]


class _Rotations(Structure):
    """``struct rotations``."""

    _fields_: ClassVar = [
        *sizes("rows heads kv_heads size"),
        *pointers("cosine sine joined query key value"),
    ]


def normed(x: Tensor, weight_W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The RMSNorm of rows, and its scales [N]."""
    out, scale_N = torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1])
    given = _Norms(len(scale_N), x.shape[-1], eps, *addresses(x, None, weight_W, out, None, scale_N))
    _run("norm", given, x.numel())
    return out, scale_N


def add_normed(
    x: Tensor, residual: Tensor, weight_W: Tensor, eps: float, kind: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The RMSNorm of a sum, the sum, the norm's scales."""
    assert kind is None, kind
    out, summed, scale_N = torch.empty_like(x), torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1])
    given = _Norms(len(scale_N), x.shape[-1], eps, *addresses(x, residual, weight_W, out, summed, scale_N))
    _run("norm", given, x.numel())
    return out, summed, scale_N


def norm_gradients(
    x: Tensor,
    weight_W: Tensor,
    scale_N: Tensor,
    gradient: Tensor,
    more: Tensor | None,
    narrow: torch.dtype | None = None,
    again: bool = False,
) -> NormGradients:
    """Gradients of a norm's input and weight; ``more`` is added to the input's. ``again``: the norm's result too."""
    assert narrow is None, narrow
    rows, width = len(scale_N), x.shape[-1]
    parts = -(-rows // load_library().rows_of_a_sum())
    out, sums_PW = torch.empty_like(x), x.new_empty(parts, width)
    result = torch.empty_like(x) if again else None
    gradient, more = gradient.contiguous(), None if more is None else more.contiguous()
    tensors = (x, weight_W, scale_N, gradient, more, out, result, sums_PW)
    _run("norm_gradient", _NormGradients(rows, width, *addresses(*tensors)), x.numel())
    return NormGradients(out, None, sums_PW.sum(0), out if result is None else result)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    out = torch.empty_like(gate)
    _run("gate_values", _Gates(gate.numel(), *addresses(gate, up, None, out, None, None)), gate.numel())
    return out


def gated_finely(gate: Tensor, up: Tensor) -> Tensor:
    """Never asked for: only bfloat16 layers on CUDA are fine (``LayerParts.fine``)."""
    raise NotImplementedError("float16 activations are for bfloat16 layers on CUDA; these layers are float32.")


def gate_gradients(gate: Tensor, up: Tensor, gradient: Tensor, again: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and where asked for ``again`` what ``gated`` gives (else the last is unspecified)."""
    gate_gradient, up_gradient = torch.empty_like(gate), torch.empty_like(up)
    out = torch.empty_like(gate) if again else None
    tensors = (gate, up, gradient, out, gate_gradient, up_gradient)
    _run("gate_values", _Gates(gate.numel(), *addresses(*tensors)), gate.numel())
    return gate_gradient, up_gradient, gate_gradient if out is None else out


def column_sums(x_NW: Tensor) -> Tensor:
    """Sums over rows: a bias' gradient."""
    return x_NW.sum(0)


def split_rotated(joined_NW: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [N, H, D], rotated keys, and values, of what one product gave side by side."""
    tokens, size = cos_ND.shape
    kv_heads = (joined_NW.shape[1] // size - heads) // 2
    query, key, value = (joined_NW.new_empty(tokens, count, size) for count in (heads, kv_heads, kv_heads))
    _rotate("split_rotated", cos_ND, sin_ND, joined_NW, query, key, value)
    return query, key, value


def joined_gradients(query: Tensor, key: Tensor, value: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """The gradient of what was split."""
    joined_NW = query.new_empty(len(query), (query.shape[1] + 2 * key.shape[1]) * query.shape[2])
    _rotate("join_rotated", cos_ND, sin_ND, joined_NW, query, key, value)
    return joined_NW


def rotated(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, back: bool) -> Tensor:
    """Heads rotated by their token's angles, or a gradient of that ``back``."""
    cos_ND, sin_ND, x_NHD = (x.contiguous().flatten(0, 1) for x in (cos_BTD, sin_BTD, x_BTHD))
    out, none = torch.empty_like(x_NHD), x_NHD.new_empty(len(x_NHD), 0, x_NHD.shape[2])
    given = (out, x_NHD) if back else (x_NHD, out)
    _rotate("join_rotated" if back else "split_rotated", cos_ND, sin_ND, *given, none, none)
    return out.view(x_BTHD.shape)


def _rotate(how: str, cos_ND: Tensor, sin_ND: Tensor, joined: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    shape = (*query.shape[:2], key.shape[1], query.shape[2])
    _run(how, _Rotations(*shape, *addresses(cos_ND, sin_ND, joined, query, key, value)), joined.numel())


def _run(name: str, given: Structure, numbers: int) -> None:
    call(name, given, threads_for(numbers, NUMBERS_OF_A_THREAD))
