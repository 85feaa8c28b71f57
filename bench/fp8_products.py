"""Which way to multiply FP8 weights is fastest: µs of a decode step's products, in graphs of many, on one GPU.

python bench/fp8_products.py [--rows 128,512] [--quick]. Each line is one way for one product of Qwen2.5-VL-3B's layers.
What fails prints why. Weights of as many layers as are larger than the L2 cache are used in turn. Kernels are compiled
first, by processes side by side.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product as pairs
from typing import Any

import torch
from torch import Tensor

from sensorium.kernels import fp8, fp8_triton
from sensorium.kernels.decode_triton import Tiling, gated_products
from sensorium.kernels.decode_triton import product_parts as wide_parts
from sensorium.kernels.fp8 import Fp8Rows
from sensorium.kernels.layer_triton import gated

HIDDEN, INNER, JOINED = 2048, 11008, 2560
SHAPES = {"qkv": (JOINED, HIDDEN), "out": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
COLD_BYTES = 200 << 20  # of weights that take turns: four times the L2 cache
BEST = 4  # tilings printed of a sweep
FEW = 128
WORKERS = 12

Work = Callable[[int], Any]


def time_us(work: Work, count: int, repeats: int) -> float:
    """µs of one work, of a graph that does it with each of ``count`` weights."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work(0)
        work(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            work(i)
    graph.replay()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / repeats / count)
    return best


class Bench:
    """Times each work and prints it; a ``share`` (one, of so many) does its part of them once, which compiles them."""

    def __init__(self, share: tuple[int, int] | None = None) -> None:
        self._share, self._met = share, 0

    def _tried(self, work: Work, count: int, repeats: int) -> tuple[float | None, str]:
        self._met += 1
        try:
            if self._share is None:
                return time_us(work, count, repeats), ""
            if self._met % self._share[1] == self._share[0]:
                work(0)
                torch.cuda.synchronize()
        except Exception as error:  # the other ways are worth having
            torch.cuda.synchronize()
            return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:140]}"
        return None, ""

    def one(self, rows: int, name: str, way: str, work: Work, count: int) -> None:
        """Time one way with ``count`` weights in turn."""
        us, failure = self._tried(work, count, 20)
        if self._share is None:
            told = f"{us:8.2f} us  {way}" if us is not None else f"  failed     {way}: {failure}"
            print(f"{rows:4d} {name:8s} {told}", flush=True)

    def sweep(
        self, rows: int, name: str, work: Callable[[Tiling, int], Any], tilings: Sequence[Tiling], count: int
    ) -> None:
        """The fastest of some tilings."""
        tried = [(*self._tried(partial(work, tiling), count, 10), tiling) for tiling in tilings]
        if self._share is not None:
            return
        for us, _, tiling in sorted((one for one in tried if one[0] is not None), key=lambda one: one[0])[:BEST]:
            print(f"{rows:4d} {name:8s} {us:8.2f} us  ours {tiling}", flush=True)
        if failures := [failure for _, failure, _ in tried if failure]:
            print(f"{rows:4d} {name:8s}   ({len(failures)} of {len(tilings)} tilings failed: {failures[-1]})", flush=True)


def weights_of(name: str) -> tuple[list[Tensor], list[Fp8Rows]]:
    """bfloat16 weights of several layers, and their FP8 copies."""
    shape = SHAPES[name]
    count = max(2, COLD_BYTES // (shape[0] * shape[1]))
    wide = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
    return wide, [fp8_triton.quantise(each) for each in wide]


def gate_up(bench: Bench, rows: int, quick: bool, x: Tensor, wide: list[Tensor], narrow: list[Fp8Rows]) -> None:
    """Gate, up and what is made of them."""
    name, count, x8 = "gate_up", len(wide), fp8_triton.quantise(x)
    gates = [each.split(INNER) for each in wide]
    if rows <= FEW:
        bench.one(rows, name, "bfloat16 kernel with gate (today)", lambda i: gated_products(x, *gates[i]), count)
    else:
        bench.one(
            rows, name, "bfloat16 library twice, gate kernel (today)",
            lambda i: gated(x @ gates[i][0].T, x @ gates[i][1].T), count,
        )  # fmt: skip
    rowwise = "_scaled_mm rowwise, then gate_rows"
    bench.one(rows, name, rowwise, lambda i: fp8_triton.gated_rows(fp8.scaled_product(x8, narrow[i])), count)
    bench.one(rows, name, "ours with gate", lambda i: fp8_triton.gated_product(x8, narrow[i]), count)
    if not quick:
        forms = ((64, 4), (64, 8), (128, 8), (128, 4)) if rows <= 64 else ((64, 4), (64, 8), (128, 8))
        tilings = [Tiling(*form[:1], k, 1, form[1], s) for form, k, s in pairs(forms, (64, 128, 256), (3, 4, 6))]
        bench.sweep(rows, name, lambda tiling, i: fp8_triton.gated_product(x8, narrow[i], tiling), tilings, count)


def narrow_product(
    bench: Bench, rows: int, name: str, quick: bool, x: Tensor, wide: list[Tensor], narrow: list[Fp8Rows]
) -> None:
    """A product whose parts are summed by whoever takes it."""
    few, count = rows <= FEW, len(wide)
    x8, inner = fp8_triton.quantise(x), x.shape[1]
    if few:
        bench.one(rows, name, "bfloat16 kernel (today)", lambda i: wide_parts(x, [wide[i]]), count)
    given: dict[str, Any] = {"FP8 rows": x8}
    if name == "down":
        given |= {f"FP8 rows, a scale for {each}": fp8.quantise(x, inner // each) for each in (128, 64)}
    if name == "out":
        given["bfloat16 rows, widened weights"] = x
    for what, each in given.items():
        tile = Tiling(64, 64 if what.endswith("64") else 128, fp8_triton.narrow_tiling(rows, 2048, inner).parts, 4, 5)
        work = partial(_ours, each, narrow, tile if what.endswith("64") else None)
        bench.one(rows, name, f"ours, {what}", work, count)
    if name == "out":
        both = "quantise, then"
        bench.one(rows, name, f"{both} ours", lambda i: fp8_triton.product_parts(fp8_triton.quantise(x), narrow[i]), count)
        bench.one(
            rows, name, f"{both} _scaled_mm rowwise", lambda i: fp8.scaled_product(fp8_triton.quantise(x), narrow[i]), count
        )
    if quick:
        return
    chosen: Any = given["FP8 rows, a scale for 128"] if name == "down" and few else x if name == "out" and few else x8
    parts = {"qkv": (2, 3, 4), "out": (2, 4, 8), "down": (4, 6, 8)}[name] if few else (1, 2)
    sizes = (128,) if name == "down" and few else (128, 256)
    forms = [(n, k, p, w, s) for n, k, p, w, s in pairs((64, 128), sizes, parts, (4, 8), (4, 6)) if (n, w) != (64, 8)]
    tilings = [Tiling(*form) for form in forms]
    bench.sweep(rows, name, lambda tiling, i: fp8_triton.product_parts(chosen, narrow[i], tiling), tilings, count)


def _ours(x: Any, narrow: list[Fp8Rows], tiling: Tiling | None, i: int) -> Tensor:
    return fp8_triton.product_parts(x, narrow[i], tiling)


def _library(x8: Fp8Rows, narrow: list[Fp8Rows], kind: torch.dtype, one: Tensor, i: int) -> Tensor:
    """Rows and outputs with one scale for all."""
    multiply: Any = torch._scaled_mm
    found: Tensor = multiply(
        x8.values_BK, narrow[i].values_BK.T, scale_a=one, scale_b=one, out_dtype=kind, use_fast_accum=True
    )
    return found


def measure(bench: Bench, rows: int, quick: bool) -> None:
    """All ways with so many rows."""
    one = torch.ones((), device="cuda")
    for name, (_, inner) in SHAPES.items():
        wide, narrow = weights_of(name)
        count = len(wide)
        x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        x8 = fp8_triton.quantise(x)
        bench.one(
            rows, name, "bfloat16 library, float32 out",
            lambda i, x=x, w=wide: torch.mm(x, w[i].T, out_dtype=torch.float32), count,
        )  # fmt: skip
        bench.one(rows, name, "bfloat16 library, bfloat16 out", lambda i, x=x, w=wide: x @ w[i].T, count)
        work = lambda i, x=x8, w=narrow: fp8.scaled_product(x, w[i])  # noqa: E731
        bench.one(rows, name, "_scaled_mm rowwise, bfloat16 out", work, count)
        for kind in (torch.bfloat16, torch.float32):
            bench.one(rows, name, f"_scaled_mm one scale, {kind} out", partial(_library, x8, narrow, kind, one), count)
        if name == "gate_up":
            gate_up(bench, rows, quick, x, wide, narrow)
        else:
            narrow_product(bench, rows, name, quick, x, wide, narrow)
        del wide, narrow
        torch.cuda.empty_cache()
    between(bench, rows)


def between(bench: Bench, rows: int) -> None:
    """What lies between products."""
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    both = torch.randn(rows, 2 * INNER, device="cuda", dtype=torch.bfloat16)
    weight, residual = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), torch.randn(rows, HIDDEN, device="cuda")
    parts = torch.randn(4, rows, HIDDEN, device="cuda")
    bench.one(rows, "between", "quantise", lambda i: fp8_triton.quantise(x), 20)
    bench.one(rows, "between", "gate_rows", lambda i: fp8_triton.gated_rows(both), 20)
    for what, given in {"4 parts": parts, "bfloat16": x[None]}.items():
        work = lambda i, given=given: fp8_triton.add_norm(given, None, residual, weight, 1e-6)  # noqa: E731
        bench.one(rows, "between", f"add_norm of {what}", work, 20)


def main() -> None:
    """Parse, compile, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="128,512")
    parser.add_argument("--quick", action="store_true", help="default tilings alone")
    parser.add_argument("--share", type=int, help="for the processes that compile")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU")
    several = [int(rows) for rows in given.rows.split(",")]
    if given.share is None:
        began = time.perf_counter()
        command = [sys.executable, *sys.argv]
        children = [subprocess.Popen([*command, "--share", str(i)], stderr=subprocess.DEVNULL) for i in range(WORKERS)]
        for child in children:
            try:
                child.wait(max(1.0, began + 240 - time.perf_counter()))
            except subprocess.TimeoutExpired:
                child.kill()
        device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
        print(f"{device}; compiled in {time.perf_counter() - began:.0f} s", flush=True)
    bench = Bench(None if given.share is None else (given.share, WORKERS))
    for rows in several:
        measure(bench, rows, given.quick)


if __name__ == "__main__":
    main()
