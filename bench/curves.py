"""How cost grows with group size, response length, pictures and their size: steps of small workloads, and the picture.

python -m bench curves > curves.json       measures, on a CUDA GPU
python bench/curves.py curves.json > docs/internals/growth.svg    draws what was measured
"""

import asyncio
import gc
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

BASE = {"prompts": 8, "group": 8, "pixels": 448, "new_tokens": 256, "pictures": 1}
AXES: dict[str, tuple[str, list[int]]] = {
    "group": ("episodes of a group", [2, 8, 16]),
    "new_tokens": ("tokens of a response", [64, 256, 512]),
    "pictures": ("pictures of 448 × 448 in a prompt", [1, 4, 16]),
    "pixels": ("sides of the picture in pixels", [224, 448, 896]),
}
WIDTH, HEIGHT, MARGIN = 260, 180, 46
COLOURS = {"rollout_s": "#2a6f97", "update_s": "#c1440e"}


def measure() -> list[dict[str, Any]]:
    """The second step of a workload at each point: seconds of rollout and update, tokens computed."""
    from workload import Workload, write_model

    base, found = Workload(**BASE), []
    works = {replace(base, **{axis: value}) for axis, (_, values) in AXES.items() for value in values}
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model")
        for i, work in enumerate(sorted(works, key=lambda work: (work.pictures, work.pixels, work.group, work.new_tokens))):
            found.append({name: asdict(work)[name] for name in BASE} | _step(work, model, Path(scratch) / f"run{i}"))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def _step(work: Any, model: Path, folder: Path) -> dict[str, float]:
    import torch
    from workload import recipe_for

    from sensorium.runs.metrics import read_metrics
    from sensorium.runs.run_directory import RunDirectory
    from sensorium.trainer.run import open_trainer

    directory = RunDirectory(folder).create()
    settings = {"dtype": "bfloat16", "device": "cuda", "gradient_checkpointing": "selective"}
    recipe = recipe_for(
        work, model, folder, model=settings, batch={"tokens_per_microbatch": 14100}, optimizer={"moments": "bfloat16"}
    )
    trainer = open_trainer(recipe, directory)
    loop = asyncio.new_event_loop()
    for _ in range(2):
        loop.run_until_complete(trainer.advance())
    trainer.close()
    loop.close()
    row = read_metrics(directory.metrics)[-1]
    vars(trainer).clear()  # the next point needs the GPU
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return {"rollout_s": row["time/rollout_s"], "update_s": row["time/update_s"], "tokens": row["packing/tokens"]}


def draw(points: list[dict[str, Any]]) -> str:
    """Four panels side by side: seconds of rollout and update against each axis, the others as in the base workload."""
    panels = []
    top = max(max(point["rollout_s"], point["update_s"]) for point in points)
    for i, (axis, (title, _)) in enumerate(AXES.items()):
        fixed = {name: value for name, value in BASE.items() if name != axis}
        along = [point for point in points if all(point[name] == value for name, value in fixed.items())]
        along.sort(key=lambda point: point[axis])
        panels.append(f'<g transform="translate({i * WIDTH},0)">{_panel(axis, title, along, top)}</g>')
    size = f'width="{WIDTH * len(AXES)}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *panels, "</svg>", ""])


def _panel(axis: str, title: str, along: list[dict[str, Any]], top: float) -> str:
    right, bottom = WIDTH - 14, HEIGHT - MARGIN
    most = max(point[axis] for point in along)
    x = {point[axis]: MARGIN + (right - MARGIN) * point[axis] / most for point in along}
    parts = [f'<path d="M{MARGIN} 20V{bottom}H{right}" fill="none" stroke="#888"/>']
    parts += [f'<text x="{x[value]:.0f}" y="{bottom + 14}" text-anchor="middle">{value}</text>' for value in x]
    parts.append(f'<text x="{(MARGIN + right) / 2:.0f}" y="{bottom + 32}" text-anchor="middle">{title}</text>')
    for share in (0, 0.5, 1):
        y = bottom - (bottom - 20) * share
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.0f}" text-anchor="end">{top * share:.1f} s</text>')
    for row, (name, colour) in enumerate(COLOURS.items()):
        at = [(x[point[axis]], bottom - (bottom - 20) * point[name] / top) for point in along]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in at]
        parts.append(f'<text x="{MARGIN + 8}" y="{30 + 13 * row}" fill="{colour}">{name.removesuffix("_s")}</text>')
    return "".join(parts)


if __name__ == "__main__":
    print(draw(json.loads(Path(sys.argv[1]).read_text())))
