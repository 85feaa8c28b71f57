"""What of a recipe vLLM cannot do: refused or told at the dry run, before anything is started. Imports no torch."""

import platform
from collections.abc import Iterator
from pathlib import Path

from sensorium.engines.vllm.known_arguments import check_arguments
from sensorium.engines.vllm.options import LORA_RANKS, check_options
from sensorium.engines.vllm.versions import VllmVersion, installed_version, known_newer
from sensorium.recipe.recomputation import vllm_share
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import read_shape
from sensorium.vocabulary.errors import EngineError, RecipeError

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2", "qwen3")
"""Families whose log-probs were held against the native engine's, but for the mixture of experts."""

EXPERTS = ("qwen3_vl_moe",)

TOWER_GROUPS = frozenset(["vision", "projector"])
REPEATS_NOT = (
    "rollout.engine: vLLM's batches depend on the clock, so a run does not repeat bit for bit and a resumed one goes on "
    "with other samples"
)


def look_at(recipe: Recipe) -> Iterator[str]:
    """Refuse what vLLM does not do, and say what is different with it."""
    engine, rollout = recipe.rollout.engine, recipe.rollout
    try:
        check_options(engine.options)
    except ValueError as error:
        raise RecipeError(f"rollout.engine.options: {error}.") from error
    try:
        found = installed_version()
    except EngineError as error:
        raise RecipeError(str(error)) from error
    try:
        unchecked = check_arguments(engine.options.get("engine_args") or {})
    except ValueError as error:
        raise RecipeError(f"rollout.engine.options.engine_args: {error} (vLLM {found.name} is installed).") from error
    if rollout.top_p < 1 or rollout.top_k > 0:
        raise RecipeError(
            "rollout.top_p and rollout.top_k: vLLM gives log-probs of the truncated distribution or of the whole policy, "
            "not both, and training needs those of the policy. Leave them at 1 and 0, or use rollout.engine: native."
        )
    if rollout.schedule == "lockstep":
        raise RecipeError(f"{REPEATS_NOT}. Set rollout.schedule: eager, or use rollout.engine: native, which repeats.")
    if recipe.schedule.name == "asynchronous":
        refuse_across_updates(recipe, found)
    shape = read_shape(recipe.model.path, recipe.model.revision)
    on_cpu = found.on_cpu or recipe.model.device == "cpu"
    if shape is not None:
        refuse_family(shape.family, on_cpu=on_cpu)
    refuse_adapters(recipe.model.lora.groups if recipe.model.lora.rank else ())
    if recipe.model.lora.rank > LORA_RANKS[-1]:
        raise RecipeError(
            f"model.lora.rank is {recipe.model.lora.rank}, and vLLM takes adapters of rank {LORA_RANKS[-1]} at most. Lower "
            "it, or use rollout.engine: native."
        )
    refuse_dtype(recipe.model.dtype, on_cpu=on_cpu)
    if on_cpu and engine.options.get("push") == "ipc":
        raise RecipeError("rollout.engine.options.push is ipc, which shares GPU memory; on a CPU use file, or auto.")
    yield from found.sentences()
    if unchecked:
        yield unchecked
    if known_newer(found.name):
        yield f"rollout.engine: vLLM {found.name} is newer than any that this engine was tried with; its parity will tell"
    yield REPEATS_NOT
    if on_cpu:
        cache = engine.options.get("cache_gib", 1)
        yield (
            f"rollout.engine: vLLM has weights of its own and takes {cache} GiB for keys and values "
            "(rollout.engine.options.cache_gib), which is not in the forecast of memory"
        )
    else:
        yield (
            f"rollout.engine: vLLM takes {vllm_share(recipe):g} of its GPU (rollout.engine.options.gpu_share), which is "
            "not in the forecast of memory"
        )
    if TOWER_GROUPS & {*recipe.model.lora.groups} and recipe.model.lora.rank:
        yield "rollout.engine: adapters of the vision tower are switched on in vLLM (enable_tower_connector_lora)"


def refuse_across_updates(recipe: Recipe, found: VllmVersion) -> None:
    """Refuse responses across updates where vLLM would not say which weights wrote which tokens."""
    if not found.tells_weight_versions:
        raise RecipeError(
            f"schedule: asynchronous updates weights while responses are open, and vLLM {found.name} does not tell which "
            "weights wrote which tokens (0.32 does). Use schedule: one_step_off, or rollout.engine: process."
        )
    if recipe.rollout.engine.options.get("restarts"):
        raise RecipeError(
            "rollout.engine.options.restarts starts vLLM with the weights of that moment, which schedule: asynchronous may "
            "be in the middle of changing. Leave it out and set cluster.engines: 2 or more: one that dies is replaced "
            "(cluster.restarts), and samples after the next push."
        )
    if recipe.model.lora.rank:
        raise RecipeError(
            "schedule: asynchronous updates weights while responses are open, and with model.lora vLLM goes on with the "
            "adapter that a response began with, but names the newer one. Use schedule: one_step_off, or rollout.engine: "
            "process."
        )


def refuse_family(family: str, *, on_cpu: bool) -> None:
    """Refuse a family whose log-probs were never compared, and one whose weights cannot be pushed."""
    if on_cpu and family in EXPERTS:
        raise RecipeError(
            f"rollout.engine: vLLM does not take the experts of family '{family}' from a push on a CPU: it would go on with"
            " other weights, without an error. Use rollout.engine: native, or process."
        )
    if family not in FAMILIES:
        raise RecipeError(
            f"rollout.engine: the engine vllm samples {', '.join(FAMILIES)}; this model is of family '{family}'. Use "
            "rollout.engine: native, or process."
        )


def refuse_adapters(groups: tuple[str, ...]) -> None:
    """Refuse adapters where vLLM has none."""
    if strange := sorted({*groups} - TOWER_GROUPS - {"language"}):
        raise RecipeError(
            f"model.lora.groups names '{strange[0]}': vLLM adapts the language model and the vision tower alone. Leave it "
            "out, or use rollout.engine: native."
        )


def refuse_dtype(dtype: str, *, on_cpu: bool, features: frozenset[str] | None = None, machine: str = "") -> None:
    """Refuse bfloat16 on an Arm CPU that has no such instructions: vLLM starts, and is killed at its first forward."""
    if dtype != "bfloat16" or not on_cpu or (machine or platform.machine()) not in ("aarch64", "arm64"):
        return
    if "bf16" not in (cpu_features() if features is None else features):
        raise RecipeError(
            "model.dtype is bfloat16, and this CPU has no bf16 instructions: vLLM would be killed (SIGILL) at its first "
            "forward. Set model.dtype: float32."
        )


def cpu_features() -> frozenset[str]:
    """What this machine's first core can do, as Linux names it; empty where that is not told."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    told = next((line for line in lines if line.lower().startswith(("features", "flags"))), "")
    return frozenset(told.partition(":")[2].split())
