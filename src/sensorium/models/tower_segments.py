"""Attention within the segments of a tower's batch, laid end to end: P patches, H heads, D head size."""

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from sensorium.models.attention import one_row


def by_flash(query_PHD: Tensor, key_PHD: Tensor, value_PHD: Tensor, ends: Tensor, longest: int, scaling: float) -> Tensor:
    """Attention within segments by torch's flash attention, 16 bits on CUDA; no length is read on the host."""
    ends = ends.to(torch.int32)
    out_PHD: Tensor = torch.ops.aten._flash_attention_forward(
        query_PHD, key_PHD, value_PHD, ends, ends, max(2, longest), max(2, longest), 0.0, False, False, scale=scaling
    )[0]
    return out_PHD


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
    """An attention function of the library's kind."""
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
    """Tokens sorted by the length of their segment, and back (None: as they stand); (length, how many) of each run."""
    runs = [(length, lengths.count(length)) for length in sorted(set(lengths))]
    if len(runs) == 1:
        return None, None, runs
    of_token = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
    order = torch.argsort(of_token, stable=True)
    return order.to(device), torch.argsort(order).to(device), runs
