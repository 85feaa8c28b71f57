"""Fails a test that hangs: one that waits for something that never comes, or computes without end.

Not by the wall clock, which a busy machine would run into: by what the processes of the test do. A watching thread sums up,
over all their threads, the seconds on a CPU and the seconds in which they wanted one and had to wait for it:

    waits for ever       0.0 of 60 s     fails after ``standstill_s`` seconds with less than 2 % of that
    slow or starved     30.0 of 60 s     goes on: a thread that is ready to run counts even where others have all cores
    computes for ever   60.0 of 60 s     fails once its own process has used ``cpu_budget_of_a_test_s``

Processes are this one, all that it started, and what other workers of the test run started: one fork server is for all.
Where the kernel does not count these seconds (/proc/*/schedstat), only pytest's own limit of wall time holds.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .cpu_budget import slowness

IDLE_SHARE = 0.02
SIGNAL = signal.SIGUSR2


def parents() -> dict[int, int]:
    """The parent of every process that can be seen."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
    return found


def processes() -> list[int]:
    """The processes whose work is a test's: not the one that hands out tests, nor the others that run them."""
    own, above = os.getpid(), parents()
    top = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else own
    generation = {top: 0}

    def depth(pid: int) -> int:
        """How many generations below ``top``; -1 for others."""
        if pid not in generation:
            generation[pid] = -1  # also where a process's parent has been replaced while we looked
            parent = depth(above[pid]) if pid in above else -1
            generation[pid] = parent + 1 if parent >= 0 else -1
        return generation[pid]

    return [pid for pid in above if pid == own or depth(pid) >= (1 if top == own else 2)]


def thread_seconds() -> dict[int, float]:
    """Of every thread of a test: seconds on a CPU or ready for one; without the thread that asks."""
    found = {}
    for pid in processes():
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                on_cpu, ready, _ = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
                found[int(task)] = (int(on_cpu) + int(ready)) / 1e9
        except (OSError, ValueError):
            continue  # it has ended
    found.pop(threading.get_native_id(), None)
    return found


class Watch:
    """Watches one test at a time from a thread of its own; a hang is raised in the main thread."""

    def __init__(self, standstill_s: float, cpu_s: float) -> None:
        self.standstill_s, self.cpu_s = standstill_s, cpu_s
        self.reason = ""
        self._over = threading.Event()
        signal.signal(SIGNAL, self._fail)
        self._thread = threading.Thread(target=self._look, name="standstill", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The test is over."""
        self._over.set()
        self._thread.join()

    def _fail(self, *_: Any) -> None:
        if not self._over.is_set():
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
            pytest.fail(self.reason)

    def _look(self) -> None:
        every, began = self.standstill_s / 12, time.process_time()
        if self._over.wait(every):  # nearly all tests: they cost no look at the machine
            return
        recent: deque[tuple[float, float]] = deque()  # seconds passed, and seconds of work in them
        looked, last = time.monotonic(), thread_seconds()
        while not self._over.wait(every):
            now, current = time.monotonic(), thread_seconds()
            worked = sum(seconds - last.get(thread, 0.0) for thread, seconds in current.items())
            recent.append((min(now - looked, 2 * every), worked))  # a pause of the whole machine is not the test's
            looked, last = now, current
            passed, worked = (sum(column) for column in zip(*recent, strict=True))
            used = time.process_time() - began
            if self.cpu_s and used > self.cpu_s * slowness():
                self.reason = f"the test has used {used:.0f} CPU seconds and goes on; its budget is {self.cpu_s:g}"
            elif passed >= self.standstill_s and worked < IDLE_SHARE * passed:
                self.reason = f"the test hangs: its processes did nothing for {passed:.0f} s but wait"
            if self.reason:
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
                return
            while passed - recent[0][0] >= self.standstill_s:
                passed -= recent.popleft()[0]


@contextmanager
def watched(item: pytest.Item) -> Iterator[None]:
    """Watch one phase of a test."""
    standstill_s = float(item.config.getini("standstill_s"))
    if not standstill_s or not Path("/proc/self/schedstat").exists():
        yield
        return
    watch = Watch(standstill_s, float(item.config.getini("cpu_budget_of_a_test_s")))
    try:
        yield
    finally:
        watch.close()


@pytest.hookimpl(wrapper=True, specname="pytest_runtest_setup")
def pytest_runtest_setup_watched(item: pytest.Item) -> Iterator[None]:
    with watched(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with watched(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with watched(item):
        return (yield)
