"""When ticks happen: in lockstep only when every live episode waits; every wait is bounded and can be cancelled."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from sensorium.engines import scheduler
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import LiveEpisodes, Request, Response, Sampling, response_key
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import EngineError

from .conftest import Bench, ask

SAMPLING = Sampling(max_new_tokens=12, temperature=1.2)


@dataclass
class Spy:
    """Records the rows of every forward of the language model."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)


async def play(
    bench: Bench,
    engine: NativeEngine,
    episodes: int,
    turns: int,
    jitter: random.Random | None,
    between_ticks: Callable[[], bool] | None = None,
    name: str = "e",
) -> list[Segment]:
    """Multi-turn episodes that wait at random between turns, some of which end early."""
    policy, live = bench.policy, LiveEpisodes(between_ticks)

    async def pause() -> None:
        if jitter is not None:
            for _ in range(jitter.randrange(6)):
                await asyncio.sleep(0)
            await asyncio.sleep(jitter.random() * 0.01)

    async def episode(index: int) -> list[Segment]:
        segments: list[Segment] = []
        live.enter()
        try:
            for turn in range(turns - index % 3):
                await pause()
                message = [user(bench.picture(100 + index % 2 + 10 * turn), "what? " * (1 + (index + turn) % 3))]
                segments.append(policy.chat.extend(message, after=segments[-1]) if turn else policy.chat.render(message))
                key = response_key(0, 0, "task", index, turn)
                thread = f"{name}{index}"
                request = Request(thread, tuple(segments), SAMPLING, (0, index, turn), key, f"{thread}/{turn}")
                segments.append((await engine.generate(request, live)).segment)
                await pause()
            return segments
        finally:
            engine.release(f"{name}{index}")
            live.leave()

    runs = [asyncio.create_task(episode(index)) for index in range(episodes)]
    return [segment for run in runs for segment in await run]


def spied(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy, original = Spy(), bench.policy.language

    def language(ids_BT, *rest, **more):  # type: ignore[no-untyped-def]
        spy.shapes.append(tuple(ids_BT.shape))
        return original(ids_BT, *rest, **more)

    monkeypatch.setattr(bench.policy, "language", language)
    return spy


def test_lockstep_runs_are_equal_to_the_last_bit_whatever_the_clock(vision: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for seed in (None, 1, 2):
        spy = spied(vision, monkeypatch)
        jitter = None if seed is None else random.Random(seed)
        segments = asyncio.run(play(vision, NativeEngine(vision.policy, record=False), 6, 4, jitter))
        runs.append((segments, spy.shapes))
        monkeypatch.undo()
    assert runs[0][0] == runs[1][0] == runs[2][0]  # tokens and log-probs
    assert runs[0][1] == runs[1][1] == runs[2][1]  # and what was batched together
    assert max(shape[0] for shape in runs[0][1]) == 6


def test_eager_runs_draw_the_same_tokens(bench: Bench) -> None:
    """Without lockstep batches depend on the clock, but what a row draws does not."""
    lockstep = asyncio.run(play(bench, NativeEngine(bench.policy), 5, 3, None))
    eager = asyncio.run(play(bench, NativeEngine(bench.policy, lockstep=False), 5, 3, random.Random(5)))
    assert [s.tokens for s in lockstep] == [s.tokens for s in eager]


def test_without_lockstep_those_who_ask_join_together_and_admission_takes_half_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of its own: an admission takes 20, a step 1, and nothing else takes time."""
    clock, joined, live = [0.0], list[list[str]](), LiveEpisodes()
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: clock[0] / 1000)
    writing: dict[str, tuple[scheduler.Job, float]] = {}

    async def tick(waiting: Sequence[scheduler.Job]) -> int:
        clock[0] += 20 if waiting else 1
        writing.update({job.request.thread: (job, clock[0] + 50) for job in waiting})
        for thread, (job, until) in list(writing.items()):
            if clock[0] >= until:
                del writing[thread]
                job.future.set_result(Response(Segment("model", (1,), logprobs=(0.0,)), "stop"))
        if waiting:
            joined.append([job.request.thread for job in waiting])
        return len(waiting)

    pump = scheduler.TickScheduler(tick, lockstep=False, patience_s=60)

    async def episode(thread: str, at: float) -> None:
        while clock[0] < at:
            await asyncio.sleep(0)
            if not writing:
                clock[0] += 0.5
        await pump.generate(Request(thread, (), Sampling(), (int(at),), 0, thread), live)
        live.leave()

    async def go() -> None:
        for _ in range(6):
            live.enter()
        await asyncio.gather(*(episode(name, at) for name, at in zip("abcdef", (0, 1, 3, 5, 200, 203), strict=True)))

    asyncio.run(go())
    # b, c and d came while a was admitted or just after; f in a row with e, while nobody wrote.
    assert joined == [["a"], ["b", "c", "d"], ["e", "f"]]


def test_a_tick_waits_for_a_live_episode_but_not_for_ever(bench: Bench) -> None:
    engine = NativeEngine(bench.policy, patience_s=0.2)
    request = ask("a", [bench.policy.chat.render([user("what?")])], SAMPLING)

    async def idle() -> None:
        live = LiveEpisodes()
        live.enter()
        live.enter()
        try:
            with pytest.raises(EngineError, match=r"1 episodes waited 0\.2 s for 1"):
                await engine.generate(request, live)
        finally:
            live.leave()
        assert engine.counters.decoded_tokens == 0
        response = await engine.generate(request, live)  # the other one left: the engine goes on
        assert response.segment.tokens
        live.leave()

    asyncio.run(idle())


def test_a_cancelled_wait_leaves_the_batch(bench: Bench) -> None:
    engine = NativeEngine(bench.policy)
    long = Sampling(max_new_tokens=300, stop_tokens=False)
    contexts = [[bench.policy.chat.render([user("what? " * (i + 1))])] for i in range(3)]

    async def run() -> None:
        tasks = []
        live = LiveEpisodes()
        for i, context in enumerate(contexts):
            live.enter()
            sampling = long if i else Sampling(max_new_tokens=20, stop_tokens=False)
            tasks.append(asyncio.create_task(engine.generate(ask(f"{i}", context, sampling, order=(i,), key=i), live)))
        while engine.counters.decode_steps < 5:
            await asyncio.sleep(0)
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        live.leave()
        first = await tasks[0]
        live.leave()
        last = await asyncio.wait_for(tasks[2], 60)
        live.leave()
        assert len(first.segment.tokens) == 20
        assert len(last.segment.tokens) == 300
        assert engine.counters.decoded_tokens < 350
        alone = NativeEngine(bench.policy)
        again = await alone.generate(ask("2", contexts[2], long, order=(2,), key=2))
        assert again.segment.tokens == last.segment.tokens
        assert (await engine.generate(ask("1", contexts[1], SAMPLING))).segment.tokens  # its thread is free again

    asyncio.run(run())


@pytest.mark.parametrize("seed", [1, 2])
def test_between_ticks_is_when_every_live_episode_waits(bench: Bench, seed: int) -> None:
    engine = NativeEngine(bench.policy)
    whole, live, moments = engine.generate, set[str](), list[tuple[int, int]]()
    asking: set[str] = set()

    async def generate(request: Request, episodes: LiveEpisodes | None = None) -> Response:
        live.add(request.thread)
        asking.add(request.thread)
        try:
            return await whole(request, episodes)
        finally:
            asking.discard(request.thread)

    def look() -> bool:
        assert asking == live, "nobody is on the way"
        moments.append((engine.counters.decode_steps, len(asking)))
        return False

    def release(thread: str) -> None:
        live.discard(thread)

    engine.generate, engine.release = generate, release  # type: ignore[method-assign]
    asyncio.run(play(bench, engine, 5, 3, random.Random(seed), look))
    assert moments[0] == (0, 5)
    steps = [step for step, _ in moments]
    assert steps[1:] == sorted(set(steps[1:])), "once a tick at most"


def test_what_is_cancelled_between_ticks_is_written_no_more_and_its_rows_are_free(bench: Bench) -> None:
    """Room for two rows: a short and a long response are written, two wait. When the short one ends, two are cancelled."""
    engine = NativeEngine(bench.policy, max_rows=2)
    context = [bench.policy.chat.render([user("what?")])]
    lengths = {"short": 5, "written": 300, "waiting": 300, "last": 30, "again": 5}
    tasks: dict[str, asyncio.Task[Response]] = {}

    async def one(order: int, thread: str, live: LiveEpisodes) -> Response:
        live.enter()
        try:
            sampling = Sampling(max_new_tokens=lengths[thread], stop_tokens=False)
            return await engine.generate(ask(thread, context, sampling, order=(order,), key=order), live)
        finally:
            engine.release(thread)
            live.leave()

    def cancel() -> bool:
        if not tasks["short"].done() or tasks["written"].cancelled():
            return False
        return all([tasks["written"].cancel(), tasks["waiting"].cancel()])

    async def run() -> None:
        live = LiveEpisodes(cancel)
        tasks.update({thread: asyncio.create_task(one(i, thread, live)) for i, thread in enumerate(list(lengths)[:4])})
        await asyncio.wait(tasks.values())
        assert [thread for thread, task in tasks.items() if task.cancelled()] == ["written", "waiting"]
        assert len(tasks["last"].result().segment.tokens) == 30
        assert engine.counters.decoded_tokens == 5 + 5 + 30
        engine.update_weights(bench.policy, bench.policy.version)  # no response is open
        steps = engine.counters.decode_steps
        pair = await asyncio.gather(*(one(i, thread, LiveEpisodes()) for i, thread in enumerate(("short", "again"))))
        assert [len(response.segment.tokens) for response in pair] == [5, 5]
        assert engine.counters.decode_steps - steps == 4, "both rows are free for the next"
        assert engine.counters.decoded_tokens == 5 + 5 + 30 + 10

    asyncio.run(run())


def test_two_rollouts_run_at_once_and_each_decides_for_itself(bench: Bench) -> None:
    """One of them cancels its second episode between ticks; the other is written as if it were alone."""
    engine = NativeEngine(bench.policy)
    alone = asyncio.run(play(bench, engine, 3, 3, None))
    engine.reset_cache()
    context = [bench.policy.chat.render([user("what?")])]
    tasks: list[asyncio.Task[Response]] = []
    looks: dict[str, int] = {"first": 0, "second": 0}

    async def one(index: int, live: LiveEpisodes) -> Response:
        live.enter()
        try:
            sampling = Sampling(max_new_tokens=4 if index == 0 else 300, stop_tokens=False)
            return await engine.generate(ask(f"b{index}", context, sampling, order=(9, index), key=index), live)
        finally:
            engine.release(f"b{index}")
            live.leave()

    def first() -> bool:
        looks["first"] += 1
        return False

    def second() -> bool:
        looks["second"] += 1
        return tasks[0].done() and not tasks[1].done() and tasks[1].cancel()

    async def both() -> list[Segment]:
        live = LiveEpisodes(second)
        tasks.extend(asyncio.create_task(one(index, live)) for index in range(2))
        written = await play(bench, engine, 3, 3, None, first)
        await asyncio.wait(tasks)
        return written

    together = asyncio.run(both())
    assert [segment.tokens for segment in together] == [segment.tokens for segment in alone]
    assert len(tasks[0].result().segment.tokens) == 4
    assert tasks[1].cancelled()
    assert looks["first"]
    assert 1 <= looks["second"] < 10, "a rollout that waits for nothing is not asked"


def test_a_thread_has_one_response_at_a_time(bench: Bench) -> None:
    engine = NativeEngine(bench.policy)
    request = ask("a", [bench.policy.chat.render([user("what?")])], SAMPLING)

    async def twice() -> None:
        first = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="one response at a time"):
            await engine.generate(request)
        assert (await first).segment.tokens

    asyncio.run(twice())


def test_weights_may_not_change_under_a_response(bench: Bench) -> None:
    engine = NativeEngine(bench.policy)
    request = ask("a", [bench.policy.chat.render([user("what?")])], Sampling(max_new_tokens=50, stop_tokens=False))

    async def run() -> None:
        task = asyncio.create_task(engine.generate(request))
        while engine.counters.decode_steps < 3:
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="responses were open"):
            engine.update_weights(bench.policy, 1)
        bench.policy.version += 1
        try:
            with pytest.raises(EngineError, match="weights changed"):
                await task
        finally:
            bench.policy.version -= 1

    asyncio.run(run())


def test_the_engine_lives_through_an_interrupted_loop(bench: Bench) -> None:
    """A loop that ends in the middle of a response leaves an engine that works in the next."""
    engine = NativeEngine(bench.policy)
    request = ask("a", [bench.policy.chat.render([user("what?")])], SAMPLING)

    async def interrupted() -> None:
        task = asyncio.create_task(engine.generate(request))
        while engine.counters.decode_steps < 1:
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(interrupted())
    assert asyncio.run(engine.generate(request)).segment.tokens
