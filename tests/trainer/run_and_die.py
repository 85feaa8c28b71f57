"""Run a recipe; with a third argument, kill this process as the given step enters the given phase: ``4:update``.

``4:rollout:2`` is the second time that step 4 enters it.
"""

import os
import signal
import sys
from pathlib import Path

from sensorium.recipe.load import load_recipe
from sensorium.report.watcher import Watcher
from sensorium.trainer.run import train


class Assassin(Watcher):
    """Kills the process at a moment of the run."""

    def __init__(self, moment: str) -> None:
        step, self.name, *nth = moment.split(":")
        self.step, self.left = int(step), int(nth[0]) if nth else 1

    def phase(self, step: int, name: str, total: int = 0) -> None:
        self.left -= (step, name) == (self.step, self.name)
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    recipe = load_recipe(Path(sys.argv[1]), [f"run_dir={sys.argv[2]}"])
    mode = sys.argv[3] if len(sys.argv) > 3 else ""
    train(recipe, resume=mode == "resume", watchers=[Assassin(mode)] if ":" in mode else [])
