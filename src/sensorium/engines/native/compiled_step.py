"""Decode steps in C, for small models on the CPU: one call for several, where torch makes some 250 for each.

``feed`` and ``draw`` take and give what the functions of these names in ``steps`` do, and ``write`` does both several times
over. Their numbers differ in the last bits, for sums are in another order. What a row gets depends on that row alone: not
on its neighbours or on threads, nor on how many steps a call makes.
"""

from ctypes import POINTER, Structure, byref, c_int64, pointer
from typing import ClassVar

import torch
from torch import Tensor

from sensorium.compiled.calls import addresses, call, pointers, sizes, threads_for
from sensorium.compiled.library import load_library
from sensorium.engines.native.packed_weights import CModel, PackedWeights
from sensorium.engines.native.sampler import SamplingRows
from sensorium.models.layer_parts import UnknownLayer
from sensorium.models.policy import Policy
from sensorium.models.token_probs import unit_bits

WORK_OF_A_THREAD = 1 << 20
"""Multiplications that are worth a thread."""
WORK_OF_A_DRAW = 16
"""Drawing a token, in multiplications for each entry of the vocabulary."""
WORK_OF_A_CALL = 1 << 27
"""Multiplications for which steps are made in one call: a few milliseconds, beside which Python takes little."""


class CTokens(Structure):
    """``struct tokens`` of feed.c."""

    _fields_: ClassVar = [
        ("model", POINTER(CModel)),
        *sizes("rows block_rows capacity"),
        *pointers("tokens positions write block table logits memory"),
    ]


class CDraws(Structure):
    """``struct draws`` of draw.c."""

    _fields_: ClassVar = [
        *sizes("rows vocab unit_bits forbidden_count stop_count kv_heads"),
        *pointers("logits uniforms forbidden stop temperature greedy"),
        *pointers("stop_masked top_k top_p"),
        *pointers("tokens positions write see bias packed memory"),
    ]


class CWrites(Structure):
    """``struct writes`` of write.c."""

    _fields_: ClassVar = [("tokens", CTokens), ("draws", CDraws), *sizes("steps"), *pointers("stops ended")]


class CompiledStep:
    """The compiled functions for one policy. Raises ``UnknownLayer`` or ``NoLibrary`` where there are none for it."""

    def __init__(self, policy: Policy) -> None:
        PackedWeights.check(policy)
        self._library = load_library()
        for function in (self._library.tile_columns, self._library.feed_memory, self._library.draw_memory):
            function.restype = c_int64
        self._packed = PackedWeights(policy, self._library.tile_columns())
        self._vocab = policy.vocab_size
        if max((*policy.chat.forbidden_ids, *policy.chat.stop_ids), default=0) >= self._vocab:
            raise UnknownLayer(f"ids that may not be sampled lie beyond the {self._vocab} that the head has")
        # Kept from step to step: where memory comes from the system anew, it costs as much as the step.
        self._logits_BV = torch.empty(0, self._vocab)
        self._memory = torch.empty(0)
        self._drawing = torch.empty(0, dtype=torch.int64)

    def refresh(self) -> bool:
        """The weights changed. False if modules came or went, so that this step is no longer theirs."""
        self._packed.forget()
        return self._packed.is_of_the_same_modules()

    def feed(self, tokens_B: Tensor, positions_B: Tensor, block: Tensor, write_N: Tensor, bias_B11S: Tensor) -> Tensor:
        """Feed one token per row, its keys and values to the cache; the logits of the next, until the next call.

        A row sees the entries up to the one it writes; ``bias_B11S`` says the same and is not read.
        """
        given = self._fed(tokens_B, positions_B, block, write_N)
        call("feed", given, threads_for(given.rows * self._packed.weights, WORK_OF_A_THREAD))
        return self._logits_BV[: given.rows]

    def draw(
        self,
        sampling: SamplingRows,
        logits_BV: Tensor,
        uniforms_B: Tensor,
        tokens_B: Tensor,
        positions_B: Tensor,
        write_N: Tensor,
        see_B: Tensor,
        bias_B11S: Tensor,
    ) -> Tensor:
        """Sample the next tokens and advance the rows in place. Returns tokens, log-probs, sampled log-probs as [3, B]."""
        rows, vocab = logits_BV.shape
        threads = threads_for(rows * vocab * WORK_OF_A_DRAW, WORK_OF_A_THREAD)
        logits_BV, packed_3B = logits_BV.contiguous(), torch.empty(3, rows, dtype=torch.float64)
        moved = (tokens_B, positions_B, write_N, see_B, bias_B11S)
        call("draw", self._drawn(sampling, logits_BV, uniforms_B, moved, packed_3B, threads), threads)
        return packed_3B

    def write(
        self,
        sampling: SamplingRows,
        block: Tensor,
        uniforms_TB: Tensor,
        stops_B: Tensor,
        tokens_B: Tensor,
        positions_B: Tensor,
        write_N: Tensor,
        see_B: Tensor,
        bias_B11S: Tensor,
    ) -> Tensor:
        """Feed and draw T times; what was drawn, as [T, 3, B]. What follows a stop id means nothing, where ``stops_B``."""
        steps, rows = uniforms_TB.shape
        work = self._packed.weights + WORK_OF_A_DRAW * self._vocab
        threads = threads_for(rows * work, WORK_OF_A_THREAD)
        packed_T3B, ended_B = torch.zeros(steps, 3, rows, dtype=torch.float64), torch.zeros_like(stops_B)
        fed = self._fed(tokens_B, positions_B, block, write_N, steps - 1)
        moved = (tokens_B, positions_B, write_N, see_B, bias_B11S)
        drawn = self._drawn(sampling, self._logits_BV[:rows], uniforms_TB, moved, packed_T3B, threads)
        call("write_steps", CWrites(fed, drawn, steps, *addresses(stops_B, ended_B)), threads)
        return packed_T3B

    def steps_of_a_call(self, rows: int) -> int:
        """How many steps of so many rows are made at once."""
        return max(1, WORK_OF_A_CALL // (rows * self._packed.weights))

    def _fed(self, tokens_B: Tensor, positions_B: Tensor, block: Tensor, write_N: Tensor, ahead: int = 0) -> CTokens:
        """Rows that may be fed now, and after each of so many steps ``ahead``."""
        rows, capacity = len(tokens_B), block.shape[4]
        model = self._packed.current()
        table_PE = self._packed.table(int(positions_B.max()) + ahead)
        if len(self._logits_BV) < rows:
            self._logits_BV = torch.empty(rows, self._vocab)
        needed = self._library.feed_memory(byref(model), c_int64(rows), c_int64(capacity))
        if len(self._memory) < needed:
            self._memory = torch.empty(needed)
        return CTokens(
            pointer(model), rows, block.shape[2], capacity,
            *addresses(tokens_B, positions_B, write_N, block, table_PE, self._logits_BV, self._memory),
        )  # fmt: skip

    def _drawn(
        self,
        sampling: SamplingRows,
        logits_BV: Tensor,
        uniforms: Tensor,
        moved: tuple[Tensor, ...],
        packed: Tensor,
        threads: int,
    ) -> CDraws:
        rows, vocab = logits_BV.shape
        needed = threads * self._library.draw_memory(c_int64(vocab))
        if len(self._drawing) < needed:
            self._drawing = torch.empty(needed, dtype=torch.int64)
        return CDraws(
            rows, vocab, unit_bits(vocab), len(sampling.forbidden_F), len(sampling.stop_S), moved[2].numel() // rows,
            *addresses(logits_BV, uniforms, *sampling.tensors(), *moved, packed, self._drawing),
        )  # fmt: skip
