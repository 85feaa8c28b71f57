"""Which activations are computed again where a recipe leaves that to the GPU: ``model.gradient_checkpointing: auto``."""

from dataclasses import dataclass
from typing import Literal

from sensorium.recipe.activations import TowerRoom, kept_tower_bytes, may_keep_tower, tower_room
from sensorium.recipe.plan import estimate_memory, without_large_copies
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import ModelShape

Way = bool | Literal["selective"]
WAYS: tuple[Way, ...] = (False, "selective", True)
SHARE = 0.9  # of the GPU that a forecast may fill: it is within 15 % of what was measured, and torch keeps some for itself


VLLM_SHARE = 0.4
"""The part of a GPU's memory that vLLM may take where a recipe does not say."""


def vllm_share(recipe: Recipe) -> float:
    """The part of a GPU's memory that vLLM may take, weights included."""
    return float(recipe.rollout.engine.options.get("gpu_share", VLLM_SHARE))


def learners_memory(recipe: Recipe, memory: int) -> int:
    """What the learner has of a GPU of ``memory`` bytes: all of it, or what vLLM leaves where it is on the same GPU."""
    cluster = recipe.cluster
    alone = not cluster.share_gpus and (cluster.engines > 1 or cluster.placement == "ray")
    if recipe.rollout.engine.name != "vllm" or alone:
        return memory
    return round(memory * (1 - vllm_share(recipe)))


@dataclass(frozen=True)
class Choice:
    """What is recomputed of the language model, and the forecast in bytes.

    ``room`` is for what the vision tower may keep instead of computing it again; None where it cannot.
    """

    way: Way
    forecast: int
    room: TowerRoom | None = None


def least_recomputation(recipe: Recipe, shape: ModelShape, memory: int) -> Choice:
    """The way that recomputes least of those whose forecast fits a GPU of ``memory`` bytes, beside vLLM if it is there.

    Where none fits it is whole layers: the run may still go through, since forecasts take every budget as full. What is
    free where no layer is recomputed is the vision tower's.
    """
    forecast, limit = 0, round(SHARE * learners_memory(recipe, memory))
    for way in WAYS:
        model = recipe.model.model_copy(update={"gradient_checkpointing": way})
        uses = without_large_copies(estimate_memory(recipe.model_copy(update={"model": model}), shape), memory)
        forecast = sum(uses.values())
        free = limit - forecast + uses.get("vision tower", 0)
        keeps = way is False and may_keep_tower(recipe, shape)
        kept = kept_tower_bytes(recipe, shape) if keeps else 0
        if keeps and kept <= free:  # also where many pictures take less by micro-batch than recomputed
            return Choice(way, limit - free + kept, tower_room(shape, free))
        if forecast <= limit:
            return Choice(way, forecast, tower_room(shape, free) if keeps else None)
    return Choice(WAYS[-1], forecast)
