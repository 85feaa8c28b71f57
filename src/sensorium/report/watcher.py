"""Watcher: whoever follows a run while it goes on (console, tensorboard, wandb). Every hook is optional."""

from typing import Any

from sensorium.recipe.schema import Recipe


class Watcher:
    """Base with empty hooks. Watchers see numbers; they never change a run."""

    def started(self, recipe: Recipe, step: int) -> None:
        """A run begins at ``step`` (0, or where it resumes)."""

    def phase(self, step: int, name: str) -> None:
        """A step enters a phase: rollout, score, credit, update, evaluate, checkpoint."""

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """A step is done; ``metrics`` is its row."""

    def evaluated(self, step: int, summary: dict[str, Any]) -> None:
        """An evaluation is done."""

    def finished(self, step: int) -> None:
        """The run is over."""
