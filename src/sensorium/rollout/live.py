"""A live environment in a thread of its own: each call has a deadline, and its result is checked."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from itertools import islice
from typing import TYPE_CHECKING, Any

from sensorium.cluster.pool import Worker, WorkerFailure, WorkerPool
from sensorium.envs.protocol import Environment, Observation, StepResult, checked, checked_reset, checked_step
from sensorium.vocabulary.content import Media, Message
from sensorium.vocabulary.errors import (
    EnvironmentFailure,
    EnvironmentLost,
    MediaError,
    ModelError,
    RecipeError,
    SensoriumError,
    ServerLost,
    SpanMismatch,
    WorkersLost,
)
from sensorium.vocabulary.plain import attempt, printable, text_of, words
from sensorium.vocabulary.task import Task

if TYPE_CHECKING:  # they import torch; the environment service does without
    from sensorium.engines.protocol import Engine
    from sensorium.models.chat_processor import ChatProcessor

TOGETHER = 64  # media prepared at a time; after each lot those who waited for it continue

MakeEnvironment = Callable[[Task], Environment]
"""Builds a task's environment. Where it has a true ``instant``, or ``instant(task)``, building is plain computation too.

Where it has ``start_s``, building may take so long.
"""

# Where in an episode the clock decided, beside the steps (0, 1, …); a demonstration's places are -10, -11, …
RESET, CREATE, CLOSE, DEMONSTRATE = -1, -2, -3, -10


class Preparation:
    """Prepares media in a thread. One instance serves all episodes of a rollout.

    Media asked for in the same moment are prepared together, and each only once; one that cannot be prepared fails only
    those who asked for it.
    """

    def __init__(self, chat: "ChatProcessor") -> None:
        self._chat = chat
        self._waiting: dict[Media, asyncio.Future[MediaError | None]] = {}
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, media: Iterable[Media]) -> None:
        """Wait until media can be laid out; raises the error of one that cannot, and at once for a kind not taken."""
        new = self._chat.unprepared(media)
        if not new:
            return
        loop = asyncio.get_running_loop()
        answers = [self._waiting.setdefault(item, loop.create_future()) for item in new]
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work(), name="preparation of media")
        for answer in answers:
            error = await asyncio.shield(answer)  # others may wait for it too
            if error is not None:
                raise error

    async def _work(self) -> None:
        try:
            await asyncio.sleep(0)  # whoever is woken in the same moment may ask too
            while self._waiting:
                lot = list(islice(self._waiting, TOGETHER))
                errors = await asyncio.to_thread(self._chat.prepare, lot)
                for item in lot:
                    self._waiting.pop(item).set_result(errors.get(item))
        except Exception as error:
            for answer in self._waiting.values():
                answer.set_exception(error)
        finally:
            self._waiting.clear()


@dataclass
class Deadlines:
    """Deadlines of environments that fired, by (episode id, place). Known ones are repeated, not waited for again.

    A place is the turn of a step, or one of the numbers above.
    """

    known: Mapping[tuple[str, int], str] = field(default_factory=dict)
    fired: dict[tuple[str, int], str] = field(default_factory=dict)


class LiveEnvironment:
    """The environment of one episode. Whatever it does wrong is an EnvironmentFailure (or a MediaError).

    An ``instant`` environment is plain computation and runs in place. One that hangs is closed from another thread, which
    may be what ends it. ``wary`` is for options that somebody else chose: reset and demonstrate may then take long, so they
    run in a thread, under the deadline, for an instant environment too.
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
        order: Sequence[int] = (),
    ) -> None:
        self._wary, self._order = wary, order
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

    async def step(self, response: str, turn: int, usage: tuple[int, int, bool] | None = None) -> StepResult:
        """Act on a response. ``usage``, if known: tokens of its context and of itself, and whether its budget cut it."""
        assert self._environment is not None
        noted = attempt(getattr, self._environment, "response_usage", None)[0]
        if noted is not None and usage is not None:
            attempt(noted, *usage)
        return checked_step(await self._call("step", turn, self._environment.step, response), self._name)

    async def demonstrate(self, turn: int) -> str:
        """A good response from the current state."""
        assert self._environment is not None
        if not hasattr(self._environment, "demonstrate"):
            raise EnvironmentFailure(f"environment '{self._name}' has no demonstrate(), so there is nothing to learn from")
        shown = await self._call("demonstrate", DEMONSTRATE - turn, self._environment.demonstrate)
        return checked(text_of, shown, self._name, "demonstrate")

    async def close(self) -> str:
        """Close it and release its thread; returns what went wrong, or nothing."""
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
        """Close it, without waiting, as soon as its current call is done."""
        self._given_up = True
        environment, self._environment = self._environment, None
        if environment is not None and _instant(environment):
            attempt(environment.close)
        elif environment is not None:
            with suppress(WorkerFailure):  # then nothing more can be done
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
            start_s = getattr(self._make, "start_s", 0.0)
            self._environment = await self._in_thread("create", CREATE, self._built, start_s)
            if _instant(self._environment):
                self._release()
        self._name = type(self._environment).__name__

    def _built_in_place(self) -> bool:
        instant = getattr(self._make, "instant", False)
        return attempt(instant, self._task)[0] is True if callable(instant) else instant is True

    def _built(self) -> Any:
        """Runs in the environment's thread, and closes there an environment that nobody waits for any longer."""
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

    async def _in_thread(self, what: str, place: int, function: Callable[[], Any], start_s: float = 0.0) -> Any:
        deadline_s = max(start_s, self._deadline_s)  # starts are not counted: they say nothing of how slow steps are
        try:
            call = await self._pool.call(function, deadline_s, self._worker, self._order, counted=not start_s)
        except WorkerFailure as error:
            self._given_up = True
            self._release()
            raise self._decided_by_clock(what, place, error) from error
        return self._outcome(what, call.value, call.error)

    def _outcome(self, what: str, value: Any, error: BaseException | None) -> Any:
        if error is None and isawaitable(value):
            attempt(getattr(value, "close", lambda: None))
            raise EnvironmentFailure(f"environment '{self._name}': its {what} is async, so it cannot be instant")
        if error is None:
            return value
        text, failed = attempt(str, error)
        reason = printable(text) if failed is None and isinstance(error, SensoriumError) else words(error)
        if isinstance(error, MediaError | SpanMismatch | EnvironmentLost):
            raise error
        if isinstance(error, EnvironmentFailure):
            raise EnvironmentFailure(reason) from error
        raise EnvironmentFailure(f"environment '{self._name}' failed in {what}: {reason}") from error

    def _refuse_known(self, place: int) -> None:
        """Repeat a deadline that fired before the run was resumed."""
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
        last_words, failed = attempt(lambda: str(getattr(self._environment, "last_words", "")))
        if last_words and failed is None:
            reason += f".{printable(last_words)}"
        self._deadlines.fired[(self._episode, place)] = reason
        return EnvironmentFailure(reason)

    def _release(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool.give_back(worker)


def _instant(environment: Any) -> bool:
    return bool(getattr(environment, "instant", False))


def media_of(messages: Iterable[Message]) -> list[Media]:
    """All media blocks of some messages, in order."""
    return [item for message in messages for item in message.media]


def refuse_strange_media(task: Task, messages: Sequence[Message], chat: "ChatProcessor", engine: "Engine") -> None:
    """Raise for the first medium of a kind that the model family or the engine lacks; names the task and the medium."""
    pairs = [(block, part) for block in media_of(messages) for part in block.parts]
    for block, item in pairs:
        for who, able in ((f"family {chat.family}", chat.modalities), ("the engine", engine.capabilities.modalities)):
            if item.kind not in able:
                what = "is" if item == block else "is heard with (use_audio_in_video)"
                raise ModelError(
                    f"task {task.id}: {who} takes {', '.join(sorted(able))} and not {item.kind}, which {item.name} {what}. "
                    "Use one that does (model.path, rollout.engine), or leave such tasks out."
                )


def refuse_strange_environments(
    tasks: Sequence[Task], make: MakeEnvironment, chat: "ChatProcessor", engine: "Engine", seconds: float
) -> None:
    """Start one environment of each kind among the tasks, and refuse media that the model or the engine lacks.

    One that fails here, or does not start in time, fails in play, where that is counted; wrong options are refused now.
    """
    kinds = {repr((spec.name, spec.options)): task for task in tasks if (spec := task.environment) is not None}
    pool = WorkerPool("environment")
    try:
        for task in kinds.values():
            refuse_strange_media(task, _first_shown(task, make, pool, seconds), chat, engine)
    finally:
        pool.close()


def _first_shown(task: Task, make: MakeEnvironment, pool: WorkerPool, seconds: float) -> tuple[Message, ...]:
    assert task.environment is not None
    seed = task.environment.seed
    worker = pool.lease()
    try:
        made = pool.call_now(lambda: make(task), seconds, worker)
        if isinstance(made.error, RecipeError):
            raise made.error
        if made.error is not None:
            return ()
        begun = pool.call_now(lambda: made.value.reset(seed), seconds, worker)
        worker.submit(lambda: made.value.close(), seconds)
        if isinstance(begun.error, ServerLost):
            raise WorkersLost(f"{begun.error}. Start it, or correct its address in the recipe.")
        head, observation = checked_reset(begun.value, "")
        return () if begun.error is not None else (*head, *observation.messages)
    except (WorkerFailure, EnvironmentFailure):  # not hidden: in play it fails its episodes, with the reason
        return ()
    finally:
        pool.give_back(worker)
