"""Worker threads for calls of a user's code that may be slow or never return: environments and slow reward terms.

Invariants:
- At most ``size`` calls run at once. A call's deadline counts from its begin; time spent waiting for a slot is counted
  separately. The thread whose call ends begins the next one that waits: an event loop that is busy does not hold it up.
- Waiting for a slot is bounded: a call gives its slot back when it ends or is overdue, so n waiting calls wait at most
  ⌈n / size⌉ deadlines.
- A worker whose call is overdue is abandoned and replaced. While ``most_hung`` of them still hang, calls are refused.
- Threads are daemons: a call that hangs keeps neither the run nor the process from ending.

Example, of size 2 and a deadline of 1 s: calls a, b, c, of which a never returns. a and b begin, b ends, c takes its slot;
after 1 s a is CallOverdue, its thread is abandoned, and a new one serves the next call.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from inspect import isawaitable
from itertools import count
from typing import Any

from sensorium.vocabulary.plain import attempt


class Call:
    """One call: when it began and ended (monotonic seconds; None: not yet), and its value or error.

    Whatever it raises, SystemExit included, is its error.
    """

    def __init__(self, function: Callable[[], Any], deadline_s: float) -> None:
        self.function, self.deadline_s = function, deadline_s
        self.began: float | None = None
        self.ended: float | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self._finished: Future[None] = Future()

    @property
    def left_s(self) -> float:
        """Seconds until it is overdue; the whole deadline while it has not begun."""
        return self.deadline_s if self.began is None else self.began + self.deadline_s - time.monotonic()

    @property
    def overdue(self) -> bool:
        """True while it runs past its deadline."""
        return self.ended is None and self.began is not None and self.left_s <= 0

    @property
    def seconds(self) -> float:
        return 0.0 if self.began is None else (time.monotonic() if self.ended is None else self.ended) - self.began

    def wait(self, seconds: float) -> bool:
        """Block until it ended, at most so long; True if it did."""
        return bool(wait([self._finished], max(0.0, seconds)).done)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once it ended: in the worker's thread, or at once if it has."""
        self._finished.add_done_callback(lambda _: callback())

    def run(self, awaited: Callable[[Any], Any]) -> None:
        """Run it in this thread; ``finish`` must follow."""
        self.began = time.monotonic()
        try:
            self.value, self.error = attempt(lambda: awaited(self.function()))
        except KeyboardInterrupt as error:  # no Ctrl-C: that one reaches the main thread only
            self.error = error

    def finish(self) -> None:
        self.ended = time.monotonic()
        self._finished.set_result(None)


class Worker:
    """One thread. ``stop`` ends it after all earlier calls; one that hangs does not prevent exit.

    An awaitable is awaited in the thread's own event loop, so an environment's connections live as long as it does.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._given = 0
        self._done = 0
        self._current: Call | None = None
        self._runner: asyncio.Runner | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._done < self._given

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stuck(self) -> bool:
        """True while its current call is overdue."""
        current = self._current
        return current is not None and current.overdue

    def submit(self, function: Callable[[], Any], deadline_s: float) -> Call:
        """Queue a call; it begins when those before it have ended."""
        return self.take(Call(function, deadline_s))

    def take(self, call: Call) -> Call:
        """Queue a call that exists."""
        self._given += 1
        self._calls.put(call)
        return call

    def stop(self) -> None:
        """End the thread after all queued calls."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._current = call
            call.run(self._awaited)
            self._current = None
            self._done += 1  # before the callbacks, which must find the worker free
            call.finish()
            del call
        if self._runner is not None:
            attempt(self._runner.close)

    def _awaited(self, value: Any) -> Any:
        if not isawaitable(value):
            return value

        async def result() -> Any:
            return await value

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(result())


class WorkerFailure(Exception):
    """A call that was not made, or is no longer waited for."""


class CallOverdue(WorkerFailure):
    """A call did not return within its deadline."""


class NoWorker(WorkerFailure):
    """A call was not made: too many earlier ones still hang, or no further thread can be started."""


@dataclass
class CallCounters:
    """Since they were last taken: calls, overdue ones, seconds they ran and waited for a slot (sum and longest).

    ``most_callers``: how many callers were there at once, waiting for other things included, as far as they say so.
    """

    calls: int = 0
    overdue: int = 0
    ran_s: float = 0.0
    ran_most_s: float = 0.0
    waited_s: float = 0.0
    waited_most_s: float = 0.0
    most_callers: int = 0

    def add(self, waited_s: float, ran_s: float) -> None:
        self.calls += 1
        self.ran_s += ran_s
        self.ran_most_s = max(self.ran_most_s, ran_s)
        self.waited_s += waited_s
        self.waited_most_s = max(self.waited_most_s, waited_s)


class Slots:
    """``size`` places in order: one that becomes free goes to the lowest ``order`` of those that wait.

    They serve several event loops, one after the other.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free, self._arrivals = size, count()
        self._waiting: list[tuple[Sequence[int], int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def one(self, order: Sequence[int] = ()) -> AsyncIterator[float]:
        """Inside, one of the places is taken; waits until there is one, and gives the seconds that took."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._free, self._waiting = loop, self.size, []
        asked = time.monotonic()
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = loop.create_future()
            heappush(self._waiting, (order, next(self._arrivals), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield time.monotonic() - asked
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = heappop(self._waiting)[-1]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Turn:
    """A call that waits for a slot of a pool or has one, until it ends or its caller leaves. ``lent``: the worker it has.

    ``refused``: why it got no worker. ``wake`` is called, in any thread, when it ends or is refused.
    """

    def __init__(self, call: Call, leased: Worker | None, wake: Callable[[], None]) -> None:
        self.call, self.leased, self.wake = call, leased, wake
        self.asked, self.waited_s = time.monotonic(), 0.0
        self.lent: Worker | None = None
        self.refused: NoWorker | None = None
        self.placed = self.left = False  # it was given a slot; it needs none any longer

    @property
    def waits(self) -> bool:
        """False once there is something to tell the caller; stuck in this call, or in one before it, counts."""
        return self.call.ended is None and self.refused is None and not (self.lent is not None and self.lent.stuck)


class WorkerPool:
    """Daemon threads, started when needed and reused. One pool serves several event loops, one after the other."""

    def __init__(self, name: str, size: int = 64, most_hung: int | None = None) -> None:
        self.name, self.size = name, size
        self.most_hung = 4 * size if most_hung is None else most_hung
        self.counters = CallCounters()
        self.callers = 0
        self._idle: list[Worker] = []
        self._left: list[Worker] = []
        self._started = 0
        self._lock = threading.Lock()
        self._free, self._arrivals, self._slots_lock = size, count(), threading.Lock()
        self._waiting: list[tuple[Sequence[int], int, Turn]] = []

    @property
    def hung(self) -> int:
        """How many abandoned calls still run past their deadline."""
        with self._lock:
            self._left = [worker for worker in self._left if worker.alive]
            return sum(worker.stuck for worker in self._left)

    def lease(self) -> Worker:
        """A worker for a caller that needs all calls in one thread; ``give_back`` ends the lease."""
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
        """Make a worker available again; one that is still busy ends after its calls."""
        with self._lock:
            if not worker.busy and len(self._idle) < self.size:
                self._idle.append(worker)
                return
            self._left.append(worker)
        worker.stop()

    async def call(
        self,
        function: Callable[[], Any],
        deadline_s: float,
        worker: Worker | None = None,
        order: Sequence[int] = (),
        *,
        counted: bool = True,
    ) -> Call:
        """The call once it has ended, with its value or error. CallOverdue and NoWorker if it has not.

        It runs in ``worker`` where one is leased. If the wait is cancelled, the call goes on by itself. A slot goes to the
        lowest ``order`` of those that wait for one, so that what began first ends first.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits for this call any more
                loop.call_soon_threadsafe(end)

        turn = Turn(Call(function, deadline_s), worker, wake)
        turn.call.when_ended(lambda: self._leave(turn))
        turn.call.when_ended(wake)
        self._enter(turn, order)
        try:
            while turn.waits:
                await asyncio.wait({ended}, timeout=max(0.001, turn.call.left_s))
        finally:
            self._leave(turn)
            if counted and turn.lent is not None:
                self.counters.add(turn.waited_s, turn.call.seconds)
        if turn.refused is not None:
            raise turn.refused
        return self._outcome(turn.call)

    def call_now(self, function: Callable[[], Any], deadline_s: float, worker: Worker | None = None) -> Call:
        """``call`` for callers without an event loop: blocks, and needs no slot."""
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

    @contextmanager
    def caller(self) -> Iterator[None]:
        """Somebody who will call and do other things in between, such as an episode."""
        self.callers += 1
        self.counters.most_callers = max(self.counters.most_callers, self.callers)
        try:
            yield
        finally:
            self.callers -= 1

    def take_counters(self) -> CallCounters:
        """What was counted since the last time."""
        taken, self.counters = self.counters, CallCounters(most_callers=self.callers)
        return taken

    def close(self) -> None:
        """End the idle threads; the others end after their calls, if ever."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop()

    def _enter(self, turn: Turn, order: Sequence[int]) -> None:
        """Begin a call, or let it wait for a slot."""
        with self._slots_lock:
            if not self._free:
                heappush(self._waiting, (order, next(self._arrivals), turn))
                return
            self._free -= 1
            turn.placed = True
        self._begin(turn)

    def _begin(self, placed: Turn | None) -> None:
        """Give a call that has a slot to a worker; one that gets none passes its slot on."""
        while (turn := placed) is not None:
            placed = None
            turn.waited_s = time.monotonic() - turn.asked
            try:
                lent = turn.leased if turn.leased is not None else self.lease()
            except NoWorker as error:
                turn.refused, placed = error, self._next(turn)
                turn.wake()
                continue
            with self._slots_lock:
                if not turn.left:
                    turn.lent = lent
                    lent.take(turn.call)
                    continue
            if turn.leased is None:
                self.give_back(lent)

    def _leave(self, turn: Turn) -> None:
        """A call ends, or its caller leaves: its slot goes to the first that waits."""
        self._begin(self._next(turn))

    def _next(self, turn: Turn) -> Turn | None:
        """The call that gets the slot of one that leaves, if it has one that it did not give up before."""
        with self._slots_lock:
            if turn.left:
                return None
            turn.left = True
            if not turn.placed:
                return None
        if turn.lent is not None and turn.leased is None:
            self.give_back(turn.lent)
        with self._slots_lock:
            while self._waiting:
                following = heappop(self._waiting)[-1]
                if not following.left:
                    following.placed = True
                    return following
            self._free += 1
            return None

    def _outcome(self, call: Call) -> Call:
        if call.ended is None:
            self.counters.overdue += 1
            raise CallOverdue(f"did not answer within {call.deadline_s:g} s")
        return call
