"""The other side of a placed worker: what ``python -m`` runs there, for any kind of work.

    first message    settings, and the folder of its log → {"ready": …}, or an error and the end
    then             (number, question) → (number, {"value": …} or an error), many at once
                     (SIGN_OF_LIFE, None) → the same, at once

The process ends when its driver hangs up, whatever it does at that moment.
"""

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sensorium.cluster.channel import PickledChannel, plain_error
from sensorium.cluster.pool import Call, Worker, WorkerPool
from sensorium.cluster.python_process import end_descendants
from sensorium.vocabulary.plain import attempt

SIGN_OF_LIFE = -1
"""The number of a question that asks only whether the process still reads."""
Answer = Callable[[Any], Any]
OpenWork = Callable[[Any, Path], tuple[Any, Answer]]
"""From settings and a folder of its own: what to tell the driver, and who answers its questions."""


def serve(open_work: OpenWork) -> None:
    """Serve the connection whose file descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal interrupts all; the driver decides when to close
    folders: list[str] = []
    with suppress(EOFError, OSError):  # the driver is gone: nobody wants anything any more
        _Serving(PickledChannel(socket.socket(fileno=int(sys.argv[1])))).serve(open_work, folders)
    for folder in folders:  # a driver that was killed cannot remove its own
        shutil.rmtree(folder, ignore_errors=True)
    end_descendants()  # browsers of environments, for one: a driver that was killed cannot end them
    os._exit(0)


class _Serving:
    def __init__(self, channel: PickledChannel) -> None:
        self._channel, self._sending = channel, threading.Lock()
        self._pool = WorkerPool("worker")

    def serve(self, open_work: OpenWork, folders: list[str]) -> None:
        settings, shared = self._channel.receive()
        # In the driver's folder, where there is one on this machine: it is removed even if this process is killed.
        folder = tempfile.mkdtemp(prefix="sensorium-worker-", dir=shared if os.path.isdir(shared) else None)
        folders += [folder, shared]
        opened, error = attempt(open_work, settings, Path(folder))
        if error is not None:
            self._channel.send(plain_error(error))
            return
        told, answer = opened
        self._channel.send({"ready": told})
        while True:
            number, question = self._channel.receive()
            if number == SIGN_OF_LIFE:
                with self._sending:
                    self._channel.send((number, {"value": None}))
                continue
            worker = self._pool.lease()
            call = worker.submit(partial(answer, question), float("inf"))
            call.when_ended(partial(self._reply, number, call, worker))

    def _reply(self, number: int, call: Call, worker: Worker) -> None:
        self._pool.give_back(worker)
        found = {"value": call.value} if call.error is None else plain_error(call.error)
        with self._sending:
            _, failed = attempt(self._channel.send, (number, found))
            if failed is not None and not isinstance(failed, OSError):  # what cannot be pickled
                attempt(self._channel.send, (number, plain_error(failed)))
