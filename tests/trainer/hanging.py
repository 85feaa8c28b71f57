"""Environments and a reward term that hang for ever or try to end the process, for runs in processes of their own."""

import os
import threading
from pathlib import Path
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.vocabulary import Episode, Message, Task, system, user


class Unwell:
    """By seed: well, hanging in its constructor's caller, a step or close, or leaving the process in a step."""

    def __init__(self, store: MediaStore) -> None: ...

    @classmethod
    def content_key(cls, seed: int, options: dict[str, Any]) -> str:
        return str(seed)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self.seed, self.turn = seed, 0
        if seed % 5 == 1:
            threading.Event().wait()
        return (system("go"),), Observation((user("0"),))

    def step(self, response: str) -> StepResult:
        self.turn += 1
        if self.seed % 5 == 2:
            threading.Event().wait()
        if self.seed % 5 == 3:
            raise SystemExit(0)
        done = self.turn == 2
        return StepResult(None if done else Observation((user("1"),)), reward=float(len(response) % 3), done=done)

    def close(self) -> None:
        if self.seed % 5 == 4:
            threading.Event().wait()


class Stuck(Unwell):
    """Says by a file that it hangs."""

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        return super().reset(0)

    def step(self, response: str) -> StepResult:
        Path(os.environ["STUCK"]).touch()
        threading.Event().wait()
        raise AssertionError


class Leaving:
    """Hangs on the first of a group, leaves the process on the second, and judges the others; closing it hangs as well."""

    name = "leaving"

    def score(self, task: Task, episode: Episode) -> float:
        if episode.index == 0:
            threading.Event().wait()
        if episode.index == 1:
            os.sys.exit(0)  # type: ignore[attr-defined]
        return float(episode.index)

    def close(self) -> None:
        threading.Event().wait()
