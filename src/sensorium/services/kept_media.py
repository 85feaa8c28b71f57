"""Media of requests lie in a folder for a while: pictures that were shown, frames that were sent."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from sensorium.media.store import MediaStore

SWEEP_S = 30.0


def sweep(folder: Path | None, older_s: float) -> int:
    """Delete media that are older than so many seconds: nobody asks for them any more. Returns how many."""
    if folder is None:
        return 0
    oldest, deleted = time.time() - older_s, 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # it is gone already, or not ours to delete; the others are swept all the same
                if entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)
                    deleted += 1
    return deleted


@asynccontextmanager
async def sweeping(store: MediaStore, older_s: float) -> AsyncIterator[None]:
    """Keep a store's folder small for as long as a service runs."""

    async def go_on() -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, older_s))
            await asyncio.to_thread(sweep, store.folder, older_s)

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
