"""``asyncio.run`` that another thread may interrupt and every signal wakes, loops in threads of their own, and garbage
collection around a run.

Python delivers Ctrl-C to the main thread only. A notebook's main thread has its own event loop, so a run works in a second
thread: the main thread waits, and forwards an interrupt with ``interrupt(thread.ident)``.
"""

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, Literal, TypeVar

Result = TypeVar("Result")

NO_FD = -1
_lock = threading.RLock()  # a signal's handler may interrupt its own thread while that holds it
_running: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = {}
_interrupted: set[int] = set()


def run_async(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end in a new event loop; KeyboardInterrupt if this thread was interrupted."""
    thread = threading.get_ident()
    runner, registered = asyncio.Runner(), _registered(main, thread)
    try:
        with _signals_held_back():  # a loop that is interrupted while it is made cannot be closed
            loop = runner.get_loop()
        with _woken_by_signals(loop), runner:
            return runner.run(registered)
    except asyncio.CancelledError:
        with _lock:
            asked = thread in _interrupted
            _interrupted.discard(thread)
        if asked:
            raise KeyboardInterrupt from None
        raise
    finally:
        runner.close()  # an interrupt may have come before the runner was entered, or before it began the coroutines
        for work in (registered, main):
            if getcoroutinestate(work) == CORO_CREATED:
                work.close()


class LoopThread:
    """An event loop in a daemon thread of its own, which callers in other threads give coroutines."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    def submit(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Begin a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self, wait_s: float = 10.0) -> None:
        """Cancel what runs, close the loop and end its thread; waits for that at most so long."""
        with suppress(RuntimeError):  # it is closed already
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(wait_s)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            running = asyncio.all_tasks(self.loop)
            for task in running:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
        finally:
            self.loop.close()


def interrupt(thread: int) -> None:
    """Interrupt what ``run_async`` runs in a thread, or what it will run next there."""
    with _lock:
        _interrupted.add(thread)
        if thread in _running:
            loop, task = _running[thread]
            loop.call_soon_threadsafe(task.cancel)


def interrupt_here() -> bool:
    """Interrupt what ``run_async`` runs in this thread; False if nothing runs, or if it was interrupted before.

    For signal handlers: raising there would end whichever task runs at that moment, and asyncio would complain.
    """
    thread = threading.get_ident()
    with _lock:
        if thread not in _running or thread in _interrupted:
            return False
        _interrupted.add(thread)
        _running[thread][1].cancel()  # not at the loop's next turn, which comes after the end of what ends now
    return True


def forget(thread: int) -> None:
    """A thread has ended: drop an interrupt that came too late, or a later thread with its id would get it."""
    with _lock:
        _interrupted.discard(thread)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM wait, if this is the main thread and they have a handler; they are raised at the end."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    held: list[int] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: held.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


@contextmanager
def _woken_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Inside, every signal wakes the loop of the main thread.

    Python runs a signal's handler between two instructions of the main thread. A signal that another thread took, or that
    came just before the loop began to wait, would otherwise be handled at the loop's next event: if all hangs, never.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)

        def awake() -> None:
            with suppress(BlockingIOError):
                signals = reader.recv(4096)
                if before != NO_FD:
                    with suppress(OSError):  # forward to the earlier descriptor, unless its owner closed it
                        os.write(before, signals)

        loop.add_reader(reader, awake)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            try:
                signal.set_wakeup_fd(before)
            except (OSError, ValueError):  # its owner closed it meanwhile
                signal.set_wakeup_fd(NO_FD)
            loop.remove_reader(reader)


async def _registered(main: Coroutine[Any, Any, Result], thread: int) -> Result:
    task = asyncio.current_task()
    assert task is not None
    with _lock:
        _running[thread] = (asyncio.get_running_loop(), task)
        if thread in _interrupted:
            task.cancel()
    try:
        return await main
    finally:
        with _lock:  # a coroutine that a second Ctrl-C abandoned ends late, when another may run in its thread
            if _running.get(thread, (None, None))[1] is task:
                del _running[thread]


async def side_by_side(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Their results, in the order given. Unlike ``asyncio.gather`` it leaves none running after an error."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        raise first_error(failed) from failed
    return [run.result() for run in running]


def first_error(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group of errors, or of groups within it."""
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


USUAL = gc.get_threshold()
RARELY = 50_000  # objects with references, allocated since the last collection

_excluded_by: Literal["nobody", "us", "others"] = "nobody"
"""Who is known to have excluded objects from garbage collections; counting 400,000 of them takes 0.03 s."""


def set_aside() -> bool:
    """Exclude what exists now from garbage collections; False if somebody did so before, as a fork server does.

    A model with its libraries has about 400,000 objects. Scanning them takes 0.2 s or more, while a GPU idles.
    """
    global _excluded_by
    if _excluded_by != "nobody":
        return False
    _excluded_by = "others" if gc.get_freeze_count() else "us"
    if _excluded_by == "others":
        return False
    gc.set_threshold(*USUAL)
    set_aside_more()
    return True


def collect_rarely() -> None:
    """Collect garbage rarely until ``set_aside``: importing torch and transformers makes a million objects, and none.

    Scanning them took a sixth of a short command's time.
    """
    gc.set_threshold(RARELY, *USUAL[1:])


def take_back() -> None:
    """Include again what ``set_aside`` excluded."""
    global _excluded_by
    _excluded_by = "nobody"
    gc.unfreeze()


def set_aside_more() -> None:
    """Exclude what has been created since, too: kernels and graphs that the first step compiled, for example."""
    gc.collect()
    gc.freeze()


@contextmanager
def lasting_objects() -> Iterator[None]:
    """Inside, what existed before is excluded from garbage collections."""
    ours = set_aside()
    try:
        yield
    finally:
        if ours:
            take_back()
