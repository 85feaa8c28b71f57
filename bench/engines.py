"""Steps of a workload sampled by the native engine and by vLLM, one after the other: ``python -m bench engines``.

Each engine has a child process, so that the second finds an empty GPU. What one gives is printed to stderr as soon as it is
there, so that it is not lost with the other. ``--tiny`` runs it on a CPU, with a tiny model.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from math import exp
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from workload import TINY_SIZES, Workload, recipe_for, write_model

ENGINES = ("native", "vllm")
LIMIT_S = 900.0
WARM_UP = 1
GPU_SHARE = 0.2
"""Of the GPU for vLLM: a 3B model and the keys and values of 512 rows. With more the learner would have to recompute."""
TOLD_LINES = 80
TINY = Workload(prompts=2, group=4, pixels=112, new_tokens=16)


def time_engines(
    name: str,
    work: Workload,
    steps: int,
    tiny: bool,
    engines: Sequence[str] = ENGINES,
    push: str = "auto",
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """What each engine gives within ``limit_s``, and their ratio; an engine that failed says why."""
    found: dict[str, dict[str, Any]] = {}
    for engine in engines:
        found[engine] = _in_child(engine, work, steps, tiny, push, limit_s)
        print(json.dumps({engine: found[engine]}), file=sys.stderr, flush=True)
    result: dict[str, Any] = {"workload": f"{name}, tiny" if tiny else name, "steps": steps, "engines": found}
    if all("step_s" in found.get(engine, {}) for engine in ENGINES):
        result["vllm_over_native"] = {
            key: round(found["vllm"][key] / found["native"][key], 2) for key in ("step_s", "rollout_s")
        }
    return result


def _in_child(engine: str, work: Workload, steps: int, tiny: bool, push: str, limit_s: float) -> dict[str, Any]:
    asked = {"engine": engine, "work": asdict(work), "steps": steps, "tiny": tiny, "push": push}
    # The workload's tasks and reward are named by the recipe, also in the processes of an engine.
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, str(Path(__file__)), json.dumps(asked)]
    with tempfile.TemporaryFile("w+") as log:
        environment = os.environ | {"PYTHONPATH": paths}
        done: subprocess.CompletedProcess[str] | None = None
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=limit_s, check=False, env=environment
            )
        log.seek(0)
        told = log.read().strip().splitlines()
    lines = done.stdout.strip().splitlines() if done is not None else []
    if done is not None and not done.returncode and lines:
        result: dict[str, Any] = json.loads(lines[-1])
        return result
    print(*told[-TOLD_LINES:], sep="\n", file=sys.stderr, flush=True)
    if done is None:
        return {"failed": f"no result within {limit_s:g} s"}
    return {"failed": (told or ["no output"])[-1][-600:]}


def timed(engine: str, work: Workload, steps: int, tiny: bool, push: str, folder: Path) -> dict[str, Any]:
    """Medians over the steps after the first, of one engine."""
    from sensorium.models.tiny import make_tiny
    from sensorium.runs.metrics import read_metrics
    from sensorium.runs.run_directory import RunDirectory
    from sensorium.trainer.run import open_trainer

    model = make_tiny("qwen2_5_vl", folder / "model", **TINY_SIZES) if tiny else write_model(folder / "model")
    directory = RunDirectory(folder / "run").create()
    changes: dict[str, Any] = {"model": {"device": "cpu"} if tiny else {"dtype": "bfloat16", "device": "cuda"}}
    if not tiny:
        changes["model"]["gradient_checkpointing"] = "auto"
        changes["optimizer"] = {"lr": 1e-6, "moments": "bfloat16"}
    recipe = recipe_for(work, model, directory.path, **changes)
    if engine == "vllm":
        options = {"max_context": work.context, "max_rows": work.episodes, "push": push, "gpu_share": GPU_SHARE}
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
    return {"step_s": round(statistics.median(seconds[WARM_UP:]), 3), **summary(rows, work)}


def summary(rows: list[dict[str, float]], work: Workload) -> dict[str, Any]:
    """Medians: seconds of parts, tokens a second, the push of weights, and how far log-probs are from the learner's.

    ``prob_error_by_modality`` is over sampled tokens, which all follow the workload's media; ``probe_error_by_modality``,
    of vLLM alone, is e to the mean gap over the probes that it is held against after a push.
    """
    middle = {
        name: statistics.median(values)
        for name in {name for row in rows for name in row}
        if (values := [row[name] for row in rows if name in row])
    }
    tokens = work.episodes * middle["episodes/length_mean"]
    parity = {name.rpartition("/")[2]: mean for name, mean in middle.items() if name.startswith("engine/parity_mean/")}
    return {
        "rollout_s": round(middle["time/rollout_s"], 3),
        "update_s": round(middle["time/update_s"], 3),
        "tokens_per_s": round(tokens / middle["time/rollout_s"]),
        "push_s": _rounded(middle.get("engine/push_s")),
        "parity_s": _rounded(middle.get("engine/parity_s")),
        "prob_error": _rounded(middle.get("mismatch/prob_error"), 6),
        "prob_error_by_modality": {"clip" if work.clip else "picture": _rounded(middle.get("mismatch/prob_error"), 6)},
        "probe_error_by_modality": {kind: round(exp(mean), 6) for kind, mean in sorted(parity.items())},
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
        found = timed(asked["engine"], work, asked["steps"], asked["tiny"], asked["push"], Path(scratch))
    versions = {"torch": torch.__version__, "sensorium": sensorium.__version__}
    if asked["engine"] == "vllm":
        from sensorium.engines.vllm.recipe_checks import installed_version

        versions["vllm"] = installed_version().name
    device = "cpu" if asked["tiny"] else torch.cuda.get_device_name()
    print(json.dumps({"device": device, **versions, **found}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
