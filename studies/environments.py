"""What tiny environments teach, before and after, on held-out tasks by which nothing was chosen; and four estimators.

    python studies/environments.py [sokoban|geometry …] [process|service] [seed=1 …]
    python studies/environments.py [frozen_lake+grpo|sokoban+masked_gae …] [seed=1 …]

A claim is run with its environments in this process, and (with seed 0) through an environment service of its own: the
numbers of both must be the same. Of geometry the tool's replies are garbled, to see whether it is used. Each estimator of
the comparison has the same start, batch and steps as the others of its environment. Writes
studies/results/environments/NAME.json.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from sensorium.evaluation.evaluate import SAMPLED_AND_GREEDY, Variant, measure
from sensorium.recipe.load import load_recipe
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import train
from studies.recipes import CRITIC, DISCOUNT, LAKE, TURNS
from studies.seeds import add_run, by_name, chosen_seeds, circumstances, cpu_minutes

RESULTS = Path(__file__).parent / "results" / "environments"
QUIET = ["threads=1", "evaluation.every=0", "evaluation.at_start=false", "health.sight_tasks=0", "logging.episodes=1"]
QUIET += ["model.device=cpu", "tasks.evaluate.0.options.seed=7", "tasks.evaluate.0.options.distinct=true"]
CLAIMS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "sokoban": ("tiny/vagen_sokoban", {"blank": {"view": "blank"}}),
    "geometry": ("tiny/geo3k_multi_turn", {"blank": {"view": "blank"}, "garbled": {"tool": "garbled"}}),
}
"""By name: the recipe, and what is taken away from its environment to see whether it matters."""

ESTIMATORS = {
    "grpo": ["algorithm.advantage={name: grpo}"],
    "masked_gae": ["algorithm.advantage={name: masked_gae}", *CRITIC, *DISCOUNT],
    "turn_wise_gae": ["algorithm.advantage={name: turn_wise_gae, turn_lam: 0.95}", CRITIC[0], *TURNS],
    "bi_level_gae": ["algorithm.advantage={name: bi_level_gae}", *CRITIC, *TURNS],
}
EARLY = "runs/tiny_vagen_sokoban_warm/checkpoints/step_000160"
"""Where Sokoban's comparison starts: the first half of the warm start, which the comparison makes if it is not there."""

COMPARED = {
    "frozen_lake": ("frozen_lake", LAKE),
    "sokoban": ("tiny/vagen_sokoban", ["steps=24", "batch.prompts_per_step=16", f"model.path={EARLY}"]),
}
"""By name: the recipe that estimators are compared on, and the budget that they share."""


def environment_options(recipe: Any) -> dict[str, Any]:
    """The options of the environment that a recipe's held-out tasks are played in."""
    return dict(recipe.tasks.evaluate[0].options["options"])


def claim(name: str, seed: int, through: str) -> None:
    """Run one claim with one seed and add it to its results."""
    source, taken_away = CLAIMS[name]
    overrides = [f"name=study_{name}_{through}_seed{seed}", f"seed={seed}", *QUIET]
    plain = environment_options(load_recipe(source, overrides))
    variants = {variant: {**plain, **changes} for variant, changes in taken_away.items()}
    with service(name) if through == "service" else here() as address:
        played = {key: remote(name, options, address) if address else options for key, options in variants.items()}
        if address:
            for split in ("train", "evaluate"):
                there = json.dumps(remote(name, plain, address))
                overrides += [f"tasks.{split}.0.options.environment=remote", f"tasks.{split}.0.options.options={there}"]
        more = [
            Variant(key + ("" if temperature else ", greedy"), temperature, {"options": options})
            for key, options in played.items()
            for temperature in (1.0, 0.0)
        ]
        facts = {"study": name, "through": through, "command": f"python studies/environments.py {name} {through}"}
        run(name if through == "process" else f"{name}_service", seed, source, overrides, facts, more)


def compare(name: str, seed: int) -> None:
    """Run one estimator on one environment with one seed."""
    environment, _, estimator = name.partition("+")
    source, budget = COMPARED[environment]
    if environment == "sokoban" and not Path(EARLY).exists():
        train(load_recipe("tiny/vagen_sokoban_warm", ["threads=1", "model.device=cpu"]))
    overrides = [f"name=study_{environment}_{estimator}_seed{seed}", f"seed={seed}", *budget, *ESTIMATORS[estimator]]
    facts = {"study": environment, "estimator": estimator, "command": f"python studies/environments.py {name}"}
    run(f"{environment}_{estimator}", seed, source, [*overrides, *QUIET], facts, ())


def run(name: str, seed: int, source: str, overrides: list[str], facts: dict[str, Any], more: Any) -> None:
    """Measure, train, measure again on the same tasks with the same random numbers; ``more`` variants at the end."""
    recipe = load_recipe(source, overrides)
    shutil.rmtree(recipe.directory, ignore_errors=True)
    spent = cpu_minutes()
    before = measure(recipe, recipe.model.path, SAMPLED_AND_GREEDY)
    directory = train(recipe)
    checkpoints = Checkpoints(directory / "checkpoints", recipe.checkpoint.keep)
    last = str(checkpoints.path(checkpoints.complete()[-1]))
    after = measure(recipe, last, (*SAMPLED_AND_GREEDY, *more))
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    one = {
        "seed": seed,
        **circumstances(),
        "cpu_minutes": round(cpu_minutes() - spent, 1),
        "curve": [round(row["accuracy"], 4) for row in rows if "accuracy" in row],
        "before": by_name(before),
        "after": by_name(after),
    }
    episodes = recipe.batch.prompts_per_step * recipe.batch.group_size * recipe.steps
    found = add_run(RESULTS / f"{name}.json", {**facts, "steps": recipe.steps, "episodes": episodes}, one)
    for kind, summary in found["after"].items():
        was = f"{found['before'][kind]['mean']:.3f}" if kind in found["before"] else "     "
        print(f"{name:>28} {kind:>16} {was} → {summary['mean']:.3f}, seeds to {seed}", flush=True)


def remote(name: str, options: dict[str, Any], address: str) -> dict[str, Any]:
    """The options of the environment ``remote`` that play one at a service."""
    return {"servers": [address], "environment": name, "options": options}


@contextmanager
def here() -> Iterator[str]:
    """No service: environments are played in this process."""
    yield ""


@contextmanager
def service(name: str) -> Iterator[str]:
    """An environment service in a process of its own, by its address."""
    command = [sys.executable, "-m", "sensorium.cli.main", "serve", "env", name, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as server:
        try:
            assert server.stdout is not None
            said = re.search(r"http://\S+", server.stdout.readline())
            assert said is not None, "the service says where it listens"
            yield said[0]
        finally:
            server.terminate()


def main(words: list[str]) -> None:
    """Run the named claims and estimators, or all, with the given seeds, or all."""
    ways = [word for word in words if word in ("process", "service")] or ["process", "service"]
    every = [*CLAIMS, *(f"{environment}+{estimator}" for environment in COMPARED for estimator in ESTIMATORS)]
    for name in [word for word in words if "=" not in word and word not in ways] or every:
        for seed in chosen_seeds(words):
            if "+" in name:
                compare(name, seed)
                continue
            for through in ways:
                if through == "process" or seed == 0:
                    claim(name, seed, through)


if __name__ == "__main__":
    main(sys.argv[1:])
