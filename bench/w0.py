"""Workload W0 (tiny model, CPU): ours and TRL's steps, interleaved in one run. Prints the ratio and where our time goes.

python bench/w0.py [--steps 20]
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from workload import W0, W0_SIZES, recipe_for

from sensorium.models.tiny import make_tiny
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import open_trainer

MICROBATCHES = (8, 16, 32, 64)
WARM_UP = 2


def median_step(peer: Any, steps: int) -> float:
    """Median seconds of a peer's step, warm."""
    return statistics.median([peer.step() for _ in range(WARM_UP + steps)][WARM_UP:])


@contextmanager
def usual_algorithms() -> Iterator[None]:
    """Inside, torch may choose algorithms as in a process of the peer's own: a run of ours asks for deterministic ones."""
    ours = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(ours)


def main() -> None:
    """Parse, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trial-steps", type=int, default=3)
    arguments = parser.parse_args()
    time_w0(arguments.steps, arguments.trial_steps)


def time_w0(steps: int, trial_steps: int = 3) -> None:
    """Time both, best peer setting first, print the result and leave the process."""
    try:
        from peer_trl import TrlPeer
    except ModuleNotFoundError as error:
        sys.exit(f"W0 is timed beside TRL, and '{error.name}' is not installed here; pip install trl datasets.")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_tiny("qwen2_5_vl", folder / "model", **W0_SIZES)
        peers = [TrlPeer(model, W0, 1000, size, folder / f"trl{size}") for size in MICROBATCHES]
        trials = {peer.microbatch: median_step(peer, trial_steps) for peer in peers}
        peer = min(peers, key=lambda p: trials[p.microbatch])
        directory = RunDirectory(folder / "run").create()
        trainer = open_trainer(recipe_for(W0, model, directory.path), directory)
        loop = asyncio.new_event_loop()
        ours, theirs = [], []
        for i in range(WARM_UP + steps):
            peer.wait_until_loaded()
            started = time.perf_counter()
            loop.run_until_complete(trainer.advance())
            seconds = time.perf_counter() - started
            with usual_algorithms():
                other = peer.step()
            if i >= WARM_UP:
                ours.append(seconds)
                theirs.append(other)
        rows = read_metrics(directory.metrics)[WARM_UP:]
        phases = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name.startswith("time/")}
        mine, peer_s = statistics.median(ours), statistics.median(theirs)
        result = {
            "workload": "W0",
            "steps": steps,
            "ratio": round(peer_s / mine, 2),
            "shares_of_our_step": {name: round(s / mine, 3) for name, s in phases.items() if name != "time/step_s"},
            "peer": f"trl, micro-batch {peer.microbatch}",
            "peer_by_microbatch_relative_to_ours": {size: round(s / mine, 2) for size, s in trials.items()},
        }
        print(json.dumps(result, indent=1))
        sys.stdout.flush()
        os._exit(0)  # the peers' threads wait for their next step


if __name__ == "__main__":
    main()
