"""The workload CPU: GRPO steps of SmolLM2-135M on two cores, ours and TRL's in turn: their ratio, where our time goes.

Equal are checkpoint, float32, threads, prompts, group, new tokens without early stop, temperature 1, AdamW and one update a
step. TRL runs in a process of its own, at the best of several micro-batches, without recomputing activations; its rows are
loaded between its steps. Our step draws its prompts, and writes its episodes to disk.
"""

import asyncio
import gc
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from workload import CPU, Workload, recipe_for

from sensorium.models.tiny import make_tiny
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import open_trainer

THREADS = 2
MICROBATCHES = (8, 16, 32, 64)
WARM_UP = 1
TINY = replace(CPU, prompts=2, group=4, new_tokens=16)


class ChildPeer:
    """TRL in a process of its own, which waits for leave before each step."""

    def __init__(self, model: Path, work: Workload, microbatch: int, folder: Path) -> None:
        self.microbatch = microbatch
        asked = {"model": str(model), "work": asdict(work), "microbatch": microbatch, "folder": str(folder)}
        command = [sys.executable, str(Path(__file__).with_name("peer_trl.py")), json.dumps(asked | {"threads": THREADS})]
        self._log = (folder.parent / f"{folder.name}.log").open("w+")
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1
        )

    def step(self) -> float:
        """One step; returns its seconds."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("\n")
        for line in self._child.stdout:
            if line.startswith('{"step_s"'):
                return float(json.loads(line)["step_s"])
        self._log.seek(0)
        sys.exit(f"TRL with micro-batches of {self.microbatch} ended:\n{self._log.read()[-2000:]}")

    def close(self) -> None:
        """End the process, and free what it holds."""
        self._child.kill()
        self._child.wait()


def time_cpu(steps: int, tiny: bool = False) -> dict[str, Any]:
    """Both sides' steps in turn, on a ``tiny`` model with less work if asked; ours alone where TRL is not installed."""
    logging.disable(logging.WARNING)
    work = TINY if tiny else CPU
    missing = [package for package in ("trl", "datasets") if find_spec(package) is None]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_tiny("llama", folder / "model") if tiny else _smollm2()
        peer = None if missing else _best_peer(model, work, folder)
        ours, theirs, phases = _in_turn(model, work, folder, steps, None if peer is None else peer[0].step)
        if peer is not None:
            peer[0].close()
    whole = median(ours)
    result: dict[str, Any] = {
        "workload": f"{'tiny' if tiny else 'SmolLM2-135M'}: {work.prompts} x {work.group} x {work.new_tokens}",
        "threads": THREADS,
        "steps": steps,
        "shares_of_our_step": {name: round(seconds / whole, 3) for name, seconds in phases.items()},
    }
    if peer is None:
        return result | {"peer": f"not timed: {', '.join(missing)} not installed"}
    ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
    return result | {
        "ratio": round(median(ratios), 2),
        "ratio_of_medians": round(median(theirs) / whole, 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "peer": f"trl, micro-batch {peer[0].microbatch}",
        "peer_by_microbatch_relative_to_ours": {size: round(seconds / whole, 2) for size, seconds in peer[1].items()},
    }


def _smollm2() -> Path:
    from smollm2 import fetch, place

    return fetch(place("SmolLM2-135M-Instruct"))


def _best_peer(model: Path, work: Workload, folder: Path) -> tuple[ChildPeer, dict[int, float]]:
    """TRL at the micro-batch whose step was the fastest after a warm-up, and the seconds of all; one runs at a time."""
    trials: dict[int, float] = {}

    def started(size: int) -> ChildPeer:
        return ChildPeer(model, work, size, folder / f"trl{size}")

    for size in [size for size in MICROBATCHES if work.episodes % size == 0]:
        peer = started(size)
        trials[size] = [peer.step() for _ in range(WARM_UP + 1)][-1]
        peer.close()
    return started(min(trials, key=trials.__getitem__)), trials


def _in_turn(
    model: Path, work: Workload, folder: Path, steps: int, other: Callable[[], float] | None
) -> tuple[list[float], list[float], dict[str, float]]:
    """Seconds of our steps and of the ``other`` side's, one after the other, and the medians of our phases."""
    directory = RunDirectory(folder / "run").create()
    recipe = recipe_for(work, model, directory.path, threads=THREADS, model={"device": "cpu", "dtype": "float32"})
    trainer = open_trainer(recipe, directory)
    loop = asyncio.new_event_loop()
    gc.collect()
    gc.freeze()  # as a run does when it starts
    ours, theirs = [], []
    try:
        for _ in range(WARM_UP + steps):
            started = time.perf_counter()
            loop.run_until_complete(trainer.advance())
            ours.append(time.perf_counter() - started)
            theirs.append(0.0 if other is None else other())
    finally:
        trainer.close()
        loop.close()
    rows = read_metrics(directory.metrics)[WARM_UP:]
    named = [name for name in rows[0] if name.startswith("time/") and name != "time/step_s"]
    return ours[WARM_UP:], theirs[WARM_UP:], {name: median(row[name] for row in rows) for name in named}
