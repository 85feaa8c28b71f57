"""A live environment: created, asked and closed in one thread of its own, each call under guard and deadline.

Invariants: whatever the environment does, the episode hears an EnvironmentFailure (or a MediaError) and nothing else. What
the clock decided is handed to ``Deadlines``, so that a resumed run repeats it. An ``instant`` environment is plain
computation and runs in place. One that hangs is closed from another thread all the same: that may be what ends it.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from typing import Any

from sensorium.envs.protocol import Environment, Observation, StepResult
from sensorium.rollout.intake import checked_demonstration, checked_reset, checked_step
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import EnvironmentFailure, EnvironmentLost, MediaError, SensoriumError, SpanMismatch
from sensorium.vocabulary.plain import attempt, printable, words
from sensorium.vocabulary.task import Task
from sensorium.workers.pool import WorkerFailure, WorkerPool
from sensorium.workers.worker import Worker

MakeEnvironment = Callable[[Task], Environment]
"""Builds a task's environment. Where it has a true ``instant``, or ``instant(task)``, building is plain computation too."""

RESET, CREATE, CLOSE, DEMONSTRATE = -1, -2, -3, -10
"""Where in an episode the clock decided, beside the steps (0, 1, …); a demonstration's are -10, -11, …"""


@dataclass
class Deadlines:
    """What the clock decided of environments, by (episode id, place). What is known is repeated, not waited for again.

    A place is the turn of a step, or one of the numbers above.
    """

    known: Mapping[tuple[str, int], str] = field(default_factory=dict)
    fired: dict[tuple[str, int], str] = field(default_factory=dict)


class LiveEnvironment:
    """The environment of one episode.

    ``wary`` is for options that somebody else chose: what makes a start (reset) or searches for a way (demonstrate) may
    then take long, so it runs in a thread, under the deadline, for an instant environment too.
    """

    def __init__(
        self,
        pool: WorkerPool,
        make: MakeEnvironment,
        task: Task,
        deadline_s: float,
        deadlines: Deadlines,
        episode: str,
        wary: bool = False,
    ) -> None:
        self._wary = wary
        self._pool, self._make, self._task, self._deadline_s = pool, make, task, deadline_s
        self._deadlines, self._episode = deadlines, episode
        self._environment: Environment | None = None
        self._worker: Worker | None = None
        self._given_up = False
        self._name = task.environment.name if task.environment is not None else "question"

    async def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """Create it, and start it by its seed."""
        await self._create()
        assert self._environment is not None
        return checked_reset(await self._call("reset", RESET, self._environment.reset, seed), self._name)

    async def step(self, response: str, turn: int) -> StepResult:
        """Act on a response."""
        assert self._environment is not None
        return checked_step(await self._call("step", turn, self._environment.step, response), self._name)

    async def demonstrate(self, turn: int) -> str:
        """A good response from the current state."""
        assert self._environment is not None
        said = await self._call("demonstrate", DEMONSTRATE - turn, self._environment.demonstrate)
        return checked_demonstration(said, self._name)

    async def close(self) -> str:
        """Close it and give its thread back; returns what went wrong, or nothing."""
        environment = self._environment
        if environment is None:
            self._release()
            return ""
        try:
            self._refuse_known(CLOSE)
            self._environment = None
            await self._call("close", CLOSE, environment.close, instant=_instant(environment))
        except SensoriumError as error:
            return str(error)
        finally:
            self.abandon()
        return ""

    def abandon(self) -> None:
        """Nobody plays it any longer: close it when it is done with what it does, and do not wait for that."""
        self._given_up = True
        environment, self._environment = self._environment, None
        if environment is not None and _instant(environment):
            attempt(environment.close)
        elif environment is not None:
            with suppress(WorkerFailure):  # then nothing more can be done for it
                self._worker = self._worker or self._pool.lease()
                self._worker.submit(environment.close, self._deadline_s)
        self._release()

    async def _create(self) -> None:
        if self._built_in_place():
            self._environment = self._outcome("create", *attempt(self._make, self._task))
        else:
            self._refuse_known(CREATE)
            try:
                self._worker = self._pool.lease()
            except WorkerFailure as error:
                raise self._decided_by_clock("create", CREATE, error) from error
            self._environment = await self._in_thread("create", CREATE, self._built)
            if _instant(self._environment):
                self._release()
        self._name = type(self._environment).__name__

    def _built_in_place(self) -> bool:
        instant = getattr(self._make, "instant", False)
        return attempt(instant, self._task)[0] is True if callable(instant) else instant is True

    def _built(self) -> Any:
        """Runs in the environment's thread. One that is ready when nobody waits any longer is closed there."""
        made: Any = self._make(self._task)
        if self._given_up and not isawaitable(made):
            attempt(made.close)
        return made

    async def _call(
        self, what: str, place: int, method: Callable[..., Any], *arguments: Any, instant: bool | None = None
    ) -> Any:
        self._refuse_known(place)
        in_place = instant if instant is not None else _instant(self._environment)
        if in_place and not (self._wary and what in ("reset", "demonstrate")):
            return self._outcome(what, *attempt(method, *arguments))
        return await self._in_thread(what, place, partial(method, *arguments))

    async def _in_thread(self, what: str, place: int, function: Callable[[], Any]) -> Any:
        try:
            call = await self._pool.call(function, self._deadline_s, self._worker)
        except WorkerFailure as error:
            self._given_up = True
            self._release()
            raise self._decided_by_clock(what, place, error) from error
        return self._outcome(what, call.value, call.error)

    def _outcome(self, what: str, value: Any, error: BaseException | None) -> Any:
        """What a call returned; what it raised as the episode's failure."""
        if error is None and isawaitable(value):
            attempt(getattr(value, "close", lambda: None))
            raise EnvironmentFailure(f"environment '{self._name}': its {what} is async, so it cannot be instant")
        if error is None:
            return value
        said, failed = attempt(str, error)
        told = printable(said) if failed is None and isinstance(error, SensoriumError) else words(error)
        if isinstance(error, MediaError | SpanMismatch | EnvironmentLost):
            raise error
        if isinstance(error, EnvironmentFailure):
            raise EnvironmentFailure(told) from error
        raise EnvironmentFailure(f"environment '{self._name}' failed in {what}: {told}") from error

    def _refuse_known(self, place: int) -> None:
        """Repeat what the clock decided before the run was resumed."""
        reason = self._deadlines.known.get((self._episode, place))
        if reason is not None:
            self._deadlines.fired[(self._episode, place)] = reason
            raise EnvironmentFailure(reason)

    def _decided_by_clock(self, what: str, place: int, error: WorkerFailure) -> EnvironmentFailure:
        overdue = f"environment '{self._name}' {error}"
        reason = overdue.replace("did not answer", f"did not answer {what}")
        if reason == overdue:
            reason = (
                f"environment '{self._name}' was not asked to {what}: {error}. End what they wait for, or restart the run"
            )
        waits_for, failed = attempt(lambda: str(getattr(self._environment, "waits_for", "")))
        if waits_for and failed is None:
            reason += f"; it waits for a place: {printable(waits_for)}"
        self._deadlines.fired[(self._episode, place)] = reason
        return EnvironmentFailure(reason)

    def _release(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool.give_back(worker)


def _instant(environment: Any) -> bool:
    return bool(getattr(environment, "instant", False))
