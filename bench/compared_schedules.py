"""The three schedules on the same work in one run: questions, and environments that take their time.

On a GPU the work is that of a GSM8K run: a text model of Qwen2.5 0.5B's shape with random weights, 128 prompts × 8, up to
320 new tokens, two updates a step; or W1. Random weights do not end a response, so lengths are drawn from 120 to 320 tokens
by the request's key. On a CPU the model has a few hundred thousand weights.

Slow environments take 0.2 to 1 s a turn, times ``slower`` (for a machine of which a process gets only a part). ``of_ideal``
compares with ``PLACES`` environments that are in a call all the time: with a mean call of c seconds and t turns they end
PLACES / (t · c) episodes a second, 26.7 with 64 places, 4 turns and 0.6 s. ``of_bound`` compares with what a schedule that
waits for a step's last episode could reach if engine and update took no time: a step's episodes in the time that the calls
of its longest one take, on average. The asynchronous schedule does not wait, so its bound is the ideal.
"""

import asyncio
import gc
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
SECONDS, TURNS, PLACES = (0.2, 1.0), 4, 64  # of slow environments: of a call, of an episode, at once
SHOWN = (
    "time/rollout_s", "time/update_s", "episodes/length_mean", "mismatch/prob_error", "correction/effective_share",
    "staleness/mean", "wait/learner_for_episodes_s", "wait/engine_for_learner_s", "time/environments_busy",
    "time/environment_mean_s", "time/environment_wait_max_s", "engine/rows_mean",
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
    """Answers after 0.2 to 1 s times ``slower``, ``TURNS`` times; how long is a function of the seed and the turn."""

    instant = False

    def __init__(self, *, store: Any = None, slower: float = 1.0) -> None:
        self.turn, self.slower = 0, slower

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self.seconds = [self.slower * second for second in call_seconds(seed)]
        return (), Observation((user(QUESTION),))

    def step(self, response: str) -> StepResult:
        time.sleep(self.seconds[self.turn])
        self.turn += 1
        done = self.turn == TURNS
        return StepResult(
            None if done else Observation((Message("user", (Text(QUESTION),)),)), float(len(response) % 7), done
        )

    def demonstrate(self) -> str:
        return "red"

    def close(self) -> None:
        pass


def call_seconds(seed: int) -> list[float]:
    """How long each call of an episode takes, before ``slower``."""
    drawn = random.Random(seed)
    return [drawn.uniform(*SECONDS) for _ in range(TURNS)]


def shares(episodes_per_s: float, schedule: str, prompts: int, episodes: int, slower: float) -> dict[str, float]:
    """Episodes a second as a share of the ideal, and of the schedule's own bound; members of a group take equally long."""
    ideal = PLACES / (TURNS * slower * sum(SECONDS) / 2)
    steps = [max(sum(call_seconds(prompts * step + i)) for i in range(prompts)) for step in range(1000)]
    bound = ideal if schedule == "asynchronous" else min(ideal, episodes / (slower * statistics.mean(steps)))
    return {"of_ideal": round(episodes_per_s / ideal, 3), "of_bound": round(episodes_per_s / bound, 3)}


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
    with ExitStack() as scratching:
        folder = Path(scratching.enter_context(tempfile.TemporaryDirectory()))
        model = _model(device, work, folder)
        if more.get("where") == "service":
            more["served"] = scratching.enter_context(served())
        for name in schedules or tuple(SCHEDULES):
            recipe = _recipe(device, work, environments, model, folder / name, SCHEDULES[name.partition("+")[0]], more)
            if name.endswith("+eager"):
                recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"schedule": "eager"})})
            row = {"schedule": name, "work": work, "environments": environments} | _measured(recipe, steps, work)
            if environments == "slow":
                batch, slower = recipe.batch, more.get("slower", 1.0)
                episodes = batch.prompts_per_step * batch.group_size
                row |= shares(row["episodes_per_s"], recipe.schedule.name, batch.prompts_per_step, episodes, slower)
            print(row, file=sys.stderr, flush=True)
            found.append(row)
    base = found[0]
    for row in found:
        row["over_first"] = round(row["step_s"] / base["step_s"], 3)
    return found


@contextmanager
def served() -> Iterator[str]:
    """The address of an environment service in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "sensorium", "serve", "env", "compared_schedules:Slow", "--port", str(port)]
    server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.DEVNULL)
    try:
        wait_until_up(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def wait_until_up(port: int, seconds: float = 120.0) -> None:
    """Until a server on this machine accepts connections."""
    ends = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.2)


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
        given["cluster"] = {"environments": 2 if more.get("where") == "workers" else 0}
        place = {"environment": "compared_schedules:Slow", "options": {"slower": more.get("slower", 1.0)}}
        if served := more.get("served"):
            place = {"environment": "remote", "options": {"servers": [served]} | place}
        tasks = {"source": "environments", "options": {"size": 4096, "split_by": "seed"} | place}
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
