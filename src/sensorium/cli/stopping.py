"""How a command ends by a signal: SIGTERM ends it as Ctrl-C does, in an orderly way.

A run started with SIGINT ignored (``nohup``, a background job of a script) goes on ignoring it, as whoever started it so
wants; SIGTERM ends it all the same.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sensorium.workers.event_loop import interrupt_here

LINGER_S = 30.0
"""How long a command that is over waits for threads that others started before it ends without them."""


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


def end_without_hung_threads(code: int) -> None:
    """See to it that the process ends with this code soon, also if a thread of a user's code never does.

    At exit Python waits for every thread that is no daemon, such as those of a ``ThreadPoolExecutor`` in a reward term.
    """

    def leave() -> None:
        time.sleep(LINGER_S)
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        hung = [thread.name for thread in others if not thread.daemon]
        told = f"{len(hung)} threads that an environment, a reward or a source started do not end ({', '.join(hung[:5])})"
        print(f"{told}; the process ends without them.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)

    threading.Thread(target=leave, name="leave", daemon=True).start()
