"""How a command ends by a signal: SIGTERM ends it as Ctrl-C does, in an orderly way.

A run started with SIGINT ignored (``nohup``, a background job of a script) goes on ignoring it, as whoever started it so
wants; SIGTERM ends it all the same.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sensorium.workers.event_loop import interrupt_here


@dataclass
class Stop:
    """Which signal ended the command: the exit code that says so, and a word for people."""

    number: int = signal.SIGINT

    @property
    def code(self) -> int:
        """128 and the number of the signal, as shells count."""
        return 128 + self.number

    @property
    def word(self) -> str:
        """What happened."""
        return "terminated" if self.number == signal.SIGTERM else "interrupted"


@contextmanager
def stopping_in_order() -> Iterator[Stop]:
    """While this lasts, SIGTERM raises KeyboardInterrupt the way Ctrl-C does."""
    stop = Stop()
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is not signal.SIG_DFL:
        yield stop
        return

    def terminate(number: int, frame: object) -> None:
        stop.number = signal.SIGTERM
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # ignored, so asyncio has put no handler of its own in its place
            if interrupt_here():
                return
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)  # type: ignore[arg-type]  # an event loop's own, which ends its tasks first

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
