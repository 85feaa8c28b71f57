"""Which kernels take the GPU's time, and which functions the host's."""

import cProfile
import io
import pstats
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def kernels_of(work: Callable[[], object], count: int = 30) -> list[str]:
    """The kernels of some work that take most of the device's time, and the whole."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    whole = sum(event.self_device_time_total for event in events)
    shown = [f"{1e-3 * e.self_device_time_total:9.1f} ms {e.count:7d} × {e.key[:90]}" for e in events[:count]]
    return [f"{1e-3 * whole:9.1f} ms in all", *shown]


def host_of(work: Callable[[], object], count: int = 25) -> list[str]:
    """The Python functions of some work by the time spent in themselves."""
    profiler = cProfile.Profile()
    profiler.runcall(work)
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(count)
    return [line[-110:] for line in out.getvalue().splitlines() if line.strip()]
