"""Bytes on each GPU, by use: of a learner's rank as FSDP2 spreads it (learner/sharded), and of an engine.

Layers, towers that learn, and what is left of the model (embeddings, norms, projector, head: the root) are spread over the
ranks. The root stays whole through an update, and so do two layers at a time; a frozen tower is whole on every rank.
"""

from dataclasses import dataclass

from sensorium.forecast.machine import Kind
from sensorium.recipe.activations import activation_bytes, gathered_bytes, head_bytes, tower_bytes
from sensorium.recipe.plan import (
    BYTES,
    SHARE,
    WAYS,
    Way,
    cached_tokens,
    estimate_memory,
    trained_parameters,
    vllm_share,
)
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import ModelShape

GATHERED_LAYERS = 2  # the one at work and the next, which is fetched meanwhile
ENGINES = ("keys and values",)
OFFLOADED = ("weights", "gradients", "optimizer moments", "remainders of fp32 masters")


@dataclass(frozen=True)
class GpuMemory:
    """What one GPU holds: ``uses`` in bytes; ``host`` what is in the machine's memory instead, for each rank."""

    uses: dict[str, int]
    host: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.uses.values())

    def fits(self, kind: Kind) -> bool:
        """True if it fits the share of a GPU that forecasts may fill."""
        return self.total <= round(SHARE * kind.memory)


def with_checkpointing(recipe: Recipe, way: Way) -> Recipe:
    """The recipe with another way of recomputing activations."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"gradient_checkpointing": way})})


def engine_memory(recipe: Recipe, shape: ModelShape, kind: Kind, engines: int, gpus: int) -> GpuMemory:
    """An engine with GPUs of its own: the whole model and its share of the keys and values. vLLM takes what it is given."""
    size = BYTES[recipe.model.dtype]
    weights = shape.total * size // gpus
    if recipe.rollout.engine.name == "vllm":
        return GpuMemory({"weights": weights, "keys and values": max(0, round(vllm_share(recipe) * kind.memory) - weights)})
    cached = -(-cached_tokens(recipe, engines) // engines) * 2 * shape.layers * shape.key_values * size
    return GpuMemory({"weights": weights, "keys and values": cached // gpus})


def fitting_memory(recipe: Recipe, shape: ModelShape, kind: Kind, ranks: int, *, samples: bool) -> tuple[Recipe, GpuMemory]:
    """The recipe with ``auto`` recomputation decided, and a rank's memory, which may be more than there is."""
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
    frozen = shape.parameters["vision"] + shape.parameters["audio"] if tower_is_whole(recipe) else 0
    layer = layer_parameters(shape)
    root = shape.total - shape.layers * layer - (shape.parameters["vision"] + shape.parameters["audio"])
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
        "activations": stock_activations(rank_share(recipe, ranks), shape),
        "gathered keys and values": gathered_bytes(rank_share(recipe, ranks), shape),
        "logits": head_bytes(recipe, shape),
        "vision tower": -(-tower_bytes(recipe, shape, spread=True) // ranks),
    }
    if samples:
        uses |= vllm or {"the engine's weights": shape.total * size, **{use: whole.get(use, 0) for use in ENGINES}}
    return GpuMemory({use: amount for use, amount in uses.items() if amount}, host)


def tower_is_whole(recipe: Recipe) -> bool:
    """True if towers do not learn, so that every rank has them whole."""
    lora = recipe.model.lora
    return "vision" not in lora.groups if lora.rank else "vision" in recipe.model.freeze


def layer_parameters(shape: ModelShape) -> int:
    """Parameters of one decoder layer."""
    return (shape.parameters["language"] - shape.vocabulary * shape.hidden) // shape.layers


def rank_share(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe with the prompts that one rank of so many computes, alone or sharing, which bound its micro-batches."""
    groups = max(1, ranks // recipe.cluster.sequence_parallel)
    prompts = max(recipe.batch.updates_per_epoch, -(-recipe.batch.prompts_per_step // groups))
    return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"prompts_per_step": prompts})})


def stock_activations(recipe: Recipe, shape: ModelShape) -> int:
    """Activations of stock layers, which sharded policies run. What is kept with recomputation is as in fused layers."""
    kept = activation_bytes(recipe, shape)
    if recipe.model.dtype == "float32" or recipe.model.gradient_checkpointing is True:
        return kept
    fused = activation_bytes(with_checkpointing(recipe, False), shape)
    at_work = 8 * shape.mlp + 12 * shape.hidden
    per_layer = 8 * shape.hidden + 4 * shape.queries + 4 * shape.key_values + 4 * shape.mlp
    stock = stock_layer_bytes(shape)
    tokens = fused // (shape.layers * per_layer + at_work)
    if recipe.model.gradient_checkpointing == "selective":
        stock -= 8 * shape.mlp
    return max(kept, tokens * (shape.layers * stock + at_work))


def stock_layer_bytes(shape: ModelShape) -> int:
    """What a stock layer keeps of a token in bfloat16, by what autograd saves; up to 18 % more than Qwen2.5's do.

    Its norms' inputs (float32 too) and outputs; queries, keys, values and what was seen, with the norms of Qwen3's heads;
    and four values of its MLP.
    """
    return 18 * shape.hidden + 10 * (shape.queries + shape.key_values) + 8 * shape.mlp
