"""When an engine's ticks happen, and which requests wait for them. The engine decides what happens in a tick.

In lockstep a tick happens only when every live episode waits, so what is batched together is a function of the requests,
not of the clock. For example, with two episodes of one rollout, of which B's environment is slow:

    A asks    B asks    tick, tick, …    A ends    (B still writes: tick, …)    A asks again    tick with both

Otherwise requests join as they come, but several together: one pass over many contexts takes little longer than over one,
and all who write wait for it. Admission takes half of the time at most, and begins when those who come in a row have come:

    A asks    B, C ask    tick, tick, … as long as A's admission took    tick with B and C

Waiting requests are sorted by ``request.order``. One that fails fails alone; one whose wait is cancelled leaves the batch
at the next tick.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from sensorium.engines.protocol import LiveEpisodes, Request, Response
from sensorium.vocabulary.errors import EngineError, EngineLost

# Idle turns of the event loop before a lockstep tick: an episode that just woke may still enter or send a request.
QUIET_TURNS = 3
MOST_HELD_S = 0.1  # a longer admission has much to compute, which does not become less by waiting
IN_A_ROW = 0.25  # of the time of an admission: who comes within it has come together
LOOK_S = 0.005  # while nobody writes, how often those who are held back are looked at


class Job:
    """A request and the future its episode awaits. ``keep`` is False once the thread was released."""

    def __init__(self, request: Request, future: "asyncio.Future[Response]", episodes: LiveEpisodes | None = None) -> None:
        self.request = request
        self.future = future
        self.episodes = episodes
        self.keep = True

    def fail(self, error: Exception) -> None:
        """Pass an error to the episode, if it still waits."""
        if not self.future.done():
            self.future.set_exception(error)


Tick = Callable[[Sequence[Job]], Awaitable[int]]
"""Advances all responses and completes those that end; admits waiting jobs in order, and returns how many."""


class TickScheduler:
    """Calls ``tick`` as long as any request is open; any number of rollouts may ask at once.

    ``patience_s`` bounds how long a lockstep tick waits for an episode that neither asks nor leaves. ``waited_s`` are the
    seconds that requests waited so, all in all.
    """

    def __init__(self, tick: Tick, *, lockstep: bool, patience_s: float) -> None:
        self._tick_once, self.lockstep, self._patience_s = tick, lockstep, patience_s
        self.waited_s = 0.0
        self._rollouts: set[LiveEpisodes] = set()
        self._open: dict[str, Job] = {}
        self._waiting: list[Job] = []
        self._unsorted = False
        self._admission_s = self._admitted = self._first = self._newest = 0.0  # how long the last took; moments
        self._pump: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._events = 0
        self._resumed: asyncio.Event | None = None

    async def generate(self, request: Request, episodes: LiveEpisodes | None) -> Response:
        """Write one response. Cancelling the wait withdraws the request."""
        if request.thread in self._open:
            raise EngineError(f"thread '{request.thread}' is being continued already; a thread has one response at a time.")
        if episodes is not None and episodes not in self._rollouts:
            self._rollouts = {episodes, *(other for other in self._rollouts if other.count)}
            episodes.listen(self._happened)
        job = Job(request, asyncio.get_running_loop().create_future(), episodes)
        self._open[request.thread] = job
        self._newest = time.perf_counter()
        if not self._waiting:
            self._first = self._newest
        self._waiting.append(job)
        self._unsorted = True
        if self._pump is None or self._pump.done():
            self._news = asyncio.Event()
            self._pump = asyncio.get_running_loop().create_task(self._run(), name="engine ticks")
        self._happened()
        try:
            return await job.future
        finally:
            if self._open.get(request.thread) is job:
                del self._open[request.thread]
                self._happened()

    def refuse_open(self) -> None:
        """Raise if any response is being written: its weights may not change under it."""
        if self._open:
            raise EngineError(f"the weights changed while {len(self._open)} responses were open; finish the rollout first.")

    def stop_lockstep(self) -> None:
        """Wait for nobody any longer."""
        self.lockstep = False
        self._happened()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No tick begins inside; others may ask."""
        self._resumed = asyncio.Event()
        try:
            yield
        finally:
            self._resumed.set()
            self._resumed = None

    async def take_turn(self, seconds: float) -> None:
        """Inside ``paused``: tick until no request is open, for so long at most."""
        if (resumed := self._resumed) is None:
            return
        self._resumed, ends = None, time.perf_counter() + seconds
        resumed.set()
        try:
            while self._open and time.perf_counter() < ends:
                await asyncio.sleep(0)  # the pump ticks once in each turn of the event loop
        finally:
            self._resumed = asyncio.Event()

    def _happened(self) -> None:
        self._events += 1
        self._news.set()

    @property
    def _live(self) -> int:
        return sum(episodes.count for episodes in self._rollouts)

    async def _run(self) -> None:
        """The pump: one task, alive while any request is open."""
        seen = -1
        try:
            while self._open:
                if self.lockstep and seen != self._events:
                    await self._all_wait()
                    if self._any_cancelled():
                        continue  # those that were cancelled leave before the others go on
                    seen = self._events
                if self._resumed is not None:
                    await self._resumed.wait()
                elif self._open:
                    await self._tick()
                await asyncio.sleep(0 if self._at_work else min(LOOK_S, self._held_s()))
        except Exception as error:
            known = isinstance(error, EngineError | EngineLost)
            for job in self._open.values():
                job.fail(error if known else EngineError(f"the engine failed: {error!r}"))
        finally:
            for job in self._open.values():
                job.future.cancel()
            self._open.clear()
            self._waiting.clear()

    def _any_cancelled(self) -> bool:
        """Let every rollout that waits cancel episodes before the next tick; True if any did."""
        asking = dict.fromkeys(job.episodes for job in self._open.values() if job.episodes is not None)
        decided = [episodes.between_ticks() for episodes in asking if episodes.between_ticks is not None]
        return any(decided)

    async def _all_wait(self) -> None:
        """Wait until every live episode waits for the engine, and nothing else happens."""
        quiet, seen = 0, self._events
        while quiet < QUIET_TURNS and self._open and self.lockstep:
            if len(self._open) >= self._live:
                await asyncio.sleep(0)
                quiet = quiet + 1 if seen == self._events else 0
                seen = self._events
                continue
            quiet, began = 0, time.perf_counter()
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), self._patience_s)
            except TimeoutError:
                raise EngineError(
                    f"{len(self._open)} episodes waited {self._patience_s:g} s for {self._live - len(self._open)} that "
                    "neither asked for a response nor ended; give their environments shorter deadlines, or set "
                    "rollout.schedule: eager."
                ) from None
            finally:
                self.waited_s += time.perf_counter() - began

    @property
    def _at_work(self) -> bool:
        """Whether any response is being written."""
        return len(self._open) > len(self._waiting)

    def _held_s(self) -> float:
        """How long those who wait are still held back, for others to join with them. In lockstep all have come."""
        if self.lockstep or not self._waiting or len(self._open) >= self._live:
            return 0.0
        if self._at_work:
            until = self._admitted + self._admission_s
        else:
            until = min(self._newest + IN_A_ROW * self._admission_s, self._first + self._admission_s)
        return max(0.0, until - time.perf_counter())

    async def _tick(self) -> None:
        """One tick; answered requests are closed. Others may ask while it is under way."""
        waiting = [job for job in self._waiting if not job.future.done()]
        if self._unsorted:
            waiting.sort(key=lambda job: job.request.order)
        self._waiting, self._unsorted = waiting, False
        if self._held_s() > 0:
            if not self._at_work:
                return
            waiting = []
        else:
            self._waiting = []
        began = time.perf_counter()
        admitted = await self._tick_once(waiting)
        if admitted:
            self._admitted = time.perf_counter()
            self._admission_s = min(MOST_HELD_S, self._admitted - began)
        self._waiting = [*waiting[admitted:], *self._waiting]
        for thread in [thread for thread, job in self._open.items() if job.future.done()]:
            del self._open[thread]
            self._events += 1
