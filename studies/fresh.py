"""The finished studies once more, on held-out tasks by which no setting was chosen.

    python studies/run.py && python studies/fresh.py [shapes|frozen_lake|sight_and_sound …]

The recipes were tuned while looking at held-out tasks of seed 0. Here the shapes are drawn from another seed, and the lakes
are 512 different maps of the held-out side (each counted once, so rare maps with many holes weigh more than in play).
"""

import json
import sys
from pathlib import Path

from sensorium.recipe.load import load_recipe
from sensorium.trainer.study import SAMPLED_AND_GREEDY, measure

RESULTS = Path(__file__).parent / "results"
FRESH = {
    "shapes": ["tasks.evaluate.0.options.seed=7"],
    "sight_and_sound": ["tasks.evaluate.0.options.seed=7", "tasks.evaluate.0.options.size=700"],
    "frozen_lake": ["tasks.evaluate.0.options.seed=7", "tasks.evaluate.0.options.distinct=true"],
}


def main(names: list[str]) -> None:
    """Measure the starting and the finished model of each study; studies/results/fresh.json keeps the others' figures."""
    place = RESULTS / "fresh.json"
    found = json.loads(place.read_text()) if place.exists() else {}
    for name in names:
        recipe = load_recipe(name, FRESH[name])
        last = f"runs/study_{name}/checkpoints/step_{recipe.steps:06d}"
        found[name] = {
            when: {summary["name"]: summary for summary in measure(recipe, path, SAMPLED_AND_GREEDY)}
            for when, path in (("before", recipe.model.path), ("after", last))
        }
    place.write_text(json.dumps({**found, "command": "python studies/fresh.py"}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(FRESH))
