"""Which kernels take the GPU's time, and which functions the host's."""

import cProfile
import io
import pstats
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def kernels_of(work: Callable[[], object], count: int = 30) -> list[str]:
    """The kernels of some work that take most of the device's time, and the whole."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    whole = sum(event.self_device_time_total for event in events)
    shown = [f"{1e-3 * e.self_device_time_total:9.1f} ms {e.count:7d} × {e.key[:90]}" for e in events[:count]]
    return [f"{1e-3 * whole:9.1f} ms in all", *shown, *_gaps(profiler.events())]


def _gaps(events: Any, count: int = 15) -> list[str]:
    """When the device had nothing to do for longest, and between which kernels: there the host was behind."""
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events if e.device_type == DeviceType.CUDA)
    found, (first, end, last) = [], spans[0]
    for start, stop, name in spans[1:]:
        if start > end:
            found.append((start - end, end - first, last, name))
        if stop > end:
            end, last = stop, name
    idle = sum(gap for gap, *_ in found)
    shown = [
        f"{1e-3 * gap:9.1f} ms idle at {1e-3 * at:9.1f} ms: {before[:50]} … {after[:50]}"
        for gap, at, before, after in sorted(found, reverse=True)[:count]
    ]
    return [f"{1e-3 * idle:9.1f} ms idle in all", *shown]


def host_of(work: Callable[[], object], count: int = 25) -> list[str]:
    """The Python functions of some work by the time spent in themselves."""
    profiler = cProfile.Profile()
    profiler.runcall(work)
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(count)
    return [line[-110:] for line in out.getvalue().splitlines() if line.strip()]
