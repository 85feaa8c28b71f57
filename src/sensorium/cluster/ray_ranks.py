"""Ranks as Ray actors: on a cluster that runs, or on one that is started for the run. Ray places them."""

import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sensorium.cluster.messages import Answer, Call, RankSettings
from sensorium.cluster.rank_failures import SharedError, judged, refuse_other_versions
from sensorium.recipe.cluster_checks import ray_needs
from sensorium.vocabulary.errors import LearnerLost, SensoriumError
from sensorium.workers.ray_cluster import connect, disconnect, first_answers, free, short

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
            from sensorium.cluster.rank import Rank

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
