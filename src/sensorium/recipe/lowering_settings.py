"""Settings of a recipe that lower the memory of its run."""

from typing import Any

from sensorium.recipe.plan import engine_rows
from sensorium.recipe.schema import Recipe

ROWS = (256, 128, 64, 32)
LORA_RANK = 16


def lowering_settings(recipe: Recipe, ranks: int, *, samples: bool) -> dict[str, tuple[Any, ...]]:
    """Settings that lower memory, each with ever stronger values; first those that leave the result as it is."""
    model, tokens = recipe.model, recipe.batch.tokens_per_microbatch
    context = recipe.rollout.max_context_tokens  # which is a micro-batch of its own where it is longer
    halved = [max(context, tokens // part) for part in (2, 4)]
    moments = {"float32": ("bfloat16", "8-bit"), "bfloat16": ("8-bit",)}.get(recipe.optimizer.moments, ())
    rows = engine_rows(recipe) if samples and recipe.rollout.engine.name != "vllm" else 0
    found: dict[str, tuple[Any, ...]] = {
        "model.gradient_checkpointing": () if model.gradient_checkpointing in (True, "auto") else ("auto",),
        "batch.tokens_per_microbatch": tuple(fewer for fewer in dict.fromkeys(halved) if fewer < tokens),
        "rollout.engine.options.max_rows": tuple(fewer for fewer in ROWS if fewer < rows),
    }
    if ranks > 1:
        sharing = (n for n in range(recipe.cluster.sequence_parallel + 1, ranks + 1) if ranks % n == 0)
        found["cluster.sequence_parallel"] = tuple(sharing)[:1]
        found["cluster.offload"] = (True,)
        moments = tuple(held for held in moments if held != "8-bit")  # ranks do not hold them so
    found["optimizer.moments"] = moments
    found["model.lora.rank"] = () if model.lora.rank else (LORA_RANK,)
    return found
