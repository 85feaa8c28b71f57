"""Groups as an asynchronous stream: each comes when its last episode has ended, while others are still sampled.

Example, of three tasks whose groups are complete in the order 2, 0, 1: the stream gives ``(2, group)``, ``(0, group)``,
``(1, group)``. Whoever needs the tasks' order sorts by the place: completion may follow the clock, a record must not.
"""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from sensorium.vocabulary.episode import Group

Emit = Callable[[int, Group], None]
"""Hands a group to the stream, with its place among the tasks."""


class GroupStream:
    """``async with stream: async for place, group in stream``. Leaving it early ends what is still played."""

    def __init__(self, play: Callable[[Emit], Coroutine[Any, Any, None]]) -> None:
        self._play = play
        self._queue: asyncio.Queue[tuple[int, Group] | None] = asyncio.Queue()
        self._player: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._player = asyncio.create_task(self._play(self._emit), name="rollout")
        self._player.add_done_callback(lambda _: self._queue.put_nowait(None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._player is not None
        self._player.cancel()
        await asyncio.wait({self._player})
        if not self._player.cancelled():
            self._player.exception()  # heard when the stream ended, or of no interest to who left early

    async def in_order(self) -> list[Group]:
        """All groups once the stream has ended, in the tasks' order."""
        async with self:
            found = {place: group async for place, group in self}
        return [found[place] for place in sorted(found)]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Group]:
        assert self._player is not None
        item = await self._queue.get()
        if item is not None:
            return item
        self._player.result()  # raises what went wrong
        raise StopAsyncIteration

    def _emit(self, place: int, group: Group) -> None:
        self._queue.put_nowait((place, group))
