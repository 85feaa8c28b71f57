"""Ranks as processes of this machine: started, asked together, and ended. Every wait is bounded.

Invariant: after an error that not all ranks share, no rank is left. They wait for each other, so one that is lost ends all.
"""

import os
import selectors
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sensorium.cluster.messages import Answer, Call, RankSettings
from sensorium.cluster.rank_failures import SharedError, judged, refuse_other_versions
from sensorium.record.processes import process_state
from sensorium.vocabulary.errors import LearnerLost, SensoriumError
from sensorium.workers.channel import PickledChannel
from sensorium.workers.python_process import CLOSE_S, PythonProcess, last_words

GRACE_S = 10.0
"""How long the others may take to notice that a rank is lost, before they are ended."""


class RankProcess:
    """One rank: its process, its socket and its log."""

    def __init__(self, rank: int, log: Path) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        # Ranks of one machine talk over the loopback interface: others may be down, or firewalled.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        variables = {"GLOO_SOCKET_IFNAME": interface} if sys.platform == "linux" else {}
        with theirs:
            self._python = PythonProcess("sensorium.cluster.process_main", [theirs], log, variables)
        self.socket = ours
        self._channel = PickledChannel(ours)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._python.pid

    @property
    def name(self) -> str:
        """What it is called in errors."""
        return f"rank {self.rank} of the learner (pid {self.pid})"

    @property
    def stopped(self) -> bool:
        """True while it is held by a signal, as far as the system tells."""
        return process_state(self.pid) == "T"

    def send(self, call: Call, limit_s: float) -> None:
        """Ask; the answer is received later."""
        self._channel.send(call, limit_s)

    def receive(self, limit_s: float) -> Answer:
        """Its answer; EOFError or OSError if it is gone."""
        answer: Any = self._channel.receive(limit_s)
        return answer

    def close(self) -> None:
        """Tell it to end."""
        with suppress(EOFError, OSError):
            self.send(Call("close"), CLOSE_S)

    def end(self, after_s: float = 0.0) -> None:
        """Wait so long for it to end, then kill it."""
        self._python.end(after_s)
        with suppress(OSError):
            self._channel.close()

    def why(self) -> str:
        """How it ended, and the last that it said."""
        ending = self._python.ending()
        return f"{self.name} {ending}.{last_words(self._python.log_text())}"


class ProcessRanks:
    """All ranks of a learner on this machine. ``exchange`` is a folder for what is too large for a message."""

    def __init__(self, settings: Sequence[RankSettings], exchange: Path, start_s: float, reply_s: float) -> None:
        self._exchange, self._reply_s = exchange, reply_s
        self._ranks = [RankProcess(one.rank, exchange / f"rank_{one.rank}.log") for one in settings]
        try:
            answers = self._ask_each([Call("open", (one,)) for one in settings], start_s)
            refuse_other_versions(answers)
        except BaseException:
            self._end()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, in order."""
        return [rank.pid for rank in self._ranks]

    def ask(self, name: str, *given: Any) -> Answer:
        """Ask all ranks the same; the answer is that of rank 0."""
        return self._ask_each([Call(name, given)] * len(self._ranks), self._reply_s)[0]

    def close(self) -> None:
        """Tell all to end, and end those that do not."""
        for rank in self._ranks:
            rank.close()
        self._end(CLOSE_S)
        shutil.rmtree(self._exchange, ignore_errors=True)

    def _ask_each(self, calls: Sequence[Call], limit_s: float) -> list[Answer]:
        if not self._ranks:
            raise LearnerLost("the ranks of the learner were ended; start the run again with --resume.")
        until = time.monotonic() + limit_s
        answers: dict[int, Answer] = {}
        lost: list[RankProcess] = []
        for rank, call in zip(self._ranks, calls, strict=True):
            try:
                rank.send(call, limit_s)
            except OSError:
                lost.append(rank)
        waiting = [rank for rank in self._ranks if rank not in lost]
        with selectors.DefaultSelector() as selector:
            for rank in waiting:
                selector.register(rank.socket, selectors.EVENT_READ, rank)
            while waiting:
                if lost or any(answer.error for answer in answers.values()):
                    until = min(until, time.monotonic() + GRACE_S)
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    rank = key.data
                    try:
                        answers[rank.rank] = rank.receive(limit_s)
                    except (EOFError, OSError):
                        lost.append(rank)
                    selector.unregister(rank.socket)
                    waiting.remove(rank)
        why = [rank.why() for rank in lost]
        why += [
            f"{rank.name} is stopped (SIGSTOP): it did not answer in {limit_s:g} s." for rank in waiting if rank.stopped
        ]
        try:
            return judged(answers, len(self._ranks), why, calls[0].name, limit_s)
        except SharedError as shared:
            raise shared.error from None
        except SensoriumError:
            self._end()
            raise

    def _end(self, after_s: float = 0.0) -> None:
        for rank in self._ranks:
            rank.end(after_s)
        self._ranks = []
