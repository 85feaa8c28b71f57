"""The reference workloads: what one step does, for us and for the peers, and our side of it as a recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sensorium.media.picture import encode_png
from sensorium.media.store import MediaStore
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary import Episode, Score, Task, user

QUESTION = "what colour is it? red green blue"
W0_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vision_hidden_size": 32, "vision_intermediate_size": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Work of one step."""

    prompts: int
    group: int
    pixels: int
    new_tokens: int

    @property
    def episodes(self) -> int:
        """Episodes of one step."""
        return self.prompts * self.group


W0 = Workload(prompts=8, group=8, pixels=112, new_tokens=64)
W1 = Workload(prompts=16, group=8, pixels=448, new_tokens=256)


class NoisePictures:
    """Tasks with one noise picture each: as good as any for timing."""

    def __init__(self, *, store: MediaStore, pixels: int, size: int = 1024) -> None:
        self.store, self.pixels, self.size = store, pixels, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        pixels = np.random.default_rng(index).integers(0, 255, (self.pixels, self.pixels, 3), dtype=np.uint8)
        return Task(f"noise/{index}", (user(self.store.put(encode_png(pixels), "picture"), QUESTION),))


class LengthModulo:
    """A reward that differs between members of a group, as the peer's does."""

    name = "length"
    instant = True

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """The length of what was written, modulo 7."""
        return (Score("length", float(len(episode.response) % 7)),)


def recipe_for(work: Workload, path: Path, run_dir: Path, **changes: Any) -> Recipe:
    """Our side of a workload: no early stop, one update a step, nothing logged but metrics."""
    return Recipe.model_validate(
        {
            "name": "bench",
            "steps": 10**6,
            "run_dir": run_dir,
            "model": {"path": str(path)} | changes.pop("model", {}),
            "tasks": {"train": [{"source": "workload:NoisePictures", "options": {"pixels": work.pixels}}]},
            "batch": {"prompts_per_step": work.prompts, "group_size": work.group} | changes.pop("batch", {}),
            "rollout": {"max_new_tokens": work.new_tokens, "ignore_stop_tokens": True},
            "rewards": {"terms": [{"name": "workload:LengthModulo"}]},
            "optimizer": {"lr": 1e-6},
            "checkpoint": {"best": ""},
        }
        | changes
    )
