"""The kernels of a decode step give what plain torch gives. Where there is no GPU they run in Triton's interpreter."""

import random
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sensorium.engines.native.decode_state import DecodeRows, DecodeState, RowLayout, TorchOps
from sensorium.engines.native.key_values import PAGE, StateSlots
from sensorium.engines.protocol import Sampling
from sensorium.kernels.layer_ops import GatedMLP, LayerParts, NormWeights
from sensorium.kernels.layer_torch import FINE_SCALE
from sensorium.models.delta_net import DeltaState, hand_over_states

pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]
if torch.cuda.is_available():
    pytestmark.append(pytest.mark.gpu)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 5000
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02}
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]  # the interpreter has no bfloat16


@pytest.fixture(scope="module")
def kernels() -> TorchOps:
    """The operations as kernels."""
    from sensorium.engines.native.decode_kernels import TritonOps

    return TritonOps()


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_rows(
    lengths: list[int], shared: list[int], groups: list[int], sampling: list[Sampling] | None = None
) -> DecodeRows:
    """Rows with pages of their own behind the pages that their group shares."""
    state = DecodeState(len(lengths), 8, VOCAB, DEVICE)
    layouts, next_page, common = [], 1, {}
    names = {group: object() for group in groups}
    for i, (length, share, group) in enumerate(zip(lengths, shared, groups, strict=True)):
        if group not in common:
            common[group] = list(range(next_page, next_page + share))
            next_page += share
        count = length // PAGE + 1 - share
        pages = [*common[group], *range(next_page, next_page + count)]
        next_page += count
        kind = Sampling() if sampling is None else sampling[i % len(sampling)]
        layouts.append(RowLayout(i, length, length, 5 + i, 2**63 + i, kind, pages, share, names[group]))
    state.lay_out(layouts, len(lengths), torch.arange(len(lengths), device=DEVICE))
    return state.view(len(lengths))


def delta_net(hidden: int, heads: int, groups: int, size: int, value: int, dtype: torch.dtype = torch.float32) -> Any:
    """A gated delta net of Qwen3.5 whose states the caller holds, with weights that all matter."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = Qwen3_5TextConfig(
        hidden_size=hidden, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=heads,
        linear_num_value_heads=groups, linear_key_head_dim=size, linear_value_head_dim=value,
    )  # fmt: skip
    net: Any = Qwen3_5GatedDeltaNet(config, 0).to(DEVICE, dtype).requires_grad_(False)
    hand_over_states(SimpleNamespace(layers=[SimpleNamespace(linear_attn=net)]))
    for i, parameter in enumerate((net.dt_bias, net.norm.weight)):
        parameter.add_(normal(*parameter.shape, dtype=dtype, seed=20 + i))
    return net


def close(found: Tensor, expected: Tensor) -> bool:
    scale = expected.float().abs().max()
    return bool(((found.float() - expected.float()).abs().max() / scale) <= TOLERANCE[expected.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (7, 1, 32), (3, 3, 24)])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_keys_and_values_go_to_their_places(
    kernels: TorchOps, dtype: torch.dtype, heads: int, kv_heads: int, size: int, normed: bool
) -> None:
    rows = make_rows([0, 63, 64, 200], [0, 0, 0, 0], [0, 1, 2, 3])
    projected = [normal(4, n * size, dtype=dtype, seed=n) for n in (heads, kv_heads, kv_heads)]
    rotary = normal(4, size, dtype=dtype, seed=8), normal(4, size, dtype=dtype, seed=9)
    norms = (NormWeights(normal(size, dtype=dtype), 1e-6), NormWeights(normal(size, dtype=dtype, seed=1), 1e-6))
    blocks, queries = [], []
    for ops in (kernels, TorchOps()):
        blocks.append(torch.zeros(2, 12, kv_heads, PAGE, size, dtype=dtype, device=DEVICE))
        queries.append(ops.place(*projected, rotary, norms if normed else None, rows, blocks[-1]))
    assert close(*queries)
    assert close(*blocks)
    assert int(blocks[0].flatten(0, 1).any(-1).any(1).sum()) == 8  # one key and one value entry for each row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (7, 1, 32)])
@pytest.mark.parametrize("shared", [[0] * 6, [2, 2, 2, 2, 1, 1], [2, 2, 2, 2, 0, 0]])
def test_attention_over_shared_and_own_pages(
    kernels: TorchOps, dtype: torch.dtype, heads: int, kv_heads: int, size: int, shared: list[int]
) -> None:
    rows = make_rows([130, 200, 128, 140, 65, 100], shared, [0, 0, 0, 0, 1, 1])
    query = normal(6, heads, size, dtype=dtype)
    block = normal(2, 40, kv_heads, PAGE, size, dtype=dtype, seed=3)
    found, expected = (ops.attend(query, rows, block, 0.3) for ops in (kernels, TorchOps()))
    assert close(found, expected)


@pytest.mark.parametrize("few_rows", [3, 4])
def test_shared_pages_in_splits_of_one_or_two(kernels: TorchOps, monkeypatch: pytest.MonkeyPatch, few_rows: int) -> None:
    monkeypatch.setattr("sensorium.engines.native.decode_kernels.FEW_ROWS", few_rows)
    rows = make_rows([200, 330, 70, 260], [3, 3, 0, 0], [0, 0, 1, 2])
    query, block = normal(4, 4, 16), normal(2, 20, 2, PAGE, 16, seed=3)
    assert close(kernels.attend(query, rows, block, 0.3), TorchOps().attend(query, rows, block, 0.3))


def test_a_group_larger_than_a_tile_is_read_in_several(kernels: TorchOps) -> None:
    count = 21
    rows = make_rows([130 + i for i in range(count)], [2] * count, [0] * count)
    assert rows.tile_rows_B.tolist()[:4] == [8, 8, 5, 0]
    query, block = normal(count, 4, 16), normal(2, 60, 2, PAGE, 16, seed=3)
    assert close(kernels.attend(query, rows, block, 0.3), TorchOps().attend(query, rows, block, 0.3))


MIXED = [
    Sampling(), Sampling(temperature=0.6), Sampling(temperature=0.0), Sampling(stop_tokens=False),
    Sampling(temperature=1.5, stop_tokens=False),
]  # fmt: skip


def test_the_draw_is_the_samplers(kernels: TorchOps) -> None:
    count = 40
    forbidden, stops = torch.tensor([3, 4, 4999], device=DEVICE), torch.tensor([7, 9], device=DEVICE)
    logits = normal(count, VOCAB) * 4
    logits[:, [3, 7]] = 30.0  # what may not be drawn, and what rows that ignore stop tokens may not draw
    drawn = []
    for ops in (kernels, TorchOps()):
        rows = make_rows([10] * count, [0] * count, list(range(count)), MIXED)
        ops.draw(logits, rows, forbidden, stops, truncated=False)
        drawn.append(rows)
    found, expected = drawn
    assert torch.equal(found.tokens_B, expected.tokens_B)
    assert torch.equal(found.packed_3B[0].long(), found.tokens_B)
    assert torch.allclose(found.packed_3B, expected.packed_3B, atol=1e-5)
    for name in ("positions_B", "lengths_B", "counts_B"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert 3 not in found.tokens_B
    assert {7} == {int(token) for token in found.tokens_B[0::5]}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_spoil_only_their_row(kernels: TorchOps, bad: float) -> None:
    none = torch.tensor([], dtype=torch.int64, device=DEVICE)
    rows = make_rows([10] * 3, [0] * 3, [0, 1, 2])
    logits = normal(3, VOCAB)
    logits[1, 2000] = bad
    kernels.draw(logits, rows, none, none, truncated=False)
    assert rows.packed_3B[1].isnan().tolist() == [False, True, False]
    assert int(rows.tokens_B[1]) < VOCAB


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 24, 100])
def test_products_in_parts_are_products(kernels: TorchOps, dtype: torch.dtype, rows: int) -> None:
    plain = TorchOps()
    x, residual = normal(rows, 256, dtype=dtype), normal(rows, 128, seed=1)
    norm = NormWeights(normal(128, dtype=dtype, seed=2), 1e-6)
    for bias in (True, False):
        layer = torch.nn.Linear(256, 128, bias=bias, device=DEVICE, dtype=dtype).requires_grad_(False)
        found, expected = (ops.add_product(layer, x, residual, norm) for ops in (kernels, plain))
        assert close(found[0], expected[0])
        assert (found[1] - expected[1]).abs().max() <= 1e-5 * expected[1].abs().max()  # not rounded on the way
        assert (found[0].dtype, found[1].dtype) == (dtype, torch.float32)
    gate, up = (torch.nn.Linear(256, 384, bias=False, device=DEVICE, dtype=dtype).requires_grad_(False) for _ in range(2))
    inner = GatedMLP(gate, up, torch.nn.Identity())
    assert close(kernels.gated(inner, x), plain.gated(inner, x))


@pytest.mark.parametrize("parts", [3, 4, 7])
def test_parts_need_not_divide_the_inner_size(kernels: TorchOps, parts: int) -> None:
    from sensorium.kernels.decode_triton import Tiling, product_parts

    x, weights = normal(5, 640), [normal(64, 640, seed=1), normal(128, 640, seed=2)]
    found_PBN = product_parts(x, weights, Tiling(64, 128, parts, 4, 2))
    expected = x.double() @ torch.cat(weights).double().T
    assert (found_PBN.sum(0) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no bfloat16")
@pytest.mark.parametrize("rows", [3, 100, 200])
def test_early_layers_compute_from_activations_of_eleven_bits(kernels: TorchOps, rows: int) -> None:
    plain, half = TorchOps(), torch.float16
    gate, up, down = (
        torch.nn.Linear(size, out, bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
        for size, out in ((256, 384), (256, 384), (384, 256))
    )
    inner, norm = GatedMLP(gate, up, down), NormWeights(normal(256, dtype=torch.bfloat16, seed=2), 1e-6)
    x, residual = normal(rows, 256).to(half), normal(rows, 256, seed=1)
    exact = exact_of(x, gate, up)
    for ops in (kernels, plain):
        values = ops.gated(inner, x)
        assert values.dtype == half
        assert (values.float() * FINE_SCALE - exact).abs().max() <= 2e-3 * exact.abs().max()
        normed, summed = ops.add_product(down, values, residual, norm, half)
        wanted = residual + exact @ down.weight.float().T
        assert (summed - wanted).abs().max() <= 2e-3 * wanted.abs().max()
        assert (normed.float() - plain.norm(wanted, norm).float()).abs().max() <= 0.01 * normed.float().abs().max()
        assert normed.dtype == half
    with torch.no_grad():
        gate.weight.mul_(2)
    kernels.renew()
    exact = exact_of(x, gate, up)  # also where a copy of the weights was kept
    assert (kernels.gated(inner, x).float() * FINE_SCALE - exact).abs().max() <= 2e-3 * exact.abs().max()


def exact_of(x: Tensor, gate: torch.nn.Linear, up: torch.nn.Linear) -> Tensor:
    return torch.nn.functional.silu(x.float() @ gate.weight.float().T) * (x.float() @ up.weight.float().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_projections_in_parts_go_to_their_places(kernels: TorchOps, dtype: torch.dtype, normed: bool, bias: bool) -> None:
    rows = make_rows([0, 63, 64, 200], [0, 0, 0, 0], [0, 1, 2, 3])
    size, heads, kv_heads = 32, 8, 4
    layers = [
        torch.nn.Linear(256, n * size, bias=bias, device=DEVICE, dtype=dtype).requires_grad_(False)
        for n in (heads, kv_heads, kv_heads)
    ]
    unit = NormWeights(normal(256, dtype=dtype), 1e-6)
    norms = (NormWeights(normal(size, dtype=dtype), 1e-6), NormWeights(normal(size, dtype=dtype, seed=1), 1e-6))
    parts = LayerParts(
        index=0, before=unit, query=layers[0], key=layers[1], value=layers[2], out=layers[0],
        norms=norms if normed else None, head_dim=size, scaling=1.0, between=unit, inner=layers[0],
    )  # fmt: skip
    rotary = normal(4, size, dtype=dtype, seed=8), normal(4, size, dtype=dtype, seed=9)
    blocks, queries = [], []
    for ops in (kernels, TorchOps()):
        blocks.append(torch.zeros(2, 12, kv_heads, PAGE, size, dtype=dtype, device=DEVICE))
        queries.append(ops.project(parts, normal(4, 256, dtype=dtype, seed=4), rotary, rows, blocks[-1]))
    assert close(*queries)
    assert close(*blocks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [8, 32])
@pytest.mark.parametrize("hidden", [256, 192])  # as one product in parts, and as three
def test_gated_queries_go_to_their_places_and_gates_open(
    kernels: TorchOps, dtype: torch.dtype, rotated: int, hidden: int
) -> None:
    rows = make_rows([0, 63, 64, 200], [0, 0, 0, 0], [0, 1, 2, 3])
    size, heads, kv_heads = 32, 8, 4
    layers = [
        torch.nn.Linear(hidden, n * size, bias=False, device=DEVICE, dtype=dtype).requires_grad_(False)
        for n in (2 * heads, kv_heads, kv_heads)
    ]
    unit = NormWeights(normal(hidden, dtype=dtype), 1e-6, centred=True)
    norms = tuple(NormWeights(normal(size, dtype=dtype, seed=seed), 1e-6, centred=True) for seed in (0, 1))
    parts = LayerParts(0, unit, *layers, layers[0], norms, size, 0.3, unit, layers[0], gated=True)
    rotary = normal(4, rotated, dtype=dtype, seed=8), normal(4, rotated, dtype=dtype, seed=9)
    blocks, queries, seen = [], [], []
    for ops in (kernels, TorchOps()):
        blocks.append(normal(2, 12, kv_heads, PAGE, size, dtype=dtype, seed=3))
        query = ops.project(parts, normal(4, hidden, dtype=dtype, seed=4), rotary, rows, blocks[-1])
        assert isinstance(query, Tensor)
        assert query.shape == (2, 4, heads, size)
        queries.append(query)
        seen.append(ops.attend(query, rows, blocks[-1], parts.scaling))
    assert close(*blocks)
    for found, expected in zip(queries[0], queries[1], strict=True):
        assert close(found, expected)
    assert close(*seen)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 200])
def test_norms_may_be_centred(kernels: TorchOps, dtype: torch.dtype, rows: int) -> None:
    x, residual = normal(rows, 256, dtype=dtype), normal(rows, 128, seed=1)
    norm = NormWeights(normal(128, dtype=dtype, seed=2), 1e-6, centred=True)
    layer = torch.nn.Linear(256, 128, bias=False, device=DEVICE, dtype=dtype).requires_grad_(False)
    found, expected = (ops.add_product(layer, x, residual, norm) for ops in (kernels, TorchOps()))
    assert close(found[0], expected[0])
    assert close(found[1], expected[1])
    stock = torch.nn.functional.rms_norm(residual, (128,), eps=1e-6) * (1 + norm.weight.float())
    assert close(kernels.norm(residual, norm), stock.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [6, 24])
@pytest.mark.parametrize("sizes", [(8, 16, 16, 16), (1, 3, 40, 24)])  # projections in parts, and one by one
@pytest.mark.parametrize("steps", [0, 3, 6])  # with updates that wait so many steps, or none
def test_a_delta_net_step_by_step(
    kernels: TorchOps, dtype: torch.dtype, rows: int, sizes: tuple[int, int, int, int], steps: int
) -> None:
    """Windows and states are those that the kernel left; two rows are on the scratch slot."""
    net = delta_net(256, *sizes, dtype=dtype)
    _, groups, size, value = sizes
    slots = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(0))[:rows].to(DEVICE)
    slots[:2] = 0
    used, kept = slots[slots > 0], torch.tensor([i for i in range(1, rows + 3) if i not in slots.tolist()], device=DEVICE)
    results = []
    for ops in (kernels, TorchOps()):
        windows, states = (
            normal(rows + 3, 3, net.conv_dim, dtype=dtype, seed=2),
            normal(rows + 3, groups, size, value, seed=3),
        )
        held, outs = StateSlots([windows], [states]), []
        for i in range(steps or 2):
            waiting = held.waiting(0) if steps and ops is kernels else None
            outs.append(ops.mix(net, normal(rows, 256, dtype=dtype, seed=i), windows, states, slots, waiting)[slots > 0])
            if waiting is not None:
                held.count(slots)
        held.settle(slots)
        assert torch.equal(states[kept], normal(rows + 3, groups, size, value, seed=3)[kept])
        results.append([*outs, windows[used], states[used]])
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert (found.float() - expected.float()).norm() <= 1.5 * TOLERANCE[dtype] * expected.float().norm()


@pytest.mark.parametrize("seed", [4, 23])  # in which slots grow, and are forked, beside updates that wait
def test_slots_are_forked_given_back_grown_and_stored_while_updates_wait(kernels: TorchOps, seed: int) -> None:
    """In an order of chance, with padding rows on the scratch slot; plain torch has one row for each slot."""
    net, chance = delta_net(64, 1, 2, 8, 8), random.Random(seed)
    held = StateSlots([torch.zeros(0, 3, net.conv_dim, device=DEVICE)], [torch.zeros(0, 2, 8, 8, device=DEVICE)])
    rows: dict[int, tuple[Tensor, Tensor]] = {}

    def check() -> None:
        for slot, row in rows.items():
            (kept,) = held.take(slot)
            for found, expected in zip((kept.window_BWC[0], kept.state_BGKV[0]), row, strict=True):
                assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()

    for i in range(24):
        what = chance.choice(["step"] * 4 + ["join", "fork", "leave", "grow", "store"]) if rows else "join"
        slot = chance.choice(list(rows)) if rows else 0
        if what == "join":
            slot, rows_of = held.allocate(), (normal(3, net.conv_dim, seed=i), normal(2, 8, 8, seed=i))
            held.put(slot, [DeltaState(rows_of[0][None], rows_of[1][None])])
            rows[slot] = rows_of
        elif what == "fork":
            targets = [held.allocate() for _ in range(chance.randint(1, 3))]
            held.copy([slot] * len(targets), targets)
            rows |= dict.fromkeys(targets, rows[slot])
        elif what == "leave":
            held.release(slot)
            del rows[slot]
        elif what == "grow":
            held.reserve(chance.randint(1, 6))
        elif what == "store":
            check()
        else:
            stepping = chance.sample(list(rows), chance.randint(1, len(rows)))
            slots = torch.tensor(stepping + [0] * chance.choice([0, 2]), device=DEVICE)
            x = normal(len(slots), 64, seed=100 + i)
            kernels.mix(net, x, held.windows[0], held.states[0], slots, held.waiting(0))
            held.count(slots)
            windows, states = (torch.stack([rows[slot][part] for slot in stepping]) for part in (0, 1))
            TorchOps().mix(net, x[: len(stepping)], windows, states, torch.arange(len(stepping), device=DEVICE))
            rows |= {slot: (windows[j], states[j]) for j, slot in enumerate(stepping)}
    check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_go_to_their_pages(kernels: TorchOps, dtype: torch.dtype) -> None:
    from sensorium.kernels.decode_attention_triton import write_entries

    new, pages = normal(5, 3, 24, dtype=dtype), normal(4, 3, PAGE, 24, dtype=dtype, seed=1)
    page, offset = (torch.tensor(values, device=DEVICE) for values in ([1, 1, 3, 2, 1], [0, 5, PAGE - 1, 7, 6]))
    expected = pages.clone()
    expected[page, :, offset] = new
    write_entries(new, pages, page, offset)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_copied_within_a_pool_and_into_it(kernels: TorchOps, dtype: torch.dtype) -> None:
    from sensorium.kernels.decode_attention_triton import copy_pages

    pool, other = (normal(3, 2, pages, 2, PAGE, 40, dtype=dtype, seed=pages) for pages in (9, 3))
    expected = pool.clone()
    expected[:, :, [7, 2, 4]] = pool[:, :, [1, 1, 5]]
    expected[:, :, [6, 8]] = other[:, :, [0, 2]]
    for source, taken, filled in ((pool, [1, 1, 5], [7, 2, 4]), (other, [0, 2], [6, 8])):
        copy_pages(source, torch.tensor(taken, device=DEVICE), pool, torch.tensor(filled, device=DEVICE))
    assert torch.equal(pool, expected)
