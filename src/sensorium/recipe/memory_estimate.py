"""The memory that a run takes at most, in bytes by use and without torch: what the dry run shows and the forecast uses.

Weights, optimizer and caches are counted; activations, the head's logits and the blocks of towers are estimated. At most:
a micro-batch is full, every prompt fills the context and is all pictures. In bfloat16 layers are assumed to be fused, as
on CUDA.
"""

from dataclasses import dataclass

from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.model_shape import ModelShape
from sensorium.recipe.schema import OptimizerSection, Recipe

BYTES = {"float32": 4, "bfloat16": 2}
MOMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "8-bit": 1 + 4 / 256}  # the last: a code, and a float32 for 256 of them
NATIVE_ROWS, VLLM_ROWS = 512, 256  # max_rows of engines, unless the recipe sets it
TOWER = "vision tower"
CLIPS_AT_ONCE = 64  # distinct videos and sounds of held-out tasks that are played at once: all of them are decoded
HEAD_ROWS = 2048  # rows of logits at once (kernels/learner_triton.py)
CHUNK = 64  # tokens of a chunk of the gated delta rule (kernels/delta_rule.py)
PATCHES = 4  # patches that become one token
# Of a tower through a whole update at most. One pass over few pictures beats several over fewer, which launch more slowly
# than they compute.
WHOLE_BYTES = 24 << 30
LEAST_ROOM = 2 << 30  # of a tower where a forecast leaves it less: forecasts take every budget as full


def estimate_memory(recipe: Recipe, shape: ModelShape) -> dict[str, int]:
    """Bytes by use at most, without vLLM's, which is a share of the GPU. Gradients are summed in float32 for any dtype."""
    size = BYTES[recipe.model.dtype]
    trainable = trained_parameters(recipe, shape)
    adapters = trainable if recipe.model.lora.rank else 0
    on_gpu = size < 4 or recipe.model.device.startswith("cuda")
    vllm, cached = recipe.rollout.engine.name == "vllm", cached_tokens(recipe, recipe.cluster.engines)
    uses = {
        "weights": (shape.total + adapters) * size,
        "gradients": trainable * 4,
        "optimizer moments": round(trainable * 2 * MOMENT_BYTES[recipe.optimizer.moments]),
        "remainders of fp32 masters": trainable * 2 if size < 4 else 0,
        "reference model": shape.total * size if recipe.algorithm.kl.coef and not adapters else 0,
        "merged adapters": shape.merged(recipe.model.lora) * size if on_gpu and recipe.model.precision == "fast" else 0,
        "FP8 copy of the MLPs": fp8_bytes(shape) if recipe.rollout.quantization == "fp8" else 0,
        "former adapters": adapters * size if recipe.algorithm.kl.coef and recipe.warm_start.steps else 0,
        "critic": critic_bytes(recipe, shape, gradients=True),
        "keys and values": 0 if vllm else cached * 2 * shape.attention_layers * shape.key_values * size,
        "states of delta nets": 0 if vllm else state_bytes(recipe, shape, recipe.cluster.engines),
        "activations": activation_bytes(recipe, shape),
        "gathered keys and values": gathered_bytes(recipe, shape),
        "logits": head_bytes(recipe, shape),
        TOWER: tower_bytes(recipe, shape),
    }
    return {use: amount for use, amount in uses.items() if amount}


def trained_parameters(recipe: Recipe, shape: ModelShape) -> int:
    """How many parameters learn: those of the adapters, or all that are not frozen."""
    lora = recipe.model.lora
    return shape.adapters(lora) if lora.rank else shape.trainable(recipe.model.freeze)


def fp8_bytes(shape: ModelShape) -> int:
    """A copy of gate and up, and of down, with a byte for each weight and a float32 scale of both."""
    return shape.layers * (3 * shape.mlp * shape.hidden + 2 * 4)


def critic_bytes(recipe: Recipe, shape: ModelShape, *, gradients: bool) -> int:
    """A critic with its own trunk: weights and optimizer state. A head alone is next to nothing."""
    section = recipe.algorithm.critic
    if not estimator_traits(recipe.algorithm.advantage.name).critic or section.trunk == "shared":
        return 0
    size = BYTES[recipe.model.dtype]
    trained = optimizer_bytes(section.optimizer, size) + 4 * gradients
    return shape.total * size + round(shape.trainable(section.freeze) * trained)


def optimizer_bytes(section: OptimizerSection, size: int) -> float:
    """Bytes of optimizer state per trained number: two moments, and the remainder of a weight that is not float32."""
    return 2 * MOMENT_BYTES[section.moments] + (2 if size < 4 else 0)


def engine_rows(recipe: Recipe) -> int:
    """Responses that one engine writes at once; others wait."""
    engine = recipe.rollout.engine
    return int(engine.options.get("max_rows", VLLM_ROWS if engine.name == "vllm" else NATIVE_ROWS))


def cached_tokens(recipe: Recipe, engines: int = 1) -> int:
    """Tokens in the caches of all engines at most: a single-turn prompt is cached once for its group."""
    batch, rollout, evaluation = recipe.batch, recipe.rollout, recipe.evaluation
    rows = engines * engine_rows(recipe)
    most = rollout.concurrency or 10**9
    in_flight = min(most, recipe.selection.played(batch.prompts_per_step) * batch.group_size)
    if rollout.max_turns > 1:  # episodes keep their cache while an environment answers
        trained = in_flight * rollout.max_context_tokens
    else:
        in_flight = min(in_flight, rows) if rollout.engine.name in ("native", "process") else in_flight
        groups = -(-in_flight // batch.group_size)
        trained = groups * longest_prompt(recipe) + in_flight * rollout.max_new_tokens
    held_out = recipe.held_out_rollout
    if not recipe.evaluation_count or held_out.max_context_tokens <= rollout.max_context_tokens:
        return trained
    tasks = min(CLIPS_AT_ONCE, evaluation.limit or CLIPS_AT_ONCE)
    in_flight = min(most, tasks * evaluation.samples, rows)
    groups = -(-in_flight // evaluation.samples)
    return max(
        trained, groups * (held_out.max_context_tokens - held_out.max_new_tokens) + in_flight * held_out.max_new_tokens
    )


def state_bytes(recipe: Recipe, shape: ModelShape, engines: int = 1) -> int:
    """States of gated delta nets in all engines at most: one of each response in flight, and one of what it continues."""
    if shape.delta is None:
        return 0
    batch, rollout = recipe.batch, recipe.rollout
    in_flight = min(rollout.concurrency or 10**9, recipe.selection.played(batch.prompts_per_step) * batch.group_size)
    rows = min(in_flight, engines * engine_rows(recipe))
    known = in_flight if rollout.max_turns > 1 else -(-rows // batch.group_size)
    return (rows + known) * shape.delta.sequence_bytes(BYTES[recipe.model.dtype])


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
