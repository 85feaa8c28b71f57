"""What a run's directory holds, to compare two of them, and to damage one."""

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
    assert rows == other_rows
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
