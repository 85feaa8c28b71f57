"""Pictures and videos apart in time, for towers with adapters.

vLLM 0.32 lays out the adapters of a tower for all media of a step, and then runs the tower over pictures and over videos
separately: a step with both ends the engine. So requests with one kind wait until none with the other is open. For example:

    open: two with pictures    comes: a video, waits    comes: a picture, joins    all three end    the video begins
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sensorium.vocabulary.content import MediaKind


class OneKindAtATime:
    """Lets requests in that show the kind of medium that is shown now, or none."""

    def __init__(self) -> None:
        self._kind: MediaKind | None = None
        self._open = 0
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def showing(self, kind: MediaKind | None) -> AsyncIterator[None]:
        """Inside, no other kind is shown."""
        if kind is None:
            yield
            return
        while self._open and self._kind != kind:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        self._kind = kind
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                waiting, self._waiting = self._waiting, []
                for waiter in waiting:
                    if not waiter.done():
                        waiter.set_result(None)
