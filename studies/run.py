"""The learning claims: each shipped recipe before and after on held-out tasks, with what should matter taken away.

    python studies/run.py [shapes|frozen_lake|sight_and_sound …] [seed=1 …] [threads=1]

Writes studies/results/NAME.json: mean and range over three seeds, each seed's figures with intervals, commit, machine.
READMEs and docs quote these files. The recipes were tuned while looking at held-out tasks of seed 0; by the "fresh" ones
nothing was chosen: pictures and clips drawn from another seed, and 512 different lakes of the held-out side (each walked
once, so that rare maps with many holes weigh more than in play).
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from sensorium.evaluation.evaluate import SAMPLED_AND_GREEDY, Variant
from sensorium.recipe.load import load_recipe
from sensorium.report.console import ConsoleWatcher
from sensorium.trainer.run import study
from studies.seeds import add_run, by_name, chosen_seeds, circumstances, cpu_minutes

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Claim:
    """What is taken away from a recipe's tasks to see whether the model looks, and which tasks are fresh."""

    taken_away: tuple[Variant, ...]
    fresh: dict[str, Any]

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Every way to look at the held-out tasks."""
        fresh = tuple(Variant(f"{v.name}, fresh", v.temperature, self.fresh) for v in SAMPLED_AND_GREEDY)
        return (*SAMPLED_AND_GREEDY, *fresh, *self.taken_away)


UNSEEN_LAKE = {"options": {"max_turns": 10, "cell": 32, "view": "blank"}}
CLAIMS = {
    "shapes": Claim(
        (Variant("blank", 1.0, {"picture": "blank"}), Variant("swapped", 1.0, {"picture": "swapped"})), {"seed": 7}
    ),
    "frozen_lake": Claim(
        (Variant("blank", 1.0, UNSEEN_LAKE), Variant("blank, greedy", 0.0, UNSEEN_LAKE)), {"seed": 7, "distinct": True}
    ),
    "sight_and_sound": Claim(
        (Variant("mute", 1.0, {"mute": True}), Variant("blank", 1.0, {"blank": True})), {"seed": 7, "size": 700}
    ),
}


def run(name: str, seed: int, *overrides: str) -> None:
    """Run one claim with one seed and add it to the claim's result."""
    recipe = load_recipe(name, [f"name=study_{name}_seed{seed}", f"seed={seed}", *overrides])
    shutil.rmtree(recipe.directory, ignore_errors=True)
    spent = cpu_minutes()
    found = study(recipe, CLAIMS[name].variants, [ConsoleWatcher()])
    facts = {
        "study": name,
        "command": f"python studies/run.py {name}",
        "steps": recipe.steps,
        "episodes": recipe.steps * recipe.batch.prompts_per_step * recipe.batch.group_size,
    }
    one = {
        "seed": seed,
        **circumstances(),
        "cpu_minutes": round(cpu_minutes() - spent, 1),
        "before": by_name(found.before),
        "after": by_name(found.after),
    }
    result = add_run(RESULTS / f"{name}.json", facts, one)
    for variant, summary in result["after"].items():
        was, now = one["before"][variant]["accuracy"], one["after"][variant]["accuracy"]
        low, high = summary["range"]
        print(
            f"{variant:>16}  seed {seed}: {was:.3f} → {now:.3f}   all seeds: {summary['mean']:.3f} ({low:.3f}–{high:.3f})"
        )


def main(arguments: list[str]) -> None:
    """Run the named claims, or all, with the given seeds, or all."""
    overrides = [each for each in arguments if "=" in each and not each.startswith("seed=")]
    for name in [each for each in arguments if "=" not in each] or CLAIMS:
        for seed in chosen_seeds(arguments):
            run(name, seed, *overrides)


if __name__ == "__main__":
    main(sys.argv[1:])
