"""Small steps on a CPU that the forecast is held against: sizes, schedules with a slow scorer, one and two gloo ranks.

python bench/schedules.py [sizes] [scoring] [asynchronous] [ranks] > bench/baselines/cpu.json     three minutes, one core

Every case is the median of some steps after the first. ``role`` says what the case is for: the forecast's constants are
fitted to ``calibrate`` (bench/calibrate.py) and tested on ``held out`` (tests/forecast).
"""

import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from workload import TINY, TINY_SIZES, Workload, recipe_for

from sensorium.models.tiny import make_tiny
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import open_trainer

STEPS = 4
SCORING_S = "SENSORIUM_BENCH_SCORING_S"
OFF = {"schedule": "one_step_off", "algorithm": {"correction": {"weights": "token"}}}
STREAMING = {
    "schedule": {"name": "asynchronous", "max_staleness": 1},
    "algorithm": {"correction": {"weights": "token"}},
    "rollout": {"max_new_tokens": 64, "ignore_stop_tokens": True, "max_context_tokens": TINY.context, "schedule": "eager"},
}
SIZES: list[tuple[str, Workload]] = [
    ("calibrate", TINY),
    ("calibrate", replace(TINY, new_tokens=16)),
    ("calibrate", replace(TINY, new_tokens=128)),
    ("calibrate", replace(TINY, prompts=2)),
    ("calibrate", replace(TINY, prompts=16)),
    ("calibrate", replace(TINY, pixels=224)),
    ("held out", replace(TINY, prompts=4)),
    ("held out", replace(TINY, group=4)),
    ("held out", replace(TINY, new_tokens=32)),
    ("held out", replace(TINY, pixels=168)),
]
RANKS: list[tuple[str, int, Workload]] = [
    ("calibrate", 2, replace(TINY, prompts=4)),
    ("calibrate", 2, replace(TINY, prompts=32)),
    ("held out", 2, TINY),
    ("held out", 2, replace(TINY, prompts=16)),
    ("held out", 2, replace(TINY, new_tokens=128)),
]


async def scored_late(task: Any, episode: Any) -> float:
    """A reward that takes its time, as a judge does; all episodes are judged at once."""
    await asyncio.sleep(float(os.environ[SCORING_S]))
    return float(len(episode.response) % 7 + episode.index)


def measure(parts: Sequence[str]) -> dict[str, Any]:
    """The cases of some parts, one after the other."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_tiny("qwen2_5_vl", folder / "model", **TINY_SIZES)
        for role, work in SIZES if "sizes" in parts else []:
            found.append({"role": role, "schedule": "synchronous", "ranks": 1} | _steps(work, model, folder))
        for seconds in (0.25, 1.0) if "scoring" in parts else ():
            os.environ[SCORING_S] = str(seconds)
            late = {"rewards": {"terms": [{"name": "schedules:scored_late"}], "deadline_s": 600}}
            for name, more in (("synchronous", {}), ("one_step_off", OFF)):
                found.append(
                    {"role": "held out", "schedule": name, "ranks": 1, "scoring_s": seconds}
                    | _steps(TINY, model, folder, **late, **more)
                )
        for seconds in (0.25, 1.0) if "asynchronous" in parts else ():
            os.environ[SCORING_S] = str(seconds)
            late = {"rewards": {"terms": [{"name": "schedules:scored_late"}], "deadline_s": 600}}
            found.append(
                {"role": "held out", "schedule": "asynchronous", "ranks": 1, "scoring_s": seconds}
                | _steps(TINY, model, folder, **late, **STREAMING)
            )
        for role, ranks, work in RANKS if "ranks" in parts else []:
            shared = {"cluster": {"learners": ranks}, "threads": ranks}
            found.append({"role": role, "schedule": "synchronous", "ranks": ranks} | _steps(work, model, folder, **shared))
    return {
        "what": f"python bench/schedules.py: medians of {STEPS} steps after the first, seconds; one thread a process",
        "machine": "two Arm cores (Neoverse N1), shared with other work",
        "model": "bench/workload.py TINY_SIZES of qwen2_5_vl, float32",
        "cases": found,
    }


def _steps(work: Workload, model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    directory = RunDirectory(Path(tempfile.mkdtemp(dir=folder))).create()
    recipe = recipe_for(work, model, directory.path, **{"threads": 1, **changes})
    trainer = open_trainer(recipe, directory)
    loop = asyncio.new_event_loop()
    seconds = []
    for _ in range(2 + STEPS):
        started = time.perf_counter()
        loop.run_until_complete(trainer.advance())
        seconds.append(time.perf_counter() - started)
    loop.run_until_complete(trainer.schedule.abandon())
    trainer.close()
    loop.close()
    rows = read_metrics(directory.metrics)[2:]
    middle = {
        name: statistics.median(row[name] for row in rows) for name in rows[0] if name.startswith(("time/", "packing/"))
    }
    sizes = {name: getattr(work, name) for name in ("prompts", "group", "pixels", "new_tokens")}
    case = sizes | {"step_s": round(statistics.median(seconds[2:]), 4)}
    case |= {name.removeprefix("time/"): round(value, 4) for name, value in middle.items() if name != "time/step_s"}
    print(json.dumps(case), file=sys.stderr, flush=True)
    return case


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(measure(sys.argv[1:] or ["sizes", "scoring", "asynchronous", "ranks"]), indent=1))
    sys.stdout.flush()
    os._exit(0)
