"""Which activations are computed again where a recipe leaves that to the GPU: ``model.gradient_checkpointing: auto``."""

from typing import Literal

from sensorium.recipe.plan import estimate_memory
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import ModelShape

Way = bool | Literal["selective"]
WAYS: tuple[Way, ...] = (False, "selective", True)
SHARE = 0.9  # of the GPU that a forecast may fill: it is within 15 % of what was measured, and torch keeps some for itself


def least_recomputation(recipe: Recipe, shape: ModelShape, memory: int) -> tuple[Way, int]:
    """The way that recomputes least of those whose forecast fits a GPU of ``memory`` bytes, and the forecast.

    Where none fits it is whole layers: the run may still go through, since forecasts take every budget as full.
    """
    forecast = 0
    for way in WAYS:
        model = recipe.model.model_copy(update={"gradient_checkpointing": way})
        forecast = sum(estimate_memory(recipe.model_copy(update={"model": model}), shape).values())
        if forecast <= SHARE * memory:
            return way, forecast
    return WAYS[-1], forecast
