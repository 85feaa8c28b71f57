"""Workers for calls of a user's code that may be slow or never return: environments and slow reward terms.

Invariants:
- At most ``size`` calls run at once. A call's deadline counts from when it begins, so waiting for a place costs nothing.
- Waiting for a place is bounded: who holds one gives it back when its call ends or is overdue, so n waiting calls wait at
  most ⌈n / size⌉ deadlines. How long they waited is counted apart from how long they ran.
- A worker whose call is overdue is left behind and replaced. While ``most_hung`` of them still hang, calls are refused.
- Threads are daemons: what hangs keeps neither the run nor the process from ending.

Example, of size 2 and a deadline of 1 s: calls a, b, c, of which a never returns. a and b begin, b ends, c takes its place;
after 1 s a is CallOverdue, its thread is left behind, and a new one serves whoever asks next.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sensorium.workers.worker import Call, Worker


class WorkerFailure(Exception):
    """A call that was not made, or not waited for any longer."""


class CallOverdue(WorkerFailure):
    """A call did not return within its deadline."""


class NoWorker(WorkerFailure):
    """A call was not made: too many earlier ones still hang, or no further thread can be started."""


@dataclass
class CallCounters:
    """Since they were last taken: calls made, overdue ones, seconds they ran and waited for a place (sum and longest)."""

    calls: int = 0
    overdue: int = 0
    ran_s: float = 0.0
    ran_most_s: float = 0.0
    waited_s: float = 0.0
    waited_most_s: float = 0.0

    def add(self, waited_s: float, ran_s: float) -> None:
        """Count a call."""
        self.calls += 1
        self.ran_s += ran_s
        self.ran_most_s = max(self.ran_most_s, ran_s)
        self.waited_s += waited_s
        self.waited_most_s = max(self.waited_most_s, waited_s)


class WorkerPool:
    """Daemon threads, started when needed and used again. One pool serves several event loops, one after the other."""

    def __init__(self, name: str, size: int = 64, most_hung: int | None = None) -> None:
        self.name, self.size = name, size
        self.most_hung = 4 * size if most_hung is None else most_hung
        self.counters = CallCounters()
        self._idle: list[Worker] = []
        self._left: list[Worker] = []
        self._started = 0
        self._lock = threading.Lock()
        self._gate: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @property
    def hung(self) -> int:
        """How many calls that are not waited for any longer still run past their deadline."""
        with self._lock:
            self._left = [worker for worker in self._left if worker.alive]
            return sum(worker.stuck for worker in self._left)

    def lease(self) -> Worker:
        """A worker for whoever needs all calls in one thread; ``give_back`` ends the lease."""
        hung = self.hung
        if hung >= self.most_hung:
            raise NoWorker(f"{hung} earlier calls of {self.name}s still hang")
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._started += 1
            number = self._started
        try:
            return Worker(f"{self.name}-{number}")
        except RuntimeError as error:
            raise NoWorker(f"no thread can be started ({error}); {threading.active_count()} are running") from error

    def give_back(self, worker: Worker) -> None:
        """Use a worker again; one that is still busy is left to end what it does, and then ends."""
        with self._lock:
            if not worker.busy and len(self._idle) < self.size:
                self._idle.append(worker)
                return
            self._left.append(worker)
        worker.stop()

    async def call(self, function: Callable[[], Any], deadline_s: float, worker: Worker | None = None) -> Call:
        """The call once it has ended, with its value or error. CallOverdue and NoWorker if it has not.

        It runs in ``worker`` where one is leased. Whoever is cancelled here leaves the call to end by itself.
        """
        asked = time.monotonic()
        async with self._place():
            waited_s = time.monotonic() - asked
            lent = worker if worker is not None else self.lease()
            call = lent.submit(function, deadline_s)
            try:
                await _ended(call, lent)
            finally:
                self.counters.add(waited_s, call.seconds)
                if worker is None:
                    self.give_back(lent)
            return self._outcome(call)

    def call_now(self, function: Callable[[], Any], deadline_s: float, worker: Worker | None = None) -> Call:
        """``call`` for callers without an event loop: blocks, and waits for no place."""
        lent = worker if worker is not None else self.lease()
        call = lent.submit(function, deadline_s)
        try:
            while not call.wait(call.left_s) and not lent.stuck:
                continue
        finally:
            self.counters.add(0.0, call.seconds)
            if worker is None:
                self.give_back(lent)
        return self._outcome(call)

    def take_counters(self) -> CallCounters:
        """What was counted since the last time."""
        taken, self.counters = self.counters, CallCounters()
        return taken

    def close(self) -> None:
        """End the threads that have nothing to do; the others end when they are done, if ever."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop()

    def _outcome(self, call: Call) -> Call:
        if call.ended is None:
            self.counters.overdue += 1
            raise CallOverdue(f"did not answer within {call.deadline_s:g} s")
        return call

    def _place(self) -> asyncio.Semaphore:
        """The gate of the running loop."""
        loop = asyncio.get_running_loop()
        if self._gate is None or self._gate[0] is not loop:
            self._gate = (loop, asyncio.Semaphore(self.size))
        return self._gate[1]


async def _ended(call: Call, worker: Worker) -> None:
    """Wait until a call ended, or its worker is stuck: in it, or in one before it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[None] = loop.create_future()

    def hear() -> None:
        if not answer.done():
            answer.set_result(None)

    def tell() -> None:
        with suppress(RuntimeError):  # the loop has gone: nobody waits for this call any more
            loop.call_soon_threadsafe(hear)

    call.when_ended(tell)
    while call.ended is None and not worker.stuck:
        await asyncio.wait({answer}, timeout=max(0.001, call.left_s))
