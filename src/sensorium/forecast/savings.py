"""What makes a recipe fit that does not: settings that lower memory, by the forecast itself, or more GPUs.

Settings are tried one after the other, each on top of those before, until the forecast fits. Then each is taken back as far
as it still fits. caprl_image on an H100, 71.2 GiB of which may be filled:

    as it is, without recomputation             189.6 GiB
    + model.gradient_checkpointing=auto         156.9
    + batch.tokens_per_microbatch=8192          150.6
    + rollout.engine.options.max_rows=256, …, 32    110.1, 89.8, 79.7, 74.7
    + optimizer.moments=bfloat16                 64.9, which fits
    tokens_per_microbatch as it was              67.0, which fits too; anything else taken back does not
"""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from sensorium.forecast.machine import Kind
from sensorium.forecast.memory import GpuMemory, fitting_memory, rank_memory, with_checkpointing
from sensorium.recipe.lowering_settings import lowering_settings
from sensorium.recipe.plan import GIB
from sensorium.recipe.recomputation import SHARE
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import ModelShape


@dataclass(frozen=True)
class Saving:
    """Settings by dotted key, and a rank's memory with them."""

    settings: dict[str, Any]
    memory: GpuMemory

    def __str__(self) -> str:
        words = " ".join(f"{key}={str(value).lower()}" for key, value in self.settings.items())
        return f"{words} ({self.memory.total / GIB:.1f} GiB)"


def ways_out(recipe: Recipe, shape: ModelShape, kind: Kind, ranks: int, *, samples: bool) -> str:
    """What to do where a rank does not fit, in a sentence or two."""
    saving = least_settings(recipe, shape, kind, ranks, samples=samples)
    fitting = [str(saving)] if saving.memory.fits(kind) else []
    fitting += more_ranks(recipe, shape, kind, ranks)
    nearest = "" if saving.memory.fits(kind) or not saving.settings else f"Settings bring it down to {saving}. "
    return f"{nearest}What would fit: {'; '.join(fitting)}." if fitting else f"{nearest}It needs a larger GPU."


def least_settings(recipe: Recipe, shape: ModelShape, kind: Kind, ranks: int, *, samples: bool) -> Saving:
    """The first settings with which a rank fits; where none are enough, those with which it holds least."""

    def saving(settings: dict[str, Any]) -> Saving:
        changed = recipe
        for key, value in settings.items():
            changed = with_setting(changed, key, value)
        return Saving(settings, fitting_memory(changed, shape, kind, ranks, samples=samples)[1])

    ladder = lowering_settings(recipe, ranks, samples=samples)
    found = saving({})
    for key, value in ((key, value) for key, values in ladder.items() for value in values):
        found = saving(found.settings | {key: value})
        if found.memory.fits(kind):
            break
    limit = max(round(SHARE * kind.memory), found.memory.total)
    for key in list(found.settings):
        others = {other: value for other, value in found.settings.items() if other != key}
        weaker = (saving(others), *(saving(found.settings | {key: value}) for value in ladder[key]))
        found = next(one for one in weaker if one.memory.total <= limit)
    return found


def with_setting(recipe: Recipe, key: str, value: Any) -> Recipe:
    """The recipe with one dotted key changed."""
    changed: Recipe = _changed(recipe, key.split("."), value)
    return changed


def _changed(section: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    name, *inner = path
    if isinstance(section, BaseModel):
        return section.model_copy(update={name: _changed(getattr(section, name), inner, value)})
    return section | {name: _changed(section.get(name), inner, value)}


def more_ranks(recipe: Recipe, shape: ModelShape, kind: Kind, ranks: int) -> list[str]:
    """The fewest ranks, by doubling, among which the recipe fits: as it is, else with whole layers recomputed; or none."""
    recomputed = with_checkpointing(recipe, True)
    for words, changed in (("", recipe), (", with model.gradient_checkpointing=true", recomputed)):
        for count in (2**power for power in range(1, 13) if 2**power > ranks):
            memory = rank_memory(changed, shape, kind, count, samples=False)
            if memory.fits(kind):
                return [f"{count} ranks beside engines on GPUs of their own{words} ({memory.total / GIB:.1f} GiB each)"]
    return []
