"""Learning claims: the same held-out tasks before and after, sampled, greedy, and with what should matter taken away."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensorium.evaluation.variants import Variant, measure
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import train


@dataclass(frozen=True)
class Study:
    """What a run changed: summaries by variant, before and after, and where the run lies."""

    before: tuple[dict[str, Any], ...]
    after: tuple[dict[str, Any], ...]
    directory: Path


def study(recipe: Recipe, variants: Sequence[Variant], watchers: Iterable[Watcher] = ()) -> Study:
    """Measure, train, measure again on the same tasks with the same random numbers."""
    watchers = tuple(watchers)
    before = measure(recipe, recipe.model.path, variants)
    directory = train(recipe, watchers=watchers)
    checkpoints = Checkpoints(directory / "checkpoints", recipe.checkpoint.keep)
    after = measure(recipe, str(checkpoints.path(checkpoints.complete()[-1])), variants)
    return Study(before, after, directory)
