"""Where a step's time goes: seconds by phase, throughput, peak memory."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from sensorium.assembly.session import Session
from sensorium.compiled.compile_time import compile_seconds
from sensorium.vocabulary.episode import Group


class Clock:
    """Times a step's phases and announces which one runs."""

    def __init__(self, session: Session, announce: Callable[[str, int], None]) -> None:
        self.session, self.announce = session, announce
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.patches, self.compiled = session.patches, compile_seconds()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def __call__(self, phase: str, total: int = 0) -> Iterator[None]:
        self.announce(phase, total)
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Seconds by phase, throughput and peak memory."""
        whole = time.perf_counter() - self.started
        episodes = [e for group in groups for e in group.episodes]
        row = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        row["time/step_s"] = whole
        if (compiled := compile_seconds() - self.compiled) > 0:
            row["time/compile_s"] = compiled
        row["throughput/episodes_per_s"] = len(episodes) / whole
        row["throughput/tokens_per_s"] = sum(e.sampled_tokens for e in episodes) / whole
        row["throughput/patches_per_s"] = (self.session.patches - self.patches) / whole
        if self.session.fallbacks:
            row["throughput/fallbacks"] = self.session.fallbacks
        row["memory/peak_gib"] = peak_memory_gib()
        return row


def peak_memory_gib() -> float:
    """Peak memory: the GPU's of this step, else the process's so far."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
