"""A run's event loop: what an interrupted run leaves behind does not disturb the next one in the same thread."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pytest

from sensorium.workers.event_loop import run_async


def test_a_run_after_one_whose_end_was_interrupted_too() -> None:
    left: list[Coroutine[Any, Any, None]] = []

    async def interrupted() -> None:
        raise KeyboardInterrupt

    async def interrupted_at_its_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise KeyboardInterrupt

    async def cut_off() -> None:
        await asyncio.gather(interrupted_at_its_end(), interrupted())

    async def whole() -> int:
        left.clear()
        gc.collect()
        await asyncio.sleep(0)
        return 7

    left.append(cut_off())
    with pytest.raises(KeyboardInterrupt):
        run_async(left[0])
    assert run_async(whole()) == 7
