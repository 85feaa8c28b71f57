"""Attention over trees laid out flat, for float32 on a CPU, in C (``compiled/c/attention.c``).

Nothing is gathered, padded or masked: a run's queries meet its ancestors' keys and values where they are. Held against
``TreeAttention``, values and gradients, before its first use; where they disagree, or nothing can be compiled, that one is
used, with a warning that says why.
"""

from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sensorium.compiled.calls import addresses, call, pointers, sizes, threads_for
from sensorium.compiled.library import NoLibrary, load_library
from sensorium.learner.tree_attention import TokenRun, TreeAttention, arrange, nearest_above
from sensorium.models.attention import one_row
from sensorium.models.fast_paths import fall_back, largest_gap, trying, without_compiled_parts

WORK_OF_A_THREAD = 1 << 20
"""Multiplications that are worth a thread."""
BOUND = 1e-5
"""How far values and gradients may be from those of ``TreeAttention``, relative to the largest."""


class CompiledTree:
    """Attention of one flat row [1, T] that holds trees, their runs arranged in batches."""

    def __init__(self, batches: Sequence[Sequence[TokenRun]], device: torch.device) -> None:
        self._batches, self._device = batches, device

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        """Attend; [1, T, H, D]."""
        heads, size = query_BHTD.shape[1], query_BHTD.shape[3]
        plain = query_BHTD.dtype == torch.float32 and query_BHTD.device.type == "cpu"
        if not plain or not _is_right(heads, key_BKTD.shape[1], size):
            return self._rectangles(layer, query_BHTD, key_BKTD, value_BKTD, scaling)
        return _attend(self._trees, layer, query_BHTD, key_BKTD, value_BKTD, scaling)

    @cached_property
    def _rectangles(self) -> TreeAttention:
        return TreeAttention(self._batches, self._device)

    @cached_property
    def _trees(self) -> "_Trees":
        return _trees([*chain(*self._batches)])


@dataclass(frozen=True)
class _Trees:
    """Runs as C reads them, tree by tree: ancestors first, those below the same run next to each other."""

    first_run: np.ndarray
    start: np.ndarray
    length: np.ndarray
    prefix: np.ndarray
    above: np.ndarray

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest run and its ancestors."""
        return int((self.prefix + self.length).max(initial=1))

    @cached_property
    def cells(self) -> int:
        """Pairs of a query and a key, about."""
        return int((self.length * (self.prefix + self.length)).sum())


def _trees(runs: Sequence[TokenRun]) -> _Trees:
    below: dict[TokenRun | None, list[TokenRun]] = {}
    for run in sorted(runs, key=lambda run: run.start):
        below.setdefault(nearest_above(run), []).append(run)
    ordered: list[TokenRun] = []
    first_run = [0]
    for root in below.get(None, []):
        tree = [root]
        for run in tree:  # grows meanwhile
            tree += below.get(run, [])
        ordered += tree
        first_run.append(len(ordered))
    place = {run: i for i, run in enumerate(ordered)}
    above = [-1 if (nearest := nearest_above(run)) is None else place[nearest] for run in ordered]
    columns = ([run.start for run in ordered], [run.length for run in ordered], [run.prefix for run in ordered], above)
    return _Trees(*(np.array(column, dtype=np.int64) for column in (first_run, *columns)))


class _CTrees(Structure):
    """``struct trees`` of attention.c."""

    _fields_: ClassVar = [
        *sizes("trees heads kv_heads size longest"),
        ("scaling", c_double),
        *pointers("first_run start length prefix above query key value"),
        *pointers("out logs gradient query_gradient key_gradient value_gradient"),
        *pointers("memory"),
    ]


class _Attend(torch.autograd.Function):
    """(query [T, H, D], key [T, K, D], value, trees, scaling) → [T, H, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, trees: _Trees, scaling: float) -> Tensor:
        out_THD, logs_TH = torch.empty_like(query), query.new_empty(query.shape[:2])
        _run("attend_trees", trees, scaling, query, key, value, out_THD, logs_TH, None, None, None, None)
        ctx.save_for_backward(query, key, value, logs_TH)
        ctx.trees, ctx.scaling = trees, scaling
        return out_THD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, logs_TH = ctx.saved_tensors
        found = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        given = gradients[0].contiguous()
        _run("attend_trees_back", ctx.trees, ctx.scaling, query, key, value, None, logs_TH, given, *found)
        return *found, None, None


def _run(
    name: str, trees: _Trees, scaling: float, query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None
) -> None:
    (heads, size), kv_heads, library = query.shape[1:], key.shape[1], load_library()
    count = len(trees.first_run) - 1
    threads = min(threads_for(trees.cells * heads * size, WORK_OF_A_THREAD), max(1, count * kv_heads))
    library.tree_memory.restype = c_int64
    memory = query.new_empty(threads * library.tree_memory(c_int64(size), c_int64(trees.longest)))
    runs = (trees.first_run, trees.start, trees.length, trees.prefix, trees.above)
    given = _CTrees(
        count, heads, kv_heads, size, trees.longest, scaling,
        *(column.ctypes.data for column in runs), *addresses(query, key, value, *others, memory),
    )  # fmt: skip
    call(name, given, threads)


def _attend(trees: _Trees, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    three = (one_row(x).contiguous() for x in (query, key, value))
    seen_THD: Tensor = _Attend.apply(*three, trees, scaling)
    return seen_THD[None]


@cache
def _is_right(heads: int, kv_heads: int, size: int) -> bool:
    """Whether it gives what rectangles give, of two trees of uneven runs; what is wrong is said once for each shape."""
    generator = torch.Generator().manual_seed(0)
    roots = [TokenRun(7, None), TokenRun(0, None)]
    middle = TokenRun(3, roots[0])
    batches = arrange([*roots, middle, *(TokenRun(length, above) for length, above in (
        (5, middle), (67, middle), (9, roots[0]), (1, roots[0]), (12, roots[1]), (4, roots[1])))])  # fmt: skip
    tokens = sum(run.length for batch in batches for run in batch)
    query, key, value, pull = (
        torch.randn(1, count, tokens, size, generator=generator) for count in (heads, kv_heads, kv_heads, heads)
    )
    device, results = torch.device("cpu"), []
    try:
        with trying():
            for attend in (TreeAttention(batches, device), partial(_attend, _trees([*chain(*batches)]))):
                q, k, v = three = [x.clone().requires_grad_() for x in (query, key, value)]
                out = attend(0, q, k, v, size**-0.5)
                results.append([out.detach(), *torch.autograd.grad(out, three, pull.transpose(1, 2))])
    except NoLibrary as error:
        without_compiled_parts(str(error))
        return False
    expected, found = results
    gap = largest_gap(found, expected)
    if gap <= BOUND:
        return True
    fall_back(f"attention of the learner runs without its compiled way, which is slower: it is {gap:.2g} off the plain one")
    return False
