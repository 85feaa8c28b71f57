"""Processes of a run that are killed (SIGKILL) at random moments: counts add up, and nothing is trained twice.

    python studies/cluster_kills.py [KILLS] [PART …]      parts: engine, environment, reward, learner, driver

An engine, a worker of environments and a worker of rewards are replaced, and the run goes on to its end. The death of a
rank of the learner ends the run with one paragraph, that of the driver without one: both are resumed until the run ends.
Half of the kills fall into runs of the asynchronous schedule. Writes studies/results/cluster_kills.json, each part as it
ends. Processes are forks of a server that has imported everything; with ``placement=ray`` as a further argument
they are placed by Ray (not the driver, and no forks), the learner's rank too.
"""

import json
import os
import random
import re
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from sensorium.recipe.schema import Recipe
from sensorium.runs.ledger import Ledger
from sensorium.runs.metrics import read_metrics
from sensorium.runs.process_table import alive, read_processes
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import LearnerLost
from studies.fork_server import ForkServer
from studies.seeds import circumstances
from tests.forked import forked_python
from tests.trainer.small import small

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "studies" / "results" / "cluster_kills.json"
WORKERS = ("sensorium.assembly.rank_main", "sensorium.services.environment_service", "sensorium.rewards.placed")
PRELOADED = (*WORKERS, "uvicorn")
STEPS, PROMPTS, SIZE = 6, 2, 2
STREAM = ("schedule.name=asynchronous", "algorithm.correction.weights=token")
NUMBERS: dict[str, Any] = {
    "tasks": {"train": [{"source": "environments", "options": {"environment": "countdown", "size": 16}}]},
    "rollout": {"max_new_tokens": 8, "max_turns": 3, "schedule": "eager"},
    "rewards": {"terms": [{"name": "environment"}, {"name": "tests.cluster.slow_term:SlowParity"}]},
    "batch": {"prompts_per_step": PROMPTS, "group_size": SIZE},
}
ENGINES = ("cluster.engines=2", "rollout.engine.name=process")
PARTS: dict[str, tuple[str, ...]] = {
    "engine": ENGINES,
    "environment": ("cluster.environments=2",),
    "reward": ("cluster.rewards=2",),
    "learner": ("cluster.learners=2",),
    "driver": (*ENGINES, "cluster.environments=2", "cluster.rewards=2"),
}
COUNTED = ("engine/replaced", "engine/sampled_again", "worker/environment_replaced", "worker/rolled_again")
COUNTED += ("worker/reward_replaced", "worker/asked_again")
GONE_S = 60.0


@dataclass
class Killed:
    """What became of a part's runs: kills by the steps that were done, how often a run was resumed, what did not add up."""

    runs: int = 0
    kills: list[int] = field(default_factory=list)
    resumed: int = 0
    restarted: int = 0
    told: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def recipe_of(part: str, folder: Path, number: int, *more: str) -> Recipe:
    """The recipe of a part's run; every other one has the asynchronous schedule."""
    stream = STREAM if number % 2 else ()
    fixed = (f"steps={STEPS}", "threads=1", "checkpoint.every=2")
    return small(folder / f"run_{number}", *PARTS[part], *fixed, *stream, *more, **NUMBERS)


def what_is_wrong(run: Path, stream: bool) -> Iterator[str]:
    """What a run that ended has on record, and should not."""
    steps = [row["step"] for row in read_metrics(run / "metrics.jsonl")]
    if steps != list(range(1, STEPS + 1)):
        yield f"the rows are those of steps {steps}"
    ledger = Ledger(run / "ledger.sqlite")
    fates = Counter(fate for step in steps for fate in ledger.fates(step).values())
    draws = ledger.draws()
    ledger.close()
    if fates != {"trained": STEPS * PROMPTS * SIZE}:
        yield f"episodes came to {dict(fates)}"
    if stream:
        became = Counter(str(fate) for _, _, fate in draws.values())
        if list(draws) != list(range(len(draws))) or became["trained"] != STEPS * PROMPTS or became["None"]:
            yield f"draws came to {dict(became)}"
    else:
        with sqlite3.connect(run / "ledger.sqlite") as ledger_file:
            taken = ledger_file.execute("SELECT first, next FROM steps ORDER BY step").fetchall()
        if taken != [(PROMPTS * n, PROMPTS * (n + 1)) for n in range(STEPS)]:
            yield f"steps took the rows {taken}"
    until = time.monotonic() + GONE_S
    while left := [row.part for row in rows_of(run) if row.part != "driver" and alive(row.pid)]:
        if time.monotonic() > until:
            yield f"processes are left: {left}"
            break
        time.sleep(0.1)


def rows_of(run: Path) -> tuple[Any, ...]:
    told = read_processes(run)
    return () if told is None else told.rows


@contextmanager
def killer(run: Path, part: str, after_s: float, moments: random.Random, killed: list[int]) -> Iterator[None]:
    """Inside, so long after the run has begun, a process of a kind is killed; ``killed`` hears how many steps are done."""
    ended = threading.Event()

    def kill() -> None:
        begun = time.time()
        while not ((run / "cluster.json").exists() and (run / "cluster.json").stat().st_mtime > begun):
            if ended.wait(0.01):
                return
        if ended.wait(after_s):
            return
        pids = [row.pid for row in rows_of(run) if row.part.startswith(part) and alive(row.pid)]
        if pids:
            done = len(read_metrics(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0
            with suppress(ProcessLookupError):
                os.kill(moments.choice(pids), signal.SIGKILL)
                killed.append(done)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def resumable(run: Path) -> bool:
    return any((run / "checkpoints").glob("step_*"))


def killed_inside(part: str, folder: Path, kills: int, moments: random.Random, more: tuple[str, ...]) -> Killed:
    """Kill processes of a run; one that ends because of it is resumed, or started anew if nothing was saved."""
    found = Killed()
    longest_s = [0.0, 0.0]
    for stream in (0, 1):
        recipe = recipe_of(part, folder, stream, "name=whole", f"run_dir={folder / f'whole_{stream}'}", *more)
        train(recipe)
        found.wrong += [f"uninterrupted: {what}" for what in what_is_wrong(recipe.directory, bool(stream))]
        longest_s[stream] = sum(row["time/step_s"] for row in read_metrics(recipe.directory / "metrics.jsonl"))
    number = 0
    while len(found.kills) < kills:
        recipe, stream = recipe_of(part, folder, number, *more), number % 2
        run = recipe.directory
        resume, restart, fell = False, False, 0
        while True:
            killed: list[int] = []
            try:
                with killer(run, part, moments.uniform(0, longest_s[stream]), moments, killed):
                    train(recipe, resume=resume, restart=restart)
                break
            except LearnerLost as error:
                found.told.add(re.sub(r"\d+", "N", str(error)))
                resume, restart = resumable(run), not resumable(run)
                found.resumed += resume
                found.restarted += restart
            finally:
                fell += len(killed)
                found.kills += killed
        found.runs += 1
        found.wrong += [f"run {number}: {what}" for what in what_is_wrong(run, bool(stream))]
        last = read_metrics(run / "metrics.jsonl")[-1]
        found.counts.update({name: int(last[name]) for name in COUNTED if name in last})
        replaced = sum(last.get(name, 0) for name in COUNTED if name.endswith("replaced"))
        if part != "learner" and replaced > fell:
            found.wrong.append(f"run {number}: {fell} kills and {replaced} replaced")
        number += 1
        print(f"{part}: {len(found.kills)} kills, {found.runs} runs ended, {len(found.wrong)} wrong", flush=True)
    return found


def train_one(part: str, folder: str, number: str, mode: str) -> None:
    """One run of the driver's part, in a process that may be killed; its own processes are forks too."""
    torch.set_num_threads(1)
    with ForkServer(shared=Path(folder) / "server") as server, forked_python(server):
        train(recipe_of(part, Path(folder), int(number)), resume=mode == "resume", restart=mode == "restart")


def killed_driver(part: str, folder: Path, kills: int, moments: random.Random, more: tuple[str, ...]) -> Killed:
    """Kill the driver, and resume until the run ends."""
    found = Killed()
    log = folder / "log.txt"
    with ForkServer(*PRELOADED, shared=folder / "server") as server:

        def start(number: int, mode: str, kill_at_cpu_s: float | None) -> Any:
            return server.run(
                "studies.cluster_kills:train_one",
                part,
                str(folder),
                str(number),
                mode,
                kill_at_cpu_s=kill_at_cpu_s,
                log=log,
            )

        longest_s = [start(stream, "", None).cpu_s for stream in (0, 1)]
        number = 2
        while len(found.kills) < kills:
            run, mode, stream = folder / f"run_{number}", "", number % 2
            while (ended := start(number, mode, moments.uniform(0, 1.1 * longest_s[stream]))).code:
                if ended.code != -signal.SIGKILL:
                    found.wrong.append(f"run {number} ended with {ended.code}: {log.read_text()[-1500:]}")
                    break
                found.kills.append(len(read_metrics(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0)
                begun = (run / "recipe.yaml").exists()
                mode = ("resume" if resumable(run) else "restart") if begun else ""
                found.resumed += mode == "resume"
                found.restarted += mode == "restart"
            else:
                found.wrong += [f"run {number}: {what}" for what in what_is_wrong(run, bool(stream))]
            found.runs += 1
            number += 1
            print(f"{part}: {len(found.kills)} kills, {found.runs} runs ended, {len(found.wrong)} wrong", flush=True)
    return found


def main(kills: int, parts: list[str], more: tuple[str, ...]) -> None:
    """Kill in each part, and write the result."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    os.chdir(ROOT)
    on_ray = any("ray" in one for one in more)
    if on_ray:  # one cluster for all runs: its start takes longer than they do. Its CPUs are places, not cores
        import ray

        ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, configure_logging=False)
    wrong = False
    for part in parts:
        began = time.monotonic()
        how: Callable[..., Killed] = killed_driver if part == "driver" else killed_inside
        with tempfile.TemporaryDirectory() as folder:
            forks = ForkServer(*PRELOADED) if part != "driver" and not on_ray else None
            with forks or nullcontext(), forked_python(forks) if forks else nullcontext():
                found = how(part, Path(folder), kills, random.Random(part), more)
        told: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        if not on_ray:
            told |= {"command": "python studies/cluster_kills.py", **circumstances()}
        told[f"{part} by Ray" if on_ray else part] = {
            **(circumstances() if on_ray else {}),
            "kills": len(found.kills),
            "kills by steps done": dict(sorted(Counter(found.kills).items())),
            "runs that ended": found.runs,
            "resumed": found.resumed,
            "started anew": found.restarted,
            "counts": dict(found.counts),
            "told": sorted(found.told),
            "wrong": found.wrong,
            "minutes": round((time.monotonic() - began) / 60, 1),
        }
        RESULT.write_text(json.dumps(told, indent=1) + "\n")
        print(part, json.dumps(told[f"{part} by Ray" if on_ray else part], indent=1), flush=True)
        wrong = wrong or bool(found.wrong)
    sys.exit(wrong)


if __name__ == "__main__":
    given = sys.argv[1:]
    count = int(given.pop(0)) if given and given[0].isdigit() else 10
    options = tuple(f"cluster.{one}" for one in given if "=" in one)
    main(count, [one for one in given if "=" not in one] or list(PARTS), options)
