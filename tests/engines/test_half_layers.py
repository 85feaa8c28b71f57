"""Half a decode layer in one launch over weights in 12 bits gives what products one by one give."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from sensorium.engines.native import half_layers
from sensorium.engines.native.half_layers import HalfLayers, Packed, Sizes
from sensorium.kernels.device_code import NoDeviceCode
from sensorium.kernels.layer_parts import FINE_SCALE, GatedMLP, LayerParts, NormWeights

SHAPES = [(256, 320, 704, 192, 64), (2048, 2048, 11008, 2048, 256), (512, 384, 1088, 512, 48)]


def linear(outputs: int, inner: int, seed: int, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(inner, outputs, bias=bias, device="cuda", dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    layer.weight.data.copy_(torch.randn(outputs, inner, generator=generator) * inner**-0.5)
    return layer.requires_grad_(False)


def gain(width: int, seed: int) -> NormWeights:
    noise = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return NormWeights((1 + 0.1 * noise).to("cuda", torch.bfloat16), 1e-6)


def make_layers(seen: int, width: int, inner: int, queries: int, keys: int, first: int = 4) -> list[LayerParts]:
    """Two layers of a model, the second its last; layers 0 to 3 compute from finer activations."""
    return [
        LayerParts(
            i, gain(width, i), linear(queries, width, 10 * i, True), linear(keys, width, 10 * i + 1, True),
            linear(keys, width, 10 * i + 2, True), linear(width, seen, 10 * i + 3), None, 16, 1.0, gain(width, 7 + i),
            GatedMLP(*(linear(inner, width, 10 * i + j) for j in (4, 5)), linear(width, inner, 10 * i + 6)),
        )
        for i in (first, first + 1)
    ]  # fmt: skip


def last_norm(layers: list[LayerParts]) -> NormWeights:
    """The norm before the head."""
    return gain(len(layers[0].between.weight), 99)


def exactly(
    layer: LayerParts, following: LayerParts | NormWeights, seen: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """The next projections, without their bias, and the residual stream, in float64 with the roundings of activations.

    Where a norm follows instead of a layer, what it gives instead of projections.
    """

    def weight(part: Any) -> Tensor:
        return part.weight.double()

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    def normed(x: Tensor, norm: NormWeights) -> Tensor:
        return rounded(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double())

    def half(x: Tensor) -> Tensor:
        return x.half().double()

    inner: Any = layer.inner
    total = residual.double() + seen.double() @ weight(layer.out).T
    if layer.fine:
        x = half(
            total * torch.rsqrt(total.square().mean(-1, keepdim=True) + layer.between.eps) * layer.between.weight.double()
        )
        opened, value = x @ weight(inner.gate).T, x @ weight(inner.up).T
        total = total + half(silu(opened) * value / FINE_SCALE) @ weight(inner.down).T * FINE_SCALE
    else:
        x = normed(total, layer.between)
        opened, value = rounded(x @ weight(inner.gate).T), rounded(x @ weight(inner.up).T)
        total = total + rounded(silu(opened) * value) @ weight(inner.down).T
    if isinstance(following, NormWeights):
        return normed(total, following), total
    x = normed(total, following.before)
    projections = (following.query, following.key, following.value)
    return torch.cat([x @ weight(part).T for part in projections], 1), total


def inputs(rows: int, layer: LayerParts) -> tuple[Tensor, Tensor]:
    out: Any = layer.out
    generator = torch.Generator().manual_seed(rows)
    seen = torch.randn(rows, out.in_features, generator=generator).to("cuda", torch.bfloat16)
    return seen, torch.randn(rows, out.out_features, generator=generator).to("cuda")


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> Callable[[list[LayerParts]], HalfLayers]:
    """Half layers also of small sizes."""
    monkeypatch.setattr(half_layers, "LEAST_PACKED", 0)
    return lambda layers: HalfLayers(layers, last_norm(layers), notes.append)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 24, 32, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_launch_gives_what_the_products_give(
    make: Callable[[list[LayerParts]], HalfLayers], notes: list[str], shape: tuple[int, ...], rows: int
) -> None:
    layers = make_layers(*shape)
    halves = make(layers)
    seen, residual = inputs(rows, layers[0])
    expected = exactly(*layers, seen, residual)
    found = halves.run(4, seen, residual, lambda x, r: exactly(*layers, x, r)[0].float())
    assert found is not None, notes
    parts, total = found
    assert error(parts.sum(0), expected[0]) < 0.006
    assert error(total, expected[1]) < 0.006
    again = halves.run(4, seen, residual, lambda x, r: x)
    assert again is not None
    assert torch.equal(again[0], parts)
    assert torch.equal(again[1], total)
    assert not notes


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 13, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_layers_compute_finely(
    make: Callable[[list[LayerParts]], HalfLayers], notes: list[str], shape: tuple[int, ...], rows: int
) -> None:
    layers = make_layers(*shape, first=1)
    inner: Any = layers[0].inner
    inner.gate.weight.data[:16] *= 2.0**-9  # tiny ones are float16 numbers no more, but keep their bits here
    halves = make(layers)
    seen, residual = inputs(rows, layers[0])
    expected = exactly(*layers, seen, residual)
    found = halves.run(1, seen, residual, lambda x, r: exactly(*layers, x, r)[0].float())
    assert found is not None, notes
    assert error(found[0].sum(0), expected[0]) < 0.006
    fine, coarse = (
        error(found[1], expected[1]),
        error(exactly(replace(layers[0], index=4), *layers[1:], seen, residual)[1], expected[1]),
    )
    assert fine < 0.1 * coarse  # a float16 rounding is an eighth of a bfloat16's
    assert not notes


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 13, 40])
@pytest.mark.parametrize("first", [1, 4])
def test_the_last_layer_ends_with_what_the_head_takes(
    make: Callable[[list[LayerParts]], HalfLayers], notes: list[str], first: int, rows: int
) -> None:
    layers = make_layers(*SHAPES[0], first=first)
    halves, norm = make(layers), last_norm(layers)
    seen, residual = inputs(rows, layers[1])
    expected = exactly(layers[1], norm, seen, residual)
    for _ in range(2):  # others of the same number of rows come between
        assert halves.run(first, seen, residual, lambda x, r: exactly(*layers, x, r)[0].float()) is not None
        found = halves.run(first + 1, seen, residual, lambda x, r: exactly(layers[1], norm, x, r)[0].float())
        assert found is not None, notes
        assert found[0].dtype == torch.bfloat16
        assert error(found[0], expected[0]) < 0.006
    assert not notes


@pytest.mark.gpu
def test_twelve_bits_keep_all_but_the_last_bits_of_the_smallest(make: Callable[[list[LayerParts]], HalfLayers]) -> None:
    layers = make_layers(*SHAPES[0])
    out: Any = layers[0].out
    scales = 2.0 ** torch.randint(-30, 12, out.weight.shape, generator=torch.Generator().manual_seed(1))
    out.weight.data.mul_(scales.to("cuda", torch.bfloat16))
    out.weight.data[:32, ::7] = 0.0
    halves = make(layers)
    seen, residual = inputs(3, layers[0])
    assert halves.run(4, seen, residual, lambda x, r: exactly(*layers, x, r)[0].float()) is not None
    kept = unpacked(halves._packed[4][0])
    largest = out.weight.float().view(-1, 16 * out.in_features).abs().amax(1).log2().floor().exp2()
    largest = largest.repeat_interleave(16)[:, None]
    difference = (kept - out.weight.float()).abs()
    assert bool((difference <= largest * 2.0**-22).all())
    large = out.weight.float().abs() >= largest * 2.0**-14
    assert bool((difference[large] == 0).all())
    assert 0.1 < float(large.float().mean()) < 0.9  # so both kinds were there


def unpacked(packed: Packed) -> Tensor:
    """The weights of packed tiles, by what half_layer.cu says of its format."""
    tiles, blocks, _ = packed.tiles.shape
    words = packed.tiles.view(torch.int32).view(tiles, blocks, 3, 32, 4).long() & 0xFFFFFFFF
    scales = 2.0 ** (((packed.scales.long() >> 7) & 0xFF) - 127)
    found = torch.zeros(tiles, 16, blocks * 64, dtype=torch.float64, device=packed.tiles.device)
    for lane in range(32):
        for half in range(2):
            for i in range(16):  # eight of each of the lane's two rows
                pair, side = i // 2, i % 2
                word = words[:, :, half, lane, pair // 2] >> 16 * side
                sign, mantissa = (word >> 15, word) if pair % 2 else (word >> 7, word >> 8)
                exponents = words[:, :, 2, lane, 2 * half + i // 8]
                code = (exponents >> (4 * (pair % 4) + 16 * side)) & 15
                fraction = (mantissa & 127) / 128.0
                size = torch.where(code > 0, (1 + fraction) * 2.0 ** (code - 127), fraction * 2.0**-126)
                column = half * 32 + lane % 4 * 8 + i % 8
                found[:, lane // 4 + 8 * (i // 8), column::64] = (1 - 2 * (sign & 1)) * size * scales[:, None]
    return found.flatten(0, 1).float()


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30])
def test_weights_that_twelve_bits_cannot_hold_give_no_numbers(
    make: Callable[[list[LayerParts]], HalfLayers], bad: float
) -> None:
    layers = make_layers(*SHAPES[0])
    halves = make(layers)
    seen, residual = inputs(3, layers[0])
    assert halves.run(4, seen, residual, lambda x, r: exactly(*layers, x, r)[0].float()) is not None
    out: Any = layers[0].out
    out.weight.data[37, 5] = bad
    halves.renew()
    halves.ready(3)
    found = halves.run(4, seen, residual, lambda x, r: x)
    assert found is not None
    assert bool(found[1].isnan()[:, 32:48].all())  # the sixteen outputs


@pytest.mark.gpu
def test_graphs_keep_what_they_read_when_a_later_trial_fails(
    make: Callable[[list[LayerParts]], HalfLayers], notes: list[str]
) -> None:
    layers = make_layers(*SHAPES[0])
    halves = make(layers)
    seen, residual = inputs(3, layers[0])
    first = halves.run(4, seen, residual, lambda x, r: exactly(*layers, x, r)[0].float())
    assert first is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = halves.run(4, seen, residual, lambda x, r: x)
    more = inputs(9, layers[0])
    assert halves.run(4, *more, lambda x, r: 2 * exactly(*layers, x, r)[0].float()) is None
    assert len(notes) == 1
    inner: Any = layers[0].inner
    inner.up.weight.data.mul_(2.0)
    halves.renew()
    halves.ready(3)
    graph.replay()
    assert captured is not None
    assert error(captured[1], exactly(*layers, seen, residual)[1]) < 0.006
    assert not torch.equal(captured[1], first[1])


@pytest.mark.gpu
def test_changed_weights_are_packed_again(make: Callable[[list[LayerParts]], HalfLayers]) -> None:
    layers = make_layers(*SHAPES[0])
    halves = make(layers)
    seen, residual = inputs(5, layers[0])
    before = halves.run(4, seen, residual, lambda x, r: exactly(*layers, x, r)[0].float())
    inner: Any = layers[0].inner
    inner.up.weight.data.mul_(2.0)
    halves.renew()
    halves.ready(64)  # reads no packed weights
    stale = halves.run(4, seen, residual, lambda x, r: x)
    halves.ready(5)
    after = halves.run(4, seen, residual, lambda x, r: x)
    assert before is not None
    assert stale is not None
    assert after is not None
    assert torch.equal(before[0], stale[0])
    assert error(after[1], exactly(*layers, seen, residual)[1]) < 0.006
    assert not torch.equal(after[0], before[0])


@pytest.mark.gpu
def test_a_trial_that_differs_is_told_and_ends_it(make: Callable[[list[LayerParts]], HalfLayers], notes: list[str]) -> None:
    layers = make_layers(*SHAPES[0])
    halves = make(layers)
    seen, residual = inputs(5, layers[0])
    assert halves.run(4, seen, residual, lambda x, r: 2 * exactly(*layers, x, r)[0].float()) is None
    assert halves.run(4, seen, residual, lambda x, r: exactly(*layers, x, r)[0].float()) is None
    assert len(notes) == 1
    assert "a trial of 5 rows was" in notes[0]


@pytest.mark.gpu
def test_many_rows_and_layers_that_it_does_not_know_are_left_to_products(
    make: Callable[[list[LayerParts]], HalfLayers], notes: list[str]
) -> None:
    layers = make_layers(*SHAPES[0])
    halves = make(layers)
    seen, residual = inputs(41, layers[0])
    assert halves.run(4, seen, residual, lambda x, r: x) is None
    seen, residual = inputs(3, layers[0])
    assert halves.run(6, seen, residual, lambda x, r: x) is None  # there is none
    assert halves.run(4, seen.float(), residual, lambda x, r: x) is None
    biased: Any = layers[0].out
    biased.bias = nn.Parameter(torch.zeros(biased.out_features, device="cuda", dtype=torch.bfloat16))
    assert make(layers).run(4, seen, residual, lambda x, r: x) is None
    assert not notes


@pytest.mark.gpu
def test_without_a_compiler_it_is_told_once(
    make: Callable[[list[LayerParts]], HalfLayers], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*given: object) -> None:
        raise NoDeviceCode("NVRTC was not found")

    layers = make_layers(*SHAPES[0])
    halves = make(layers)
    monkeypatch.setattr(half_layers, "DeviceCode", none)
    seen, residual = inputs(3, layers[0])
    for _ in range(2):
        assert halves.run(4, seen, residual, lambda x, r: x) is None
    assert [note.endswith("NVRTC was not found.") for note in notes] == [True]


@pytest.mark.gpu
def test_only_the_first_of_a_process_starts_block_by_block(make: Callable[[list[LayerParts]], HalfLayers]) -> None:
    layers = make_layers(*SHAPES[0])
    kept = [make(layers), make(layers)]
    half_layers._ALONE.clear()
    assert [half_layers.Start.TOGETHER in half_layers._start(each) for each in kept] == [False, True]
    seen, residual = inputs(3, layers[0])
    found = [halves.run(4, seen, residual, lambda x, r: exactly(*layers, x, r)[0].float()) for halves in kept]
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0][0], found[1][0])


def test_sizes_that_the_kernel_takes() -> None:
    fits = Sizes(2048, 2048, 11008, 2560, 132, 232448)
    assert fits.fit
    assert fits.parts == 3
    assert fits.weights == 77_070_336
    assert not Sizes(2048, 2048, 11008, 2560, 39, 232448).fit  # fewer multiprocessors than rows
    assert not Sizes(2000, 2048, 11008, 2560, 132, 232448).fit
    assert not Sizes(256, 256, 512, 512, 132, 232448).fit  # small layers are not read long enough


def test_layers_on_the_cpu_are_left_to_products() -> None:
    layers = [
        LayerParts(
            i, *[NormWeights(torch.ones(64), 1e-6)], *(nn.Linear(64, 64) for _ in range(4)), None, 16, 1.0,
            NormWeights(torch.ones(64), 1e-6), GatedMLP(*(nn.Linear(64, 64, bias=False) for _ in range(3))),
        )
        for i in (4, 5)
    ]  # fmt: skip
    halves = HalfLayers(layers, NormWeights(torch.ones(64), 1e-6), pytest.fail)
    halves.renew()
    halves.ready(1)
    assert halves.run(4, torch.zeros(1, 64), torch.zeros(1, 64), lambda x, r: x) is None
