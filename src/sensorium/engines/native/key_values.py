"""Keys and values of the rows being written: one dense block, active rows first, grown in steps.

The block is [layers, 2, rows, K, capacity, D] (2: keys and values; K key heads; D head size), so that moving, copying or
growing rows is one operation for all layers. Entries beyond a row's length hold stale numbers that nothing attends to.
Gated delta nets have states in place of keys and values (``DeltaRows``): layer i has the place ``places[i]`` among the
layers of its kind. Axes besides: B rows of a forward, T new tokens, S cache entries seen.

Of a gated delta net (Qwen3.5) a row has one window and one state, after all tokens that were fed, whatever their
number. So a state cannot be cut back as keys and values can: it continues only a context that begins with exactly those
tokens::

    row 0   prompt of 150 tokens       state after 150
    fork    rows 1 and 2 follow it     copies of the state after 150
    decode  each row feeds its token   three states after 151, in place

Axes: N rows there is room for (or slots, in ``StateSlots``), B rows of a forward, T tokens, W, C, G, K, V as in
``models/delta_net.py``.
"""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sensorium.models.attention import causal_attention, masked_attention
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


LENGTH_STEP = 64


class KVCache:
    """The block of keys and values, and the rows' states of delta nets. Both grow on demand.

    ``places`` has the place of each layer among those of its kind (default: all are attention). Which row is whose is the
    engine's business.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        places: Sequence[int] | None = None,
        states: RowStates | None = None,
    ) -> None:
        self.block = torch.zeros(layers, 2, 0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.places = range(layers) if places is None else places
        self.states = RowStates() if states is None else states

    @property
    def rows(self) -> int:
        """Rows there is room for."""
        return self.block.shape[2]

    @property
    def capacity(self) -> int:
        """Tokens a row has room for."""
        return self.block.shape[4]

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.block.device

    def attention(self, first: int, held: Sequence[int], new: Sequence[int]) -> "FreshAttention | CachedAttention":
        """Attention of ``new`` tokens of the rows from ``first`` on, after ``held`` cached ones (of all, or of none)."""
        if not held[0]:
            return FreshAttention(self, first, new)
        held_B, width = torch.tensor(held, device=self.block.device), max(new)
        self.reserve(first + len(new), max(held) + width)  # short rows are padded: the longest may reach further than any
        bias_B1TS = causal_bias(self, held_B, width, max(held) + width)
        rows, lengths_B = slice(first, first + len(new)), real_lengths(new, self.block.device)
        deltas = DeltaRows(self.states, self.places, rows, lengths_B=lengths_B)
        return CachedAttention(
            self.block, write_places(self, first, held_B, width), bias_B1TS, first, places=self.places, deltas=deltas
        )

    def reserve(self, rows: int, length: int) -> bool:
        """Make room for that many rows and tokens; True if the block was reallocated. It grows by at least half."""
        if rows <= self.rows and length <= self.capacity:
            return False
        layers, two, old_rows, kv_heads, old_length, head_dim = self.block.shape
        rows = old_rows if rows <= old_rows else max(rows, old_rows * 3 // 2)
        if length > old_length:
            old_length = -(-max(length, old_length * 3 // 2) // LENGTH_STEP) * LENGTH_STEP
        # Zeros, not empty: a masked entry weighs nothing, but nothing times NaN is NaN.
        grown = self.block.new_zeros(layers, two, rows, kv_heads, old_length, head_dim)
        grown[:, :, : self.rows, :, : self.capacity] = self.block
        self.block = grown
        self.states.reserve(rows)
        return True

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` tokens of rows onto other rows; every source is read before a target is written."""
        if not targets:
            return
        source, target = (torch.tensor(rows, device=self.block.device) for rows in (sources, targets))
        used = self.block[:, :, :, :, :length]
        used.index_copy_(2, target, used.index_select(2, source))
        self.states.copy(sources, targets)

    def take(self, row: int, length: int) -> Tensor:
        """The keys and values of a row, as a tensor of their own: [layers, 2, K, length, D]."""
        return self.block[:, :, row, :, :length].clone()

    def put(self, row: int, kept: Tensor, length: int, states: Sequence[DeltaState] = ()) -> None:
        """Copy the first ``length`` tokens of stored keys and values, and the states after them, into a row."""
        self.block[:, :, row, :, :length] = kept[:, :, :, :length]
        self.states.put(row, states)


class FreshAttention:
    """Prefill of rows ``first … first+B`` from their beginning: causal among the new tokens, which are written down.

    Rows may be padded on the right: no real token sees the padding; what it leaves in the cache is overwritten or masked.
    """

    def __init__(self, cache: KVCache, first: int, new: Sequence[int]) -> None:
        self.block, self.places = cache.block, cache.places
        self.first = first
        rows, lengths_B = slice(first, first + len(new)), real_lengths(new, cache.device)
        self._deltas = DeltaRows(cache.states, cache.places, rows, fresh=True, lengths_B=lengths_B)

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        rows = slice(self.first, self.first + key_BKTD.shape[0])
        length = key_BKTD.shape[2]
        block = self.block[self.places[layer]]
        block[0, rows, :, :length] = key_BKTD
        block[1, rows, :, :length] = value_BKTD
        return masked_attention(query_BHTD, key_BKTD, value_BKTD, scaling, None)

    def delta(self, net: Any, tokens: DeltaTokens) -> Tensor:
        """[B, T, G, V] of a delta net; the rows' states are those after the new tokens."""
        return self._deltas(net, tokens)


class CachedAttention:
    """New tokens after cached ones, in rows ``first … first+B`` of the block. One new token each is decoding.

    ``write_N`` are the places of the new keys, by row, key head and token, in the block seen as a list of heads;
    ``bias_B1TS`` is 0 for the entries a token sees and -inf for the others; its width is how far the cache is read.
    ``places``: as in ``KVCache``.
    """

    def __init__(
        self,
        block: Tensor,
        write_N: Tensor,
        bias_B1TS: Tensor,
        first: int = 0,
        *,
        places: Sequence[int] | None = None,
        deltas: DeltaRows | None = None,
    ) -> None:
        self.block = block
        self.places, self._deltas = range(len(block)) if places is None else places, deltas
        self.write_N = write_N
        self.bias_B1TS = bias_B1TS
        self.first = first

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        batch, reach = query_BHTD.shape[0], self.bias_B1TS.shape[-1]
        # Plain numbers, also while it is being recorded: only rows and reach change from call to call.
        heads, new, size, kv_heads = (int(n) for n in (*query_BHTD.shape[1:], key_BKTD.shape[1]))
        place = self.places[layer]
        keys, values = self.block[place, 0], self.block[place, 1]
        keys.view(-1, size).index_copy_(0, self.write_N, key_BKTD.reshape(-1, size))
        values.view(-1, size).index_copy_(0, self.write_N, value_BKTD.reshape(-1, size))
        # Query heads that share a key head become queries of that head: keys and values are never repeated.
        share = heads // kv_heads
        rows = slice(self.first, self.first + batch)
        out = scaled_dot_product_attention(
            query_BHTD.reshape(batch, kv_heads, share * new, size),
            keys[rows, :, :reach],
            values[rows, :, :reach],
            attn_mask=self.bias_B1TS if new == 1 else self.bias_B1TS.repeat(1, 1, share, 1),
            scale=scaling,
        )
        return out.reshape(batch, heads, new, size).transpose(1, 2)

    def delta(self, net: Any, tokens: DeltaTokens) -> Tensor:
        """[B, T, G, V] of a delta net; the rows' states advance over the new tokens."""
        assert self._deltas is not None
        return self._deltas(net, tokens)


def write_places(cache: KVCache, first: int, lengths_B: Tensor, new: int) -> Tensor:
    """Where ``new`` tokens go after ``lengths_B`` cached ones, for ``CachedAttention``."""
    kv_heads, device = cache.block.shape[3], cache.block.device
    head_BK = torch.arange(first * kv_heads, (first + lengths_B.shape[0]) * kv_heads, device=device).view(-1, kv_heads)
    place_BT = lengths_B[:, None] + torch.arange(new, device=device)
    return (head_BK[:, :, None] * cache.capacity + place_BT[:, None]).view(-1)


def causal_bias(cache: KVCache, lengths_B: Tensor, new: int, width: int) -> Tensor:
    """What ``new`` tokens after ``lengths_B`` cached ones see of the first ``width`` entries, for ``CachedAttention``."""
    device = cache.block.device
    place_BT = lengths_B[:, None] + torch.arange(new, device=device)
    bias_BTS = cache.block.new_zeros(*place_BT.shape, width)
    return bias_BTS.masked_fill_(torch.arange(width, device=device) > place_BT[:, :, None], -torch.inf)[:, None]


# prompt of 150 tokens (PAGE 64), three responses to it: row 0: pages 4 5 6 | 7 … pages 4 and 5 are full and shared, 6
# is where row 0 goes on row 1: pages 4 5 8 | 9 … its own copy of the third page, which it writes on in row 2: pages 4 5
# 10 | 11 … The pool is [layers, 2, pages, K, PAGE, D] (2: keys and values; K key heads; D head size) and stays at its
# address until it has to grow. Page 0 is scratch: padding is written there. Axes besides: B rows, T new tokens, S
# entries seen.


PAGE = 64
SPARE = 1 / 8  # of the pages made ahead: rollouts differ a little in what they need


class PagePool:
    """The pages, how many rows hold each, and which are free; and the slots of the rows' states of delta nets.

    ``places``: as in ``KVCache``.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        places: Sequence[int] | None = None,
        states: StateSlots | None = None,
    ) -> None:
        self.block = torch.zeros(layers, 2, 1, kv_heads, PAGE, head_dim, dtype=dtype, device=device)
        self.places = range(layers) if places is None else places
        self.states = StateSlots() if states is None else states
        self._holders = [1]
        self._free: list[int] = []

    @property
    def address(self) -> tuple[int, ...]:
        """Where everything lies in memory; it moves when it grows."""
        return tuple(tensor.data_ptr() for tensor in (self.block, *self.states.tensors))

    @property
    def held(self) -> int:
        """Pages in use, without the scratch page."""
        return len(self._holders) - 1 - len(self._free)

    def reserve(self, pages: int, ahead: int = 0) -> None:
        """Make room for so many more pages. The pool grows by at least half and is copied.

        ``ahead``: pages that will be asked for at most. A pool that grows then would move, and CUDA graphs hold its
        address; so there is room for all of them at once, where a part of the free memory is enough for that.
        """
        free, old = len(self._free), len(self._holders)
        missing = pages - free
        more = max(missing, old // 2) if missing > 0 else 0
        if ahead > free and round(ahead * (1 + SPARE)) - free <= self._affordable():
            more = max(more, round(ahead * (1 + SPARE)) - free)
        if not more:
            return
        total = old + more
        layers, two, _, kv_heads, page, head_dim = self.block.shape
        grown = self.block.new_zeros(layers, two, total, kv_heads, page, head_dim)
        grown[:, :, :old] = self.block
        self.block = grown
        self._holders += [0] * (total - old)
        self._free = sorted([*self._free, *range(old, total)], reverse=True)

    def _affordable(self) -> int:
        """Pages that a quarter of the device's free memory holds; on a CPU none are made ahead."""
        if not self.block.is_cuda:
            return 0
        free, _ = torch.cuda.mem_get_info(self.block.device)
        cached = torch.cuda.memory_reserved(self.block.device) - torch.cuda.memory_allocated(self.block.device)
        return (free + cached) // 4 // (self.block[:, :, :1].numel() * self.block.element_size())

    def allocate(self, count: int) -> list[int]:
        """So many pages, lowest first, held once."""
        self.reserve(count)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more row holds these pages."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """A row lets go of its pages; those nobody holds are free."""
        for page in pages:
            self._holders[page] -= 1
        self._free += [page for page in pages if not self._holders[page]]
        self._free.sort(reverse=True)  # the next to be given out is a function of what is free alone

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if targets:
            self._fill(targets, self.block, sources)

    def take(self, pages: Sequence[int], length: int) -> Tensor:
        """The first ``length`` entries of a row's pages, as a tensor of their own: [layers, 2, K, length, D]."""
        found = self.block[:, :, self._index(pages[: -(-length // PAGE)])]
        return found.transpose(2, 3).flatten(3, 4)[:, :, :, :length].contiguous()

    def put(self, pages: Sequence[int], kept: Tensor, length: int) -> None:
        """Copy the first ``length`` entries of stored keys and values into pages."""
        layers, two, kv_heads, _, head_dim = kept.shape
        count = -(-length // PAGE)
        padded = kept.new_zeros(layers, two, kv_heads, count * PAGE, head_dim)
        padded[:, :, :, :length] = kept[:, :, :, :length]
        laid = padded.view(layers, two, kv_heads, count, PAGE, head_dim).transpose(2, 3)
        self._fill(pages[:count], laid, range(count))

    def _fill(self, targets: Sequence[int], block: Tensor, sources: Sequence[int]) -> None:
        """Copy pages of a block into pages of the pool. On CUDA by a kernel, as in ``write_tokens``."""
        if self.block.is_cuda and find_spec("triton") is not None:
            from sensorium.kernels.decode_attention_triton import copy_pages

            copy_pages(block.contiguous(), self._index(sources), self.block, self._index(targets))
        else:
            self.block[:, :, self._index(targets)] = block[:, :, self._index(sources)]

    def _index(self, pages: Sequence[int]) -> Tensor:
        return sent_to(self.block.device, torch.tensor(pages, dtype=torch.int64))


class PagedPrefill:
    """New tokens of some rows, written to their pages; each sees the row's ``held`` entries and the new ones up to it.

    Rows may be padded on the right: no real token sees the padding, which is written to the scratch page.
    """

    def __init__(
        self,
        pool: PagePool,
        pages: Sequence[Sequence[int]],
        held: Sequence[int],
        new: Sequence[int],
        slots: Sequence[int] = (),
    ) -> None:
        device, width = pool.block.device, max(new)
        seen = max(held) + width
        table_BP = page_table(pages, seen)
        place_BT = torch.tensor(held)[:, None] + torch.arange(width)
        padding_BT = torch.arange(width) >= torch.tensor(new)[:, None]
        self._block, self._places = pool.block, pool.places
        slots_B = sent_to(device, torch.tensor(list(slots), dtype=torch.int64))
        lengths_B = real_lengths(new, device)
        self._deltas = DeltaRows(pool.states, pool.places, slots_B, fresh=not any(held), lengths_B=lengths_B)
        page_N = table_BP.gather(1, place_BT // PAGE).masked_fill_(padding_BT, 0).flatten()
        self._page_N, self._offset_N = sent_to(device, page_N), sent_to(device, (place_BT % PAGE).flatten())
        self._table_BP = sent_to(device, table_BP) if any(held) else None
        mask_B1TS = (torch.arange(seen) <= place_BT[:, :, None])[:, None] if any(held) else None
        self._mask_B1TS = None if mask_B1TS is None else sent_to(device, mask_B1TS)
        self._ends_B = sent_to(device, torch.tensor(held) + torch.tensor(new)) if any(held) else None

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        keys_NKPD, values_NKPD = self.store(layer, key_BKTD, value_BKTD)
        if self._table_BP is None or self._mask_B1TS is None or self._ends_B is None:
            return causal_attention(query_BHTD, key_BKTD, value_BKTD, scaling)
        seen = self._mask_B1TS.shape[-1]
        keys, values = (gathered(part, self._table_BP, self._ends_B)[:, :, :seen] for part in (keys_NKPD, values_NKPD))
        return masked_attention(query_BHTD, keys, values, scaling, self._mask_B1TS)

    def delta(self, net: Any, tokens: DeltaTokens) -> Tensor:
        """[B, T, G, V] of a delta net; the states in the rows' slots advance over the new tokens."""
        return self._deltas(net, tokens)

    def store(self, layer: int, key_BKTD: Tensor, value_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values to their pages; all pages of the layer."""
        keys_NKPD, values_NKPD = self._block[self._places[layer]].unbind(0)
        for pages_NKPD, new_BKTD in ((keys_NKPD, key_BKTD), (values_NKPD, value_BKTD)):
            write_tokens(new_BKTD.transpose(1, 2).flatten(0, 1), pages_NKPD, self._page_N, self._offset_N)
        return keys_NKPD, values_NKPD


def page_table(pages: Sequence[Sequence[int]], seen: int) -> Tensor:
    """The pages of rows that hold their first ``seen`` entries, padded with the scratch page."""
    table_BP = torch.zeros(len(pages), -(-seen // PAGE), dtype=torch.int64)
    for row_P, owned in zip(table_BP, pages, strict=True):
        known = owned[: table_BP.shape[1]]
        row_P[: len(known)] = torch.tensor(known)
    return table_BP


def write_tokens(new_NKD: Tensor, pages_NKPD: Tensor, page_N: Tensor, offset_N: Tensor) -> None:
    """Write every token's entry to its page. On CUDA by a kernel: torch's deterministic way copies the whole pool."""
    if new_NKD.is_cuda and find_spec("triton") is not None:
        from sensorium.kernels.decode_attention_triton import write_entries

        write_entries(new_NKD.contiguous(), pages_NKPD, page_N, offset_N)
    else:
        pages_NKPD[page_N, :, offset_N] = new_NKD


def gathered(pages_NKPD: Tensor, table_BP: Tensor, ends_B: Tensor) -> Tensor:
    """The entries of rows in order: [B, K, pages · PAGE, D]; zeros behind their ends.

    What lies there may be no number, left by another row: a masked entry weighs nothing, but nothing times NaN is NaN.
    """
    found = pages_NKPD[table_BP.long()].transpose(1, 2).flatten(2, 3)
    behind_BS = torch.arange(found.shape[2], device=found.device) >= ends_B[:, None]
    return found.masked_fill_(behind_BS[:, None, :, None], 0)


def attend(
    query_BHD: Tensor, keys_NKPD: Tensor, values_NKPD: Tensor, table_BP: Tensor, lengths_B: Tensor, scaling: float
) -> Tensor:
    """Attention of one query per row over its entries up to ``lengths_B`` inclusive, as [B, H, D]; plain torch."""
    batch, heads, size = query_BHD.shape
    keys, values = (gathered(part, table_BP, lengths_B + 1) for part in (keys_NKPD, values_NKPD))
    kv_heads, reach = keys.shape[1], keys.shape[2]
    seen_BS = torch.arange(reach, device=keys.device) <= lengths_B[:, None]
    bias_B11S = torch.zeros_like(seen_BS, dtype=keys.dtype).masked_fill_(~seen_BS, -torch.inf)[:, None, None]
    grouped = query_BHD.view(batch, kv_heads, heads // kv_heads, size)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=bias_B11S, scale=scaling)
    return out.reshape(batch, heads, size)
