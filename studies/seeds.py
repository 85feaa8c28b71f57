"""One seed is not a result: every claim is run with three, and reported as their mean and range.

Nor is one machine: ARM and x86 round differently, so a run ends elsewhere there. Runs of both stand beside each other, and
ranges are over all of them.
"""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

SEEDS = (0, 1, 2)
Summaries = Iterable[dict[str, Any]]


def over_seeds(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One variant's evaluations by several seeds: mean and range of accuracy, and the hull of the intervals over tasks."""
    accuracies = [summary["accuracy"] for summary in summaries]
    lows, highs = zip(*(summary["interval"] for summary in summaries), strict=True)
    return {
        "mean": sum(accuracies) / len(accuracies),
        "range": [min(accuracies), max(accuracies)],
        "interval": [min(lows), max(highs)],
        "tasks": min(summary["tasks"] for summary in summaries),
        "failed": sum(summary["failed"] for summary in summaries),
        "missing": sum(summary["missing"] for summary in summaries),
    }


def add_run(place: Path, facts: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Put one seed's run into a result file, beside those of other seeds and machines, with what they give together.

    ``run`` has a seed, and summaries by variant under ``before`` and ``after``; it replaces one of the same seed and kind
    of processor. Returns the result. Seeds may be run side by side.
    A variant that an earlier seed was not measured in is summed up over the others.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        earlier = json.loads(place.read_text()).get("runs", []) if place.exists() else []
        runs = sorted([run, *(one for one in earlier if _seed_on(one) != _seed_on(run))], key=_seed_on)
        together = {
            when: {name: over_seeds([one[when][name] for one in runs if name in one[when]]) for name in run[when]}
            for when in ("before", "after")
        }
        result = {**facts, **together, "runs": runs}
        place.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _seed_on(run: dict[str, Any]) -> tuple[str, int]:
    """The kind of processor a run was made on (aarch64, x86_64), and its seed."""
    return str(run.get("machine", "")).partition(",")[0], run["seed"]


def by_name(summaries: Summaries) -> dict[str, dict[str, Any]]:
    """Summaries by their variant's name."""
    return {summary["name"]: summary for summary in summaries}


def circumstances() -> dict[str, Any]:
    """The commit and the machine a run was made by; a copy without its history is told the commit by ``GIT_COMMIT``."""
    commit = os.environ.get("GIT_COMMIT")
    if commit is None:
        asked = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True
        )
        commit = asked.stdout.strip() or "unknown: not a clone"
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {"commit": commit, "machine": machine + gpu}


def chosen_seeds(arguments: Sequence[str], seeds: Sequence[int] = SEEDS) -> Sequence[int]:
    """The seeds that a command line names (``seed=1``), or all."""
    return [int(each.removeprefix("seed=")) for each in arguments if each.startswith("seed=")] or seeds


def cpu_minutes() -> float:
    """CPU minutes of this process so far; unlike minutes they do not depend on what else the machine does."""
    return sum(os.times()[:4]) / 60
