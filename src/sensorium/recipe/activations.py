"""What an update holds beside weights and optimizer, in bytes: activations, the head's logits, the towers' blocks.

As high as the recipe's budgets allow: a micro-batch is full, and every prompt is as long as the context leaves room for and
all of it is pictures. In bfloat16 the layers are taken to be fused, as on CUDA.
"""

from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import ModelShape

HEAD_ROWS = 2048  # rows of logits at once (learner/head_kernels.py)
PATCHES = 4  # patches that become one token


def activation_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Activations of the language model's layers that one micro-batch keeps for its backward pass; ``auto``: at most."""
    how, tokens = recipe.model.gradient_checkpointing, microbatch_tokens(recipe)
    how = False if how == "auto" else how
    if recipe.model.dtype == "float32":
        layer = 4 * (7 * shape.hidden + 2 * shape.key_values + 4 * shape.mlp)
        return tokens * (4 * shape.layers * shape.hidden + layer if how else shape.layers * layer)
    if recipe.model.precision == "matched" and how == "selective":
        how = True  # its layers are recomputed whole, or not at all
    # The float32 stream before and between both halves; queries, keys, values and what was seen; gate and up.
    attention, gates = 12 * shape.hidden + 4 * shape.key_values, 4 * shape.mlp
    at_work = 2 * gates + 12 * shape.hidden  # gradients of the layer that the backward pass is in
    if recipe.model.precision == "matched":
        gates += 2 * shape.mlp + 6 * shape.hidden  # what the gate opened, and the normed stream twice
    if how is True:
        return tokens * (shape.layers * 4 * shape.hidden + attention + gates + at_work)
    return tokens * (shape.layers * (attention if how else attention + gates) + at_work)


def head_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Logits of a chunk in float32 and their gradients, and the gradient of the head's weight, where kernels compute it."""
    if recipe.model.dtype == "float32":
        return 0
    return 6 * HEAD_ROWS * shape.vocabulary + 6 * shape.vocabulary * shape.hidden


def tower_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """What the vision tower keeps through an update where it learns: the inputs of its blocks, which are recomputed."""
    learns = "vision" in recipe.model.lora.groups if recipe.model.lora.rank else "vision" not in recipe.model.freeze
    if not shape.tower_depth or not learns or recipe.model.dtype == "float32":
        return 0
    batch, rollout = recipe.batch, recipe.rollout
    prompt = rollout.max_context_tokens - rollout.max_new_tokens
    patches = batch.prompts_per_step // batch.updates_per_epoch * prompt * PATCHES
    return patches * 2 * shape.tower_hidden * (shape.tower_depth + 2)


def microbatch_tokens(recipe: Recipe) -> int:
    """Tokens of one micro-batch at most; small updates do not fill it."""
    batch, rollout = recipe.batch, recipe.rollout
    group = rollout.max_context_tokens + (batch.group_size - 1) * rollout.max_new_tokens
    if rollout.max_turns > 1:
        group = batch.group_size * rollout.max_context_tokens
    return min(batch.tokens_per_microbatch, batch.prompts_per_step // batch.updates_per_epoch * group)
