"""One checkpoint measured in several ways: sampled, greedy, or on tasks with something taken away."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sensorium.assembly.session import model_session
from sensorium.evaluation.evaluate import evaluate
from sensorium.recipe.schema import Recipe
from sensorium.tasks.mixture import each_once, make_sources
from sensorium.workers.event_loop import run_async


@dataclass(frozen=True)
class Variant:
    """One way to look at the held-out tasks: a temperature (0: greedy) and changed options of their sources."""

    name: str
    temperature: float
    options: dict[str, Any] = field(default_factory=dict)


SAMPLED_AND_GREEDY = (Variant("sampled", 1.0), Variant("greedy", 0.0))


def measure(recipe: Recipe, model_path: str, variants: Sequence[Variant]) -> tuple[dict[str, Any], ...]:
    """Evaluate one checkpoint on the recipe's held-out tasks in every variant."""

    async def all_variants() -> tuple[dict[str, Any], ...]:
        summaries = []
        for variant in variants:
            sections = [s.model_copy(update={"options": {**s.options, **variant.options}}) for s in recipe.tasks.evaluate]
            sources = make_sources(sections, session.store, "tasks.evaluate")
            tasks, _ = each_once(sources, limit=recipe.evaluation.limit, on_bad_row=recipe.tasks.on_bad_row)
            found = await evaluate(session, recipe, tasks, name=variant.name, temperature=variant.temperature)
            summaries.append(found.summary)
        return tuple(summaries)

    with model_session(recipe, model_path) as session:
        return run_async(all_variants())
