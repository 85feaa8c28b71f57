"""The environments that a service offers, and its sessions. Clients are not trusted: they cannot name code.

Invariants of sessions:
- A step has a number, 1, 2, …. The one after the last acts; the last one again gives the same reply (or waits for it); any
  other is refused. So a client that lost a reply asks again, and nothing acts twice.
- Opening a session again under its id, with the same request, gives the same first observation.
- A client that stops waiting does not stop the environment: the reply is kept for the next time.
- At most ``capacity`` sessions exist: open, opening, or only reserved, as VAGEN's clients do before they reset. One that
  was not used during its lease is closed, reserved or not. One whose connection broke, and that was not used since (a
  trainer that was killed), is closed when its place is needed.
- A reserved session outlives its environment: a reset begins another one in its place, also after a failure.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from typing import Any

import yaml

from sensorium.cluster.pool import WorkerFailure, WorkerPool
from sensorium.data.media_files import open_regular
from sensorium.data.media_store import MediaStore
from sensorium.envs.adapters.content import PLACEHOLDER
from sensorium.envs.protocol import Environment
from sensorium.envs.remote.instances import InstancePool, poolable
from sensorium.envs.remote.wire import Json, reset_to_json, step_to_json
from sensorium.recipe.registry import (
    build,
    closed_options,
    needs_a_row,
    parameters_of,
    plays_for_anybody,
    resolve,
    table,
    wrong_options,
)
from sensorium.rollout.live import Deadlines, LiveEnvironment
from sensorium.services.application import Refusal, whole
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import EnvironmentLost, RecipeError, SensoriumError, nearest
from sensorium.vocabulary.plain import words
from sensorium.vocabulary.task import EnvironmentSpec, Task

NOT_SERVED = ("question", "agent", "remote", "isolated")
MAX_ID = 200
MAX_SEED = 2**62
ABANDONED_S = (
    60.0  # how long a client whose connection broke may be away before its places can be taken; clients retry less
)


@dataclass(frozen=True)
class Offer:
    """An environment under a name of its own, with options that clients cannot change."""

    environment: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Offers:
    """Environments by name. A client's options go beside an offer's own, except those that say what code runs."""

    def __init__(self, offers: Mapping[str, Offer]) -> None:
        self.offers = dict(offers)
        if not self.offers:
            raise RecipeError(
                "the service offers no environment; name some, as in: sensorium serve env frozen_lake sokoban."
            )
        for name, offer in self.offers.items():
            kind = resolve("environment", offer.environment, f"environment '{name}'")
            if needs_a_row(kind):
                raise RecipeError(f"environment '{name}' plays the questions of rows, and cannot be served by seeds.")
            closed = {key: parameter for key, parameter in parameters_of(kind).items() if key in closed_options(kind)}
            for key, parameter in closed.items():
                if parameter.default is Parameter.empty and key not in offer.options:
                    raise RecipeError(
                        f"environment '{name}' needs '{key}', which a client may not set. Set it in a file, "
                        f"{{environment: {offer.environment}, options: {{{key}: …}}}}, and offer that: {name}=FILE.yaml."
                    )

    @property
    def environments(self) -> dict[str, str]:
        return {name: offer.environment for name, offer in self.offers.items()}

    def chosen(self, name: Any, options: Any) -> tuple[str, dict[str, Any]]:
        """The environment and options of a client's request; a wrong request is a RecipeError."""
        if not isinstance(name, str) or name not in self.offers:
            raise RecipeError(f"unknown environment '{name!s:.60}'{nearest(str(name)[:60], list(self.offers))}")
        if not isinstance(options, Mapping):
            raise RecipeError("the options of an environment are an object.")
        offer = self.offers[name]
        closed = {*closed_options(resolve("environment", offer.environment)), *offer.options}
        for key, value in options.items():
            if key in closed and (key not in offer.options or value != offer.options[key]):
                raise RecipeError(f"the option '{key}' of environment '{name}' is the server's own.")
        chosen = {**offer.options, **options}
        _, problem = wrong_options("environment", offer.environment, chosen)
        if problem:
            raise RecipeError(problem)
        return offer.environment, chosen

    def built(self, name: Any, options: Any, store: MediaStore) -> Any:
        environment, chosen = self.chosen(name, options)
        return build("environment", environment, chosen, f"environment '{name}'", store=store)

    def isolated(self, name: Any, options: Any, store: MediaStore, memory_mib: int, deadline_s: float) -> Any:
        """The environment, in a process of its own."""
        from sensorium.envs.remote.isolated import IsolatedEnvironment

        environment, chosen = self.chosen(name, options)
        return IsolatedEnvironment(store, environment, chosen, memory_mib, deadline_s)

    def pooled(self, name: Any, options: Any, store: MediaStore, pool: InstancePool) -> Any:
        """The environment as an instance of a pool, if it can be one."""
        environment, chosen = self.chosen(name, options)
        if poolable(Task(str(name), environment=EnvironmentSpec(environment, chosen))):
            return pool.environment(environment, chosen, store)
        return self.built(name, options, store)

    def content_key(self, name: Any, options: Any, seed: int) -> str:
        """What a seed leads to, as the environment describes it."""
        environment, chosen = self.chosen(name, options)
        kind = resolve("environment", environment)
        if not hasattr(kind, "content_key"):
            raise RecipeError(f"environment '{name}' has no content_key(seed, options).")
        return str(kind.content_key(seed, chosen))


def rows_offer(given: str) -> tuple[str, Offer]:
    """``NAME=FILE``: the rows of a source as an environment; the file is YAML, ``{source: parquet, options: {…}}``."""
    name, content = _in_file(given, "source", f"--rows {given}")
    return name, Offer("rows", {"source": content["source"], "options": dict(content.get("options") or {})})


def environment_offer(given: str) -> tuple[str, Offer]:
    """``NAME``, ``NAME=module:Class``, or ``NAME=FILE.yaml`` with ``{environment: gymnasium, options: {id: …}}``."""
    name, _, place = given.partition("=")
    if not place.endswith((".yaml", ".yml")):
        return name, Offer(place or name)
    name, content = _in_file(given, "environment", given)
    return name, Offer(str(content["environment"]), dict(content.get("options") or {}))


def _in_file(given: str, key: str, where: str) -> tuple[str, Mapping[str, Any]]:
    """The name and the content of ``NAME=FILE``: ``key`` and options."""
    name, _, file = given.partition("=")
    try:
        with open_regular(Path(file)) as opened:
            content = yaml.safe_load(opened)
    except (OSError, yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{where}: the file cannot be read: {error}") from error
    if not name or not isinstance(content, Mapping) or set(content) - {key, "options"} or key not in content:
        raise RecipeError(f"{where}: it is NAME=FILE, and the file holds {key} and options, as a recipe's tasks do.")
    return name, content


def usual_offers() -> dict[str, Offer]:
    """Every registered environment that plays from seeds and runs no code of a client's choosing."""
    names = [name for name in table("environment") if name not in NOT_SERVED]
    return {name: Offer(name) for name in names if plays_for_anybody(resolve("environment", name))}


def seed_of(given: Any) -> int:
    """A seed as other systems' clients send it: a whole number from 0, spelled 7, 7.0 or "7". All else is refused."""
    found = re.fullmatch(r"\s*([0-9]{1,19})(?:\.0*)?\s*", given) if isinstance(given, str) else None
    seed = int(found[1]) if found else whole(given)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise Refusal(422, f"a seed is a whole number from 0 to {MAX_SEED}, not {given!r:.60}")
    return seed


@dataclass
class Session:
    """One environment and its last reply. ``number`` counts its steps. Without an environment it is only reserved.

    ``reserved``: a client holds the id for further resets; ``problem`` says why these cannot succeed. ``asker`` is the
    connection that used it last, ``abandoned`` when that broke.
    """

    id: str
    environment: str
    options: Any
    reserved: bool = False
    problem: str = ""
    seed: int | None = None
    live: LiveEnvironment | None = None
    opening: "asyncio.Task[Json] | None" = None
    number: int = 0
    acting: "asyncio.Task[Json] | None" = None
    done: bool = False
    used: float = field(default_factory=time.monotonic)
    asker: object = None
    abandoned: float | None = None

    def wanted(self) -> None:
        """A client uses it: its lease begins again."""
        self.used, self.asker, self.abandoned = time.monotonic(), None, None

    @property
    def busy(self) -> bool:
        return any(task is not None and not task.done() for task in (self.opening, self.acting))

    @property
    def head(self) -> list[Json] | None:
        """The messages before the first observation; None where it was not reset."""
        if self.opening is None or not self.opening.done() or self.opening.cancelled() or self.opening.exception():
            return None
        head: list[Json] = self.opening.result()["head"]
        return head


class SessionTable:
    """All sessions of a server. ``make`` builds an environment from name and options; by default from the offers.

    With ``pool``, which it closes, environments are instances that later sessions use again.
    """

    def __init__(
        self,
        offers: Offers,
        store: MediaStore,
        capacity: int = 1024,
        lease_s: float = 3600.0,
        deadline_s: float = 60.0,
        make: Callable[[str, Json], Environment] | None = None,
        pool: InstancePool | None = None,
    ) -> None:
        self.offers, self.store, self.capacity, self.lease_s, self.deadline_s = offers, store, capacity, lease_s, deadline_s
        self.sessions: dict[str, Session] = {}
        self.opened = self.steps = self.reaped = self.failed = 0
        self._make = make or (
            (lambda name, options: offers.built(name, options, store))
            if pool is None
            else lambda name, options: offers.pooled(name, options, store, pool)
        )
        self._instances = pool
        # With instances: calls that wait for one must leave room for those that close a session and set one free.
        self._pool = WorkerPool("environment", size=max(1, capacity) * (1 if pool is None else 2))
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self, id: str, environment: Any, options: Any, seed: int) -> Json:
        """Open a session and reset its environment; again under the same id gives the same."""
        session = self.sessions.get(id)
        if session is None:
            self._take_places([id])
            self._refuse_wrong_request(environment, options)
            session = self._begin(Session(id, environment, options), seed)
        elif (session.environment, repr(session.options), session.seed) != (environment, repr(options), seed):
            raise Refusal(409, f"there is a session '{id}' of another environment; choose another id")
        session.wanted()
        return await self._outcome(session, session.opening)

    def reserve(self, requests: Mapping[str, tuple[str, Any] | str]) -> None:
        """Hold places under ids, all or none: for an environment with options, or for the reason why there is none."""
        self._take_places([id for id in requests if id not in self.sessions])
        for request in requests.values():
            if not isinstance(request, str):
                self._refuse_wrong_request(*request)
        for id, request in requests.items():
            if id in self.sessions:
                self._end(self.sessions[id])
            environment, options, problem = ("", {}, request) if isinstance(request, str) else (*request, "")
            self.sessions[id] = Session(id, environment, options, reserved=True, problem=problem)

    async def reset(self, id: str, seed: int) -> Json:
        """Begin a reserved session's environment by a seed, in place of its former one."""
        before = self._known(id)
        before.wanted()
        if before.problem:
            raise Refusal(422, before.problem)
        if before.live is not None:
            self._end(before)
        session = self._begin(Session(id, before.environment, before.options, reserved=True), seed)
        return await self._outcome(session, session.opening)

    async def act(self, id: str, response: str) -> Json:
        """Act, for protocols whose steps have no number: a repeated one acts again."""
        return await self.step(id, self._known(id).number + 1, response)

    async def step(self, id: str, number: int, response: str) -> Json:
        """Act, once; the last step, repeated, gives the same reply."""
        session = self._known(id)
        session.wanted()
        if session.live is None:
            raise Refusal(409, session.problem or f"session '{id}' was not reset, or its environment failed")
        if number == session.number and session.acting is not None:
            return await self._outcome(session, session.acting)
        if number != session.number + 1:
            raise Refusal(409, f"session '{id}' is at step {session.number}; the next one is {session.number + 1}")
        if session.busy:
            raise Refusal(409, f"session '{id}' is still at step {session.number}")
        if session.done:
            raise Refusal(410, f"session '{id}' has ended; open another one")
        session.number, live = number, session.live

        async def act() -> Json:
            result = await live.step(response, number)
            self.steps += 1
            session.done = result.done or result.truncated or result.observation is None
            return step_to_json(result)

        session.acting = asyncio.create_task(act())
        return await self._outcome(session, session.acting)

    async def demonstrate(self, id: str) -> Json:
        """A good response from the state of a session, which stays as it is."""
        session = self._known(id)
        session.wanted()
        if session.live is None or session.busy or session.done:
            raise Refusal(409, f"session '{id}' is busy or has ended: there is nothing to demonstrate")
        try:
            return {"response": await session.live.demonstrate(session.number)}
        except SensoriumError as error:
            raise Refusal(_status(error), str(error)) from error

    async def content_keys(self, environment: Any, options: Any, seeds: list[int]) -> list[str]:
        """What seeds lead to. Runs in a thread, under the deadline: options may make it take long."""
        try:
            call = await self._pool.call(
                lambda: [self.offers.content_key(environment, options, seed) for seed in seeds], self.deadline_s
            )
        except WorkerFailure as overdue:
            why = f"the seeds of '{environment!s:.60}' {overdue}; ask for fewer, or for smaller ones"
            raise Refusal(422, why) from overdue
        if call.error is not None:
            raise Refusal(422, _reason(call.error)) from call.error
        found: list[str] = call.value
        return found

    def renew(self, id: str) -> Json:
        """Keep a session for another lease."""
        session = self._known(id)
        session.wanted()
        return {"step": session.number, "done": session.done}

    async def close(self, id: str) -> Json:
        """Close a session; closing an unknown one is no error."""
        session = self.sessions.pop(id, None)
        if session is not None:
            self._end(session)
        return {"closed": True}

    def reap(self) -> int:
        """Close the sessions that were not used during their lease; returns how many."""
        now = time.monotonic()
        idle = [session for session in self.sessions.values() if not session.busy and now - session.used > self.lease_s]
        for session in idle:
            del self.sessions[session.id]
            self._end(session)
        self.reaped += len(idle)
        return len(idle)

    def asked_by(self, asker: object, id: Any, gone: bool) -> None:
        """Note the connection that used a session last, and whether it is gone."""
        session = self.sessions.get(id) if isinstance(id, str) else None
        if session is not None:
            session.asker, session.abandoned = asker, time.monotonic() if gone else None

    def abandon(self, asker: object) -> None:
        """A connection broke: after a while its sessions are closed when their places are needed."""
        for session in self.sessions.values():
            if session.asker is asker:
                session.abandoned = time.monotonic()

    async def shut(self) -> None:
        for id in list(self.sessions):
            await self.close(id)
        if self._closing:
            await asyncio.wait(self._closing, timeout=5)
        if self._instances is not None:
            await asyncio.to_thread(self._instances.close)
        self._pool.close()

    def counts(self) -> Json:
        counters = {"opened": self.opened, "steps": self.steps, "reaped": self.reaped, "failed": self.failed}
        return {"sessions": len(self.sessions), "capacity": self.capacity, **counters}

    def _take_places(self, ids: Sequence[str]) -> None:
        """Refuse new sessions where there are no places for them; abandoned ones are closed, the oldest first."""
        if not all(0 < len(id) <= MAX_ID for id in ids):
            raise Refusal(422, f"the id of a session has 1 to {MAX_ID} characters")
        if len(ids) > self.capacity:
            raise Refusal(422, f"{len(ids)} sessions at once are more than the server's --capacity, {self.capacity}")
        while len(self.sessions) + len(ids) > self.capacity:
            since = {s.id: s.abandoned for s in self.sessions.values() if s.abandoned is not None and not s.busy}
            if not since or time.monotonic() - min(since.values()) < ABANDONED_S:
                raise Refusal(
                    503,
                    f"the server is full: {len(self.sessions)} sessions are open and its --capacity is {self.capacity} "
                    "(rollout.concurrency bounds the episodes that a run plays at once)",
                    retry_after_s=1.0,
                )
            self._end(self.sessions.pop(min(since, key=lambda id: since[id])))
            self.reaped += 1

    def _refuse_wrong_request(self, environment: Any, options: Any) -> None:
        try:
            self.offers.chosen(environment, options)
        except RecipeError as error:
            raise Refusal(422 if environment in self.offers.offers else 404, str(error)) from error

    def _begin(self, session: Session, seed: int) -> Session:
        """Build and reset an environment, and add the session."""
        task = Task(session.id, environment=EnvironmentSpec(session.environment, session.options, seed))

        def make(_: Task) -> Environment:
            return self._make(session.environment, session.options)

        live = LiveEnvironment(self._pool, make, task, self.deadline_s, Deadlines(), session.id, wary=True)

        async def first() -> Json:
            return reset_to_json(*await live.reset(seed))

        session.seed, session.live, session.opening = seed, live, asyncio.create_task(first())
        self.sessions[session.id] = session
        self.opened += 1
        return session

    async def _outcome(self, session: Session, task: "asyncio.Task[Json] | None") -> Json:
        """The result of a task, which continues if nobody waits any longer."""
        assert task is not None, "a session with an environment was opened"
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Refusal(410, f"session '{session.id}' was closed") from None
            raise
        except Exception as error:
            if self.sessions.get(session.id) is session:
                self.failed += 1
                self._end(self.sessions.pop(session.id))  # its place is free again
                if session.reserved:
                    self.sessions[session.id] = Session(session.id, session.environment, session.options, reserved=True)
            wrong_request = task is session.opening and isinstance(error.__cause__, RecipeError)
            raise Refusal(422 if wrong_request else _status(error), _reason(error)) from error

    def _known(self, id: str) -> Session:
        session = self.sessions.get(id)
        if session is None:
            raise Refusal(
                404, f"there is no session '{id:.80}'; it was closed, its lease is over, or the server was restarted"
            )
        return session

    def _end(self, session: Session) -> None:
        """Close a session's environment when its current task is done; nobody waits for that."""

        async def close() -> None:
            for task in filter(None, (session.opening, session.acting)):
                await asyncio.wait({task})
                task.exception()  # was reported to the client already
            if session.live is not None:
                await session.live.close()

        closing = asyncio.ensure_future(close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _status(error: BaseException) -> int:
    """Of an episode that failed; or whose environment's process was lost, so that it may be played again."""
    return 502 if isinstance(error, EnvironmentLost) else 410


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, SensoriumError) else words(error)


def text_of_messages(messages: Sequence[Json]) -> str:
    """The text of messages, one after another."""
    return "\n".join("".join(block.get("text", "") for block in message["content"]) for message in messages)


def with_images(messages: Sequence[Json]) -> str:
    """The text of messages with ``<image>`` for each picture; one that is in the text itself is changed."""

    def text(block: Json) -> str:
        return block["text"].replace(PLACEHOLDER, "< image>") if "text" in block else PLACEHOLDER

    return "\n".join("".join(map(text, message["content"])) for message in messages)


def pictures(messages: Sequence[Json], store: MediaStore) -> list[bytes]:
    """The bytes of all pictures of messages, in order."""
    blocks = [block for message in messages for block in message["content"] if "hash" in block]
    return [store.bytes_of(Media("picture", block["hash"])) for block in blocks]


def paid(outcome: Json) -> float | None:
    """A step's reward as one number; None where the environment gives none."""
    reward = outcome["reward"]
    return sum(reward.values()) if isinstance(reward, dict) else reward
