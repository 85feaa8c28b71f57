"""The three schedules on the same work in one run: questions, and environments that take their time.

On a GPU the work is that of a GSM8K run: a text model of Qwen2.5 0.5B's shape with random weights, 128 prompts × 8, up to
320 new tokens, two updates a step; or W1. Random weights do not end a response, so lengths are drawn from 120 to 320 tokens
by the request's key. On a CPU the model has a few hundred thousand weights.
"""

import asyncio
import gc
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from workload import QUESTION, WORKLOADS, recipe_for, write_model

from sensorium.envs.protocol import Observation, StepResult
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import Recipe
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import open_trainer
from sensorium.vocabulary import Message, Task, Text, user

QWEN2_5_0_5B = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "initializer_range": 0.02, "max_position_embeddings": 32768,
}  # fmt: skip
TEXTS = "how many of the red circle are left of the blue square, what is up and what is down, which map, which move? "
SCHEDULES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "one_step_off": {"schedule": "one_step_off", "algorithm": {"correction": {"weights": "token"}}},
    "asynchronous": {
        "schedule": {"name": "asynchronous", "max_staleness": 2},
        "algorithm": {"correction": {"weights": "token"}},
    },
}
SHOWN = (
    "time/rollout_s", "time/update_s", "episodes/length_mean", "mismatch/prob_error", "correction/effective_share",
    "staleness/mean", "wait/learner_for_episodes_s", "wait/engine_for_learner_s", "time/environments_busy",
    "engine/rows_mean",
)  # fmt: skip


class LongQuestions:
    """Questions of about ``words`` words, all different."""

    def __init__(self, *, store: Any = None, words: int = 60, size: int = 4096) -> None:
        self.words, self.size = words, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        words = (f"{index}: {TEXTS * 9}").split()[: self.words]
        return Task(f"text/{index}", (user(" ".join(words)),))


class Slow:
    """Answers after 0.2 to 1 s, ``turns`` times; how long is a function of the seed and the turn."""

    instant = False

    def __init__(self, *, store: Any = None, turns: int = 4) -> None:
        self.turns, self.turn = turns, 0

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self.random = random.Random(seed)
        return (), Observation((user(QUESTION),))

    def step(self, response: str) -> StepResult:
        time.sleep(self.random.uniform(0.2, 1.0))
        self.turn += 1
        done = self.turn == self.turns
        return StepResult(
            None if done else Observation((Message("user", (Text(QUESTION),)),)), float(len(response) % 7), done
        )

    def demonstrate(self) -> str:
        return "red"

    def close(self) -> None:
        pass


def compare(
    device: str,
    work: str = "text",
    *,
    environments: str = "fast",
    steps: int = 4,
    schedules: tuple[str, ...] = (),
    **more: Any,
) -> list[dict[str, Any]]:
    """A row for each schedule."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = _model(device, work, folder)
        for name in schedules or tuple(SCHEDULES):
            recipe = _recipe(device, work, environments, model, folder / name, SCHEDULES[name.partition("+")[0]], more)
            if name.endswith("+eager"):
                recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"schedule": "eager"})})
            row = {"schedule": name, "work": work, "environments": environments} | _measured(recipe, steps, work)
            print(row, file=sys.stderr, flush=True)
            found.append(row)
    base = found[0]
    for row in found:
        row["over_first"] = round(row["step_s"] / base["step_s"], 3)
    return found


def _model(device: str, work: str, folder: Path) -> Path:
    if device == "cpu":
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
        return make_tiny("qwen2", folder / "model", **sizes)
    if work != "text":
        return write_model(folder / "model")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        path = make_tiny("qwen2", folder / "model", **QWEN2_5_0_5B)
    torch.set_default_dtype(torch.float32)
    return path


def _recipe(
    device: str, work: str, environments: str, model: Path, run: Path, schedule: dict[str, Any], more: dict[str, Any]
) -> Recipe:
    gpu = device != "cpu"
    given: dict[str, Any] = {
        "model": {"dtype": "bfloat16" if gpu else "float32", "device": device, "gradient_checkpointing": "auto"},
        "batch": {"tokens_per_microbatch": 16384 if gpu else 4096},
        "threads": 1,
    }
    run.mkdir()
    if work != "text":
        return recipe_for(WORKLOADS[work], model, run, **given | schedule)
    longest = 320 if gpu else 64
    rollout: dict[str, Any] = {"max_new_tokens": longest, "ignore_stop_tokens": True, "max_context_tokens": 1024}
    tasks: dict[str, Any] = {"source": "compared_schedules:LongQuestions"}
    batch: dict[str, Any] = {"prompts_per_step": 128 if gpu else 16, "group_size": 8, "updates_per_epoch": 2}
    if environments == "slow":
        rollout |= {"max_turns": 4, "max_new_tokens": 32 if gpu else 16}
        tasks = {"source": "environments", "options": {"environment": "compared_schedules:Slow", "size": 4096}}
        tasks["options"] |= {"split_by": "seed"}
        batch["prompts_per_step"] = 8
    rollout |= more.get("rollout", {})
    batch |= more.get("batch", {})
    given["batch"] |= batch
    rewards = "environment" if environments == "slow" else "workload:LengthModulo"
    return Recipe.model_validate(
        {
            "name": "bench", "steps": 10**6, "run_dir": run, "tasks": {"train": [tasks]}, "rollout": rollout,
            "rewards": {"terms": [{"name": rewards}]}, "optimizer": {"lr": 1e-6},
            "checkpoint": {"best": ""},
        } | given | {"model": {"path": str(model)} | given["model"]} | schedule
    )  # fmt: skip


def _measured(recipe: Recipe, steps: int, work: str) -> dict[str, Any]:
    directory = RunDirectory(recipe.run_dir).create()  # type: ignore[arg-type]
    trainer = open_trainer(recipe, directory)
    if work == "text":
        _vary_lengths(trainer.session.engine)
    gc.collect()
    gc.freeze()
    loop = asyncio.new_event_loop()
    ignored = 1 + recipe.schedule.max_staleness * (recipe.schedule.name == "asynchronous")
    seconds = []
    try:
        for number in range(ignored + steps):
            if number == ignored:
                before = dict(vars(trainer.session.engine.counters))
            started = time.perf_counter()
            loop.run_until_complete(trainer.advance())
            seconds.append(time.perf_counter() - started)
        counted = {name: (now - before[name]) / steps for name, now in vars(trainer.session.engine.counters).items()}
        loop.run_until_complete(trainer.abandon_open())
    finally:
        trainer.close()
        loop.close()
        gc.unfreeze()
    rows = read_metrics(directory.metrics)[ignored:]
    middle = {n: round(statistics.median(row[n] for row in rows), 4) for n in SHOWN if all(n in row for row in rows)}
    step_s = sum(seconds[ignored:]) / steps
    episodes = recipe.batch.prompts_per_step * recipe.batch.group_size
    result = {"step_s": round(step_s, 3), "first_s": round(seconds[0], 2), "episodes_per_s": round(episodes / step_s, 2)}
    return result | middle | {"engine": {name: round(value, 1) for name, value in counted.items() if value}}


def _vary_lengths(engine: Any) -> None:
    """Give responses lengths from three eighths of the recipe's to all of it, by the request's key."""
    generate = engine.generate

    async def cut(request: Any, *rest: Any) -> Any:
        longest = request.sampling.max_new_tokens
        length = random.Random(request.key).randint(max(1, 3 * longest // 8), longest)
        return await generate(replace(request, sampling=replace(request.sampling, max_new_tokens=length)), *rest)

    engine.generate = cut
