"""W4, many turns with a new picture each: the rollout's token rate beside W1's in one process, and what was computed twice.

The native engine plays in lockstep, as ``rollout.schedule: auto`` does where environments are quick, and eagerly.

64 episodes of 8 turns in Sokoban (8 × 8), a picture of 448² (256 vision tokens) each turn and 64 tokens without early stop.
Random weights write no moves, so an environment takes what is written as the key of one: every turn something moves.

``again``: tokens that were prefilled, over those that threads hold and the engine did not decode (the last one of a turn
is read with the next): 1 if no prompt, picture or earlier turn was computed twice; members of a group share their prompt.
``tower_items``: pictures encoded, and different pictures shown.
"""

import asyncio
import gc
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from workload import TINY, W1, Workload, recipe_for, write_model

from sensorium.envs.protocol import StepResult
from sensorium.envs.sokoban import Sokoban
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import Recipe
from sensorium.runs.episodes import read_episodes
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import open_trainer

TURNS, NEW_TOKENS = 8, 64


class Wandering(Sokoban):
    """Sokoban that goes where a hash of what is written points, three steps at once; it ends after ``TURNS``."""

    def step(self, response: str) -> StepResult:
        moves, position = [], self._position
        for digit in blake2b(f"{self._turn} {response}".encode(), digest_size=3).digest():
            free = [i for i in range(4) if self._room.after(position, i) != position] or [0]
            moves.append(free[digit % len(free)])
            position = self._room.after(position, moves[-1])
        result = super().step(f"<answer>{self.grammar.spell(tuple(moves))}</answer>")
        over = self._turn >= TURNS
        return replace(result, done=over, observation=None if over else result.observation or self._shown(""))


def compare(steps: int, *, tiny: bool = False, engines: tuple[str, ...] = ("native",)) -> dict[str, Any]:
    """W1 and W4 with the first engine, then W4 with the others."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_tiny("qwen2_5_vl", folder / "model") if tiny else write_model(folder / "model")
        found = {
            "W1": _measured(folder / "w1", recipe_for(TINY if tiny else W1, model, folder / "w1", **_where(tiny)), steps)
        }
        played = [
            (engine, schedule) for engine in engines for schedule in (["auto"] if engine == "native" else []) + ["eager"]
        ]
        for engine, schedule in played:
            run = folder / f"{engine}_{schedule}"
            found[f"W4, {engine}, {schedule}"] = _measured(run, _recipe(model, run, tiny, engine, schedule), steps)
    for name, row in found.items():
        if name != "W1":
            row["over_w1"] = round(row["tokens_per_s"] / found["W1"]["tokens_per_s"], 3)
            print(name, row, file=sys.stderr, flush=True)
    return found


def _where(tiny: bool) -> dict[str, Any]:
    device = "cpu" if tiny else "cuda"
    return {
        "model": {"device": device, "dtype": "float32" if tiny else "bfloat16", "gradient_checkpointing": "auto"},
        "batch": {"tokens_per_microbatch": 4096 if tiny else 14100},
    }


def _recipe(model: Path, run: Path, tiny: bool, engine: str, schedule: str) -> Recipe:
    work = Workload(prompts=2 if tiny else 8, group=4 if tiny else 8, pixels=112 if tiny else 448, new_tokens=NEW_TOKENS)
    given = _where(tiny)
    base = recipe_for(work, model, run, **given).model_dump(mode="json", exclude_unset=True)
    each = (work.pixels // 28) ** 2 + NEW_TOKENS + 128
    room = {
        "size": 8,
        "cell": work.pixels // 8,
        "boxes": 2,
        "min_solution": 4,
        "max_solution": 30,
        "max_actions_per_turn": 3,
    }
    environments = {"size": 4096, "split_by": "seed", "environment": "many_turns:Wandering", "options": room}
    base["tasks"] = {"train": [{"source": "environments", "options": environments}]}
    base["rollout"] |= {"max_turns": TURNS, "max_new_tokens": NEW_TOKENS, "max_context_tokens": TURNS * each + 512}
    base["rollout"] |= {"schedule": schedule, "engine": {"name": engine}}
    base["rewards"] = {"terms": [{"name": "environment"}]}
    return Recipe.model_validate(base)


def _measured(run: Path, recipe: Recipe, steps: int) -> dict[str, Any]:
    directory = RunDirectory(run).create()
    trainer = open_trainer(recipe, directory)
    gc.collect()
    gc.freeze()
    loop, seconds, counted = asyncio.new_event_loop(), [], []
    try:
        for _ in range(1 + steps):
            before = dict(vars(trainer.session.engine.counters))
            started = time.perf_counter()
            loop.run_until_complete(trainer.advance())
            seconds.append(time.perf_counter() - started)
            counted.append({name: now - before[name] for name, now in vars(trainer.session.engine.counters).items()})
    finally:
        trainer.close()
        loop.close()
        gc.unfreeze()
    rows = read_metrics(directory.metrics)[1:]
    logs = sorted(directory.episodes.iterdir())[1:]
    played = [[episode for *_, episode in read_episodes(log)] for log in logs]
    rollout_s = statistics.median(row["time/rollout_s"] for row in rows)
    tokens = statistics.mean(sum(episode.sampled_tokens for episode in episodes) for episodes in played)
    pictures = {span.media for e in played[-1] for thread in e.threads for s in thread.segments for span in s.media}
    last = counted[-1]
    return {
        "step_s": round(statistics.median(seconds[1:]), 3),
        "first_s": round(seconds[0], 2),
        "rollout_s": round(rollout_s, 3),
        "update_s": round(statistics.median(row["time/update_s"] for row in rows), 3),
        "tokens_per_s": round(tokens / rollout_s),
        "turns": statistics.mean(len(episode.turns) for episode in played[-1]),
        "prob_error": rows[-1].get("mismatch/prob_error"),
        "again": round((last["prefill_tokens"] + last.get("extension_tokens", 0)) / _read_once(trainer, played[-1]), 4),
        "tower_items": [last.get("features", 0), len(pictures)],
        "peak_gib": rows[-1].get("memory/peak_gib"),
        "engine": {name: value for name, value in last.items() if value},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _read_once(trainer: Any, episodes: list[Any]) -> int:
    """Tokens that no decode step reads: of others, a group's common ones once, and each turn's last but for the end."""
    chat, seen = trainer.session.policy.chat, set()
    found = sum(len(episode.turns) - len(episode.threads) for episode in episodes)
    for thread in (thread for episode in episodes for thread in episode.threads):
        for i, segment in enumerate(thread.segments):
            if segment.author != "model" and thread.segments[: i + 1] not in seen:
                seen.add(thread.segments[: i + 1])
                found += len(chat.layout(segment))
    return found
