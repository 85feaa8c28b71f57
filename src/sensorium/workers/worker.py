"""A worker: a daemon thread that runs calls one after another, in the order they were given.

Whatever a call raises, SystemExit included, is its outcome. What is awaitable is awaited, in an event loop that belongs to
the thread, so that an environment's connections live as long as it does.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

from sensorium.vocabulary.plain import attempt


class Call:
    """One call: when it began and ended (monotonic seconds; None: not yet), and what came of it."""

    def __init__(self, function: Callable[[], Any], deadline_s: float) -> None:
        self.function, self.deadline_s = function, deadline_s
        self.began: float | None = None
        self.ended: float | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self._finished = threading.Event()
        self._heard: Callable[[], None] | None = None
        self._lock = threading.Lock()

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
        """How long it ran, or has been running."""
        return 0.0 if self.began is None else (time.monotonic() if self.ended is None else self.ended) - self.began

    def wait(self, seconds: float) -> bool:
        """Block until it ended, at most so long; True if it did."""
        return self._finished.wait(max(0.0, seconds))

    def when_ended(self, heard: Callable[[], None]) -> None:
        """Call ``heard`` once it ended: in the worker's thread, or at once if it has."""
        with self._lock:
            self._heard = heard
            ended = self.ended is not None
        if ended:
            heard()

    def run(self, awaited: Callable[[Any], Any]) -> None:
        """Run it here; ``tell`` then says that it ended."""
        self.began = time.monotonic()
        try:
            self.value, self.error = attempt(lambda: awaited(self.function()))
        except KeyboardInterrupt as error:  # no Ctrl-C: that one reaches the main thread only
            self.error = error

    def tell(self) -> None:
        """It ended: wake who waits for it."""
        with self._lock:
            self.ended = time.monotonic()
            heard = self._heard
        self._finished.set()
        if heard is not None:
            heard()


class Worker:
    """One thread. ``stop`` ends it when everything given before is done; one that hangs is no obstacle to exit."""

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
        """True while something given to it has not ended."""
        return self._done < self._given

    @property
    def alive(self) -> bool:
        """True until its thread has ended."""
        return self._thread.is_alive()

    @property
    def stuck(self) -> bool:
        """True while what it runs is overdue."""
        current = self._current
        return current is not None and current.overdue

    def submit(self, function: Callable[[], Any], deadline_s: float) -> Call:
        """Give it a call; it begins when those before it have ended."""
        call = Call(function, deadline_s)
        self._given += 1
        self._calls.put(call)
        return call

    def stop(self) -> None:
        """End the thread after what it was given."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._current = call
            call.run(self._awaited)
            self._current = None
            self._done += 1  # before anybody hears of it, so that who does finds the worker free
            call.tell()
            del call
        if self._runner is not None:
            attempt(self._runner.close)

    def _awaited(self, value: Any) -> Any:
        if not isawaitable(value):
            return value

        async def wait() -> Any:
            return await value

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(wait())
