"""The same recipe sampled by the native engine, by vLLM, and by vLLM with two learners under Ray: what each learns.

    python studies/engines.py [brief] [native|vllm|vllm_ray …] [seed=N …] [key=value …]

Trains shapes from its warm start and evaluates before and after on 500 held-out items that no choice was made by. Writes
studies/results/engines.json. vLLM does not repeat bit for bit, so another run gives slightly other figures; each must end
at least 0.2 above the warm start, within what the native engine reaches with three seeds (the hull of their intervals).
``brief`` is the form that CI runs as a test (`make scale-learning`): fewer steps, larger ones. Needs vLLM and Ray
(docs/guides/scale_out.md).
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from sensorium.evaluation.evaluate import Variant
from sensorium.recipe.load import load_recipe
from sensorium.report.console import ConsoleWatcher
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import measure, train
from studies.seeds import SEEDS, by_name, chosen_seeds, circumstances, cpu_minutes, over_seeds

RESULT = Path(__file__).parent / "results" / "engines.json"
VLLM = [
    "rollout.engine={name: vllm, options: {max_context: 512, restarts: 1}}",
    "rollout.max_context_tokens=512",
    "rollout.schedule=eager",
]
ENGINES = {
    "native": ["rollout.engine.name=native"],
    "vllm": VLLM,
    "vllm_ray": [*VLLM, "cluster.learners=2", "cluster.placement=ray"],
}
SHAPES = ["steps=50", "batch.prompts_per_step=32", "optimizer.lr=4e-4", "evaluation.every=0", "health.sight_tasks=0"]
SHAPES += ["threads=1", "checkpoint.every=0"]
BRIEF = ["steps=45", "optimizer.lr=5e-4", "optimizer.warmup_steps=2", "evaluation.at_start=false"]
HELD_OUT = (Variant("sampled, fresh", 1.0, {"seed": 7, "size": 500}),)
LEAST_GAIN = 0.2
TIMES = ("time/step_s", "time/rollout_s", "time/update_s", "engine/push_s", "engine/parity_s")


def learned(engine: str, *overrides: str, quiet: bool = False) -> dict[str, Any]:
    """Train with one engine; accuracy on held-out items before and after, with intervals, and what a step took."""
    recipe = load_recipe("shapes", [f"name=study_engine_{engine}", *SHAPES, *ENGINES[engine], *overrides])
    shutil.rmtree(recipe.directory, ignore_errors=True)
    spent = cpu_minutes()
    judge = load_recipe("shapes", [*SHAPES, *ENGINES["native"]])  # all are measured by one engine
    before = by_name(measure(judge, recipe.model.path, HELD_OUT))["sampled, fresh"]
    directory = train(recipe, watchers=[] if quiet else [ConsoleWatcher()])
    checkpoints = Checkpoints(directory / "checkpoints", recipe.checkpoint.keep)
    after = by_name(measure(judge, str(checkpoints.path(checkpoints.complete()[-1])), HELD_OUT))["sampled, fresh"]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        **circumstances(), "steps": recipe.steps, "before": before, "after": after,
        "gain": after["accuracy"] - before["accuracy"], "enough": after["accuracy"] - before["accuracy"] >= LEAST_GAIN,
        "cpu_minutes": cpu_minutes() - spent,
        "mismatch_max": max(row["mismatch/max"] for row in rows if "mismatch/max" in row),
        "medians": {name: _median(rows, name) for name in TIMES},
    }  # fmt: skip


def _median(rows: list[dict[str, float]], name: str) -> float | None:
    given = sorted(row[name] for row in rows if name in row)
    return given[len(given) // 2] if given else None


def main() -> None:
    """Run the engines that the arguments name, or all, and keep each result beside the others'."""
    brief = "brief" in sys.argv
    named = [word for word in sys.argv[1:] if word in ENGINES] or ([*ENGINES][::2] if brief else [*ENGINES])
    overrides = [word for word in sys.argv[1:] if "=" in word and not word.startswith("seed=")]
    for engine in named:
        seeds = chosen_seeds(sys.argv[1:])
        if seeds is SEEDS and engine != "native" and not brief:
            seeds = SEEDS[:1]
        for seed in seeds:
            run = {"seed": seed, **learned(engine, f"seed={seed}", *(BRIEF if brief else ()), *overrides)}
            keep(f"{engine}, brief" if brief else engine, run)


def keep(name: str, run: dict[str, Any], place: Path = RESULT) -> None:
    """Put a run into the result file beside those of other seeds, and what they give together."""
    result: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {}
    earlier = [one for one in result.get(name, {}).get("runs", []) if one.get("seed") != run["seed"]]
    runs = sorted([*earlier, run], key=lambda one: one.get("seed", 0))
    found = {"after": over_seeds([one["after"] for one in runs]), "runs": runs}
    place.write_text(json.dumps(result | {name: found}, indent=1) + "\n")
    print(name, run["seed"], run["before"]["accuracy"], run["after"]["accuracy"])


if __name__ == "__main__":
    main()
