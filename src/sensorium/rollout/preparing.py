"""Media that episodes show, made ready off the event loop.

Invariants: whoever waits leaves the loop free for others; media asked for in the same moment are prepared together, and one
that many wait for is prepared once; one that cannot be prepared fails those who asked for it and nobody else.
"""

import asyncio
from collections.abc import Iterable
from itertools import islice

from sensorium.models.chat_processor import ChatProcessor
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import MediaError

TOGETHER = 64
"""Media prepared at a time; after each lot those who waited for it go on, so that no wait is longer than it must be."""


class Preparation:
    """Prepares media in a thread. One instance serves all episodes of a rollout."""

    def __init__(self, chat: ChatProcessor) -> None:
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
        """Prepare what is waited for, lot by lot, until nobody waits."""
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
