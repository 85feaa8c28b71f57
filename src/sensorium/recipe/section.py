"""What every section of a recipe has in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NamedSection(Section):
    """Something that is built by name with options. A plain text is short for the name alone."""

    name: str
    options: dict[str, Any] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given
