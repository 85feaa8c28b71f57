"""The same recipe by each schedule: does what is sampled by older weights teach as much?

    python studies/schedules.py [synchronous|one_step_off|asynchronous|eight_steps_old …] [seed=1 …] [key=value …]

Trains shapes with three seeds and evaluates before and after on 500 held-out pictures that no choice was made by,
sampled and greedy. ``asynchronous`` may be two steps old, ``eight_steps_old`` eight: were age harmless, there would be no
bound to keep. What is asynchronous does not repeat bit for bit. All are measured by the native engine. Writes
studies/results/schedules/NAME.json.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from sensorium.evaluation.evaluate import SAMPLED_AND_GREEDY, Variant, measure
from sensorium.recipe.load import load_recipe
from sensorium.report.console import ConsoleWatcher
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import train
from studies.seeds import add_run, by_name, chosen_seeds, circumstances, cpu_minutes

RESULTS = Path(__file__).parent / "results" / "schedules"
STREAMED = ["rollout.engine.name=process", "rollout.schedule=eager", "algorithm.correction.weights=token"]
SCHEDULES = {
    "synchronous": ["algorithm.correction.weights=token"],
    "one_step_off": ["schedule=one_step_off", "algorithm.correction.weights=token"],
    "asynchronous": [*STREAMED, "schedule={name: asynchronous, max_staleness: 2}"],
    "eight_steps_old": [*STREAMED, "schedule={name: asynchronous, max_staleness: 8}"],
}
COMMON = ["evaluation.every=0", "evaluation.at_start=false", "health.sight_tasks=0", "threads=1", "checkpoint.every=0"]
HELD_OUT = tuple(Variant(each.name, each.temperature, {"seed": 7, "size": 500}) for each in SAMPLED_AND_GREEDY)
MEANS = ("staleness/mean", "staleness/spanning", "mismatch/effective_share", "policy/clip_fraction")


def main() -> None:
    """Run the schedules and seeds that the arguments name, or all."""
    words = sys.argv[1:]
    overrides = [word for word in words if "=" in word and not word.startswith("seed=")]
    for schedule in [word for word in words if word in SCHEDULES] or SCHEDULES:
        for seed in chosen_seeds(words):
            named = [f"name=study_{schedule}_{seed}", f"seed={seed}"]
            recipe = load_recipe("shapes", [*named, *COMMON, *SCHEDULES[schedule], *overrides])
            shutil.rmtree(recipe.directory, ignore_errors=True)
            spent = cpu_minutes()
            before = measure(load_recipe("shapes", COMMON), recipe.model.path, HELD_OUT)
            directory = train(recipe, watchers=[ConsoleWatcher()])
            checkpoints = Checkpoints(directory / "checkpoints", recipe.checkpoint.keep)
            after = measure(load_recipe("shapes", COMMON), str(checkpoints.path(checkpoints.complete()[-1])), HELD_OUT)
            rows = read_metrics(RunDirectory(directory).metrics)
            means = {name: [row[name] for row in rows if name in row] for name in MEANS}
            run = {
                "seed": seed, **circumstances(), "steps": recipe.steps, "cpu_minutes": cpu_minutes() - spent,
                "before": by_name(before), "after": by_name(after),
                "means": {name: sum(values) / len(values) for name, values in means.items() if values},
            }  # fmt: skip
            result = add_run(RESULTS / f"{schedule}.json", {"schedule": schedule, "overrides": SCHEDULES[schedule]}, run)
            print(schedule, seed, result["after"]["sampled"], result["after"]["greedy"])


if __name__ == "__main__":
    main()
