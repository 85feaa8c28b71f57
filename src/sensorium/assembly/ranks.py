"""The ranks of a sharded learner as the driver sees them: started by a host, asked together, and ended.

Invariant: after an error that not all ranks share, no rank is left. They wait for each other, so losing one ends all. Every
wait is bounded. ``rank_main`` is the other side.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sensorium.cluster.channel import Channel, error_of, plain_error
from sensorium.cluster.python_process import CLOSE_S, ProcessHost, last_words
from sensorium.recipe.schema import Recipe
from sensorium.runs.process_table import process_state
from sensorium.vocabulary.errors import LearnerLost, SensoriumError

GRACE_S = 10.0  # how long the others may take to notice that a rank is lost, before they are ended
IN_USE = re.compile(r"in use|EADDRINUSE", re.IGNORECASE)
WAITED = re.compile(r"Timed out waiting|Connection closed by peer|Watchdog caught collective", re.IGNORECASE)
"""Errors of a rank that waited for another one: not the cause, if that one is silent."""


@dataclass(frozen=True)
class RankSettings:
    """All that a rank must know to open: its number, where the ranks meet ("": where rank 0 is), and what they train."""

    rank: int
    size: int
    meeting: str
    recipe: Recipe
    run: Path
    saved: Path | None
    device: str
    backend: str
    threads: int


@dataclass(frozen=True)
class Call:
    """A method of the rank's learner; or ``meeting``, ``open`` and ``close``."""

    name: str
    given: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a call returned, or why it failed; with the version of the policy afterwards."""

    value: Any = None
    version: int = 0
    error: str = ""
    kind: str = ""


def failed(error: BaseException) -> Answer:
    """The answer of a call that raised. torch's error about a checkpoint contains those of the ranks that failed."""
    failures: Mapping[int, Any] = getattr(error, "failures", None) or {}
    if failures:
        rank, (cause, *_) = min(failures.items())
        return Answer(error=f"{cause!r} on rank {rank}", kind=type(error).__name__)
    plain = plain_error(error)
    return Answer(error=plain["error"], kind=plain["kind"])


class SharedError(Exception):
    """An error that every rank has met alike: they are all as they were. ``error`` is what to raise."""

    def __init__(self, error: SensoriumError) -> None:
        super().__init__(str(error))
        self.error = error


def judged(answers: Mapping[int, Answer], size: int, lost: Sequence[str], asked: str, limit_s: float) -> list[Answer]:
    """The answers of all ranks in order; or the error they add up to. ``lost``: how ranks ended, in words.

    Raises SharedError where all ranks can go on, and another SensoriumError where none can.
    """

    def error(rank: int) -> SensoriumError:
        return error_of(vars(answers[rank]), LearnerLost, f"rank {rank} of the learner")

    errors = {rank: answer for rank, answer in answers.items() if answer.error}
    if lost:
        raise LearnerLost(lost[0])
    if len(errors) == size and len({answer.kind for answer in errors.values()}) == 1:
        raise SharedError(error(0))
    silent = [rank for rank in range(size) if rank not in answers]
    causes = [rank for rank, answer in errors.items() if not (silent and WAITED.search(answer.error))]
    if causes:
        raise error(min(causes))
    if silent:
        key = "start_s" if asked == "open" else "reply_s"
        raise LearnerLost(
            f"of the learner's {size} ranks, {', '.join(map(str, silent))} did not answer '{asked}' within {limit_s:g} s; "
            f"all were ended. Raise cluster.{key} if the model is that slow."
        )
    return [answers[rank] for rank in range(size)]


class RankProcess:
    """One rank: its process and the connection to it."""

    def __init__(self, host: ProcessHost, rank: int, log: Path) -> None:
        variables = {}
        if host.folder is None and sys.platform == "linux":  # on one machine: other interfaces may be down, or firewalled
            variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self.process, (frames,) = host.start("sensorium.assembly.rank_main", 1, log, variables)
        self._channel = Channel(frames)
        self.name = f"rank {rank} of the learner (pid {self.process.pid})"

    def ask(self, call: Call, limit_s: float) -> Answer:
        """Its answer; TimeoutError if none comes in time, another OSError or EOFError if it is gone."""
        self._channel.send(call, limit_s)
        answer: Answer = self._channel.receive(limit_s)
        return answer

    def close(self) -> None:
        """Ask it to end."""
        with suppress(EOFError, OSError):
            self._channel.send(Call("close"), CLOSE_S)

    def end(self, after_s: float = 0.0) -> None:
        """Wait so long for it to end, then kill it."""
        self.process.end(after_s)
        with suppress(OSError):
            self._channel.close()


class Ranks:
    """All ranks of a learner, which a host starts. ``exchange`` is a folder for what is too large for a message."""

    def __init__(
        self, host: ProcessHost, settings: Sequence[RankSettings], exchange: Path, start_s: float, reply_s: float
    ) -> None:
        self._host, self._exchange, self._reply_s = host, exchange, reply_s
        self._threads = ThreadPoolExecutor(len(settings), "ranks")
        self._left = False
        starting = [
            self._threads.submit(RankProcess, host, one.rank, exchange / f"rank_{one.rank}.log") for one in settings
        ]
        wait(starting)
        self._ranks = [future.result() for future in starting if future.exception() is None]
        try:
            for future in starting:
                future.result()
            self._open(settings, start_s)
        except BaseException:
            self._end()
            raise

    def _open(self, settings: Sequence[RankSettings], start_s: float) -> None:
        meeting = settings[0].meeting
        if not meeting:
            first = self._ranks[0]
            meeting = first.ask(Call("meeting", (first.process.address,)), start_s).value
        try:
            self._ask_each([Call("open", (replace(one, meeting=meeting),)) for one in settings], start_s)
        except LearnerLost as error:
            if IN_USE.search(str(error)):
                raise LearnerLost(
                    f"the port at which the learner's ranks were to meet, {meeting}, was taken by another process. "
                    "Start the run again: it chooses another one."
                ) from error
            raise

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def ask(self, name: str, *given: Any) -> Answer:
        """Ask all ranks the same; the answer is that of rank 0. After a LearnerLost no rank is left."""
        return self._ask_each([Call(name, given)] * len(self._ranks), self._reply_s)[0]

    def close(self) -> None:
        """Ask all to end, and end those that do not."""
        for rank in self._ranks:
            rank.close()
        self._end(CLOSE_S)
        shutil.rmtree(self._exchange, ignore_errors=True)

    def _ask_each(self, calls: Sequence[Call], limit_s: float) -> list[Answer]:
        if not self._ranks:
            raise LearnerLost("the ranks of the learner were ended; start the run again with --resume.")
        waiting = {
            self._threads.submit(rank.ask, call, limit_s): number
            for number, (rank, call) in enumerate(zip(self._ranks, calls, strict=True))
        }
        until = time.monotonic() + limit_s
        answers: dict[int, Answer] = {}
        lost: list[str] = []
        late: list[int] = []
        while waiting:
            if lost or any(answer.error for answer in answers.values()):
                until = min(until, time.monotonic() + GRACE_S)
            done, _ = wait(waiting, max(0.0, until - time.monotonic()), FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                number = waiting.pop(future)
                process = self._ranks[number].process
                try:
                    answers[number] = future.result()
                except TimeoutError:
                    late.append(number)
                except (EOFError, OSError):
                    how = f"{self._ranks[number].name} {process.ending()}"
                    lost.append(f"{how}.{last_words(process.log_text())}")
        if self._host.folder is None:  # on this machine
            silent = [self._ranks[number] for number in (*late, *waiting.values())]
            stopped = [rank.name for rank in silent if process_state(rank.process.pid) == "T"]
            lost += [f"{name} is stopped (SIGSTOP): it did not answer in {limit_s:g} s." for name in stopped]
        try:
            return judged(answers, len(self._ranks), lost, calls[0].name, limit_s)
        except SharedError as shared:
            raise shared.error from None
        except SensoriumError:
            self._end()
            raise

    def _end(self, after_s: float = 0.0) -> None:
        for rank in self._ranks:
            rank.end(after_s)
        self._ranks = []
        self._threads.shutdown(wait=False)
        if not self._left:
            self._left = True
            self._host.close()
