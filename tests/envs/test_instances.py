"""A pool of environment instances: reused by reset, replaced where an episode broke one, and never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sensorium.cluster.python_process import end_orphans
from sensorium.data.media_store import MediaStore
from sensorium.envs.remote.client import RemoteEnvironment
from sensorium.envs.remote.instances import InstancePool, PooledEnvironment, poolable
from sensorium.services.sessions import Offer, Offers, SessionTable, text_of_messages
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import EnvironmentFailure, EnvironmentLost, RecipeError
from sensorium.vocabulary.task import EnvironmentSpec, Task
from tests.envs.browsing import CHROMIUM, NAME
from tests.services.running import serving

BROWSER = "chromium" if Path(CHROMIUM).exists() else "plain"


@pytest.fixture
def pool() -> Iterator[InstancePool]:
    made = InstancePool(1, 60.0)
    made.noted = lambda text: None
    yield made
    made.close()


def shown(environment: Any, seed: int = 0) -> list[int]:
    """The pids of an instance and of what it started, and how often it was reset."""
    return [int(word) for word in environment.reset(seed)[1].messages[0].text.split()]


def opened(pool: InstancePool, **options: Any) -> PooledEnvironment:
    return pool.environment(NAME, options, MediaStore())


def wait_for(happened: Callable[[], object]) -> None:
    until = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def family(pid: int) -> set[int]:
    """A process, and all its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while further := {child for child, parent in parents.items() if parent in found} - found:
        found |= further
    return found


def test_an_instance_is_reset_for_the_next_episode_and_stopped_by_its_close(pool: InstancePool, tmp_path: Path) -> None:
    closed = str(tmp_path / "closed")
    first = opened(pool, closed=closed)
    process, child, resets = shown(first)
    first.close()
    assert resets == 1
    assert not Path(closed).exists()
    assert shown(opened(pool, closed=closed)) == [process, child, 2]
    pool.close()
    assert Path(closed).exists()
    assert not alive(process)
    assert not alive(child)


def test_an_episode_waits_until_an_instance_is_free_and_another_kind_takes_its_place(pool: InstancePool) -> None:
    first = opened(pool)
    process, child, _ = shown(first)
    others: list[list[int]] = []
    waiting = threading.Thread(target=lambda: others.append(shown(opened(pool, closed=""))))
    waiting.start()
    assert others == []
    first.close()
    waiting.join()
    assert others[0][2] == 1
    assert not alive(process)
    assert not alive(child)


@pytest.mark.parametrize("response", ["raise", "crash", "hang"])
def test_an_instance_that_an_episode_broke_is_stopped_and_replaced(pool: InstancePool, response: str) -> None:
    notes: list[str] = []
    pool.noted = notes.append
    broken = opened(pool)
    process, child, _ = shown(broken)
    if response == "hang":
        failed: list[BaseException] = []

        def step() -> None:
            try:
                broken.step(response)
            except EnvironmentFailure as error:
                failed.append(error)

        hanging = threading.Thread(target=step)
        hanging.start()
        wait_for(lambda: broken.asking)
        broken.close()
        hanging.join()
        assert [type(error) for error in failed] == [EnvironmentFailure]
    else:
        with pytest.raises(EnvironmentLost if response == "crash" else EnvironmentFailure) as refused:
            broken.step(response)
        assert type(refused.value) is (EnvironmentLost if response == "crash" else EnvironmentFailure)
        broken.close()
    assert not alive(process)
    assert not alive(child)
    assert pool.replaced == len(notes) == 1
    assert shown(opened(pool))[2] == 1


def test_what_cannot_be_an_instance_is_known() -> None:
    def task(name: str, *messages: Any) -> Task:
        return Task("t", messages, environment=EnvironmentSpec(name, {}, 0))

    assert poolable(task(NAME))
    assert not poolable(task("frozen_lake"))  # plain computation
    assert not poolable(task("tools", user("What is 2 + 2?")))  # plays the question of its row
    assert not poolable(task("remote"))
    assert not poolable(Task("t"))
    with pytest.raises(RecipeError, match="no option"):
        InstancePool(1, 60.0).environment(NAME, {"colour": 1}, MediaStore())


@pytest.mark.parametrize(
    ("end", "program"), [("close", "plain"), ("SIGTERM", "plain"), ("SIGINT", BROWSER), ("SIGKILL", BROWSER)]
)
def test_nothing_outlives_the_driver_however_it_ends(end: str, program: str) -> None:
    driver, pids = driven(program)
    families = {each for pid in pids for each in family(pid)}
    assert driver.stdin is not None
    if end == "close":
        driver.stdin.close()
    else:
        driver.send_signal(getattr(signal, end))
    driver.wait()
    wait_for(lambda: not any(map(alive, families)))


def test_what_a_killed_run_left_is_ended_by_the_next_start_and_nothing_else_is() -> None:
    driver, pids = driven(BROWSER)
    other, theirs = driven("plain")  # another run, which goes on
    children = pids[1::2]
    families = {each for pid in children for each in family(pid)}
    for pid in (driver.pid, *pids[::2]):  # the driver, and its instances, which could have cleaned up
        os.kill(pid, signal.SIGKILL)
    driver.wait()
    wait_for(lambda: not any(map(alive, pids[::2])))
    end_orphans()  # or any pool that is opened by another test meanwhile
    wait_for(lambda: not any(map(alive, families)))
    assert all(map(alive, theirs))
    other.kill()
    wait_for(lambda: not any(map(alive, theirs)))


def test_a_service_keeps_instances_for_later_sessions_and_stops_them_at_its_end() -> None:
    async def served() -> None:
        table = SessionTable(Offers({"browsing": Offer(NAME)}), MediaStore(), 1, pool=InstancePool(1, 60.0))
        seen = []
        for number in range(2):
            reply = await table.open(f"s{number}", "browsing", {}, number)
            seen.append([int(word) for word in text_of_messages(reply["observation"]).split()])
            await table.close(f"s{number}")
        await table.shut()
        assert seen[0] == [*seen[1][:2], 1]
        assert seen[1][2] == 2
        assert not any(map(alive, seen[0][:2]))

    asyncio.run(served())


def test_an_episode_whose_instance_a_service_lost_may_be_played_again_there() -> None:
    with serving(SessionTable(Offers({"browsing": Offer(NAME)}), MediaStore(), 1, pool=InstancePool(1, 60.0))) as address:
        playing = RemoteEnvironment(MediaStore(), address, "browsing")
        os.kill(shown(playing)[0], signal.SIGKILL)
        with pytest.raises(EnvironmentLost):
            playing.step("look")
        assert shown(playing)[2] == 1
        playing.close()


def driven(program: str) -> tuple["subprocess.Popen[str]", list[int]]:
    """A process with a pool of two instances, and the pids of instance, program, instance, program."""
    command = [sys.executable, "-m", "tests.envs.browsing", program]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    return driver, [int(word) for _ in range(2) for word in driver.stdout.readline().split()[:2]]
