"""An environment that shows a clip a turn, rows of clips in files, and a short run over either on the tiny omni model."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import encode_wav
from sensorium.envs.protocol import Observation, StepResult
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary import Episode, Media, Message, Score, Task, system, user
from tests.data.clips import middle
from tests.recipes import parsed, quick

HERE = "tests.trainer.cinema"
RECIPE = quick(
    "cinema",
    model={"path": "tiny:qwen2_5_omni"},
    tasks={"train": [{"source": "sight_and_sound", "options": {"size": 6}}]},
    batch={"prompts_per_step": 3, "group_size": 2},
    rollout={"max_new_tokens": 3, "ignore_stop_tokens": True},
    rewards={"terms": [{"name": f"{HERE}:ByIndex"}]},
)


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    """The short run's recipe with some sections changed."""
    return parsed(RECIPE, folder, **changes)


class ByIndex:
    """Pays the members of a group differently."""

    name = "index"
    instant = True

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        return (Score("index", float(episode.index), correct=episode.index > 0),)


def video_bytes(seed: int, frames: int = 2, size: int = 28) -> bytes:
    """A small MP4 in large blocks of noise."""
    blocks = np.random.default_rng(seed).integers(0, 255, (frames, size // 14, size // 14, 3), dtype=np.uint8)
    return encode_clip(blocks.repeat(14, axis=1).repeat(14, axis=2), fps=frames / 2)


def sound_bytes(seed: int, seconds: float = 0.2) -> bytes:
    """A small WAV of a tone."""
    times = np.arange(round(seconds * 16000)) / 16000
    return encode_wav((0.3 * np.sin(2 * np.pi * (200 + 37 * seed) * times)).astype(np.float32))


class Cinema:
    """Shows a video at first and a sound in every later turn, few of each; ``long_s``: the last sound lasts so long.

    ``broken``: the file of the last sound is cut off.
    """

    instant = True

    def __init__(self, store: MediaStore, turns: int = 3, long_s: float = 0.0, broken: bool = False) -> None:
        self.store, self.turns, self.long_s, self.broken = store, turns, long_s, broken

    @classmethod
    def content_key(cls, seed: int, options: dict[str, Any]) -> str:
        return str(seed)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self.turn, self.seed = 0, seed
        video = self.store.put(video_bytes(seed % 4), "video", f"reel {seed % 4}", middle(frames=2))
        return (system("watch"),), Observation((user(video, "?"),))

    def step(self, response: str) -> StepResult:
        self.turn += 1
        done = self.turn == self.turns
        return StepResult(None if done else Observation((user(self._sound(), "?"),)), reward=1.0, done=done)

    def demonstrate(self) -> str:
        return "yes"

    def close(self) -> None: ...

    def _sound(self) -> Media:
        last = self.turn == self.turns - 1
        data = sound_bytes(self.seed % 2, self.long_s if last and self.long_s else 0.2)
        if last and self.broken:
            data = data[:30]
        return self.store.put(data, "sound", f"record {self.seed % 2}, turn {self.turn}")


def cinema(**options: Any) -> dict[str, Any]:
    """The sections of a recipe that is played in the cinema."""
    worlds = {"environment": f"{HERE}:Cinema", "options": options, "size": 8}
    return {
        "tasks": {"train": [{"source": "environments", "options": worlds}]},
        "rollout": RECIPE["rollout"] | {"max_turns": 4},
    }


def rows_of(folder: Path, rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """A tasks section over a JSONL file with these content blocks, one row each."""
    lines = [
        json.dumps({"id": f"row-{i}", "messages": [{"role": "user", "content": [*blocks, {"type": "text", "text": "?"}]}]})
        for i, blocks in enumerate(rows)
    ]
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    return {"train": [{"source": "jsonl", "options": {"path": str(folder / "tasks.jsonl")}}]}
