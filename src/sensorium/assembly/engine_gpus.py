"""Which GPUs of this machine each of several engines has to itself.

For example, four GPUs, ``cluster.learners=1`` on the first and ``cluster.engines=3``:

    learner 0    engine 0 → "1"    engine 1 → "2"    engine 2 → "3"

With ``cluster.engines=4`` there is one too few: refused, or with ``cluster.share_gpus`` engine 3 → "0", beside the learner.
"""

import os
from collections.abc import Mapping, Sequence

from sensorium.recipe.cluster_checks import engine_gpus
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.errors import RecipeError


def visible_gpus(count: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The names of the ``count`` GPUs that this process sees, as CUDA_VISIBLE_DEVICES calls them."""
    named = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] or [str(number) for number in range(count)]


def gpus_of_engines(recipe: Recipe, visible: Sequence[str], policy_gpu: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine. ``policy_gpu`` is the number of the driver's own; ranks have the first ones."""
    section, each = recipe.cluster, int(engine_gpus(recipe))
    learning = {policy_gpu, *range(section.learners if section.shared else 0)}
    free = [name for number, name in enumerate(visible) if number not in learning]
    wanted = section.engines * each
    if len(free) < wanted:
        have = f"this machine has {len(visible)} ({len(visible) - len(free)} for the learner)"
        asked = f"cluster.engines={section.engines}" + (f" with tensor_parallel={each}" if each > 1 else "")
        if not section.share_gpus or each > len(visible):
            shared = "" if each > len(visible) else "let them share GPUs (cluster.share_gpus: true), "
            raise RecipeError(
                f"{asked} asks for {wanted} GPUs beside the learner's, and {have}. Ask for fewer engines, {shared}or place "
                "them on more machines (cluster.placement: ray)."
            )
        free += [name for name in visible if name not in free]
    return [",".join(free[(engine * each + one) % len(free)] for one in range(each)) for engine in range(section.engines)]
