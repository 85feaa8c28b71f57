"""The beginning of a decode step as one Triton kernel: embeddings, their norm, cosines and sines of positions."""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from sensorium.engines.native.decode_state import DecodeRows
from sensorium.kernels.layer_parts import FIXED_ANGLES, NormWeights
from sensorium.models.policy import Policy

TRIED_POSITIONS = 1 << 17  # up to which a model's angles are compared


def begun(
    embedding_VW: Tensor, rows: DecodeRows, norm: NormWeights, frequencies_D: Tensor, scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Of every row's last token: the residual stream, its norm, and the cosines and sines of its position."""
    batch, width, half = len(rows.tokens_B), embedding_VW.shape[1], len(frequencies_D)
    sum_BW = embedding_VW.new_empty(batch, width, dtype=torch.float32)
    normed_BW = norm.weight.new_empty(batch, width)
    cos_BD, sin_BD = (embedding_VW.new_empty(batch, 2 * half) for _ in range(2))
    _begin[(batch,)](
        rows.tokens_B, rows.positions_B, embedding_VW, frequencies_D, norm.weight, sum_BW, normed_BW, cos_BD, sin_BD,
        width, half, norm.eps, scale, W=triton.next_power_of_2(width), D=triton.next_power_of_2(half), num_warps=8,
    )  # fmt: skip
    return sum_BW, normed_BW, (cos_BD, sin_BD)


def angles_of(policy: Policy) -> tuple[Tensor, float] | tuple[()]:
    """Frequencies and scale of a model's rotary angles, if ``begun`` gives the same of them; otherwise nothing."""
    model = policy.adapter.language_model
    rotary, embedding = getattr(model, "rotary_emb", None), model.embed_tokens
    frequencies_D, scale = getattr(rotary, "inv_freq", None), getattr(rotary, "attention_scaling", None)
    if getattr(rotary, "rope_type", "") not in FIXED_ANGLES or type(embedding) is not nn.Embedding:
        return ()
    if not isinstance(frequencies_D, Tensor) or frequencies_D.dtype != torch.float32 or not isinstance(scale, int | float):
        return ()
    positions_B = torch.arange(0, TRIED_POSITIONS, 61, device=frequencies_D.device)
    expected = policy.adapter.rotary(embedding.weight[:1, None], positions_B[None, :, None].expand(3, -1, 1))
    found = [torch.empty_like(part) for part in expected]
    if any(part.shape[-1] != 2 * len(frequencies_D) for part in expected):
        return ()
    half = len(frequencies_D)
    _angles[(len(positions_B),)](
        positions_B, frequencies_D, *found, half, float(scale), D=triton.next_power_of_2(half), num_warps=8
    )
    return (frequencies_D, float(scale)) if all(map(torch.equal, found, expected)) else ()


@triton.jit
def _turned(row, positions, frequencies, cosines, sines, half, scale, D: tl.constexpr):
    d = tl.arange(0, D)
    inside = d < half
    angle = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + d, mask=inside, other=0.0)
    c = (tl.cos(angle) * scale).to(cosines.dtype.element_ty)
    s = (tl.sin(angle) * scale).to(sines.dtype.element_ty)
    for part in tl.static_range(2):
        place = (row * 2 + part) * half + d
        tl.store(cosines + place, c, mask=inside)
        tl.store(sines + place, s, mask=inside)


@triton.jit
def _angles(positions, frequencies, cosines, sines, half, scale, D: tl.constexpr):
    """Cosines and sines of positions, as models take them: for both halves of a head."""
    _turned(tl.program_id(0).to(tl.int64), positions, frequencies, cosines, sines, half, scale, D)


@triton.jit
def _begin(
    tokens, positions, embedding, frequencies, gain, summed, out, cosines, sines, width, half, eps, scale,
    W: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _turned(row, positions, frequencies, cosines, sines, half, scale, D)
    place = tl.arange(0, W)
    inside = place < width
    x = tl.load(embedding + tl.load(tokens + row) * width + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(summed + row * width + place, x, mask=inside)
    x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps))
    x = tl.load(gain + place, mask=inside, other=0.0).to(tl.float32) * x
    tl.store(out + row * width + place, x.to(out.dtype.element_ty), mask=inside)
