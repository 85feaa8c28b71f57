"""Running work that starts an event loop from code that may already be inside one, as every notebook cell is.

Outside a loop the work runs in place. Inside one it runs in a second thread with a loop of its own while this thread waits;
Ctrl-C (a notebook's stop button) reaches this thread and is handed on. A second Ctrl-C does not wait for the work to end.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from sensorium.workers.event_loop import forget, interrupt

Result = TypeVar("Result")
LOOK_S = 0.1


def outside_loop(work: Callable[[], Result]) -> Result:
    """What ``work`` returns or raises, wherever this is called."""
    if not _inside_loop():
        return work()
    results: list[Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            forget(threading.get_ident())
            done.set()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="sensorium", daemon=True)
    thread.start()
    _wait(done, thread)
    if errors:
        raise errors[0]
    return results[0]


def _inside_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _wait(done: threading.Event, thread: threading.Thread) -> None:
    """Wait for the event, not for the thread: an interrupted join takes a running thread for ended (CPython 3.11)."""
    asked = False
    while not done.is_set():
        try:
            done.wait(LOOK_S)
        except KeyboardInterrupt:
            if asked:
                raise
            asked = True
            assert thread.ident is not None
            interrupt(thread.ident)
