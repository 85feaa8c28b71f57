"""What judges cost an evaluation: one file of sums that goes on counting when a killed evaluation goes on."""

import json
from collections.abc import Mapping
from pathlib import Path

from sensorium.record.durable import read_json, write_whole

MEAN, LONGEST = "latency_mean_s", "latency_max_s"
TOLD = ("calls", "cache_hits", "failures", "input_tokens", "output_tokens", "cost")


def add_costs(path: Path, row: Mapping[str, float]) -> None:
    """Add what judges cost (``judge/MODEL/…``) to the file; nothing was asked: nothing is written."""
    if not row:
        return
    sums = read_json(path, "Remove it; costs are then counted from now on.") if path.exists() else {}
    for name, value in row.items():
        model, _, what = name.rpartition("/")
        if what == MEAN:
            before, now = sums.get(f"{model}/calls", 0) - row[f"{model}/calls"], row[f"{model}/calls"]
            sums[name] = (sums.get(name, 0.0) * before + value * now) / (before + now)
        elif what == LONGEST:
            sums[name] = max(sums.get(name, 0.0), value)
        else:
            sums[name] = sums.get(name, 0) + value
    write_whole(path, json.dumps(sums, indent=1) + "\n")


def told(path: Path) -> str:
    """The costs in one line, empty where no judge was asked."""
    if not path.exists():
        return ""
    sums = read_json(path, "Remove it.")
    models = sorted({name.split("/")[1] for name in sums})
    return "judges: " + "; ".join(_told(model, {name: sums[f"judge/{model}/{name}"] for name in TOLD}) for model in models)


def _told(model: str, cost: Mapping[str, float]) -> str:
    answers = f"{cost['cache_hits']:,} answers from the cache, {cost['failures']:,} questions without one"
    tokens = f"{cost['input_tokens']:,} tokens read, {cost['output_tokens']:,} written"
    return f"{model} was called {cost['calls']:,} times ({answers}; {tokens}), cost {cost['cost']:g}"
