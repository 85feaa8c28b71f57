"""What a step takes on a machine: its work in tokens and patches, the seconds it costs, and the memory.

For example a decode step of 64 rows on an H200 with Qwen2.5-VL-3B's shape (36 layers with 2.8 B parameters):
36 layers × 27 µs + 6.2 GB of weights at 4.3 TB/s + 64 rows × 6.2 GFLOP at 500 TFLOP/s + keys and values ≈ 3.4 ms

And the bytes on each GPU, by use: of a learner's rank as FSDP2 spreads it (``learner/sharding``), and of an engine.
Layers, towers that learn, and the rest of the model (the root: embeddings, norms, projector, head) are sharded over the
ranks. During an update the root is gathered, and two layers at a time; a frozen tower is whole on every rank.

The rates of a machine are published peaks of a kind of GPU, and the shares of them that were measured:

    assets/forecast/gpus.json          peaks of each kind, as published, and its memory, as torch reports it
    assets/forecast/calibration.json   constants fitted to measurements, each with where it comes from

Figures for other kinds of GPU are scaled: the same shares of their peaks are assumed.
"""

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sensorium.recipe.memory_estimate import (
    BYTES,
    PATCHES,
    activation_bytes,
    cached_tokens,
    estimate_memory,
    gathered_bytes,
    head_bytes,
    hybrid_layer_bytes,
    microbatch_tokens,
    state_bytes,
    stock_hybrid_bytes,
    stock_layer_bytes,
    tower_bytes,
    trained_parameters,
)
from sensorium.recipe.model_shape import ModelShape, read_shape, shape_by_config
from sensorium.recipe.plan import GIB, SHARE, WAYS, Way, vllm_share
from sensorium.recipe.schema import ModelSection, Recipe
from sensorium.vocabulary.errors import RecipeError, nearest

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "forecast"
MEASURED_KIND = "h200"


@dataclass(frozen=True)
class Kind:
    """A kind of GPU, in bytes and operations a second. ``link`` and ``network`` are of one GPU, one way."""

    name: str
    title: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    gpus_per_machine: int

    @property
    def measured(self) -> bool:
        """True if the constants were measured on this kind."""
        return self.name == MEASURED_KIND


@dataclass(frozen=True)
class Constants:
    """Fitted constants of one machine: seconds, or shares of a peak (of a CPU: rates, its peaks being 1).

    A decode step: ``decode_layer_s`` per layer, reads of weights, keys and values at a share of the bandwidth, operations
    of each row at a share of the peak. An update: operations at a share, those of experts at another, and
    ``microbatch_s`` per micro-batch.
    ``rank_times``: an update on one of several ranks, relative to one process with the same work.
    """

    decode_fixed_s: float
    decode_layer_s: float
    weight_reads: float
    kv_reads: float
    decode_flops: float
    prefill_fixed_s: float
    prefill_flops: float
    update_fixed_s: float
    microbatch_s: float
    update_flops: float
    expert_flops: float
    attention_flops: float
    rollout_fixed_s: float
    other_s: float
    other_episode_s: float
    push_fixed_s: float
    push_bytes: float
    rank_fixed_s: float
    rank_times: float


@dataclass(frozen=True)
class Machine:
    """A kind of GPU with its constants. ``network``: bytes a second between machines, a GPU's share."""

    kind: Kind
    constants: Constants
    network: float
    buckets: tuple[int, ...]

    def bucket(self, rows: int) -> int:
        """How many rows a decode step computes for so many live rows."""
        return next((size for size in self.buckets if size >= rows), rows)


@cache
def calibration() -> dict[str, Any]:
    """The committed constants with their sources."""
    found: dict[str, Any] = json.loads((FOLDER / "calibration.json").read_text())
    return found


@cache
def kinds() -> dict[str, Kind]:
    """The kinds of GPU that are known, by name."""
    listed = json.loads((FOLDER / "gpus.json").read_text())["kinds"]
    known = (kind | {"name": name, "memory": kind["memory_gib"] * GIB} for name, kind in listed.items())
    return {kind["name"]: Kind(**{field.name: kind[field.name] for field in fields(Kind)}) for kind in known}


def kind_named(name: str) -> Kind:
    """A kind of GPU by name."""
    if name not in kinds():
        raise RecipeError(f"--kind '{name}': its peaks are not in the table{nearest(name, list(kinds()))}")
    return kinds()[name]


def machine(kind: Kind, *, network: float | None = None) -> Machine:
    """A kind of GPU with the constants that were measured on an H200, taken as shares of peaks."""
    found = calibration()
    assumed = found["assumed"]
    return Machine(
        kind,
        Constants(**{name: one["value"] for name, one in found["gpu"].items()}),
        assumed["network"]["value"] if network is None else network,
        tuple(found["buckets"]["value"]),
    )


def assumed(name: str) -> float:
    """A number that was not measured here; calibration.json has its source."""
    return float(calibration()["assumed"][name]["value"])


VARIANTS = ("-Instruct", "-Thinking")


@cache
def published_configs() -> dict[str, dict[str, Any]]:
    """Configs by the name of the model."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / "shapes.json").read_text())["shapes"]
    return found


def planned_shape(section: ModelSection, named: str = "") -> tuple[ModelShape, str]:
    """The shape to plan with and its source: the given name, the checkpoint on this disk, or the hub id's name."""
    if named:
        return shape_by_config(_config(named, f"--shape {named}")), f"the published sizes of {_plain(named)}"
    found = read_shape(section.path, section.revision, unused=section.unused_weights)
    if found is not None:
        return found, "the checkpoint on this disk"
    name = section.path.rstrip("/").rpartition("/")[2]
    place = f"model.path '{section.path}' is not on this disk, and its sizes are not known by that name"
    return shape_by_config(_config(name, place)), f"the published sizes of {_plain(name)}"


def _config(name: str, place: str) -> dict[str, Any]:
    by_name = {known.lower(): config for known, config in published_configs().items()}
    if _plain(name).lower() not in by_name:
        raise RecipeError(
            f"{place}{nearest(_plain(name), list(published_configs()))} Name the nearest with --shape: "
            f"{', '.join(published_configs())}."
        )
    return by_name[_plain(name).lower()]


def _plain(name: str) -> str:
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    return name


PARETO = 1.3  # of the heavy tail that W3 draws its lengths from (bench/workload.py)


@dataclass(frozen=True)
class StepWork:
    """The work of one step. ``response`` is the mean length; ``tail`` the longest over the mean (1: all equal).

    ``prompt``: tokens of a prompt with its media; ``patches``: those of its media a tower computes. Several turns count
    as one response with the longest prompt. ``observed``: tokens of that prompt which are trained in every episode, as
    observations under ``algorithm.loss_mask: false``.
    """

    prompts: int
    group: int
    prompt: int
    response: float
    tail: float = 1.0
    patches: int = 0
    updates: int = 1
    epochs: int = 1
    tokens_per_microbatch: int = 16384
    observed: int = 0

    @property
    def episodes(self) -> int:
        return self.prompts * self.group

    @property
    def sampled(self) -> float:
        """Tokens that a step writes, on average."""
        return self.episodes * self.response

    @property
    def trained_tokens(self) -> float:
        """Tokens that an epoch of updates computes: prompts once per group, and responses."""
        return self.prompts * self.prompt + self.sampled

    def lengths(self, groups: int, seed: int) -> np.ndarray:
        """Response lengths of so many groups, a row each: from a heavy tail that is cut at ``tail`` times the mean."""
        if self.tail == 1:
            return np.full((groups, self.group), round(self.response))
        drawn = np.random.default_rng(seed).pareto(PARETO, (groups, self.group)) + 0.2
        for _ in range(20):  # cutting lowers the mean, so scale and cut in turn
            drawn = np.minimum(drawn / drawn.mean(), self.tail)
        return np.maximum(1, drawn * self.response).astype(int)


def work_of(recipe: Recipe, prompt_tokens: int = 0, response_tokens: float = 0) -> StepWork:
    """The work of a recipe's step; lengths that are not given fill the recipe's budgets.

    With a mean response below the budget, lengths have a heavy tail that the budget cuts.
    """
    batch, rollout = recipe.batch, recipe.rollout
    budget = rollout.max_new_tokens * rollout.max_turns
    if rollout.max_episode_tokens:
        budget = min(budget, rollout.max_episode_tokens)
    budget = min(budget, rollout.max_context_tokens - 1)
    if response_tokens > budget:
        raise RecipeError(
            f"--response-tokens {response_tokens:g} is more than an episode of this recipe may write ({budget}: "
            "rollout.max_new_tokens, max_turns, max_episode_tokens)."
        )
    prompt = prompt_tokens or max(1, rollout.max_context_tokens - budget)
    response = response_tokens or float(budget)
    return StepWork(
        prompts=recipe.selection.kept(batch.prompts_per_step),
        group=batch.group_size,
        prompt=prompt,
        response=response,
        tail=budget / response,
        patches=PATCHES * prompt,
        updates=batch.updates_per_epoch,
        epochs=batch.epochs_per_step,
        tokens_per_microbatch=batch.tokens_per_microbatch,
        observed=prompt if rollout.max_turns > 1 and not recipe.algorithm.loss_mask else 0,
    )


Recomputation = bool | Literal["selective"]
Push = Literal["file", "broadcast", "ipc"]
BACKWARD_OF_ATTENTION = 3.5  # forward and backward of attention over its forward, recomputing the scores


@dataclass(frozen=True)
class ModelCosts:
    """Sizes of a model's parts: ``layers``: parameters that a token meets there, ``experts`` those among them of a
    mixture's experts; ``held``: parameters in memory; ``queries``: size of a token's queries, for attention.

    ``layer_times``: operations per parameter of a trained token, 6, and 2 more if recomputed; ``tower_times``: the same of
    patches, 2 if the tower is frozen. ``forwards``: passes without gradients (reference, old log-probs, critic).
    """

    depth: int
    queries: float
    layers: float
    held: float
    head: float
    tower: float
    kv_bytes: float
    number_bytes: int
    experts: float = 0.0
    layer_times: float = 6.0
    head_times: float = 8.0
    tower_times: float = 8.0
    recomputed: bool = False
    forwards: float = 0.0


def costs_of(
    shape: ModelShape,
    *,
    number_bytes: int = 2,
    recompute: Recomputation = False,
    frozen: tuple[str, ...] = (),
    lora: bool = False,
    forwards: float = 0.0,
) -> ModelCosts:
    """The costs of a model of some shape, trained in some way."""
    table = shape.vocabulary * shape.hidden
    stored = shape.parameters["language"] - table
    attention = sum(
        one.inputs * one.outputs
        for one in shape.linears
        if one.group == "language" and ("self_attn" in one.name or "linear_attn" in one.name)
    )
    mlps = shape.layers * 3 * shape.hidden * shape.mlp
    met = min(stored, attention + mlps) if attention else stored
    again = 2.0 if recompute is True else 2.0 * (2 / 3) * mlps / met if recompute else 0.0
    learns = "vision" not in frozen and not lora
    return ModelCosts(
        depth=shape.layers,
        queries=shape.queries * shape.attention_layers / shape.layers,
        layers=met,
        held=stored + table,
        head=table,
        tower=max(shape.parameters["vision"], shape.parameters["audio"]) + shape.parameters["projector"],
        kv_bytes=2 * shape.attention_layers * shape.key_values * number_bytes,
        number_bytes=number_bytes,
        experts=mlps if "moe" in shape.family else 0.0,
        layer_times=(4.0 if lora else 6.0) + again,
        head_times=6.0 if lora else 8.0,
        tower_times=8.0 if learns else 2.0,
        recomputed=bool(recompute),
        forwards=forwards,
    )


@dataclass(frozen=True)
class Costs:
    """Seconds of each part on a machine. ``shards``: tensor parallelism; ``slower``: sampling over the native engine's."""

    model: ModelCosts
    machine: Machine
    shards: int = 1
    slower: float = 1.0

    def decode_step(self, rows: int, kv_tokens: float) -> float:
        """Seconds of one decode step of so many rows with so many cached tokens."""
        kind, by, model = self.machine.kind, self.machine.constants, self.model
        reads = model.held * model.number_bytes / (kind.bandwidth * by.weight_reads)
        reads += kv_tokens * model.kv_bytes / (kind.bandwidth * by.kv_reads)
        products = self.machine.bucket(rows) * 2 * (model.layers + model.head) / (kind.flops * by.decode_flops)
        exchanged = model.depth * 2 * assumed("collective_s") if self.shards > 1 else 0.0
        fixed = by.decode_fixed_s + model.depth * by.decode_layer_s + exchanged
        return self.slower * (fixed + (reads + products) / self.shards)

    def prefill(self, prompts: int, work: StepWork) -> float:
        """Seconds until so many prompts are in the cache, towers included."""
        kind, by, model = self.machine.kind, self.machine.constants, self.model
        tokens = prompts * work.prompt
        flops = 2 * (model.layers * tokens + model.tower * prompts * work.patches)
        flops += 4 * model.depth * model.queries * tokens * work.prompt / 2 * by.prefill_flops / by.attention_flops
        return self.slower * (by.prefill_fixed_s + flops / (kind.flops * by.prefill_flops * self.shards))

    def prefill_tokens(self, tokens: float) -> float:
        """Seconds to recompute contexts of so many tokens, without media."""
        kind, by = self.machine.kind, self.machine.constants
        return 2 * self.model.layers * tokens / (kind.flops * by.prefill_flops * self.shards)

    def update(self, groups: float, written: float, work: StepWork, ranks: int = 1, sharing: int = 1) -> float:
        """Seconds of one update of so many groups on one rank, without gathering; ``sharing`` ranks compute equal parts."""
        kind, by, model = self.machine.kind, self.machine.constants, self.model
        tokens = groups * work.prompt + written
        times = model.layer_times + 2 * model.forwards
        rows = written + groups * work.group * work.observed
        flops = times * (model.layers - model.experts) * tokens
        flops += (model.head_times + 2 * model.forwards) * model.head * rows
        flops += model.tower_times * model.tower * groups * work.patches
        per_pair = 4 * model.depth * model.queries * (BACKWARD_OF_ATTENTION + model.forwards)
        pairs = groups * work.prompt**2 / 2 + written * (work.prompt + written / max(1.0, groups * work.group) / 2)
        microbatches = -(-tokens // work.tokens_per_microbatch)
        seconds = times * model.experts * tokens / (kind.flops * by.expert_flops)
        seconds += flops / (kind.flops * by.update_flops) + per_pair * pairs / (kind.flops * by.attention_flops)
        alone = by.update_fixed_s + microbatches * by.microbatch_s + seconds / sharing
        return alone if ranks == 1 else by.rank_fixed_s + by.rank_times * alone

    def gathering(self, groups: float, written: float, work: StepWork, ranks: int) -> float:
        """Seconds of a rank's links in one update: weights gathered twice and gradients reduced, per micro-batch.

        Not measured: bytes over published rates. FSDP2 overlaps it with computing.
        """
        if ranks == 1:
            return 0.0
        tokens = groups * work.prompt + written
        microbatches = -(-tokens // work.tokens_per_microbatch)
        moved = (self.model.held + self.model.tower) * (2 * self.model.number_bytes + 4)
        return microbatches * moved * (ranks - 1) / ranks / self.link(ranks)

    def exchange(self, groups: float, written: float, work: StepWork, sharing: int) -> float:
        """Seconds that ranks with shared tokens wait for keys and values, and for the sums of their float32 gradients.

        Gathered forward, backward, in each pass without gradients, and for recomputed layers. Not measured: bytes over
        published rates.
        """
        if sharing == 1:
            return 0.0
        model, tokens = self.model, groups * work.prompt + written
        gathers = 2 + model.forwards + model.recomputed
        moved = tokens * model.kv_bytes * (gathers + 4 / model.number_bytes)
        return moved * (sharing - 1) / sharing / self.link(sharing)

    def link(self, gpus: int) -> float:
        """Bytes a second per GPU among so many: over the machine's links, or the network between machines."""
        kind = self.machine.kind
        rate = kind.link if gpus <= kind.gpus_per_machine else min(kind.link, self.machine.network)
        return rate * assumed("link_share")

    def push(self, pushed: float, engines: int, gpus: int, way: Push = "file") -> float:
        """Seconds until engines on so many GPUs have so many bytes of new weights.

        file: the first rank writes them once. broadcast: one GPU sends them to each engine in turn (bytes over
        published rates). ipc: vLLM copies them on the learner's GPU.
        """
        by = self.machine.constants
        if way == "ipc":
            return pushed / assumed("ipc_bytes")
        if way == "broadcast":
            return by.push_fixed_s + engines * pushed / self.link(1 + gpus)
        machines = -(-gpus // self.machine.kind.gpus_per_machine)
        return by.push_fixed_s + pushed / by.push_bytes + (pushed / self.machine.network if machines > 1 else 0.0)

    def other(self, episodes: int) -> float:
        """Seconds of drawing tasks, credit and writing episodes."""
        return self.machine.constants.other_s + episodes * self.machine.constants.other_episode_s


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
