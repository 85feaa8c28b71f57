"""Several workers of one kind in processes that a host starts: asked in parallel, and replaced when they die or hang.

For example, with two workers and one restart:

    questions 1 2 3      1 → worker 0, 2 → worker 1, 3 → worker 0
    worker 0 dies        1 and 3 are asked again of worker 1; another worker 0 starts meanwhile
    worker 1 dies        2 is asked again of worker 0 when that is ready; worker 1 is not replaced
    worker 0 dies        every ask() raises WorkersLost

A worker that is stopped, or whose machine is, hangs. So each is asked for a sign of life now and then, and ended when it
has sent neither that nor an answer for ``hang_s``.

A question may be what ends workers, and would use them all up. It is given up (WorkGivenUp) when MOST_LOSSES were lost
while they had it. Other questions that a lost worker had are suspects as well: they are asked again one at a time, as long
as a turn comes within TURN_S, so that the next loss has one cause:

    questions 1 2 3 to worker 0, which dies of 2       all three are suspects
    1 → worker 1; then 2 → worker 1, which dies        2 is given up; 3, which waited, is no more suspect than before
    3 → worker 0

Invariant: a question is answered once, however often it was asked. ``asked_again`` counts how often.

``serve`` is the other side, for any kind of work:

    first message    settings, and the folder of its log → {"ready": …}, or an error and the end
    then             (number, question) → (number, {"value": …} or an error), many at once
                     (SIGN_OF_LIFE, None) → the same, at once

The process ends when its driver hangs up, whatever it does at that moment.
"""

import itertools
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sensorium.cluster.pool import Call, Worker, WorkerPool
from sensorium.cluster.python_process import (
    CLOSE_S,
    Channel,
    HostedProcess,
    ProcessHost,
    end_descendants,
    error_of,
    last_words,
    parent_sockets,
    plain_error,
)
from sensorium.vocabulary.errors import SensoriumError, WorkersLost, WorkGivenUp
from sensorium.vocabulary.plain import attempt

SIGN_OF_LIFE = -1  # the number of a question that only asks whether the process still reads
LOOKS = 12  # how often within ``hang_s`` a worker is asked for a sign of life
LONGEST_LOOK_S = 5.0
MOST_LOSSES = 2  # workers that may be lost while they answer one question, or play one episode
TURN_S = 5.0  # how long a suspect waits for its turn; then it is asked beside the others


class _Gone(Exception):
    """The worker died before it answered."""


@dataclass(eq=False)
class PlacedWorker:
    """A place and the process in it. ``report`` is what it sent when it was ready; ``ready``: it takes questions.

    ``lost``: it is gone for good, and why. Neither ready nor lost: it, or its replacement, is starting. ``heard`` is set by
    whatever it sends.
    """

    number: int
    process: HostedProcess | None = None
    channel: Channel | None = None
    report: Any = None
    ready: bool = False
    lost: str = ""
    replaced: int = 0
    open: dict[int, "Future[Any]"] = field(default_factory=dict)
    sending: threading.Lock = field(default_factory=threading.Lock)
    heard: threading.Event = field(default_factory=threading.Event)


class PlacedWorkers:
    """``count`` processes of ``python -m module``, each opened with ``settings``. At most ``restarts`` are replaced in all.

    ``what`` is one of them, in words, and ``failure`` the class of their errors. ``changed`` is called, in any thread, for
    each that is about to take questions (True) and for each that is gone (False).
    """

    def __init__(
        self,
        host: ProcessHost,
        module: str,
        settings: Any,
        count: int,
        what: str,
        failure: type[SensoriumError],
        *,
        restarts: int = 3,
        start_s: float = 600.0,
        hang_s: float = 20.0,
        changed: Callable[[PlacedWorker, bool], None] = lambda worker, ready: None,
    ) -> None:
        self._host, self._module, self._settings = host, module, settings
        self._what, self._failure = what, failure
        self._restarts_left, self._start_s, self._hang_s, self._changed = restarts, start_s, hang_s, changed
        self.workers = tuple(PlacedWorker(number) for number in range(count))
        self.replaced = self.asked_again = 0
        self.noted: Callable[[str], None] = lambda sentence: None
        self._numbers = itertools.count()
        self._state = threading.Condition()
        self._starting = 0
        self._closed = False
        self._losses: Counter[Hashable] = Counter()
        self._turn = threading.Lock()
        self._last = ""
        self._threads = ThreadPoolExecutor(count, "placed")
        self._folder = Path(tempfile.mkdtemp(prefix="sensorium-workers-"))

    def start(self) -> None:
        """Start all in parallel; the first that cannot start ends the others."""
        futures = [self._threads.submit(self._start, worker) for worker in self.workers]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self.close()
            raise errors[0]

    def ask(self, question: Any, known_by: Hashable = None) -> Any:
        """The answer of some worker; an error that it gave is raised. WorkersLost where no worker is left.

        Questions with the same ``known_by`` are one question in the count of workers that were lost with it.
        """
        known_by = object() if known_by is None else known_by
        while True:
            if self._losses[known_by] >= MOST_LOSSES:
                raise WorkGivenUp(
                    f"{MOST_LOSSES} {self._what}s were lost while they did this, which may be what ends them, so no other "
                    f"is asked ({self._last})"
                )
            worker = self.wait()
            alone = bool(self._losses[known_by]) and self._turn.acquire(timeout=TURN_S)  # a suspect waits for its turn
            answer: Future[Any] = Future()
            number = next(self._numbers)
            worker.open[number] = answer
            try:
                channel = worker.channel
                if not worker.ready or channel is None:
                    continue
                with worker.sending:
                    channel.send((number, question))
                return answer.result()
            except OSError:  # it was gone before it had the question, which is no suspect
                with self._state:
                    self.asked_again += 1
                    while not self._closed and worker.ready and worker.channel is channel:  # until _lose() knows
                        self._state.wait()
            except _Gone:
                with self._state:
                    self.asked_again += 1
                    self._losses[known_by] += 1
            finally:
                worker.open.pop(number, None)
                if alone:
                    self._turn.release()

    @property
    def given_up(self) -> int:
        """Questions that are not asked again, because too many workers were lost with them."""
        with self._state:
            return sum(lost >= MOST_LOSSES for lost in self._losses.values())

    def wait(self) -> PlacedWorker:
        """The worker with the fewest questions, as soon as there is one. WorkersLost if none is left."""
        with self._state:
            while not (ready := [worker for worker in self.workers if worker.ready]):
                if self._closed or not self._starting:
                    raise WorkersLost(
                        f"no {self._what} is left that takes work, and cluster.restarts are used up. {self._last} Fix "
                        "what ends them, or raise cluster.restarts; then go on with --resume, or with --restart if there "
                        "is no checkpoint."
                    )
                self._state.wait()
            return min(ready, key=lambda worker: (len(worker.open), worker.number))

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()
        for worker in self.workers:
            worker.ready = False
            self._end(worker)
        self._threads.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, worker: PlacedWorker) -> None:
        log = self._folder / f"{worker.number}.{worker.replaced}.txt"
        process, (frames,) = self._host.start(self._module, 1, log, own_group=True)
        channel = Channel(frames)
        try:
            channel.send((self._settings, str(self._folder)), self._start_s)
            first = channel.receive(self._start_s)
        except (EOFError, OSError) as error:
            late = isinstance(error, TimeoutError)
            if late:
                process.end()
            how = f"was not ready within {self._start_s:g} s (cluster.start_s)" if late else process.ending()
            output = last_words(process.log_text())
            raise WorkersLost(f"a {self._what} (pid {process.pid}) {how}, so it cannot be used.{output}") from error
        if "ready" not in first:
            process.end(CLOSE_S)
            raise error_of(first, WorkersLost, f"a {self._what}")
        worker.process, worker.channel, worker.report = process, channel, first["ready"]
        gone = threading.Event()
        for task in (self._read, self._watch):
            threading.Thread(target=task, args=(worker, process, channel, gone), name=self._what, daemon=True).start()
        if not self._closed:
            self._changed(worker, True)
        with self._state:
            worker.ready = not self._closed
            self._state.notify_all()
        if not worker.ready:
            self._end(worker)

    def _read(self, worker: PlacedWorker, process: HostedProcess, channel: Channel, gone: threading.Event) -> None:
        """Complete the futures of answers as they come, until the worker is gone."""
        while True:
            try:
                number, found = channel.receive()
            except (EOFError, OSError, ValueError):
                break
            worker.heard.set()
            answer = worker.open.get(number)
            if answer is not None and not answer.done():
                if "value" in found:
                    answer.set_result(found["value"])
                else:
                    answer.set_exception(error_of(found, self._failure, f"a {self._what}"))
        self._lose(worker, process, gone)

    def _watch(self, worker: PlacedWorker, process: HostedProcess, channel: Channel, gone: threading.Event) -> None:
        """Ask for signs of life; lose a worker that gives none. Time when this process itself is stopped does not count."""

        def ask_for_life() -> None:
            with worker.sending, suppress(OSError):
                channel.send((SIGN_OF_LIFE, None))

        look_s = min(LONGEST_LOOK_S, self._hang_s / LOOKS)
        silent_s, before = 0.0, time.monotonic()
        asking: threading.Thread | None = None
        while not gone.wait(look_s):
            now = time.monotonic()
            silent_s, before = silent_s + min(now - before, 2 * look_s), now
            if worker.heard.is_set():
                silent_s = 0.0
                worker.heard.clear()
            if silent_s > self._hang_s:
                hung = f"gave no sign of life for {self._hang_s:g} s (cluster.hang_s) and is ended"
                self._lose(worker, process, gone, hung)
                return
            if asking is None or not asking.is_alive():  # sending may block forever, so another thread does it
                asking = threading.Thread(target=ask_for_life, daemon=True)
                asking.start()

    def _lose(self, worker: PlacedWorker, process: HostedProcess, gone: threading.Event, hung: str = "") -> None:
        """A worker has ended, or hangs (and is ended now). The first thread that notices it reports and replaces it."""
        with self._state:
            if gone.is_set():
                return
            gone.set()
            worker.ready = False
            self._starting += 1  # ask() waits until it is known whether it is replaced
        if hung:
            process.end()
        ending = "is closed" if self._closed else hung or process.ending()
        with self._state:
            again = not self._closed and self._restarts_left > 0
            if again:
                self._restarts_left -= 1
                self.replaced += 1
                worker.replaced += 1
            else:
                self._starting -= 1
                worker.lost = "it is closed" if self._closed else "cluster.restarts are used up"
            how = f"{self._what} {worker.number} (pid {process.pid}) {ending}"
            self._last = f"{how}.{last_words(process.log_text())}" if not self._closed else ""
            self._state.notify_all()
        if not self._closed:
            left = any(other.ready for other in self.workers) or self._starting
            used_up = f"cluster.restarts are used up{': the others go on' if left else ', and no other is left'}."
            self.noted(f"{self._last} {'It is replaced.' if again else used_up}")
            self._changed(worker, False)
        for answer in list(worker.open.values()):
            if not answer.done():
                answer.set_exception(_Gone())
        if again:
            try:
                self._start(worker)
            except SensoriumError as error:
                worker.lost = "it could not be replaced"
                self._last = f"It could not be replaced: {error}"
                self.noted(self._last)
            finally:
                with self._state:
                    self._starting -= 1
                    self._state.notify_all()

    def _end(self, worker: PlacedWorker) -> None:
        if worker.channel is not None and worker.process is not None:
            with suppress(OSError):
                worker.channel.close()
            worker.process.end(0.0 if self._closed else CLOSE_S)


Answer = Callable[[Any], Any]
OpenWork = Callable[[Any, Path], tuple[Any, Answer]]
"""From settings and a folder of its own: the report for the driver, and the function that answers its questions."""


def serve(open_work: OpenWork) -> None:
    """Serve the connection whose file descriptor is the first argument."""
    (connection,) = parent_sockets()
    folders: list[str] = []
    with suppress(EOFError, OSError):  # the driver is gone
        _serve(Channel(connection), open_work, folders)
    for folder in folders:  # a driver that was killed cannot remove its own
        shutil.rmtree(folder, ignore_errors=True)
    end_descendants()  # browsers of environments, for example: a driver that was killed cannot end them
    os._exit(0)


def _serve(channel: Channel, open_work: OpenWork, folders: list[str]) -> None:
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
