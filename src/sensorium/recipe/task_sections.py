"""The section ``tasks`` of a recipe: sources, and what decides which task comes next."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from sensorium.recipe.section import Section, named

FORMER_NAMES = {"worlds": "environments"}
"""Sources that had another name, which recipes and run directories may still say."""


class SourceSection(Section):
    """One source of tasks and its share of a mixture."""

    source: Annotated[str, AfterValidator(lambda name: FORMER_NAMES.get(name, name))]
    weight: float = Field(default=1.0, gt=0)
    options: dict[str, Any] = Field(default={})


class PlannerSection(Section):
    """What decides which training task comes next. A plain text is short for the name alone: `planner: mixture`."""

    name: str = "mixture"
    options: dict[str, Any] = Field(default={})

    _from_name = named


class TasksSection(Section):
    """Tasks to train on and to evaluate on. Bad rows and over-long prompts are refused, or skipped and counted."""

    train: tuple[SourceSection, ...] = Field(min_length=1)
    evaluate: tuple[SourceSection, ...] = ()
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    on_long_prompt: Literal["refuse", "skip"] = "refuse"
    shuffle: bool = True
    planner: PlannerSection = PlannerSection()
