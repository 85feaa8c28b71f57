"""Bytes on each GPU, by use: of a learner's rank as FSDP2 spreads it (learner/sharded), and of an engine.

Layers, towers that learn, and the rest of the model (the root: embeddings, norms, projector, head) are sharded over the
ranks. During an update the root is gathered, and two layers at a time; a frozen tower is whole on every rank.
"""

from dataclasses import dataclass

from sensorium.forecast.machine import Kind
from sensorium.recipe.activations import (
    activation_bytes,
    gathered_bytes,
    head_bytes,
    hybrid_layer_bytes,
    microbatch_tokens,
    stock_hybrid_bytes,
    stock_layer_bytes,
    tower_bytes,
)
from sensorium.recipe.plan import (
    BYTES,
    SHARE,
    WAYS,
    Way,
    cached_tokens,
    estimate_memory,
    state_bytes,
    trained_parameters,
    vllm_share,
)
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import ModelShape

GATHERED_LAYERS = 2  # the current one and the next, which is prefetched
ENGINES = ("keys and values", "states of delta nets")
OFFLOADED = ("weights", "gradients", "optimizer moments", "remainders of fp32 masters")


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on one GPU by use; ``host``: those in the machine's memory instead, per rank."""

    uses: dict[str, int]
    host: int = 0

    @property
    def total(self) -> int:
        return sum(self.uses.values())

    def fits(self, kind: Kind) -> bool:
        """True if it fits the share of a GPU that forecasts may fill."""
        return self.total <= round(SHARE * kind.memory)


def with_checkpointing(recipe: Recipe, way: Way) -> Recipe:
    """The recipe with another way of recomputing activations."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"gradient_checkpointing": way})})


def engine_memory(recipe: Recipe, shape: ModelShape, kind: Kind, engines: int, gpus: int) -> GpuMemory:
    """An engine on its own GPUs: the whole model and its share of the keys and values. vLLM takes all it is given."""
    size = BYTES[recipe.model.dtype]
    weights = shape.total * size // gpus
    if recipe.rollout.engine.name == "vllm":
        return GpuMemory({"weights": weights, "keys and values": max(0, round(vllm_share(recipe) * kind.memory) - weights)})
    cached = -(-cached_tokens(recipe, engines) // engines) * 2 * shape.attention_layers * shape.key_values * size
    uses = {"weights": weights, "keys and values": cached // gpus}
    states = state_bytes(recipe, shape, engines) // (engines * gpus)
    return GpuMemory(uses | ({"states of delta nets": states} if states else {}))


def fitting_memory(recipe: Recipe, shape: ModelShape, kind: Kind, ranks: int, *, samples: bool) -> tuple[Recipe, GpuMemory]:
    """The recipe with ``auto`` recomputation decided, and a rank's memory, even if it does not fit."""
    ways = WAYS if recipe.model.gradient_checkpointing == "auto" else (recipe.model.gradient_checkpointing,)
    for way in ways:
        decided = with_checkpointing(recipe, way)
        memory = rank_memory(decided, shape, kind, ranks, samples=samples)
        if memory.fits(kind):
            break
    return decided, memory


def rank_memory(recipe: Recipe, shape: ModelShape, kind: Kind, ranks: int, *, samples: bool) -> GpuMemory:
    """A rank of the learner, of one or of several; ``samples``: the engine is on its GPU too."""
    whole = estimate_memory(recipe, shape)
    vllm = {"vLLM": round(vllm_share(recipe) * kind.memory)} if samples and recipe.rollout.engine.name == "vllm" else {}
    if ranks == 1:
        return GpuMemory({use: amount for use, amount in whole.items() if samples or use not in ENGINES} | vllm)
    size = BYTES[recipe.model.dtype]
    lora, towers = recipe.model.lora, shape.parameters["vision"] + shape.parameters["audio"]
    frozen = towers if ("vision" not in lora.groups if lora.rank else "vision" in recipe.model.freeze) else 0
    layer = (shape.parameters["language"] - shape.vocabulary * shape.hidden) // shape.layers
    root = shape.total - shape.layers * layer - towers
    trained = trained_parameters(recipe, shape)
    spread = whole | {"weights": (shape.total - frozen) * size}
    uses = {use: -(-amount // ranks) for use, amount in spread.items() if use in (*OFFLOADED, "reference model", "critic")}
    host = 0
    if recipe.cluster.offload:
        host = sum(uses.pop(use, 0) for use in OFFLOADED)
    uses |= {
        "frozen tower": frozen * size,
        "gathered root and layers": (root + GATHERED_LAYERS * layer) * size,
        "gradients being reduced": (layer if trained > layer else trained) * 4,
        "activations": _stock_activations(_rank_share(recipe, ranks), shape),
        "gathered keys and values": gathered_bytes(_rank_share(recipe, ranks), shape),
        "logits": head_bytes(recipe, shape),
        "vision tower": -(-tower_bytes(recipe, shape, spread=True) // ranks),
    }
    if samples:
        uses |= vllm or {"the engine's weights": shape.total * size, **{use: whole.get(use, 0) for use in ENGINES}}
    return GpuMemory({use: amount for use, amount in uses.items() if amount}, host)


def _rank_share(recipe: Recipe, ranks: int) -> Recipe:
    groups = max(1, ranks // recipe.cluster.sequence_parallel)
    prompts = max(recipe.batch.updates_per_epoch, -(-recipe.batch.prompts_per_step // groups))
    return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"prompts_per_step": prompts})})


def _stock_activations(recipe: Recipe, shape: ModelShape) -> int:
    kept = activation_bytes(recipe, shape)
    if recipe.model.dtype == "float32" or recipe.model.gradient_checkpointing is True:
        return kept
    if shape.delta:  # recomputed whole or not at all
        if recipe.model.gradient_checkpointing == "selective":
            return activation_bytes(with_checkpointing(recipe, True), shape)
        both = zip(stock_hybrid_bytes(shape), hybrid_layer_bytes(shape), strict=True)
        more = [stock - fused for stock, fused in both]
        return kept + microbatch_tokens(recipe) * (more[0] * shape.delta.layers + more[1] * shape.attention_layers)
    fused = activation_bytes(with_checkpointing(recipe, False), shape)
    at_work = 8 * shape.mlp + 12 * shape.hidden
    per_layer = 8 * shape.hidden + 4 * shape.queries + 4 * shape.key_values + 4 * shape.mlp
    stock = stock_layer_bytes(shape)
    tokens = fused // (shape.layers * per_layer + at_work)
    if recipe.model.gradient_checkpointing == "selective":
        stock -= 8 * shape.mlp
    return max(kept, tokens * (shape.layers * stock + at_work))
