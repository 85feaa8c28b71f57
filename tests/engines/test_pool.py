"""Several engines as one: groups stay together, weights are of one version, and who dies is replaced."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest

from sensorium.assembly.workers import process_work
from sensorium.engines.pool import EnginePool, group_of
from sensorium.engines.protocol import Capabilities, LiveEpisodes, Request, Response, Sampling
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import EngineError, EngineLost


@dataclass
class Counting:
    """An engine that answers with its number, and dies on demand."""

    number: int
    made: list["Counting"]
    dead: bool = False
    version: int = 0
    started: bool = False
    asked: list[str] = field(default_factory=list)
    capabilities: Capabilities = field(
        default_factory=lambda: Capabilities(frozenset(), deterministic=True, in_flight=True)
    )

    @property
    def pid(self) -> int | None:
        return self.number if self.started else None

    def start(self) -> None:
        self.started = True
        self.version = self.made[0].version

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        self.asked.append(request.thread)
        await asyncio.sleep(0)
        self._refuse_dead()
        return Response(Segment("model", (self.number,), policy_version=self.version, name=request.name), "stop")

    def release(self, thread: str) -> None:
        pass

    def update_weights(self, source: Any, version: int) -> None:
        self._refuse_dead()
        self.version = version

    push_weights = update_weights

    def reset_cache(self) -> None:
        self._refuse_dead()

    def close(self) -> None:
        self.started = False

    def _refuse_dead(self) -> None:
        if self.dead:
            raise EngineLost("the engine process was killed")


@pytest.fixture
def made() -> list[Counting]:
    return []


def pool_of(made: list[Counting], count: int = 2, **given: Any) -> EnginePool:
    def make(place: int) -> Counting:
        made.append(Counting(len(made), made))
        return made[-1]

    pool = EnginePool(make, count, **given)
    pool.start()
    return pool


@pytest.fixture
def pool(made: list[Counting]) -> Iterator[EnginePool]:
    pool = pool_of(made)
    yield pool
    pool.close()


def asked(pool: EnginePool, *threads: str) -> list[int]:
    """Which engine answers each thread."""

    async def go() -> list[int]:
        requests = [Request(thread, (), Sampling(), (0,), 1, thread) for thread in threads]
        return [found.segment.tokens[0] for found in await asyncio.gather(*map(pool.generate, requests))]

    return asyncio.run(go())


def test_episodes_of_a_group_go_to_one_engine_and_groups_are_spread(pool: EnginePool) -> None:
    assert asked(pool, "a/0#0", "a/1#0", "b/0#0", "b/1#0", "c/0#0", "a/2#0") == [0, 0, 1, 1, 0, 0]
    for thread in ("a/0#0", "a/1#0", "a/2#0", "c/0#0"):
        pool.release(thread)
    assert asked(pool, "d/0#0", "e/0#0") == [0, 0], "the one with the fewest groups is asked"
    assert group_of("train/1/0/task/7#2") == "train/1/0/task"


def test_weights_go_to_all_under_one_version(pool: EnginePool, made: list[Counting]) -> None:
    pool.update_weights(None, 4)  # type: ignore[arg-type]
    assert [engine.version for engine in made] == [4, 4]
    assert pool.version == 4


def test_who_dies_is_replaced_and_its_responses_are_sampled_again(pool: EnginePool, made: list[Counting]) -> None:
    told: list[str] = []
    pool.tell_by(told.append)
    made[0].dead = True
    assert asked(pool, "a/0#0", "a/1#0", "b/0#0") == [1, 1, 1]
    pool._workers.submit(lambda: None).result()
    while not pool._places[0].ready:
        pass
    assert pool.metrics() == {
        "engine/ready": 2, "engine/replaced": 1, "engine/sampled_again": 2, "engine/answered_0": 0, "engine/answered_1": 3
    }  # fmt: skip
    assert [place.replaced for place in pool.places] == [1, 0]
    assert "engine 0 is lost and is replaced" in told[0]
    assert asked(pool, "c/0#0") == [2]


def test_one_that_was_replaced_waits_for_weights_where_the_policy_is_being_trained(made: list[Counting]) -> None:
    pool = pool_of(made, joins_at_push=True)
    try:
        made[1].dead = True
        assert asked(pool, "a/0#0", "b/0#0") == [0, 0]
        while not _started(made):
            pass
        assert asked(pool, "c/0#0", "d/0#0") == [0, 0]
        assert [process_work(place, "samples") for place in pool.places] == ["samples", "is being replaced"]
        while pool._places[1].engine is not made[2]:
            pass
        pool.push_weights(None, 1)  # type: ignore[arg-type]
        assert asked(pool, "e/0#0") == [2]
    finally:
        pool.close()


def _started(made: list[Counting]) -> bool:
    return len(made) > 2 and made[2].started


def test_an_engine_that_cannot_start_is_tried_again_while_restarts_are_left(made: list[Counting]) -> None:
    pool, notes, ended = pool_of(made, restarts=2), list[str](), threading.Event()

    def noted(told: str) -> None:
        notes.append(told)
        if "tried again" not in told and "could not be replaced" in told:
            ended.set()

    pool.tell_by(noted)
    try:
        with patch.object(Counting, "start", side_effect=EngineError("its log-probs differ")):
            pool._lose(pool.places[0], made[0], EngineLost("it was killed"))
            assert ended.wait(30)
        assert [note.endswith("It is tried again.") for note in notes] == [False, True, False]
        assert len(made) == 4
        assert pool.places[0].lost == "it could not be replaced"
        assert asked(pool, "a/0#0") == [1], "the other one goes on"
    finally:
        pool.close()


def test_when_no_engine_is_left_the_run_hears_why(made: list[Counting]) -> None:
    pool = pool_of(made, restarts=0)
    try:
        made[0].dead = made[1].dead = True
        with pytest.raises(EngineLost, match="was killed"):
            asked(pool, "a/0#0", "b/0#0")
        told = [process_work(place, "samples") for place in pool.places]
        assert told == ["is lost: cluster.restarts are used up"] * 2
        with pytest.raises(EngineLost, match=r"none of cluster\.engines is left"):
            asked(pool, "c/0#0")
    finally:
        pool.close()


def test_the_last_engine_dies_while_another_is_starting_and_that_one_is_waited_for(made: list[Counting]) -> None:
    pool = pool_of(made, restarts=1)
    start, other_died = Counting.start, threading.Event()

    def starts_later(self: Counting) -> None:
        assert other_died.wait(30)
        start(self)

    def hears(note: str) -> None:
        if "restarts are used up" in note:
            other_died.set()

    pool.tell_by(hears)
    try:
        with patch.object(Counting, "start", starts_later):
            made[0].dead = made[1].dead = True
            assert asked(pool, "a/0#0", "b/0#0") == [2, 2], "the one that replaces the first"
    finally:
        pool.close()


def test_closing_does_not_wait_for_an_engine_that_is_starting(made: list[Counting]) -> None:
    pool = pool_of(made)
    notes: list[str] = []
    pool.tell_by(notes.append)
    began, closed = threading.Event(), threading.Event()

    def start(self: Counting) -> None:
        closed.clear()  # of the one that was lost
        began.set()
        assert closed.wait(30)
        raise EngineLost("it was closed while it started")

    with patch.object(Counting, "start", start), patch.object(Counting, "close", lambda self: closed.set()):
        pool._lose(pool.places[0], pool.places[0].engine, EngineLost("it was killed"))
        assert began.wait(30)
        pool.close()
    assert len(made) == 3
    assert not any("could not be replaced" in note for note in notes)
