"""Keys and values of the rows being written: one dense block, active rows first, grown in steps.

The block is [layers, 2, rows, K, capacity, D] (2: keys and values; K key heads; D head size), so that moving, copying or
growing rows is one operation for all layers. Entries beyond a row's length hold stale numbers that nothing attends to.
Gated delta nets have states in place of keys and values (``delta_states``): layer i has the place ``places[i]`` among the
layers of its kind. Axes besides: B rows of a forward, T new tokens, S cache entries seen.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sensorium.engines.native.delta_states import DeltaRows, RowStates, StateSlots, real_lengths
from sensorium.models.attention import causal_attention, masked_attention
from sensorium.models.delta_net import DeltaState, DeltaTokens
from sensorium.models.segment_layout import sent_to

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
        """Copy pages."""
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
            from sensorium.kernels.attention_triton import copy_pages

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
        from sensorium.kernels.attention_triton import write_entries

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
