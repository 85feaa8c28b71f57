"""Ranks as processes of this machine or as Ray actors: started, asked together, and ended. Every wait is bounded."""

import os
import re
import selectors
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sensorium.assembly.ranks import Answer, Call, RankSettings, SharedError, judged, refuse_other_versions
from sensorium.cluster.channel import PickledChannel
from sensorium.cluster.python_process import CLOSE_S, PythonProcess, last_words
from sensorium.cluster.ray_host import connect, disconnect, first_answers, free, short
from sensorium.recipe.checks import ray_needs
from sensorium.runs.process_table import process_state
from sensorium.vocabulary.errors import LearnerLost, SensoriumError

# Invariant: after an error that not all ranks share, no rank is left. They wait for each other, so one that is lost
# ends all.


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
            self._python = PythonProcess("sensorium.assembly.rank_main", [theirs], log, variables)
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


GRACE_S = 10.0
LOCALHOST = "127.0.0.1"
IN_USE = re.compile(r"in use|EADDRINUSE", re.IGNORECASE)


class RankActor:
    """A rank inside an actor. It loads torch, which takes long, only when it is opened: before that it says that it is
    placed, so that the driver can tell a cluster without room from a slow machine.
    """

    _rank: Any = None

    def meeting(self, host: str) -> str:
        """Where the ranks may meet: a free port of the machine that this actor is on."""
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{host or ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def pid(self) -> int:
        """The process of the actor."""
        return os.getpid()

    def answer(self, call: Call) -> Answer:
        """Do what is asked."""
        if self._rank is None:
            from sensorium.assembly.ranks import Rank

            self._rank = Rank()
        answer: Answer = self._rank.answer(call)
        return answer


class RayRanks:
    """All ranks of a learner as actors, one GPU or CPU each. ``exchange`` is a folder that all machines see."""

    def __init__(
        self, settings: Sequence[RankSettings], exchange: Path, start_s: float, reply_s: float, address: str
    ) -> None:
        self._exchange, self._reply_s, self._local = exchange, reply_s, not address
        on_gpus = settings[0].device != "cpu"
        needs = ray_needs(settings[0].recipe, gpus=on_gpus)
        self._ray, self._connected = connect(address, needs), True
        self._actors: list[Any] = []
        try:
            self._actors = self._place(len(settings), on_gpus)
            self.pids = self._first([actor.pid.remote() for actor in self._actors], start_s, on_gpus)
            meeting = self._first([self._actors[0].meeting.remote(LOCALHOST if self._local else "")], start_s, on_gpus)[0]
            opened = [replace(one, meeting=meeting) for one in settings]
            try:
                refuse_other_versions(self._ask_each([Call("open", (one,)) for one in opened], start_s))
            except LearnerLost as error:
                if IN_USE.search(str(error)):
                    raise LearnerLost(
                        f"the port at which the learner's ranks were to meet, {meeting}, was taken by another process. "
                        "Start the run again: it chooses another one."
                    ) from error
                raise
        except BaseException:
            self._end()
            raise

    def ask(self, name: str, *given: Any) -> Answer:
        """Ask all ranks the same; the answer is that of rank 0."""
        call = self._ray.put(Call(name, given))  # once for all ranks of a machine
        return self._ask_each([call] * len(self._actors), self._reply_s, name)[0]

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        self._end()
        shutil.rmtree(self._exchange, ignore_errors=True)

    def _place(self, count: int, on_gpus: bool) -> list[Any]:
        paths = os.environ.get("PYTHONPATH", "")
        loopback = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "PYTHONPATH": paths}
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(on_gpus), "max_restarts": 0}
        if self._local:
            options["runtime_env"] = {"env_vars": loopback}
        actor = self._ray.remote(RankActor)
        return [actor.options(**options).remote() for _ in range(count)]

    def _first(self, references: Sequence[Any], limit_s: float, on_gpus: bool) -> list[Any]:
        """What actors answer to questions of their own; actors that are not placed in time are a cluster without room."""
        try:
            each = "1 CPU and 1 GPU" if on_gpus else "1 CPU"
            return first_answers(self._ray, references, limit_s, "the learner's ranks", each)
        except self._ray.exceptions.GetTimeoutError as error:
            raise LearnerLost(
                f"Ray did not place the learner's ranks within {limit_s:g} s (cluster.start_s): others use the cluster, or "
                f"it is too small. Free now: {free(self._ray)}; 'ray status' has more."
            ) from error
        except self._ray.exceptions.RayActorError as error:
            raise LearnerLost(f"a rank of the learner ended before it was ready: {short(error)}") from error

    def _ask_each(self, calls: Sequence[Any], limit_s: float, name: str = "open") -> list[Answer]:
        if not self._actors:
            raise LearnerLost("the ranks of the learner were ended; start the run again with --resume.")
        ray = self._ray
        waiting = {
            actor.answer.remote(call): rank for rank, (actor, call) in enumerate(zip(self._actors, calls, strict=True))
        }
        answers: dict[int, Answer] = {}
        lost: list[str] = []
        until = time.monotonic() + limit_s
        while waiting:
            if lost or any(answer.error for answer in answers.values()):
                until = min(until, time.monotonic() + GRACE_S)
            ready, _ = ray.wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            rank = waiting.pop(ready[0])
            try:
                answers[rank] = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                lost.append(f"rank {rank} of the learner, an actor of Ray, was lost: {short(error)}")
        try:
            return judged(answers, len(self._actors), lost, name, limit_s)
        except SharedError as shared:
            raise shared.error from None
        except SensoriumError:
            self._end()
            raise

    def _end(self) -> None:
        for actor in self._actors:
            with suppress(Exception):  # one that is dead already
                self._ray.kill(actor)
        self._actors = []
        if self._connected:
            self._connected = False
            disconnect()
