"""Five kinds of algorithm on the shipped tasks, before and after, on held-out tasks.

    python studies/algorithms.py [grpo+clip rloo+clip …] [seed=1 …] [right|flipped]

Each starts from the shipped warm start with the same batch and rate as the others of its task, and is run once more with
the sign of its advantages flipped: what it gains it must then lose. Three seeds each. Writes
studies/results/algorithms/NAME_right.json and NAME_flipped.json.
"""

import inspect
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from sensorium.algorithms.advantages import Credit, Episodes
from sensorium.evaluation.evaluate import SAMPLED_AND_GREEDY
from sensorium.recipe.estimators_and_losses import ESTIMATORS
from sensorium.recipe.load import load_recipe
from sensorium.recipe.registry import register, resolve, table
from sensorium.trainer.run import study
from studies.recipes import ALGORITHMS
from studies.seeds import add_run, by_name, chosen_seeds, circumstances, cpu_minutes

RESULTS = Path(__file__).parent / "results" / "algorithms"
SIGNS = ("right", "flipped")
QUIET = ["threads=1", "evaluation.every=0", "evaluation.at_start=false", "checkpoint.every=0", "logging.episodes=1"]


def __getattr__(name: str) -> Any:
    """``flipped_NAME``: the named estimator with the wrong sign; a critic is still taught the truth."""
    if not name.startswith("flipped_"):
        raise AttributeError(name)
    right = resolve("advantage", name.removeprefix("flipped_"))

    def flipped(episodes: Episodes, **settings: Any) -> Credit:
        found = right(episodes, **settings)
        return Credit(-found.advantages_P, found.targets_P)

    flipped.__signature__ = inspect.signature(right)  # type: ignore[attr-defined]
    return flipped


@contextmanager
def flip(estimator: str) -> Iterator[str]:
    """An estimator with the wrong sign and the traits of the right one, by name, while this lasts."""
    name = f"flipped_{estimator}"
    register("advantage", name, **asdict(ESTIMATORS[estimator]) | {"place": f"{__name__}:{name}"})
    try:
        yield name
    finally:
        del ESTIMATORS[name], table("advantage")[name]


def measure(name: str, seed: int, *, flipped: bool) -> dict[str, Any]:
    """Train by one algorithm, right or flipped, with one seed, and measure before and after."""
    task, estimator, changes = ALGORITHMS[name]
    if not flipped:
        return _measure(name, seed, task, estimator, changes)
    with flip(estimator) as wrong:
        return _measure(f"{name}_flipped", seed, task, wrong, [*changes, "steps=15"])


def _measure(name: str, seed: int, task: str, estimator: str, changes: list[str]) -> dict[str, Any]:
    run = f"study_{name.replace('+', '_')}_seed{seed}"
    settings = [f"algorithm.advantage.name={estimator}", *changes]
    recipe = load_recipe(task, [f"name={run}", f"seed={seed}", *settings, *QUIET])
    shutil.rmtree(recipe.directory, ignore_errors=True)
    spent = cpu_minutes()
    found = study(recipe, SAMPLED_AND_GREEDY)
    return {
        "seed": seed,
        **circumstances(),
        "cpu_minutes": round(cpu_minutes() - spent, 1),
        "overrides": settings,
        "before": by_name(found.before),
        "after": by_name(found.after),
    }


def run(name: str, seed: int, signs: Sequence[str]) -> None:
    """Run one algorithm with one seed, right and flipped, and add it to its results."""
    for sign in signs:
        facts = {"command": f"python studies/algorithms.py {name}", "task": ALGORITHMS[name][0], "sign": sign}
        place = RESULTS / f"{name.replace('+', '_')}_{sign}.json"
        found = add_run(place, facts, measure(name, seed, flipped=sign == "flipped"))
        for kind in ("sampled", "greedy"):
            was, now = (found[when][kind]["mean"] for when in ("before", "after"))
            print(f"{name:>18} {sign:>8} {kind:>8} {was:.3f} → {now:.3f}, seeds to {seed}", flush=True)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("seed=")]
    for each in [word for word in words if word not in SIGNS] or ALGORITHMS:
        for number in chosen_seeds(sys.argv[1:]):
            run(each, number, [word for word in words if word in SIGNS] or SIGNS)
