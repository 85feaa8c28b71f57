"""What every section of a recipe has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
