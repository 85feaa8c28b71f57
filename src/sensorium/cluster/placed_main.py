"""The other side of a placed worker: what ``python -m`` runs there, for any kind of work.

    first message    settings, and the folder of its log → {"ready": …}, or an error and the end
    then             (number, question) → (number, {"value": …} or an error), many at once
                     (SIGN_OF_LIFE, None) → the same, at once

The process ends when its driver hangs up, whatever it does at that moment.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sensorium.cluster.channel import PickledChannel, plain_error
from sensorium.cluster.pool import Call, Worker, WorkerPool
from sensorium.cluster.python_process import end_descendants, parent_sockets
from sensorium.vocabulary.plain import attempt

SIGN_OF_LIFE = -1  # the number of a question that only asks whether the process still reads
Answer = Callable[[Any], Any]
OpenWork = Callable[[Any, Path], tuple[Any, Answer]]
"""From settings and a folder of its own: the report for the driver, and the function that answers its questions."""


def serve(open_work: OpenWork) -> None:
    """Serve the connection whose file descriptor is the first argument."""
    (connection,) = parent_sockets()
    folders: list[str] = []
    with suppress(EOFError, OSError):  # the driver is gone
        _serve(PickledChannel(connection), open_work, folders)
    for folder in folders:  # a driver that was killed cannot remove its own
        shutil.rmtree(folder, ignore_errors=True)
    end_descendants()  # browsers of environments, for example: a driver that was killed cannot end them
    os._exit(0)


def _serve(channel: PickledChannel, open_work: OpenWork, folders: list[str]) -> None:
    sending, pool = threading.Lock(), WorkerPool("worker")

    def reply(number: int, call: Call, worker: Worker) -> None:
        pool.give_back(worker)
        found = {"value": call.value} if call.error is None else plain_error(call.error)
        with sending:
            _, failed = attempt(channel.send, (number, found))
            if failed is not None and not isinstance(failed, OSError):  # the value cannot be pickled
                attempt(channel.send, (number, plain_error(failed)))

    settings, shared = channel.receive()
    # In the driver's folder, if that is on this machine: it is removed even if this process is killed.
    folder = tempfile.mkdtemp(prefix="sensorium-worker-", dir=shared if os.path.isdir(shared) else None)
    folders += [folder, shared]
    opened, error = attempt(open_work, settings, Path(folder))
    if error is not None:
        channel.send(plain_error(error))
        return
    report, answer = opened
    channel.send({"ready": report})
    while True:
        number, question = channel.receive()
        if number == SIGN_OF_LIFE:
            with sending:
                channel.send((number, {"value": None}))
            continue
        worker = pool.lease()
        call = worker.submit(partial(answer, question), float("inf"))
        call.when_ended(partial(reply, number, call, worker))
