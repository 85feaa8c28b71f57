"""States of gated delta nets (Qwen3.5) of the rows being written, beside the keys and values of their attention layers.

A row has one window and one state in each delta net, after all tokens that were fed, whatever their number. So a state
cannot be cut back as keys and values can: it continues only a context that begins with exactly those tokens::

    row 0   prompt of 150 tokens       state after 150
    fork    rows 1 and 2 follow it     copies of the state after 150
    decode  each row feeds its token   three states after 151, in place

Axes: N rows there is room for (or slots, in ``StateSlots``), B rows of a forward, T tokens, W, C, G, K, V as in
``models/delta_net.py``.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sensorium.models.delta_net import DeltaState, DeltaTokens, advance, is_delta, window_size
from sensorium.models.segment_layout import sent_to

WAITING = 3  # of more, reading them takes what writing a state less often saves


def layer_places(language_model: Any) -> list[int]:
    """The place of every layer among those of its kind: [0, 1, 2, 0, 3, …] of three delta nets, attention, a delta net."""
    kinds = [is_delta(layer) for layer in language_model.layers]
    return [kinds[:i].count(kind) for i, kind in enumerate(kinds)]


class RowStates:
    """Windows [N, W, C] and states [N, G, K, V] of each delta net, in order; nothing for models without."""

    def __init__(self, windows: Sequence[Tensor] = (), states: Sequence[Tensor] = ()) -> None:
        self.windows, self.states = list(windows), list(states)

    @classmethod
    def of(cls, language_model: Any, dtype: torch.dtype, device: torch.device) -> "RowStates":
        """No rows yet. States are float32, or wider if the model is."""
        nets = [layer.linear_attn for layer in language_model.layers if is_delta(layer)]
        wide = torch.promote_types(dtype, torch.float32)
        windows = [torch.zeros(0, window_size(net), net.conv_dim, dtype=dtype, device=device) for net in nets]
        heads = [(net.num_v_heads, net.head_k_dim, net.head_v_dim) for net in nets]
        return cls(windows, [torch.zeros(0, *sizes, dtype=wide, device=device) for sizes in heads])

    def __bool__(self) -> bool:
        return bool(self.windows)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All windows, then all states."""
        return (*self.windows, *self.states)

    @property
    def row_bytes(self) -> int:
        """Memory of one row."""
        return sum(math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in self.tensors)

    def reserve(self, rows: int) -> None:
        """Make room for so many rows."""
        if self and rows > len(self.windows[0]):
            self.windows, self.states = ([_grown(x, rows) for x in kind] for kind in (self.windows, self.states))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows onto other rows; every source is read before a target is written."""
        if not self or not targets:
            return
        device = self.windows[0].device
        source, target = (sent_to(device, torch.tensor(rows, dtype=torch.int64)) for rows in (sources, targets))
        for tensor in self.tensors:
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def take(self, row: int) -> tuple[DeltaState, ...]:
        """What a row has in each delta net, as tensors of their own with one row."""
        pairs = zip(self.windows, self.states, strict=True)
        return tuple(DeltaState(window[row : row + 1].clone(), state[row : row + 1].clone()) for window, state in pairs)

    def put(self, row: int, kept: Sequence[DeltaState]) -> None:
        """Copy stored states into a row."""
        for window, state, one in zip(self.windows, self.states, kept, strict=True):
            window[row : row + 1] = one.window_BWC
            state[row : row + 1] = one.state_BGKV


def _grown(tensor: Tensor, rows: int) -> Tensor:
    grown = tensor.new_zeros(rows, *tensor.shape[1:])
    grown[: len(tensor)] = tensor
    return grown


class StateSlots(RowStates):
    """States in slots that rows take and give back. Slot 0 is scratch: padding rows, and rows that ended, work on it.

    Half the traffic of a delta net's decode step is writing its states. So kernels may let the updates of ``WAITING``
    tokens wait beside a state, and write it with the next one::

        tokens since the state was written   0            1                 2                      3
        beside it                            -            (key, value, decay) of 1, 2, 3 tokens    written, with four

    Whatever else reads or writes a slot settles it first.
    """

    def __init__(self, windows: Sequence[Tensor] = (), states: Sequence[Tensor] = ()) -> None:
        super().__init__(windows, states)
        self._free: list[int] = []
        self._count = 1
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._counts_N = torch.zeros(0, dtype=torch.int64)
        super().reserve(1)

    def waiting(self, place: int) -> tuple[Tensor, Tensor, Tensor]:
        """Updates (key and value) and decays that wait beside a net's states, and how many in each slot."""
        if not self._waiting:
            device = self.states[0].device
            self._counts_N = torch.zeros(len(self.states[0]), dtype=torch.int64, device=device)
            for state in self.states:
                slots, groups, size, value = state.shape
                self._waiting.append(
                    (state.new_zeros(slots, WAITING, groups, size + value), state.new_zeros(slots, WAITING, groups))
                )
        return (*self._waiting[place], self._counts_N)

    def count(self, slots_B: Tensor) -> None:
        """Every delta net has taken a token of these slots."""
        self._counts_N.add_(self._among(slots_B)).remainder_(WAITING + 1)

    def settle(self, slots: Sequence[int] | Tensor) -> None:
        """Apply what waits beside the states of some slots, each named once (but the scratch slot, which nobody reads)."""
        if not self._waiting or not len(slots):
            return
        from sensorium.kernels.decode_triton import settle_states

        slots_B = slots if isinstance(slots, Tensor) else sent_to(self._counts_N.device, torch.tensor(list(slots)))
        for state, updates in zip(self.states, self._waiting, strict=True):
            settle_states(state, *updates, self._counts_N, slots_B)
        self._counts_N.masked_fill_(self._among(slots_B), 0)

    def _among(self, slots_B: Tensor) -> Tensor:
        """Whether each slot is among these. Not by an index that writes: those sort where torch is deterministic."""
        return (torch.arange(len(self._counts_N), device=slots_B.device)[:, None] == slots_B).any(1)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots onto other slots."""
        self.settle([*dict.fromkeys((*sources, *targets))])  # each once: a slot is copied to many
        super().copy(sources, targets)

    def take(self, row: int) -> tuple[DeltaState, ...]:
        """What a slot has in each delta net, as tensors of their own with one row."""
        self.settle([row])
        return super().take(row)

    def put(self, row: int, kept: Sequence[DeltaState]) -> None:
        """Copy stored states into a slot."""
        self.settle([row])
        super().put(row, kept)

    @property
    def held(self) -> int:
        """Slots in use, without the scratch slot."""
        return self._count - 1 - len(self._free)

    def reserve(self, rows: int) -> None:
        """Make room for so many more rows. Slots move when they grow, and CUDA graphs hold their addresses."""
        missing = rows - len(self._free)
        if self and missing > 0:
            more = max(missing, self._count // 2)
            super().reserve(self._count + more)
            self._waiting = [(_grown(x, self._count + more), _grown(y, self._count + more)) for x, y in self._waiting]
            if self._waiting:
                self._counts_N = _grown(self._counts_N, self._count + more)
            self._free = sorted([*self._free, *range(self._count, self._count + more)], reverse=True)
            self._count += more

    def allocate(self) -> int:
        """A slot, the lowest that is free; the scratch slot if the model has no delta nets."""
        self.reserve(1)
        return self._free.pop() if self else 0

    def release(self, slot: int) -> None:
        """A row gives its slot back."""
        if self:
            self._free = sorted([*self._free, slot], reverse=True)


class DeltaRows:
    """The delta nets of one forward over some rows, whose states advance in place.

    A forward of the engine has no gradient, so no layer is computed twice. ``fresh``: rows begin with the first token.
    ``lengths_B``: the real tokens of rows that are padded on the right.
    """

    def __init__(
        self,
        states: RowStates,
        places: Sequence[int],
        rows: slice | Tensor,
        *,
        fresh: bool = False,
        lengths_B: Tensor | None = None,
    ) -> None:
        if isinstance(states, StateSlots):
            assert isinstance(rows, Tensor)
            states.settle(rows)
        self._states, self._places, self._rows = states, places, rows
        self._fresh, self._lengths_B = fresh, lengths_B

    def __call__(self, net: Any, tokens: DeltaTokens) -> Tensor:
        """[B, T, G, V]."""
        place = self._places[net.layer_idx]
        windows_NWC, states_NGKV = self._states.windows[place], self._states.states[place]
        before = None if self._fresh else DeltaState(windows_NWC[self._rows], states_NGKV[self._rows])
        out_BTGV, after = advance(net, tokens, before, self._lengths_B)
        windows_NWC[self._rows] = after.window_BWC.to(windows_NWC.dtype)
        states_NGKV[self._rows] = after.state_BGKV
        return out_BTGV


def real_lengths(new: Sequence[int], device: torch.device) -> Tensor | None:
    """The lengths of rows, where any is padded."""
    return sent_to(device, torch.tensor(list(new))) if min(new) < max(new) else None
