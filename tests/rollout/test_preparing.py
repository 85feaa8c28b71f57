"""Media are made ready off the event loop: together, once each, and a bad one fails only those who asked for it."""

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.rollout import live
from sensorium.rollout.live import Preparation
from sensorium.vocabulary import Media
from sensorium.vocabulary.errors import MediaError, ModelError

from ..models.clips import clip, noise


@pytest.fixture
def policy(tmp_path: Any) -> Policy:
    return load_policy(str(make_tiny("qwen2_5_vl", tmp_path)), store=MediaStore(), device="cpu")


class Watched:
    """A policy's preparation, remembered call by call; ``gate`` holds it back."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.calls: list[tuple[str, list[Media]]] = []
        self.gate = threading.Event()
        self.gate.set()

    def unprepared(self, media: Iterable[Media]) -> list[Media]:
        return self.policy.chat.unprepared(media)

    def prepare(self, media: Iterable[Media]) -> dict[Media, MediaError]:
        wanted = list(media)
        self.calls.append((threading.current_thread().name, wanted))
        assert self.gate.wait(300)
        return self.policy.chat.prepare(wanted)


def test_what_is_asked_for_in_one_moment_is_prepared_together_in_a_thread(policy: Policy) -> None:
    watched = Watched(policy)
    media = [*(noise(policy.chat.store, i) for i in range(6)), clip(policy.chat.store, 1)]
    ready = Preparation(watched)  # type: ignore[arg-type]

    async def all_of_them() -> None:
        await asyncio.gather(*(ready(media[i : i + 3]) for i in range(5)), ready([]), ready(media[:1]))
        await ready(media)

    asyncio.run(all_of_them())
    [(thread, asked)] = watched.calls
    assert thread != threading.main_thread().name
    assert asked == media
    assert policy.chat.unprepared(media) == []


def test_a_bad_medium_fails_those_who_asked_for_it_and_nobody_else(policy: Policy) -> None:
    good, bad = noise(policy.chat.store, 1), policy.chat.store.put(b"no video", "video", "broken.mp4")
    ready = Preparation(policy.chat)

    async def asking() -> list[Any]:
        return await asyncio.gather(ready([good]), ready([good, bad]), ready([bad]), return_exceptions=True)

    for _ in range(2):
        fine, *failed = asyncio.run(asking())
        assert fine is None
        assert all(isinstance(error, MediaError) and "broken.mp4" in str(error) for error in failed)
    with pytest.raises(ModelError, match="cannot take sound"):
        asyncio.run(ready([policy.chat.store.put(b"s", "sound", "s.wav")]))


def test_waiting_leaves_the_loop_free_and_who_gives_up_takes_nothing_from_others(policy: Policy) -> None:
    watched = Watched(policy)
    watched.gate.clear()
    ready = Preparation(watched)  # type: ignore[arg-type]
    one, other = noise(policy.chat.store, 1), noise(policy.chat.store, 2)

    async def giving_up() -> None:
        first, second = asyncio.create_task(ready([one])), asyncio.create_task(ready([one]))
        while not watched.calls:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(ready([other]))
        first.cancel()
        await asyncio.wait([first], timeout=300)
        assert first.cancelled()
        assert not second.done()
        watched.gate.set()
        await asyncio.gather(second, late)

    asyncio.run(giving_up())
    assert [asked for _, asked in watched.calls] == [[one], [other]]


def test_many_go_lot_by_lot_and_the_first_do_not_wait_for_the_last(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TOGETHER", 4)
    watched = Watched(policy)
    media = [noise(policy.chat.store, i) for i in range(10)]
    ready = Preparation(watched)  # type: ignore[arg-type]
    calls_when_done: list[int] = []

    async def one(item: Media) -> None:
        await ready([item])
        calls_when_done.append(len(watched.calls))

    async def all_of_them() -> None:
        await asyncio.gather(*(one(item) for item in media))

    asyncio.run(all_of_them())
    assert [len(asked) for _, asked in watched.calls] == [4, 4, 2]
    assert calls_when_done[0] < 3


def test_a_loop_that_ends_early_leaves_nobody_waiting_in_the_next(policy: Policy) -> None:
    watched = Watched(policy)
    ready = Preparation(watched)  # type: ignore[arg-type]
    picture = noise(policy.chat.store, 1)

    async def left_alone() -> None:
        task = asyncio.create_task(ready([picture]))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(left_alone())
    asyncio.run(asyncio.wait_for(ready([picture]), 300))
    assert policy.chat.unprepared([picture]) == []
