"""The learning claims: each shipped recipe before and after on held-out tasks, with what should matter taken away.

    python studies/run.py [shapes|frozen_lake|sight_and_sound …]

Writes studies/results/NAME.json: commit, command, machine, figures and intervals. README and docs quote these files.
"""

import json
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from sensorium.recipe.load import load_recipe
from sensorium.report.console import ConsoleWatcher
from sensorium.trainer.study import SAMPLED_AND_GREEDY, Variant, study

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Claim:
    """A recipe, and what is taken away to see whether the model looks."""

    recipe: str
    taken_away: tuple[Variant, ...]


CLAIMS = {
    "shapes": Claim(
        "shapes", (Variant("blank", 1.0, {"picture": "blank"}), Variant("swapped", 1.0, {"picture": "swapped"}))
    ),
    "frozen_lake": Claim(
        "frozen_lake",
        (
            Variant("blank", 1.0, {"options": {"max_turns": 10, "cell": 32, "view": "blank"}}),
            Variant("blank, greedy", 0.0, {"options": {"max_turns": 10, "cell": 32, "view": "blank"}}),
        ),
    ),
    "sight_and_sound": Claim(
        "sight_and_sound", (Variant("mute", 1.0, {"mute": True}), Variant("blank", 1.0, {"blank": True}))
    ),
}


def run(name: str) -> None:
    """Run one claim and write its result."""
    claim = CLAIMS[name]
    recipe = load_recipe(claim.recipe, [f"name=study_{name}"])
    shutil.rmtree(recipe.directory, ignore_errors=True)
    started = time.perf_counter()
    found = study(recipe, [*SAMPLED_AND_GREEDY, *claim.taken_away], [ConsoleWatcher()])
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "study": name,
        "command": f"python studies/run.py {name}",
        "commit": commit,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "steps": recipe.steps,
        "episodes": recipe.steps * recipe.batch.prompts_per_step * recipe.batch.group_size,
        "before": {summary["name"]: summary for summary in found.before},
        "after": {summary["name"]: summary for summary in found.after},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    for summary in (*found.before, *found.after):
        print(f"{summary['name']:>14} {summary['accuracy']:.3f} {summary['interval']}")


if __name__ == "__main__":
    for each in sys.argv[1:] or CLAIMS:
        run(each)
