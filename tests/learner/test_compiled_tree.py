"""Attention over trees in C is the attention over trees in torch, whatever the trees and threads."""

import platform
import random
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sensorium.compiled import calls, library
from sensorium.compiled.library import NoLibrary
from sensorium.learner import compiled_tree, token_logprobs
from sensorium.learner.compiled_tree import CompiledTree
from sensorium.learner.tree_attention import TokenRun, TreeAttention, arrange
from sensorium.models.fast_paths import fallbacks, without_compiled_parts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    compiled_tree._is_right.cache_clear()
    without_compiled_parts.cache_clear()
    yield
    compiled_tree._is_right.cache_clear()


@st.composite
def forests(draw: st.DrawFn) -> list[TokenRun]:
    """Runs of up to 4 trees, of up to three generations; some are empty."""
    runs: list[TokenRun] = []
    for _ in range(draw(st.integers(1, 4))):
        tree = [TokenRun(draw(st.integers(0, 40)), None)]
        for _ in range(draw(st.integers(0, 6))):
            tree.append(TokenRun(draw(st.integers(0, 90)), draw(st.sampled_from(tree))))
        runs += tree
    return runs if any(run.length for run in runs) else [*runs, TokenRun(3, None)]


def results(attention: TreeAttention | CompiledTree, tokens: int, heads: int, kv_heads: int, size: int) -> list[Tensor]:
    """Values, and gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(1)
    query, key, value, pull = (
        torch.randn(1, tokens, count, size, generator=generator).transpose(1, 2)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    for x in (query, key, value):
        x.requires_grad_()
    out = attention(0, query, key, value, 0.3)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), pull.transpose(1, 2))]


@settings(max_examples=60, deadline=None)
@given(forests(), st.sampled_from([(2, 1, 32), (4, 4, 20), (6, 2, 8), (7, 1, 40)]))
def test_values_and_gradients_are_those_of_rectangles(runs: list[TokenRun], shape: tuple[int, int, int]) -> None:
    batches = arrange(runs)
    tokens = sum(run.length for run in chain(*batches))
    expected = results(TreeAttention(batches, CPU), tokens, *shape)
    found = results(CompiledTree(batches, CPU), tokens, *shape)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_no_bit_depends_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    roots = [TokenRun(30 + i, None) for i in range(5)]
    batches = arrange([*roots, *(TokenRun(20 + i, root) for i, root in enumerate(roots * 6))])
    tokens = sum(run.length for run in chain(*batches))
    monkeypatch.setattr(compiled_tree, "WORK_OF_A_THREAD", 1)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4, 4):
            torch.set_num_threads(threads)
            found.append(results(CompiledTree(batches, CPU), tokens, 4, 2, 16))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, another) for one, another in zip(found[0], other, strict=True))


@pytest.mark.parametrize("processor", ["-mno-avx512f", "-mno-avx -mno-avx512f -D__aarch64__"], ids=["AVX2", "as ARM"])
def test_vectors_of_other_widths(processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four numbers a vector and eight rows a tile, as on ARM, a context is rounded up to whole tiles."""
    if platform.machine() != "x86_64" or shutil.which("gcc") is None:
        pytest.skip("the flags are those of gcc for x86")
    monkeypatch.setenv("CC", f"gcc {processor}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = library._loaded(library.SOURCES)
    for module in (compiled_tree, calls):
        monkeypatch.setattr(module, "load_library", lambda: other)
    generator = random.Random(1)
    for heads, kv_heads, size in [(2, 1, 32), (4, 4, 20), (6, 2, 8), (1, 1, 16)] * 3:
        roots = [TokenRun(generator.randrange(40), None) for _ in range(3)]
        batches = arrange([*roots, *(TokenRun(1 + generator.randrange(90), root) for root in roots * 4)])
        tokens = sum(run.length for run in chain(*batches))
        expected = results(TreeAttention(batches, CPU), tokens, heads, kv_heads, size)
        found = results(CompiledTree(batches, CPU), tokens, heads, kv_heads, size)
        for one, another in zip(found, expected, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-4, atol=2e-5)
    assert token_logprobs.compiled_logprobs_are_right.__wrapped__()


def test_in_other_kinds_of_numbers_it_is_torchs() -> None:
    batches = arrange([TokenRun(9, None)])
    three = [torch.randn(1, 2, 9, 8, dtype=torch.bfloat16) for _ in range(3)]
    query, key, value = three
    expected = TreeAttention(batches, CPU)(0, query, key, value, 0.3)
    assert torch.equal(CompiledTree(batches, CPU)(0, query, key, value, 0.3), expected)


@pytest.mark.parametrize("how", ["wrong", "no compiler"])
def test_where_it_cannot_be_had_rectangles_are_used_and_it_is_said(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = compiled_tree._attend

    def broken(*given: object) -> Tensor:
        if how == "no compiler":
            raise NoLibrary("no C compiler was found (cc)")
        return original(*given) * 1.001  # type: ignore[arg-type]

    monkeypatch.setattr(compiled_tree, "_attend", broken)
    batches, before = arrange([TokenRun(9, None)]), fallbacks()
    attention = CompiledTree(batches, CPU)
    with pytest.warns(
        UserWarning, match="off the plain one" if how == "wrong" else "compiled parts.*No C compiler was found"
    ):
        found = results(attention, 9, 2, 1, 8)
    results(attention, 9, 2, 1, 8)  # said once
    assert fallbacks() == before + 1
    expected = results(TreeAttention(batches, CPU), 9, 2, 1, 8)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
