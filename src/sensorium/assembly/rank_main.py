"""A rank as a process of this machine: ``python -m sensorium.assembly.rank_main FD`` serves the driver on a socket."""

import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress

from sensorium.cluster.channel import PickledChannel


def main() -> None:
    """Serve the connection whose file descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal interrupts all; the driver decides when to close
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_the_driver, args=(connection.fileno(),), daemon=True).start()
    with suppress(EOFError, OSError):
        _serve(PickledChannel(connection))
    os._exit(0)  # nothing is left to be saved, and unloading a large model takes its time


def _serve(channel: PickledChannel) -> None:
    from sensorium.assembly.ranks import Rank

    rank = Rank()
    while True:
        call = channel.receive()
        if call.name == "close":
            rank.close()
            channel.send(None)
            return
        channel.send(rank.answer(call))


def _end_with_the_driver(fileno: int) -> None:
    """A rank may be waiting for others that are gone too: so it watches whether the driver hangs up."""
    poll = select.poll()
    poll.register(fileno, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
