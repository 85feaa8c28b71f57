"""``asyncio.run`` that another thread may interrupt, and that no signal escapes.

Python delivers Ctrl-C to the main thread only. A notebook's main thread has an event loop of its own, so a run works in a
second thread: the main thread waits, and hands an interrupt on with ``interrupt(thread.ident)``.
"""

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

Result = TypeVar("Result")

NOBODY = -1  # as a file descriptor: none
_lock = threading.RLock()  # a signal's handler may interrupt its own thread while that holds it
_running: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = {}
_interrupted: set[int] = set()


def run_async(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end in an event loop of its own; KeyboardInterrupt if this thread was interrupted."""
    thread = threading.get_ident()
    runner = asyncio.Runner()
    try:
        with _woken_by_signals(runner.get_loop()), runner:
            return runner.run(_registered(main, thread))
    except asyncio.CancelledError:
        with _lock:
            asked = thread in _interrupted
            _interrupted.discard(thread)
        if asked:
            raise KeyboardInterrupt from None
        raise


def interrupt(thread: int) -> None:
    """Interrupt what ``run_async`` runs in a thread, or what it will run next there."""
    with _lock:
        _interrupted.add(thread)
        if thread in _running:
            loop, task = _running[thread]
            loop.call_soon_threadsafe(task.cancel)


def interrupt_here() -> bool:
    """Interrupt what ``run_async`` runs in this thread; False if nothing runs, or if it was asked to end before.

    For the handlers of signals: raising there would end whichever task runs at that moment, and asyncio would complain.
    """
    thread = threading.get_ident()
    with _lock:
        if thread not in _running or thread in _interrupted:
            return False
    interrupt(thread)
    return True


def forget(thread: int) -> None:
    """A thread is over: an interrupt that came too late is no other thread's."""
    with _lock:
        _interrupted.discard(thread)


@contextmanager
def _woken_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """While this lasts, every signal wakes the loop of the main thread up.

    Python runs a signal's handler between two of the main thread's own instructions. A signal that another thread took, or
    that came just before the loop began to wait, would else be heard at the loop's next event: if all it waits for hangs,
    never.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hears, tells = socket.socketpair()
    with hears, tells:
        hears.setblocking(False)
        tells.setblocking(False)

        def awake() -> None:
            with suppress(BlockingIOError):
                signals = hears.recv(4096)
                if before != NOBODY:
                    with suppress(OSError):  # who waits there is told as well, unless it left
                        os.write(before, signals)

        loop.add_reader(hears, awake)
        before = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            try:
                signal.set_wakeup_fd(before)
            except (OSError, ValueError):  # its owner closed it meanwhile
                signal.set_wakeup_fd(NOBODY)
            loop.remove_reader(hears)


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
        with _lock:  # a coroutine that a second Ctrl-C left behind ends late, when another may run in its thread
            if _running.get(thread, (None, None))[1] is task:
                del _running[thread]


Outcome = TypeVar("Outcome")


async def side_by_side(coroutines: Iterable[Coroutine[Any, Any, Outcome]]) -> list[Outcome]:
    """Their results, in the order given. Unlike ``asyncio.gather`` it leaves nobody running behind an error."""
    try:
        async with asyncio.TaskGroup() as crowd:
            running = [crowd.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        raise first_error(failed) from failed
    return [run.result() for run in running]


def first_error(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group of errors, or of groups within it: one says enough."""
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# A model with its libraries is some 400,000 objects. Walking them takes 0.2 s or more, in which a GPU has nothing to
# do.


def set_aside() -> bool:
    """Leave what exists now out of collections; False if somebody did so before, as a fork server does."""
    if gc.get_freeze_count():
        return False
    set_aside_more()
    return True


def set_aside_more() -> None:
    """Leave out what came since, too: kernels and graphs that the first step compiled, say."""
    gc.collect()
    gc.freeze()


@contextmanager
def lasting_objects() -> Iterator[None]:
    """What exists now is left out of collections until the end."""
    ours = set_aside()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()
