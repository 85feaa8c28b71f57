"""Which environments a service offers. Clients are not trusted: they choose among these, and cannot name code."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from typing import Any

from sensorium.cluster.pool import WorkerFailure, WorkerPool
from sensorium.data.media_files import open_regular
from sensorium.data.media_store import MediaStore
from sensorium.envs.adapters.content import PLACEHOLDER
from sensorium.envs.protocol import Environment
from sensorium.envs.remote.wire import Json, reset_to_json, step_to_json
from sensorium.recipe.names import (
    build,
    check,
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
from sensorium.vocabulary.errors import RecipeError, SensoriumError, nearest
from sensorium.vocabulary.plain import words
from sensorium.vocabulary.task import EnvironmentSpec, Task

NOT_SERVED = ("question", "remote", "isolated")


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
            check("environment", offer.environment, f"environment '{name}'")
            if needs_a_row(resolve("environment", offer.environment)):
                raise RecipeError(f"environment '{name}' plays the questions of rows, and cannot be served by seeds.")
            kind = resolve("environment", offer.environment)
            needed = [
                key
                for key, parameter in parameters_of(kind).items()
                if key in closed_options(kind) and parameter.default is Parameter.empty and key not in offer.options
            ]
            if needed:
                raise RecipeError(
                    f"environment '{name}' needs '{needed[0]}', which a client may not set. Say it in a file, "
                    f"{{environment: {offer.environment}, options: {{{needed[0]}: …}}}}, and offer that: {name}=FILE.yaml."
                )

    @property
    def environments(self) -> dict[str, str]:
        """The environment behind each name."""
        return {name: offer.environment for name, offer in self.offers.items()}

    def chosen(self, name: Any, options: Any) -> tuple[str, dict[str, Any]]:
        """What a client's name and options stand for; RecipeError says what is wrong with them."""
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
        """The environment."""
        environment, chosen = self.chosen(name, options)
        return build("environment", environment, chosen, f"environment '{name}'", store=store)

    def isolated(self, name: Any, options: Any, store: MediaStore, memory_mib: int, deadline_s: float) -> Any:
        """The environment, in a process of its own."""
        from sensorium.envs.remote.isolated import IsolatedEnvironment

        environment, chosen = self.chosen(name, options)
        return IsolatedEnvironment(store, environment, chosen, memory_mib, deadline_s)

    def content_key(self, name: Any, options: Any, seed: int) -> str:
        """What a seed leads to."""
        environment, chosen = self.chosen(name, options)
        kind = resolve("environment", environment)
        if not hasattr(kind, "content_key"):
            raise RecipeError(f"environment '{name}' has no content_key(seed, options).")
        return str(kind.content_key(seed, chosen))


def rows_offer(given: str) -> tuple[str, Offer]:
    """``NAME=FILE``: the rows of a source as an environment; the file is YAML, ``{source: parquet, options: {…}}``."""
    name, held = _in_file(given, "source", f"--rows {given}")
    return name, Offer("rows", {"source": held["source"], "options": dict(held.get("options") or {})})


def environment_offer(given: str) -> tuple[str, Offer]:
    """``NAME``, ``NAME=module:Class``, or ``NAME=FILE.yaml`` with ``{environment: gymnasium, options: {id: …}}``."""
    name, _, place = given.partition("=")
    if not place.endswith((".yaml", ".yml")):
        return name, Offer(place or name)
    name, held = _in_file(given, "environment", given)
    return name, Offer(str(held["environment"]), dict(held.get("options") or {}))


def _in_file(given: str, key: str, where: str) -> tuple[str, Mapping[str, Any]]:
    """The name and what the file of ``NAME=FILE`` holds: ``key`` and options."""
    import yaml

    name, _, file = given.partition("=")
    try:
        with open_regular(Path(file)) as opened:
            held = yaml.safe_load(opened)
    except (OSError, yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{where}: the file cannot be read: {error}") from error
    if not name or not isinstance(held, Mapping) or set(held) - {key, "options"} or key not in held:
        raise RecipeError(f"{where}: it is NAME=FILE, and the file holds {key} and options, as a recipe's tasks do.")
    return name, held


def usual_offers() -> dict[str, Offer]:
    """Every registered environment that plays from seeds and runs no code of a client's choosing."""
    found = {}
    for name in table("environment"):
        kind = resolve("environment", name) if name not in NOT_SERVED else None
        if kind is not None and plays_for_anybody(kind):
            found[name] = Offer(name)
    return found


# Invariants: - A step has a number, 1, 2, …. The one after the last acts; the last one again gives the same reply (or
# waits for it, if it is still acting); any other is refused. So a client that lost a reply asks again, and nothing acts
# twice. - Opening a session again under its id, with the same wish, gives the same first observation. - Who stops
# waiting does not stop the environment: its reply is kept for the next time it is asked for. - At most ``capacity``
# sessions exist: open, opening, or only reserved, as VAGEN's clients do before they reset. One that nobody asked for
# during its lease is closed, reserved or not. One whose connection broke, and that nobody asked for since (a trainer
# that was killed), gives its place up to who finds none. - A reserved session outlives its environment: reset begins
# another one in its place, and so does one after a failure.


MOST_ID = 200
LARGEST_SEED = 2**62

FORSAKEN_S = 60.0
"""How long a client whose connection broke may stay away before its sessions give their places up; clients try for less."""


def seed_of(given: Any) -> int:
    """A seed as other systems' clients send it: a whole number from 0, spelled 7, 7.0 or "7". All else is refused."""
    found = re.fullmatch(r"\s*([0-9]{1,19})(?:\.0*)?\s*", given) if isinstance(given, str) else None
    seed = int(found[1]) if found else whole(given)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise Refusal(422, f"a seed is a whole number from 0 to {LARGEST_SEED}, not {given!r:.60}")
    return seed


@dataclass
class Session:
    """One environment and what it last replied. ``number`` counts its steps. Without an environment it is reserved only.

    ``reserved``: a client holds the id for further resets; ``problem`` says why these cannot succeed.
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
    asked: float = field(default_factory=time.monotonic)
    asker: object = None
    forsaken: float | None = None

    def wanted(self) -> None:
        """Somebody asks for it."""
        self.asked, self.asker, self.forsaken = time.monotonic(), None, None

    @property
    def busy(self) -> bool:
        """Whether it is opening or acting."""
        return any(task is not None and not task.done() for task in (self.opening, self.acting))

    @property
    def head(self) -> list[Json] | None:
        """The messages before the first observation; None where it was not reset."""
        if self.opening is None or not self.opening.done() or self.opening.cancelled() or self.opening.exception():
            return None
        head: list[Json] = self.opening.result()["head"]
        return head


class SessionTable:
    """All sessions of a server. ``make`` builds an environment from name and options; by default the offers' own."""

    def __init__(
        self,
        offers: Offers,
        store: MediaStore,
        capacity: int = 1024,
        lease_s: float = 3600.0,
        deadline_s: float = 60.0,
        make: Callable[[str, Json], Environment] | None = None,
    ) -> None:
        self.offers, self.store, self.capacity, self.lease_s, self.deadline_s = offers, store, capacity, lease_s, deadline_s
        self.sessions: dict[str, Session] = {}
        self.opened = self.steps = self.reaped = self.failed = 0
        self._make = make or (lambda name, options: offers.built(name, options, store))
        self._pool = WorkerPool("environment", size=max(1, capacity))
        self._closing: set[asyncio.Task[Any]] = set()

    async def open(self, id: str, environment: Any, options: Any, seed: int) -> Json:
        """Open a session and reset its environment; again under the same id gives the same."""
        session = self.sessions.get(id)
        if session is None:
            self._make_room([id])
            self._refuse_senseless(environment, options)
            session = self._begin(Session(id, environment, options), seed)
        elif (session.environment, repr(session.options), session.seed) != (environment, repr(options), seed):
            raise Refusal(409, f"there is a session '{id}' of another environment; choose another id")
        session.wanted()
        return await self._outcome(session, session.opening)

    def reserve(self, wishes: Mapping[str, tuple[str, Any] | str]) -> None:
        """Hold places under ids, all or none: for an environment with options, or for the reason why there is none."""
        self._make_room([id for id in wishes if id not in self.sessions])
        for wish in wishes.values():
            if not isinstance(wish, str):
                self._refuse_senseless(*wish)
        for id, wish in wishes.items():
            before = self.sessions.get(id)
            if before is not None:
                self._end(before)
            environment, options, problem = ("", {}, wish) if isinstance(wish, str) else (*wish, "")
            self.sessions[id] = Session(id, environment, options, reserved=True, problem=problem)

    async def reset(self, id: str, seed: int) -> Json:
        """Begin a reserved session's environment by a seed, in place of the one that it had."""
        before = self._known(id)
        before.wanted()
        if before.problem:
            raise Refusal(422, before.problem)
        if before.live is not None:
            self._end(before)
        session = self._begin(Session(id, before.environment, before.options, reserved=True), seed)
        return await self._outcome(session, session.opening)

    async def act(self, id: str, response: str) -> Json:
        """Act, for protocols whose steps have no number: one that is asked again acts again."""
        return await self.step(id, self._known(id).number + 1, response)

    async def step(self, id: str, number: int, response: str) -> Json:
        """Act, once; the last step again gives its reply again."""
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
        session.number = number
        session.acting = asyncio.create_task(self._act(session, response))
        return await self._outcome(session, session.acting)

    async def demonstrate(self, id: str) -> Json:
        """A good response from where a session is; nothing acts."""
        session = self._known(id)
        session.wanted()
        if session.live is None or session.busy or session.done:
            raise Refusal(409, f"session '{id}' is busy or has ended: there is nothing to demonstrate")
        try:
            return {"response": await session.live.demonstrate(session.number)}
        except SensoriumError as error:
            raise Refusal(410, str(error)) from error

    async def content_keys(self, environment: Any, options: Any, seeds: list[int]) -> list[str]:
        """What seeds lead to. Asked in a thread, under the deadline: options may make it take long."""

        def asked() -> list[str]:
            return [self.offers.content_key(environment, options, seed) for seed in seeds]

        try:
            call = await self._pool.call(asked, self.deadline_s)
        except WorkerFailure as overdue:
            raise Refusal(
                422, f"the seeds of '{environment!s:.60}' {overdue}; ask for fewer, or for smaller ones"
            ) from overdue
        if call.error is not None:
            told = str(call.error) if isinstance(call.error, SensoriumError) else words(call.error)
            raise Refusal(422, told) from call.error
        found: list[str] = call.value
        return found

    def renew(self, id: str) -> Json:
        """Keep a session for another lease."""
        session = self._known(id)
        session.wanted()
        return {"step": session.number, "done": session.done}

    async def close(self, id: str) -> Json:
        """Close a session; one that is not there is closed already."""
        session = self.sessions.pop(id, None)
        if session is not None:
            self._end(session)
        return {"closed": True}

    def reap(self) -> int:
        """Close the sessions that nobody asked for during their lease; returns how many."""
        now = time.monotonic()
        idle = [session for session in self.sessions.values() if not session.busy and now - session.asked > self.lease_s]
        for session in idle:
            del self.sessions[session.id]
            self._end(session)
        self.reaped += len(idle)
        return len(idle)

    def asked_by(self, asker: object, id: Any, gone: bool) -> None:
        """Who asked for a session last, a connection, and whether that is gone."""
        session = self.sessions.get(id) if isinstance(id, str) else None
        if session is not None:
            session.asker, session.forsaken = asker, time.monotonic() if gone else None

    def forsake(self, asker: object) -> None:
        """A connection broke: its sessions are kept, and after a while only as long as nobody needs their places."""
        for session in self.sessions.values():
            if session.asker is asker:
                session.forsaken = time.monotonic()

    async def shut(self) -> None:
        """Close everything."""
        for id in list(self.sessions):
            await self.close(id)
        if self._closing:
            await asyncio.wait(self._closing, timeout=5)
        self._pool.close()

    def counts(self) -> Json:
        """How it stands."""
        return {
            "sessions": len(self.sessions),
            "capacity": self.capacity,
            "opened": self.opened,
            "steps": self.steps,
            "reaped": self.reaped,
            "failed": self.failed,
        }

    def _make_room(self, ids: Sequence[str]) -> None:
        """Refuse where there are no places for new sessions."""
        if not all(0 < len(id) <= MOST_ID for id in ids):
            raise Refusal(422, f"the id of a session has 1 to {MOST_ID} characters")
        if len(ids) > self.capacity:
            raise Refusal(422, f"{len(ids)} sessions at once are more than the server's --capacity, {self.capacity}")
        while len(self.sessions) + len(ids) > self.capacity:
            if not self._room_made():
                raise Refusal(
                    503,
                    f"the server is full: {len(self.sessions)} sessions are open and its --capacity is {self.capacity} "
                    "(rollout.concurrency bounds the episodes that a run plays at once)",
                    retry_after_s=1.0,
                )

    def _refuse_senseless(self, environment: Any, options: Any) -> None:
        try:
            self.offers.chosen(environment, options)
        except RecipeError as error:
            raise Refusal(422 if environment in self.offers.offers else 404, str(error)) from error

    def _room_made(self) -> bool:
        """Close the session that was forsaken for longest, where one was for long enough."""
        since = {s.id: s.forsaken for s in self.sessions.values() if s.forsaken is not None and not s.busy}
        if not since or time.monotonic() - min(since.values()) < FORSAKEN_S:
            return False
        self._end(self.sessions.pop(min(since, key=lambda id: since[id])))
        self.reaped += 1
        return True

    def _begin(self, session: Session, seed: int) -> Session:
        """Build and reset an environment, and have the session known."""
        task = Task(session.id, environment=EnvironmentSpec(session.environment, session.options, seed))
        live = LiveEnvironment(
            self._pool,
            lambda _: self._make(session.environment, session.options),
            task,
            self.deadline_s,
            Deadlines(),
            session.id,
            wary=True,
        )

        async def first() -> Json:
            return reset_to_json(*await live.reset(seed))

        session.seed, session.live, session.opening = seed, live, asyncio.create_task(first())
        self.sessions[session.id] = session
        self.opened += 1
        return session

    async def _act(self, session: Session, response: str) -> Json:
        assert session.live is not None, "only a session that was reset acts"
        result = await session.live.step(response, session.number)
        self.steps += 1
        session.done = result.done or result.truncated or result.observation is None
        return step_to_json(result)

    async def _outcome(self, session: Session, task: "asyncio.Task[Json] | None") -> Json:
        """What a task comes to. It goes on if nobody waits any longer."""
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
                self._end(self.sessions.pop(session.id))  # it holds no place any longer
                if session.reserved:
                    self.sessions[session.id] = Session(session.id, session.environment, session.options, reserved=True)
            told = str(error) if isinstance(error, SensoriumError) else words(error)
            senseless = task is session.opening and isinstance(error.__cause__, RecipeError)
            raise Refusal(422 if senseless else 410, told) from error

    def _known(self, id: str) -> Session:
        session = self.sessions.get(id)
        if session is None:
            raise Refusal(
                404, f"there is no session '{id:.80}'; it was closed, its lease is over, or the server was restarted"
            )
        return session

    def _end(self, session: Session) -> None:
        """Give a session's environment back, when it is done with what it does; nobody waits for that."""

        async def give_back() -> None:
            for task in filter(None, (session.opening, session.acting)):
                await asyncio.wait({task})
                task.exception()  # told already to who asked
            if session.live is not None:
                await session.live.close()

        self._keep(give_back())

    def _keep(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def text_of_messages(messages: Sequence[Json], placeholder: str = "") -> str:
    """The text of messages, one after another; ``placeholder`` stands where a picture is."""
    return "\n".join("".join(_said(block, placeholder) for block in message["content"]) for message in messages)


def with_images(messages: Sequence[Json]) -> str:
    """The text of messages with ``<image>`` for each picture. A placeholder that is in the text itself stands for none."""
    return text_of_messages(messages, PLACEHOLDER)


def pictures(messages: Sequence[Json], store: MediaStore) -> list[bytes]:
    """The bytes of all pictures of messages, in order."""
    blocks = [block for message in messages for block in message["content"] if "hash" in block]
    return [store.bytes_of(Media("picture", block["hash"])) for block in blocks]


def paid(outcome: Json) -> float | None:
    """A step's pay as one number; None where nothing is paid."""
    reward = outcome["reward"]
    return sum(reward.values()) if isinstance(reward, dict) else reward


def _said(block: Json, placeholder: str) -> str:
    return (
        block["text"].replace(PLACEHOLDER, "< image>")
        if "text" in block and placeholder
        else block.get("text", placeholder)
    )
