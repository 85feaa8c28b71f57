"""What a run's directory holds, to compare two of them, and to damage one."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sensorium.runs.metrics import read_metrics, repeatable


def outcome(run: Path, step: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    rows = [repeatable(row) for row in read_metrics(run / "metrics.jsonl")]
    return rows, load_file(run / "checkpoints" / f"step_{step:06d}" / "model.safetensors")


def assert_equal(left: Path, right: Path, step: int) -> None:
    (rows, weights), (other_rows, other_weights) = outcome(left, step), outcome(right, step)
    differ = differing_metrics(rows, other_rows)
    assert not differ, f"metrics differ (step, name, values): {differ}"
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def differing_metrics(rows: list[dict[str, Any]], other_rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Which metrics differ: step, name and both values. A row that is missing differs in its step, too."""
    return [
        (one.get("step", other.get("step")), name, one.get(name), other.get(name))
        for one, other in zip_longest(rows, other_rows, fillvalue={})
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
