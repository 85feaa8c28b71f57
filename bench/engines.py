"""Steps of a workload sampled by the native engine and by vLLM, one after the other: ``python -m bench engines``.

Each engine has a child process, so that the second finds an empty GPU. ``--tiny`` runs it on a CPU, with a tiny model.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from math import exp
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from workload import W0, W0_SIZES, Workload, recipe_for, write_model

ENGINES = ("native", "vllm")
LIMIT_S = 900
WARM_UP = 1
TINY = replace(W0, prompts=2, group=4, new_tokens=16)


def time_engines(name: str, work: Workload, steps: int, tiny: bool) -> dict[str, Any]:
    """What each engine gives, and their ratio; an engine that failed says why."""
    found = {engine: _in_child(engine, work, steps, tiny) for engine in ENGINES}
    result: dict[str, Any] = {"workload": f"{name}, tiny" if tiny else name, "steps": steps, "engines": found}
    if all("step_s" in each for each in found.values()):
        result["vllm_over_native"] = {
            key: round(found["vllm"][key] / found["native"][key], 2) for key in ("step_s", "rollout_s")
        }
    return result


def _in_child(engine: str, work: Workload, steps: int, tiny: bool) -> dict[str, Any]:
    asked = {"engine": engine, "work": asdict(work), "steps": steps, "tiny": tiny}
    # The workload's tasks and reward are named by the recipe, also in the processes of an engine.
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, str(Path(__file__)), json.dumps(asked)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=os.environ | {"PYTHONPATH": paths}
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {LIMIT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][-600:]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def timed(engine: str, work: Workload, steps: int, tiny: bool, folder: Path) -> dict[str, Any]:
    """Medians over the steps after the first, of one engine."""
    from sensorium.models.tiny import make_tiny
    from sensorium.record.metrics import read_metrics
    from sensorium.record.run_directory import RunDirectory
    from sensorium.trainer.run import open_trainer

    model = make_tiny("qwen2_5_vl", folder / "model", **W0_SIZES) if tiny else write_model(folder / "model")
    directory = RunDirectory(folder / "run").create()
    changes: dict[str, Any] = {"model": {"device": "cpu"} if tiny else {"dtype": "bfloat16", "device": "cuda"}}
    if not tiny:
        changes["model"]["gradient_checkpointing"] = "auto"
        changes["optimizer"] = {"lr": 1e-6, "moments": "bfloat16"}
    recipe = recipe_for(work, model, directory.path, **changes)
    if engine == "vllm":
        options = {"max_context": work.context, "max_rows": work.episodes}
        rollout = recipe.rollout.model_dump() | {"engine": {"name": "vllm", "options": options}, "schedule": "eager"}
        recipe = type(recipe).model_validate(recipe.model_dump() | {"rollout": rollout})
    trainer = open_trainer(recipe, directory)
    try:
        loop, seconds = asyncio.new_event_loop(), []
        for _ in range(WARM_UP + steps):
            started = time.perf_counter()
            loop.run_until_complete(trainer.advance())
            seconds.append(time.perf_counter() - started)
    finally:
        trainer.session.close()
    rows = read_metrics(directory.metrics)[WARM_UP:]
    return {"step_s": round(statistics.median(seconds[WARM_UP:]), 3), **summary(rows, work.episodes)}


def summary(rows: list[dict[str, float]], episodes: int) -> dict[str, Any]:
    """Medians: seconds of parts, tokens a second, the push of weights, and how far log-probs are from the learner's."""
    middle = {
        name: statistics.median(values)
        for name in {name for row in rows for name in row}
        if (values := [row[name] for row in rows if name in row])
    }
    tokens = episodes * middle["episodes/length_mean"]
    parity = {name.rpartition("/")[2]: mean for name, mean in middle.items() if name.startswith("engine/parity_mean/")}
    return {
        "rollout_s": round(middle["time/rollout_s"], 3),
        "update_s": round(middle["time/update_s"], 3),
        "tokens_per_s": round(tokens / middle["time/rollout_s"]),
        "push_s": _rounded(middle.get("engine/push_s")),
        "parity_s": _rounded(middle.get("engine/parity_s")),
        "prob_error": _rounded(middle.get("mismatch/prob_error"), 6),
        "prob_error_by_modality": {kind: round(exp(mean), 6) for kind, mean in sorted(parity.items())},
        "peak_gib": _rounded(middle.get("memory/peak_gib"), 1),
    }


def _rounded(number: float | None, digits: int = 3) -> float | None:
    return None if number is None else round(number, digits)


def main(asked: dict[str, Any]) -> None:
    """Time one engine and print it as JSON."""
    import torch

    import sensorium

    with tempfile.TemporaryDirectory() as scratch:
        work = Workload(**asked["work"])
        found = timed(asked["engine"], work, asked["steps"], asked["tiny"], Path(scratch))
    versions = {"torch": torch.__version__, "sensorium": sensorium.__version__}
    if asked["engine"] == "vllm":
        from sensorium.engines.vllm.versions import installed_version

        versions["vllm"] = installed_version().name
    device = "cpu" if asked["tiny"] else torch.cuda.get_device_name()
    print(json.dumps({"device": device, **versions, **found}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
