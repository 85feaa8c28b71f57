"""The same recipe sampled by vLLM and by the native engine: what each learns on held-out tasks, and what a step costs.

    python studies/engines.py [vllm|native …] [key=value …]

Trains shapes from its warm start with each engine and evaluates before and after on 500 held-out items that no choice was
made by. Writes studies/results/engines.json. vLLM does not repeat bit for bit, so another run gives slightly other figures;
both engines must end at least 0.2 above the warm start, with intervals that overlap. Needs vLLM (docs/scale_out.md).
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from sensorium.evaluation.variants import Variant
from sensorium.recipe.load import load_recipe
from sensorium.report.console import ConsoleWatcher
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import train
from sensorium.trainer.study import measure
from studies.seeds import by_name, circumstances, cpu_minutes

RESULT = Path(__file__).parent / "results" / "engines.json"
ENGINES = {
    "native": ["rollout.engine.name=native"],
    "vllm": ["rollout.engine={name: vllm, options: {max_context: 512, restarts: 1}}", "rollout.schedule=eager"],
}
SHAPES = ["steps=50", "batch.prompts_per_step=32", "optimizer.lr=4e-4", "evaluation.every=0", "health.sight_tasks=0"]
SHAPES += ["threads=1", "checkpoint.every=0"]
HELD_OUT = (Variant("sampled, fresh", 1.0, {"seed": 7, "size": 500}),)
LEAST_GAIN = 0.2
TIMES = ("time/step_s", "time/rollout_s", "time/update_s", "engine/push_s", "engine/parity_s")


def run(engine: str, overrides: list[str]) -> None:
    """Train with one engine and put what it learned beside the other's."""
    recipe = load_recipe("shapes", [f"name=study_engine_{engine}", *SHAPES, *ENGINES[engine], *overrides])
    shutil.rmtree(recipe.directory, ignore_errors=True)
    spent = cpu_minutes()
    judge = load_recipe("shapes", [*SHAPES, *ENGINES["native"]])  # both are measured by one engine
    before = by_name(measure(judge, recipe.model.path, HELD_OUT))["sampled, fresh"]
    directory = train(recipe, watchers=[ConsoleWatcher()])
    checkpoints = Checkpoints(directory / "checkpoints", recipe.checkpoint.keep)
    after = by_name(measure(judge, str(checkpoints.path(checkpoints.complete()[-1])), HELD_OUT))["sampled, fresh"]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result[engine] = {
        **circumstances(), "steps": recipe.steps, "before": before, "after": after,
        "gain": after["accuracy"] - before["accuracy"], "enough": after["accuracy"] - before["accuracy"] >= LEAST_GAIN,
        "cpu_minutes": cpu_minutes() - spent,
        "mismatch_max": max(row["mismatch/max"] for row in rows if "mismatch/max" in row),
        "medians": {name: _median(rows, name) for name in TIMES},
    }  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(engine, before["accuracy"], "→", after["accuracy"])


def _median(rows: list[dict[str, float]], name: str) -> float | None:
    given = sorted(row[name] for row in rows if name in row)
    return given[len(given) // 2] if given else None


def main() -> None:
    """Run the engines that the arguments name, or both."""
    named = [word for word in sys.argv[1:] if word in ENGINES] or list(ENGINES)
    for engine in named:
        run(engine, [word for word in sys.argv[1:] if "=" in word])


if __name__ == "__main__":
    main()
