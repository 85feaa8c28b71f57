"""Calls that may hang: deadlines count from the beginning, hanging threads are replaced, nothing holds up the exit."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from sensorium.cluster.pool import CallOverdue, NoWorker, Slots, WorkerPool

LONG_S = 60.0


@pytest.fixture
def forever() -> Iterator[threading.Event]:
    """Waiting for it hangs, until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_healthy_calls_that_queue_for_longer_than_the_deadline_all_succeed() -> None:
    pool = WorkerPool("test", size=1)

    async def many() -> list[int]:
        calls = [pool.call(lambda i=i: time.sleep(0.05) or i, 2.0) for i in range(60)]  # type: ignore[misc]
        return [call.value for call in await asyncio.gather(*calls)]

    assert asyncio.run(many()) == list(range(60))
    counted = pool.take_counters()
    assert (counted.calls, counted.overdue) == (60, 0)
    assert counted.waited_most_s > 2.0 > counted.ran_most_s, "the wait for a place is longer than the deadline"


def test_places_go_to_the_lowest_order_and_a_cancelled_wait_costs_none() -> None:
    pool, ended = WorkerPool("test", size=1), []
    gate = threading.Event()

    async def many() -> None:
        first = asyncio.create_task(pool.call(gate.wait, LONG_S))
        orders = [(2, 0), (1, 1), (0, 5), (1, 0)]
        later = [asyncio.create_task(pool.call(lambda o=o: ended.append(o), LONG_S, order=o)) for o in orders]  # type: ignore[misc]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        later[2].cancel()
        await asyncio.wait([later[2]])
        gate.set()
        await asyncio.gather(first, *later[:2], later[3])
        await pool.call(lambda: ended.append(()), LONG_S)

    asyncio.run(many())
    assert ended == [(1, 0), (1, 1), (2, 0), ()]


def test_a_slot_that_is_given_to_a_cancelled_wait_goes_to_the_next() -> None:
    slots, served = Slots(1), list[str]()

    async def use(name: str) -> None:
        async with slots.one():
            served.append(name)

    async def many() -> None:
        async with asyncio.timeout(LONG_S):
            async with slots.one():
                later = [asyncio.create_task(use(name)) for name in ("cancelled", "last")]
                await asyncio.sleep(0)  # both wait now
            later[0].cancel()  # it has been given the slot, and has not gone on
            await asyncio.wait(later)

    asyncio.run(many())
    assert served == ["last"]


def test_the_next_call_begins_while_the_event_loop_is_busy() -> None:
    pool = WorkerPool("test", size=1)
    gate, begun = threading.Event(), threading.Event()

    async def run() -> None:
        calls = [
            asyncio.create_task(pool.call(lambda: gate.wait(LONG_S), LONG_S)),
            asyncio.create_task(pool.call(begun.set, LONG_S)),
        ]
        await asyncio.sleep(0)
        gate.set()
        assert begun.wait(LONG_S), "the loop does nothing else meanwhile"
        await asyncio.gather(*calls)

    asyncio.run(run())


def test_callers_that_wait_for_a_place_are_all_refused_where_no_thread_can_be_had(forever: threading.Event) -> None:
    pool = WorkerPool("judge", size=1, most_hung=1)

    async def run() -> None:
        stuck = asyncio.create_task(pool.call(lambda: forever.wait(LONG_S), 0.05))
        waiting = [asyncio.create_task(pool.call(lambda: 1, LONG_S)) for _ in range(2000)]
        found = await asyncio.gather(stuck, *waiting, return_exceptions=True)
        assert isinstance(found[0], CallOverdue)
        assert all(isinstance(error, NoWorker) for error in found[1:])
        forever.set()
        while pool.hung:
            await asyncio.sleep(0.01)
        assert (await pool.call(lambda: 2, LONG_S)).value == 2

    asyncio.run(run())


def test_threads_that_hang_are_replaced_until_too_many_do(forever: threading.Event) -> None:
    pool = WorkerPool("judge", size=2, most_hung=6)

    async def run() -> None:
        for _ in range(3):
            stuck = [pool.call(forever.wait, 0.05) for _ in range(2)]
            assert all(isinstance(e, CallOverdue) for e in await asyncio.gather(*stuck, return_exceptions=True))
            if pool.hung < 6:
                assert (await pool.call(lambda: 1, LONG_S)).value == 1
        with pytest.raises(NoWorker, match="6 earlier calls of judges still hang"):
            await pool.call(lambda: 1, LONG_S)
        forever.set()
        while pool.hung:
            await asyncio.sleep(0.01)
        assert (await pool.call(lambda: 2, LONG_S)).value == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    "raised", [SystemExit(3), KeyboardInterrupt(), StopIteration(), GeneratorExit(), asyncio.CancelledError()]
)
def test_whatever_a_call_raises_is_its_outcome(raised: BaseException) -> None:
    def fails() -> None:
        raise raised

    pool = WorkerPool("test")
    assert asyncio.run(pool.call(fails, LONG_S)).error is raised
    assert pool.call_now(fails, LONG_S).error is raised
    assert pool.call_now(lambda: 1, LONG_S).value == 1, "its thread serves on"


def test_a_lease_keeps_one_thread_and_one_event_loop() -> None:
    pool = WorkerPool("test")

    async def where() -> tuple[int, int]:
        return threading.get_ident(), id(asyncio.get_running_loop())

    async def run() -> None:
        worker = pool.lease()
        places = {(await pool.call(where, LONG_S, worker)).value for _ in range(5)}
        assert len(places) == 1
        assert (await pool.call(threading.get_ident, LONG_S, worker)).value == next(iter(places))[0]
        pool.give_back(worker)

    asyncio.run(run())


def test_a_cancelled_call_ends_by_itself_and_what_follows_it_runs_after_it(forever: threading.Event) -> None:
    pool, order = WorkerPool("test", size=1), list[str]()
    begun = threading.Event()

    def work() -> None:
        begun.set()
        forever.wait(LONG_S)
        order.append("work")

    async def run() -> None:
        worker = pool.lease()
        waiting = asyncio.create_task(pool.call(work, LONG_S, worker))
        await asyncio.to_thread(begun.wait, LONG_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        closing = worker.submit(lambda: order.append("close"), LONG_S)
        pool.give_back(worker)
        assert (await pool.call(lambda: 1, LONG_S)).value == 1, "the place is free again"
        forever.set()
        assert await asyncio.to_thread(closing.wait, LONG_S)

    asyncio.run(run())
    assert order == ["work", "close"]


def test_blocking_calls_have_a_deadline_too(forever: threading.Event) -> None:
    with pytest.raises(CallOverdue, match=r"0\.05 s"):
        WorkerPool("test").call_now(forever.wait, 0.05)


HANGING = """
import asyncio, threading
from sensorium.cluster.pool import CallOverdue, WorkerPool
pool = WorkerPool("test")
async def run():
    try:
        await pool.call(threading.Event().wait, 0.05)
    except CallOverdue:
        print("overdue")
asyncio.run(run())
pool.close()
"""


def test_a_process_ends_while_a_call_hangs() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "overdue")
