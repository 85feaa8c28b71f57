"""Which activations are computed again where a recipe leaves that to the GPU: ``model.gradient_checkpointing: auto``."""

from dataclasses import dataclass
from typing import Literal

from sensorium.recipe.activations import (
    LEAST_ROOM,
    TowerRoom,
    kept_tower_bytes,
    may_keep_tower,
    tower_learns,
    tower_room,
)
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

    ``room`` is what is left for the vision tower; None if it does not learn, or is shared by ranks.
    """

    way: Way
    forecast: int
    room: TowerRoom | None = None


def least_recomputation(recipe: Recipe, shape: ModelShape, memory: int) -> Choice:
    """The way that recomputes least of those whose forecast fits a GPU of ``memory`` bytes, beside vLLM if it is there.

    Where none fits it is whole layers: the run may still go through, since forecasts take every budget as full. What is
    free is the vision tower's, which may keep its activations where no layer is recomputed.
    """
    limit = _limit(recipe, memory)
    for way in WAYS:
        forecast, free = _forecast(recipe, shape, memory, way)
        kept = kept_tower_bytes(recipe, shape) if way is False and may_keep_tower(recipe, shape) else 0
        if kept and kept <= free:  # also where many pictures take less by micro-batch than recomputed
            return Choice(way, limit - free + kept, tower_room(shape, free))
        if forecast <= limit:
            break
    return Choice(way, forecast, _room(recipe, shape, free, keeps=kept > 0))


def given_recomputation(recipe: Recipe, shape: ModelShape, memory: int, way: Way) -> Choice:
    """What the recipe says is recomputed, and the vision tower in any case."""
    forecast, free = _forecast(recipe, shape, memory, way)
    return Choice(way, forecast, _room(recipe, shape, free, keeps=False))


def _limit(recipe: Recipe, memory: int) -> int:
    return round(SHARE * learners_memory(recipe, memory))


def _forecast(recipe: Recipe, shape: ModelShape, memory: int, way: Way) -> tuple[int, int]:
    """Bytes on a GPU of ``memory`` bytes, and how many of those that may be filled all but the vision tower leaves free."""
    model = recipe.model.model_copy(update={"gradient_checkpointing": way})
    uses = without_large_copies(estimate_memory(recipe.model_copy(update={"model": model}), shape), memory)
    forecast = sum(uses.values())
    return forecast, _limit(recipe, memory) - forecast + uses.get("vision tower", 0)


def _room(recipe: Recipe, shape: ModelShape, free: int, *, keeps: bool) -> TowerRoom | None:
    if not tower_learns(recipe, shape) or recipe.cluster.shared:
        return None
    return tower_room(shape, max(free, LEAST_ROOM), keeps=keeps)
