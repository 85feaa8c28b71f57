"""Runs in which an engine is killed at a certain moment."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from sensorium.engines.pool import EnginePool


def kill_an_engine(monkeypatch: pytest.MonkeyPatch, process_of: Callable[[int], int] = lambda pid: pid) -> None:
    """Kill the first engine, or a process of it, when a run asks for its sixth response."""
    generate, asked = EnginePool.generate, []

    async def counted(self: EnginePool, request: Any, episodes: Any = None) -> Any:
        asked.append(request.name)
        if len(asked) == 6:
            pid = self.pids[0]
            assert pid is not None
            os.kill(process_of(pid), signal.SIGKILL)
        return await generate(self, request, episodes)

    monkeypatch.setattr(EnginePool, "generate", counted)
