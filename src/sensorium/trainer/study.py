"""Learning claims: the same held-out tasks before and after, sampled, greedy, and with what should matter taken away."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sensorium.assembly.determinism import settle
from sensorium.assembly.models import load_model
from sensorium.assembly.session import make_sources, open_session, open_store, sampling_of
from sensorium.evaluation.evaluate import evaluate
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.tasks.mixture import each_once
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import train


@dataclass(frozen=True)
class Variant:
    """One way to look at the held-out tasks: a temperature (0: greedy) and changed options of their sources."""

    name: str
    temperature: float
    options: dict[str, Any] = field(default_factory=dict)


SAMPLED_AND_GREEDY = (Variant("sampled", 1.0), Variant("greedy", 0.0))


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


def measure(recipe: Recipe, model_path: str, variants: Sequence[Variant]) -> tuple[dict[str, Any], ...]:
    """Evaluate one checkpoint on the recipe's held-out tasks in every variant."""
    settle(recipe)
    session = open_session(recipe, load_model(recipe, model_path, open_store(recipe)), None)

    async def all_variants() -> tuple[dict[str, Any], ...]:
        summaries = []
        for variant in variants:
            sections = [s.model_copy(update={"options": {**s.options, **variant.options}}) for s in recipe.tasks.evaluate]
            sources = make_sources(sections, session.store, "tasks.evaluate")
            tasks, _ = each_once(sources, limit=recipe.evaluation.limit, on_bad_row=recipe.tasks.on_bad_row)
            sampling = sampling_of(recipe.rollout, variant.temperature)
            found = await evaluate(
                session.rollout, session.scorer, tasks, sampling, samples=1, seed=recipe.seed, name=variant.name
            )
            summaries.append(found.summary)
        return tuple(summaries)

    try:
        return asyncio.run(all_variants())
    finally:
        session.close()
