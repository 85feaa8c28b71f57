"""What every section of a recipe has in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _name_alone(given: Any) -> Any:
    return {"name": given} if isinstance(given, str) else given


named = model_validator(mode="before")(_name_alone)
"""For sections of a name and options: a plain text is short for the name alone."""
