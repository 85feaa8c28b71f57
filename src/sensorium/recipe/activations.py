"""Bytes of an update beside weights and optimizer: activations, the head's logits, the blocks of towers.

At most: a micro-batch is full, every prompt fills the context and is all pictures. In bfloat16 layers are assumed to be
fused, as on CUDA.
"""

from dataclasses import dataclass

from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import ModelShape

HEAD_ROWS = 2048  # rows of logits at once (kernels/learner_triton.py)
CHUNK = 64  # tokens of a chunk of the gated delta rule (kernels/delta_rule.py)
PATCHES = 4  # patches that become one token
# Of a tower through a whole update at most. One pass over few pictures beats several over fewer, which launch more slowly
# than they compute.
WHOLE_BYTES = 24 << 30
LEAST_ROOM = 2 << 30  # of a tower where a forecast leaves it less: forecasts take every budget as full


def activation_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Activations of the language model's layers that one micro-batch stores for its backward pass."""
    how, tokens = recipe.model.gradient_checkpointing, microbatch_tokens(recipe)
    how = False if how == "auto" else how
    if recipe.model.dtype == "float32":
        layer = 4 * (5 * shape.hidden + 2 * shape.queries + 2 * shape.key_values + 4 * shape.mlp)
        deltas = 0
        if shape.delta:  # what attention has, and here the convolved channels, which are laid out by run, and the gate
            delta = layer - 8 * (shape.queries + shape.key_values) + 4 * (5 * shape.delta.channels + 4 * shape.delta.values)
            layer, deltas = max(layer, delta), shape.delta.layers * (delta - layer)
        return tokens * (4 * shape.layers * shape.hidden + layer if how else shape.layers * layer + deltas)
    if shape.delta:
        return _hybrid_bytes(recipe, shape, how)
    if recipe.model.precision == "matched" and how == "selective":
        how = True  # its layers are recomputed whole, or not at all
    # The float32 residual stream before and between both halves; queries, keys, values, attention output; gate and up.
    attention, gates = 8 * shape.hidden + 4 * shape.queries + 4 * shape.key_values, 4 * shape.mlp
    at_work = 2 * gates + 12 * shape.hidden  # gradients of the layer that the backward pass is in
    if recipe.model.precision == "matched":
        gates += 2 * shape.mlp + 6 * shape.hidden  # the gated product, and the normed stream twice
    if how is True:
        return tokens * (shape.layers * 4 * shape.hidden + attention + gates + at_work)
    return tokens * (shape.layers * (attention if how else attention + gates) + at_work)


def stock_layer_bytes(shape: ModelShape) -> int:
    """Bytes that autograd saves of a token in a stock bfloat16 layer; up to 18 % more than Qwen2.5's.

    Inputs (float32 too) and outputs of norms; queries, keys, values and attention output, with Qwen3's norms of heads; four
    values of the MLP.
    """
    return 18 * shape.hidden + 10 * (shape.queries + shape.key_values) + 8 * shape.mlp


def _hybrid_bytes(recipe: Recipe, shape: ModelShape, how: bool | str) -> int:
    """Of a hybrid model in bfloat16; each response starts from a state of its own in every delta net."""
    assert shape.delta is not None, "a model of attention alone has other layers"
    tokens, (delta, attention) = microbatch_tokens(recipe), hybrid_layer_bytes(shape)
    responses = -(-tokens * recipe.batch.group_size // _group_tokens(recipe))
    layers, states = shape.delta.layers * delta + shape.attention_layers * attention, 4 * responses * shape.delta.state
    # Gradients of the MLP, or of a delta net: those of its channels and values, and the states of chunks with theirs.
    of_net = 6 * shape.delta.channels + 18 * shape.delta.values + 4 * shape.delta.state // CHUNK
    at_work = max(8 * shape.mlp, of_net) + 12 * shape.hidden
    if how is True:
        return tokens * (4 * shape.layers * shape.hidden + max(delta, attention) + at_work) + states
    if how == "selective":
        of_rule = 2 * shape.delta.channels + shape.delta.values
        again = 4 * shape.mlp * (shape.layers - 1) + of_rule * (shape.delta.layers - 1)
        return tokens * (layers - again + at_work) + states
    return tokens * (layers + at_work) + shape.delta.layers * states


def hybrid_layer_bytes(shape: ModelShape) -> tuple[int, int]:
    """Bytes kept of a token in a fused bfloat16 layer of Qwen3.5: a gated delta net, and gated attention.

    Of both the stream in float32 before and between the halves, and gate and up. Of a delta net the channels before and
    after the convolution, its gate, its result, and what solves each chunk; of attention the products, queries and keys
    as they are attended to, and the result.
    """
    assert shape.delta is not None, "a model of attention alone has other layers"
    both = 8 * shape.hidden + 4 * shape.mlp
    return both + 4 * shape.delta.channels + 5 * shape.delta.values, both + 8 * shape.queries + 6 * shape.key_values


def stock_hybrid_bytes(shape: ModelShape) -> tuple[int, int]:
    """The same of stock layers, which autograd saves.

    Of both the norms' inputs in float32, twice, and outputs, and four values of the MLP. Of a delta net the channels before
    and after the convolution and as the kernel takes them; its result normed and gated, in float32 too. Of attention its
    queries and keys normed and rotated, in float32 too, its result and the gate.
    """
    assert shape.delta is not None, "a model of attention alone has other layers"
    both = 20 * shape.hidden + 8 * shape.mlp
    delta = both + 4 * shape.delta.channels + 19 * shape.delta.values
    return delta, both + 16 * (shape.queries + shape.key_values)


def head_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Logits of a chunk in float32, their gradients, and the gradient of the head's weight, if kernels compute it."""
    if recipe.model.dtype == "float32":
        return 0
    return 6 * HEAD_ROWS * shape.vocabulary + 6 * shape.vocabulary * shape.hidden


@dataclass(frozen=True)
class TowerRoom:
    """Memory for the backward pass of towers, and bytes per patch.

    ``kept``: with all activations; 0 if blocks are always recomputed. ``recomputed``: with the inputs of blocks alone.
    """

    bytes: int
    kept: int
    recomputed: int


def tower_bytes(recipe: Recipe, shape: ModelShape, *, spread: bool = False) -> int:
    """Of a vision tower that learns: the inputs of its blocks, or all activations where nothing is recomputed.

    For all prompts of an update, or for a full micro-batch where that is too much and no ranks share the tower
    (``spread``).
    """
    if recipe.model.dtype == "float32" and _tower_is_trained(recipe, shape):
        block = 9 * shape.tower_hidden + 3 * (shape.tower_mlp or 4 * shape.tower_hidden)
        again = recipe.model.gradient_checkpointing in (True, "selective") or recipe.model.device.startswith("cuda")
        return _update_patches(recipe) * 4 * shape.tower_depth * (shape.tower_hidden if again else block)
    if not tower_learns(recipe, shape):
        return 0
    if recipe.model.gradient_checkpointing == "auto" and may_keep_tower(recipe, shape):
        return kept_tower_bytes(recipe, shape)
    recomputed, patches = tower_room(shape).recomputed, _update_patches(recipe)
    if patches * recomputed > WHOLE_BYTES and not spread and not recipe.cluster.shared:
        patches = min(patches, microbatch_tokens(recipe) * PATCHES)
    return patches * recomputed


def tower_learns(recipe: Recipe, shape: ModelShape) -> bool:
    """Whether there is a vision tower that learns in 16 bits."""
    return recipe.model.dtype != "float32" and _tower_is_trained(recipe, shape)


def kept_tower_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Bytes of a tower that is not recomputed: for the update, or by micro-batch if that is too much."""
    kept, patches = tower_room(shape).kept, _update_patches(recipe)
    at_once = recipe.batch.tokens_per_microbatch // _group_tokens(recipe) * longest_prompt(recipe) * PATCHES
    return (patches if patches * kept <= WHOLE_BYTES else min(patches, at_once)) * kept


def tower_room(shape: ModelShape, bytes: int = 0, *, keeps: bool = True) -> TowerRoom:
    """Room of so many bytes, in 16 bits.

    Stored per block: input, queries, keys, values, attention output, the stream between both halves; gate and up.
    """
    block = 12 * shape.tower_hidden + 4 * shape.tower_mlp
    inputs = 2 * shape.tower_hidden
    kept = shape.tower_depth * block + 2 * inputs if keeps else 0
    return TowerRoom(bytes, kept, (shape.tower_depth + 2) * inputs)


def may_keep_tower(recipe: Recipe, shape: ModelShape) -> bool:
    """Whether the tower's activations can be stored instead of recomputed.

    Its blocks must be those of ``models/tower.py``, without adapters. A group must fit in a micro-batch, so that one
    micro-batch alone shows a medium, and the learner must hold the whole tower.
    """
    learns = not recipe.model.lora.rank and tower_learns(recipe, shape)
    single = recipe.rollout.max_turns == 1 and _group_tokens(recipe) <= recipe.batch.tokens_per_microbatch
    facts = FAMILIES.get(shape.family)
    light = facts is not None and facts.light_tower and shape.tower_mlp > 0
    return light and learns and single and not recipe.cluster.shared


def microbatch_tokens(recipe: Recipe) -> int:
    """Tokens of a micro-batch at most, of those that are one learner's."""
    batch = recipe.batch
    limit = max(batch.tokens_per_microbatch, recipe.rollout.max_context_tokens)
    whole = min(limit, batch.prompts_per_step // batch.updates_per_epoch * _group_tokens(recipe))
    return -(-whole // recipe.cluster.sequence_parallel)


def gathered_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Keys and values that learners with shared tokens gather in a layer, twice, and their float32 gradients, twice."""
    sharing = recipe.cluster.sequence_parallel
    if sharing == 1:
        return 0
    size = 4 if recipe.model.dtype == "float32" else 2
    return sharing * microbatch_tokens(recipe) * 2 * shape.key_values * (2 * size + 2 * 4)


def _tower_is_trained(recipe: Recipe, shape: ModelShape) -> bool:
    model = recipe.model
    learns = "vision" in model.lora.groups if model.lora.rank else "vision" not in model.freeze
    return bool(shape.tower_depth) and learns


def longest_prompt(recipe: Recipe) -> int:
    return recipe.rollout.max_context_tokens - recipe.rollout.max_new_tokens


def _update_patches(recipe: Recipe) -> int:
    warm = recipe.warm_start.prompts_per_step if recipe.warm_start.steps else 0
    prompts = max(warm, recipe.batch.prompts_per_step // recipe.batch.updates_per_epoch)
    return prompts * longest_prompt(recipe) * PATCHES


def _group_tokens(recipe: Recipe) -> int:
    batch, rollout = recipe.batch, recipe.rollout
    if rollout.max_turns > 1:
        return batch.group_size * rollout.max_context_tokens
    return rollout.max_context_tokens + (batch.group_size - 1) * rollout.max_new_tokens
