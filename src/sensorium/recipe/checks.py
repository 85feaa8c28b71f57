"""What is wrong with a recipe beyond its types, and what works less well than it seems; nothing is built, without torch.

``problems`` yield the dotted place of each problem and a sentence, as ``("batch.group_size", "grpo compares …")``. Keys of
``algorithm`` are checked in ``algorithm_checks.py``, the bounds of a single key in ``schema.py``.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sensorium.recipe.algorithm_checks import algorithm_problems
from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.model_shape import IncompleteConfig, ModelShape, on_general_path, read_shape
from sensorium.recipe.plan import computing_processes
from sensorium.recipe.registry import PARAMETER_GROUPS, SCHEME, wrong_name, wrong_options
from sensorium.recipe.schema import (
    CheckpointSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    SelectionSection,
    SourceSection,
)
from sensorium.vocabulary.errors import RecipeError, nearest
from sensorium.vocabulary.metric_names import OF_A_CRITIC, OF_A_STEP, OF_AN_EVALUATION, OPEN_FAMILIES

OWN_NAMES = ("environment", "accuracy_by_type")  # terms that name their scores themselves, as a user's own may


def wrong_metric(recipe: Recipe, metric: str) -> str:
    """What is wrong with a metric that chooses the best checkpoint; empty if the recipe can produce it."""
    if not metric or metric == CheckpointSection.model_fields["best"].default:
        return ""
    family, _, rest = metric.partition("/")
    terms = [str(term.options.get("name", term.name)) for term in recipe.rewards.terms]
    open_ended = any(":" in term.name or term.name in OWN_NAMES for term in recipe.rewards.terms)
    if family == "eval":
        if not recipe.evaluation.every or not recipe.tasks.evaluate:
            return f"'{metric}' is never measured: give tasks.evaluate a source and set evaluation.every."
        known = [*OF_AN_EVALUATION, *(f"reward/{term}" for term in terms)]
        if recipe.evaluation.samples > 1:
            known += [f"{name}@{recipe.evaluation.samples}" for name in ("mean", "best", "majority")]
        if rest in known or rest.startswith("accuracy/") or (rest.startswith("reward/") and open_ended):
            return ""
        return f"no evaluation has the metric '{metric}'{nearest(metric, [f'eval/{name}' for name in known])}"
    known = [*OF_A_STEP, *(f"{prefix}/{term}" for prefix in ("reward", "missing") for term in terms)]
    if estimator_traits(recipe.algorithm.advantage.name).critic:
        known += OF_A_CRITIC
    if metric in known or family in (*OPEN_FAMILIES, "accuracy") or (family in ("reward", "missing") and open_ended):
        return ""
    return f"this recipe never has the metric '{metric}'{nearest(metric, [*known, 'eval/accuracy', 'eval/reward'])}"


Problem = tuple[str, str]
MOST, LARGEST = 10**12, 1e30
MOST_EPISODES = 10**6
ENGINES_WITH_CONTEXT = ("native", "process", "vllm")
LEAST_CONTEXT = 16  # tokens; engines refuse fewer themselves
DEVICES = ("auto", "cpu", "cuda")
ASSETS = Path(__file__).resolve().parents[1] / "assets"
EIGHT_BITS_APART = (
    "optimizer.moments is '8-bit', and the learner is spread over ranks: blocks of 256 numbers would be cut where its rows "
    "are. Use optimizer.moments: bfloat16."
)
STATES_APART = (
    "gated delta nets (Qwen3.5) read the tokens of a sequence one after the other, so learners cannot share them. Leave "
    "cluster.sequence_parallel out."
)
GENERAL_ALONE = (
    "the general path (checkpoints of families without an adapter, model.family: general) computes whole rows by the "
    "model's own forward. Learner ranks, matched precision, router loss and replay need the layers that an adapter names. "
    "Use cluster.learners: 1, or a checkpoint of a family that docs/guides/families.md names."
)
ADDRESS = re.compile(r"(\w+://)?([^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
NO_ROUTES = (
    "algorithm.router_replay sends tokens to the experts that the engine chose, and this {family} model has no experts; "
    "leave it out."
)
OWN_WEIGHTS = ("process", "vllm")
# Sources whose tasks have no environment of their own.
QUESTIONS = ("shapes", "intent", "daily_omni", "caprl", "captioned_shapes", "caption_reading", "sight_and_sound")


def cluster_problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What is wrong with ``cluster``."""
    section, rollout = recipe.cluster, recipe.rollout
    if section.engines > 1 and rollout.engine.name == "native":
        yield (
            "cluster.engines",
            f"{section.engines} engines need weights of their own each, and the native engine samples with the learner's: "
            f"use rollout.engine: {' or '.join(OWN_WEIGHTS)}.",
        )
    elif section.engines > 1 and rollout.schedule == "lockstep":
        yield "cluster.engines", "lockstep is one order of all episodes in one engine: set rollout.schedule: eager."
    sharing, learners = section.sequence_parallel, section.learners
    if learners % sharing:
        several = f"{learners} learners are" if learners > 1 else "there is one learner, which is"
        yield (
            "cluster.sequence_parallel",
            f"{sharing} learners are to share the tokens of a micro-batch, and {several} not a multiple of that: set "
            f"cluster.learners to {sharing}, {2 * sharing}, …, or leave cluster.sequence_parallel out.",
        )
    if sharing > 1 and recipe.model.precision == "matched":
        yield (
            "cluster.sequence_parallel",
            "model.precision is 'matched': attention would have to sum as the engine does, which is not built for tokens "
            "on several learners. Use model.precision: fast.",
        )
    if section.address and section.placement != "ray":
        yield (
            "cluster.address",
            f"'{section.address}' is where a Ray cluster runs, and cluster.placement is '{section.placement}': nothing "
            "would go there. Set cluster.placement=ray, or cluster.address=''.",
        )
    elif section.address == "local":
        yield "cluster.address", "a cluster is started on this machine where no address is given: leave it out."
    elif section.address and not _is_address(section.address):
        yield (
            "cluster.address",
            f"'{section.address}' is no address of a Ray cluster: give HOST:PORT, where 'ray start --head' listens (6379 "
            "if no other was given), or 'auto' on one of its machines.",
        )
    if not section.shared and (section.offload or section.backend != "auto"):
        key = "offload" if section.offload else "backend"
        default = "false" if section.offload else "auto"
        yield (
            f"cluster.{key}",
            f"it is for a learner of several ranks, and cluster.learners is {section.learners}: it would do nothing. Set "
            f"cluster.{key}={default}.",
        )
    elif section.backend == "nccl" and recipe.model.device == "cpu":
        yield "cluster.backend", "nccl needs GPUs, and model.device is cpu: leave it out, or set it to gloo."
    if section.environments:
        yield from _unplaced_environments(recipe)
    if section.rewards and (passed := [term.name for term in recipe.rewards.terms if term.name.startswith(SCHEME)]):
        yield (
            "cluster.rewards",
            f"the term '{passed[0]}' is an object of this process, which no other can import. Put it into a module and "
            "name it module:name.",
        )


def _is_address(text: str) -> bool:  # 'auto' or HOST:PORT, also of Ray's client (ray://) and of IPv6 ([::1]:6379)
    found = ADDRESS.fullmatch(text)
    return text == "auto" or (found is not None and 0 < int(found["port"]) < 65536)


def cluster_notes(recipe: Recipe, *, gpus: bool, cpus: int | None = None) -> Iterator[str]:
    """What runs, but slower than its number of processes suggests. ``gpus``: whether this machine has some."""
    device = recipe.model.device
    cpus = cpus or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if recipe.cluster.address or not (device == "cpu" or (device == "auto" and not gpus)):
        return  # other machines have CPUs of their own, and beside a GPU a process needs few
    parts = computing_processes(recipe.model_dump(include={"cluster", "rollout"}))
    # In a synchronous run engines wait while learners compute, and vice versa.
    at_once = max(parts.values(), default=0) if recipe.schedule.name == "synchronous" else sum(parts.values())
    if at_once > cpus:
        yield (
            f"cluster: {sum(parts.values())} processes ({', '.join(parts)}) share {cpus} CPU{'s' if cpus > 1 else ''} of "
            "this machine and take turns, so they are no faster than fewer would be; ask for fewer, or name a Ray cluster "
            "of more machines (cluster.placement=ray cluster.address=…)."
        )


def general_note(recipe: Recipe) -> str:
    """What a run on the general path gives up; refuses what it cannot do."""
    algorithm, model, cluster = recipe.algorithm, recipe.model, recipe.cluster
    experts = algorithm.router_coef or algorithm.router_replay
    others = cluster.shared or experts or model.precision == "matched"
    if others:
        raise RecipeError(GENERAL_ALONE)
    size = recipe.batch.group_size
    decodes = " and decodes without CUDA graphs, kernels and kept prefixes"
    return (
        "model: the general path, by the model's own forward and cache. It shares no prompt in updates"
        f"{'' if recipe.rollout.engine.name == 'vllm' else decodes}: of a prompt as long as its answer, updates compute "
        f"{2 * size} lengths a group where families with an adapter compute {size + 1} ({2 * size / (size + 1):.1f} "
        "times); each further turn computes its context again"
    )


def gpus_seen() -> bool:
    """True if this machine has GPUs, as far as that is known without torch."""
    return any(any(Path("/dev").glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd", "dxg"))


def computing_notes(recipe: Recipe) -> Iterator[str]:
    """Refuse what ``model.precision: matched`` or ranks cannot compute; note what runs without a fast path."""
    try:
        shape = read_shape(recipe.model.path, recipe.model.revision)
    except IncompleteConfig:  # loading the model reports what its config lacks
        shape = None
    model, cluster, engine = recipe.model, recipe.cluster, recipe.rollout.engine
    if on_general_path(model):
        yield general_note(recipe)
    experts = shape is not None and "moe" in shape.family
    if model.precision == "matched":
        fast = "Use model.precision: fast."
        placement = f"learners is {cluster.learners}" if cluster.learners > 1 else "placement is 'ray'"
        reason = ""
        if experts:
            reason = f"a mixture of experts computes a token together with others. {fast}"
        elif shape is not None and shape.delta:
            reason = (
                f"gated delta nets sum a prompt in chunks and a response token by token, which do not round alike. {fast}"
            )
        elif shape is not None and (facts := FAMILIES.get(shape.family)) and facts.sandwich:
            reason = f"layers with norms after attention and MLP have no form whose sums are alike everywhere. {fast}"
        elif engine.name == "vllm":
            reason = f"engine 'vllm' does not compute as the learner does. Use rollout.engine: native or process. {fast}"
        elif cluster.shared:
            reason = f"cluster.{placement}: a sharded learner runs the stock layers. {fast}"
        elif engine.options.get("kv") == "rows":
            reason = "rollout.engine.options.kv is 'rows', while it attends over pages. Use kv: auto or pages."
        if reason:
            raise RecipeError(f"model.precision is 'matched', and {reason}")
    if recipe.rollout.quantization == "fp8" and (reason := _without_fp8(recipe, shape)):
        raise RecipeError(f"rollout.quantization is 'fp8', and {reason} Or leave rollout.quantization out (none).")
    if recipe.algorithm.router_replay:
        if shape is not None and not experts:
            raise RecipeError(NO_ROUTES.format(family=shape.family))
        if engine.name == "vllm":
            raise RecipeError(
                "algorithm.router_replay needs the experts that the engine chose, and those of vLLM are not read here. Use "
                "rollout.engine: native or process, or algorithm.correction."
            )
    if shape is not None and shape.delta and cluster.sequence_parallel > 1:
        raise RecipeError(f"cluster.sequence_parallel is {cluster.sequence_parallel}, and {STATES_APART}")
    optimizers = (recipe.optimizer, recipe.warm_start.optimizer, recipe.algorithm.critic.optimizer)
    if cluster.shared and any(section.moments == "8-bit" for section in optimizers):
        raise RecipeError(EIGHT_BITS_APART)
    if experts and model.device != "cpu":
        yield (
            "model: on a GPU, decode steps of a mixture of experts run without CUDA graphs, which is slower: its routing "
            "is read on the host"
        )
    if shape is not None and (beyond := context_note(recipe, shape)):
        yield beyond
    frozen = {"vision", "audio"} & set(model.freeze)
    if frozen and "projector" not in model.freeze and not model.lora.rank and not on_general_path(model):
        yield (
            f"model.freeze has {' and '.join(sorted(frozen, reverse=True))} without projector, so media go through their "
            "tower in every step: features are cached only if the projector, which is a part of the tower, is frozen too. "
            "Freeze both to have each medium encoded once"
        )


def _without_fp8(recipe: Recipe, shape: ModelShape | None) -> str:
    """Why decode steps cannot use FP8 weights, as far as the recipe says it, and what to change; empty if they can."""
    model, engine = recipe.model, recipe.rollout.engine
    if engine.name not in ("native", "process"):
        return f"engine '{engine.name}' has no such weights here. Use rollout.engine: native or process."
    if model.device == "cpu":
        return "model.device is 'cpu', while FP8 needs an NVIDIA GPU since Ada or Hopper. Use model.device: cuda."
    if model.precision == "matched":
        return "model.precision is 'matched', which has engine and learner compute alike. Use model.precision: fast."
    if model.dtype == "float32":
        return "model.dtype is 'float32'. Use model.dtype: bfloat16."
    if on_general_path(model):
        return "the general path decodes by the model's own forward. Use a family with an adapter."
    if engine.options.get("kv") == "rows":
        return "rollout.engine.options.kv is 'rows'. Use kv: auto or pages."
    if model.lora.rank and not model.lora.merge:
        return (
            "model.lora.merge is false, so products with adapters have no weight of their own. Set model.lora.merge: true."
        )
    if recipe.cluster.shared and engine.name == "native":
        return "a sharded learner has no whole weights to copy. Use rollout.engine: process."
    facts = None if shape is None else FAMILIES.get(shape.family)
    if shape is not None and ("moe" in shape.family or shape.delta or (facts is not None and facts.sandwich)):
        return (
            f"family {shape.family} has other layers than attention and a gated MLP with a norm before each. Use a model "
            "that has such layers alone."
        )
    return ""


def context_note(recipe: Recipe, shape: ModelShape) -> str:
    """A warning if prompts and responses may be longer than the model was made for; else empty."""
    held_out = recipe.tasks.evaluate and recipe.held_out_rollout.max_context_tokens > recipe.rollout.max_context_tokens
    section = recipe.held_out_rollout if held_out else recipe.rollout
    longest = section.max_context_tokens
    if not shape.positions or longest <= shape.positions:
        return ""
    return (
        f"{section.context_key} is {longest}, and the model was made for {shape.positions} "
        "(max_position_embeddings in its config.json): what it writes behind that is likely to be noise. Lower it"
    )


def _unplaced_environments(recipe: Recipe) -> Iterator[tuple[str, str]]:
    named = [
        str(options["environment"])
        for source in (*recipe.tasks.train, *recipe.tasks.evaluate)
        if isinstance((options := source.options).get("environment"), str)
    ]
    if any(name == "remote" for name in named):
        yield (
            "cluster.environments",
            "'remote' is played by servers that the recipe names, wherever they are: workers would only pass it on. Name "
            "the environment itself, or leave cluster.environments out.",
        )
    if passed := [name for name in named if name.startswith(SCHEME)]:
        yield (
            "cluster.environments",
            f"'{passed[0]}' is an object of this process, which no other can import. Put it into a module and name it "
            "module:Class.",
        )
    if not any(source.source not in QUESTIONS for source in recipe.tasks.train):
        yield "cluster.environments", "all tasks are questions, which the driver plays: workers have no work. Leave it out."


def ray_needs(recipe: Recipe, *, gpus: bool) -> dict[str, dict[str, float]]:
    """What a Ray cluster must have for a recipe: by resource, how many for which key. ``gpus``: models are on GPUs."""
    section, engine = recipe.cluster, recipe.rollout.engine
    engines = section.engines if engine.name in OWN_WEIGHTS else 0
    counts = {"cluster.learners": float(section.learners), "cluster.engines": float(engines)}
    counts |= {"cluster.environments": float(section.environments), "cluster.rewards": float(section.rewards)}
    on_gpus = {"cluster.learners": float(section.learners), "cluster.engines": engines * engine_gpus(recipe)}
    return {"CPU": counts, "GPU": on_gpus if gpus else {}}


def engine_gpus(recipe: Recipe) -> float:
    """GPUs that one engine needs where models are on GPUs."""
    return float(recipe.rollout.engine.options.get("tensor_parallel", 1))


def problems(recipe: Recipe) -> list[Problem]:
    """Everything wrong with a recipe beyond its types; names first, since the other checks rely on them."""
    return list(_names(recipe)) or [
        *_sizes(recipe.model_dump(), ""),
        *_options(recipe),
        *_batch(recipe),
        *_rollout(recipe),
        *_training(recipe),
        *_logging(recipe),
        *algorithm_problems(recipe),
        *cluster_problems(recipe),
        *_lora(recipe),
        *_rewards(recipe),
    ]


def _sizes(section: Mapping[str, Any], at: str) -> Iterator[Problem]:
    for key, value in section.items():
        place = f"{at}{key}"
        if isinstance(value, Mapping) and key != "options":
            yield from _sizes(value, f"{place}.")
        elif isinstance(value, int) and place != "seed" and abs(value) > MOST:
            yield place, f"'{place}' is {value!r:.40}; it must be at most {MOST:,}."
        elif isinstance(value, float) and value and not 1 / LARGEST <= abs(value) <= LARGEST:
            yield place, f"'{place}' is {value:g}; a number here must be between {1 / LARGEST:g} and {LARGEST:g}, or 0."


def _names(recipe: Recipe) -> Iterator[Problem]:
    yield from _model(recipe)
    named = [
        ("engine", recipe.rollout.engine.name, "rollout.engine.name"),
        ("advantage", recipe.algorithm.advantage.name, "algorithm.advantage.name"),
        ("loss", recipe.algorithm.loss.name, "algorithm.loss.name"),
        ("planner", recipe.tasks.planner.name, "tasks.planner.name"),
    ]
    named += [("logger", name, f"logging.loggers.{i}") for i, name in enumerate(recipe.logging.loggers)]
    named += [("reward", term.name, f"rewards.terms.{i}.name") for i, term in enumerate(recipe.rewards.terms)]
    for place, section in _sources(recipe):
        named.append(("source", section.source, f"{place}.source"))
        environment = section.options.get("environment")
        if section.source == "environments" and isinstance(environment, str):
            named.append(("environment", environment, f"{place}.options.environment"))
        opened = section.options.get("environments")
        for name, kind in opened.items() if isinstance(opened, Mapping) else ():
            named.append(("environment", str(kind), f"{place}.options.environments.{name}"))
    for kind, name, place in named:
        if problem := wrong_name(kind, name):
            yield place, problem


def _model(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.family != "auto" and (problem := wrong_name("family", model.family)):
        yield "model.family", problem
    scheme, _, name = model.path.partition(":")
    if scheme == "tiny" and (problem := wrong_name("family", name)):
        yield "model.path", problem
    if scheme == "package" and not (ASSETS / name / "config.json").is_file():
        shipped = [path.parent.name for path in ASSETS.glob("*/config.json")]
        yield "model.path", f"the package ships no model '{name}'{nearest(name, shipped)}"
    if model.revision and (scheme in ("tiny", "package") or Path(model.path).expanduser().is_dir()):
        yield "model.revision", f"it is for hub ids, and model.path '{model.path}' is none; leave it out."
    if model.device.split(":")[0] not in DEVICES:
        yield "model.device", f"unknown device '{model.device}'{nearest(model.device, list(DEVICES))}"
    parts = _parts(model) if model.freeze else set[str]()
    for i, group in enumerate(model.freeze):
        yield from _group(group, f"model.freeze.{i}")
        if group in {*PARAMETER_GROUPS} - parts - {"head"}:
            yield f"model.freeze.{i}", f"the model has no parameter group '{group}'{nearest(group, sorted(parts))}"
    if model.freeze and parts <= set(model.freeze):
        yield "model.freeze", "every part of the model is frozen; leave at least one out, so that something is trained."
    for place, optimizer in _optimizers(recipe):
        for group, rate in optimizer.group_lr.items():
            at = f"{place}.group_lr.{group}"
            yield from _group(group, at)
            if group in model.freeze:
                yield at, f"'{group}' has a learning rate here and is frozen by model.freeze; drop one of the two."
            if rate <= 0:
                yield at, f"the learning rate of '{group}' must be above 0; to keep it still, put it in model.freeze."


def _parts(model: ModelSection) -> set[str]:
    shape = None
    with suppress(RecipeError):  # loading the files reports what is wrong with them
        shape = read_shape(model.path, model.revision)
    if shape and not on_general_path(model):  # whose names tell no groups
        return {group for group, count in shape.parameters.items() if count}
    scheme, _, name = model.path.partition(":")
    family = name if scheme == "tiny" else model.family
    facts = FAMILIES.get(family)  # an unknown family may have any part
    return {"language"} | ({"vision", "audio", "projector"} if facts is None else {group for _, group in facts.parts})


def _group(name: str, place: str) -> Iterator[Problem]:
    if name not in PARAMETER_GROUPS:
        yield place, f"unknown parameter group '{name}'{nearest(name, list(PARAMETER_GROUPS))}"


def _options(recipe: Recipe) -> Iterator[Problem]:
    named = []
    for place, section in _sources(recipe):
        at = f"{place}.options"
        named.append(("source", section.source, section.options, f"{place}.source", at))
        if section.source == "environments" and "environment" in section.options:
            environment, options = section.options["environment"], section.options.get("options") or {}
            if isinstance(environment, str) and isinstance(options, Mapping):
                levels = section.options.get("levels") or [{}]
                own = environment not in ("remote", "isolated")  # whose level's options are another environment's
                for level in levels if isinstance(levels, list) and own else [{}]:
                    known = {**options, **(level if isinstance(level, Mapping) else {})}
                    named.append(("environment", environment, known, f"{at}.environment", f"{at}.options"))
            else:
                yield (
                    at,
                    f"an environment is a name with an object of options, not {environment!r:.40} with {options!r:.40}",
                )
    planner = recipe.tasks.planner
    named.append(("planner", planner.name, planner.options, "tasks.planner.name", "tasks.planner.options"))
    for i, term in enumerate(recipe.rewards.terms):
        named.append(("reward", term.name, term.options, f"rewards.terms.{i}.name", f"rewards.terms.{i}.options"))
    reported = set()
    for kind, name, options, name_place, options_place in named:
        try:
            option, problem = wrong_options(kind, name, options)
        except RecipeError as error:
            if str(error) not in reported:  # training and evaluation may name the same thing
                reported.add(str(error))
                yield name_place, str(error)
            continue
        if problem:
            yield f"{options_place}.{option}", problem


def _batch(recipe: Recipe) -> Iterator[Problem]:
    if recipe.counts_rows and not recipe.epochs:
        yield "steps", "the key 'steps' is missing: give steps (of RL), epochs (passes over tasks.train), or both."
    prompts, updates = recipe.batch.prompts_per_step, recipe.batch.updates_per_epoch
    if prompts % updates:
        why = "every update takes the same number of whole groups"
        yield "batch.updates_per_epoch", f"updates_per_epoch {updates} does not divide prompts_per_step {prompts}; {why}."
    if (episodes := prompts * recipe.batch.group_size) > MOST_EPISODES:
        many = f"prompts_per_step {prompts:,} × group_size {recipe.batch.group_size:,} are {episodes:,} episodes a step"
        yield "batch.prompts_per_step", f"{many}; a step has at most {MOST_EPISODES:,}."
    name = recipe.algorithm.advantage.name
    if estimator_traits(name).compares and recipe.steps and recipe.batch.group_size < 2:
        yield "batch.group_size", f"{name} compares the episodes of a group, so group_size must be at least 2."
    section = recipe.selection
    if section.max_rounds != SelectionSection().max_rounds and not section.dynamic:
        nothing = f"max_rounds {section.max_rounds} does nothing: only dynamic sampling draws in rounds"
        yield "selection.max_rounds", f"{nothing}. Set selection.dynamic: true, or leave it out."
    if section.dynamic and section.variance_share < 1:
        both = "dynamic fills a step with groups that have signal, and variance_share drops some of them again"
        yield "selection.variance_share", f"{both}. Keep one of the two."
    alone = recipe.batch.group_size == 1
    if alone and section.variance_share < 1:
        yield "selection.variance_share", "the rewards of a group of one never vary; set batch.group_size to 2 or more."
    if alone and section.dynamic and not estimator_traits(name).greedy:
        yield "selection.dynamic", "a group of one never has signal: set batch.group_size to 2 or more."


def _rollout(recipe: Recipe) -> Iterator[Problem]:
    rollout, evaluation = recipe.rollout, recipe.evaluation
    held = rollout.engine.options.get("max_context") if rollout.engine.name in ENGINES_WITH_CONTEXT else None
    longest = max(rollout, recipe.held_out_rollout, key=lambda section: section.max_context_tokens)
    if isinstance(held, int | float) and LEAST_CONTEXT <= held < longest.max_context_tokens:
        short = f"the engine would hold {held:g} tokens, and {longest.context_key} is {longest.max_context_tokens}"
        longer = "a longer thread would be cut, or end the run"
        yield "rollout.engine.options.max_context", f"{short}: {longer}. Set both alike, or leave max_context out."
    if (evaluation.every or evaluation.at_start) and not recipe.tasks.evaluate:
        yield "evaluation", "evaluation is asked for, but tasks.evaluate names no source of held-out tasks."
    if evaluation.temperature == 0 and evaluation.samples > 1:
        yield "evaluation.samples", "at temperature 0 every sample is the same; use samples 1, or a temperature."
    most = rollout.max_episode_tokens
    own = evaluation.max_context_tokens or evaluation.max_new_tokens
    for section in (rollout, *([recipe.held_out_rollout] if own else [])):
        if section.max_new_tokens >= section.max_context_tokens:
            long = f"max_new_tokens {section.max_new_tokens} leaves no room for a prompt"
            keys = (section.new_tokens_key, section.context_key)
            key = next((key for key in keys if key.startswith("evaluation")), keys[0])  # of two, the one that differs
            yield key, f"{long} in max_context_tokens {section.max_context_tokens}."
    if recipe.rollout.count_observations and not most:
        nothing = "rollout.count_observations counts what is shown into rollout.max_episode_tokens, which is 0: no limit"
        yield "rollout.count_observations", f"{nothing}. Give max_episode_tokens, or set count_observations: false."
    if recipe.rollout.count_observations and recipe.rollout.window:
        gone = "count_observations counts the tokens of an episode's one thread, and rollout.window drops older turns"
        yield "rollout.count_observations", f"{gone}. Set window: 0, or count_observations: false."
    if 0 < evaluation.max_context_tokens < LEAST_CONTEXT:
        yield "evaluation.max_context_tokens", f"it must be {LEAST_CONTEXT} at least, or 0 for that of rollout."
    if 0 < most < evaluation.max_new_tokens:
        ends = f"rollout.max_episode_tokens ends episodes of evaluation at {most} tokens, too"
        yield (
            "evaluation.max_new_tokens",
            f"{ends}, so {evaluation.max_new_tokens} is out of reach: raise that, or lower this.",
        )


def _logging(recipe: Recipe) -> Iterator[Problem]:
    asked, loggers = recipe.logging.generations, recipe.logging.loggers
    if asked and not loggers:
        yield (
            "logging.generations",
            f"generations {asked} are sent to loggers, and logging.loggers is empty. Add wandb to it, or others.",
        )
    if asked and not recipe.evaluation.every and not recipe.evaluation.at_start:
        yield "logging.generations", "only evaluations have generations; set evaluation.every, or generations: 0."
    if recipe.logging.layout == "taskmem" and (planner := recipe.tasks.planner.name) != "causal_history":
        kept = f"taskmem writes the memories that causal_history keeps, and tasks.planner is {planner}"
        yield "logging.layout", f"{kept}. Set that planner, or leave the layout out."


def _training(recipe: Recipe) -> Iterator[Problem]:
    if problem := wrong_metric(recipe, recipe.checkpoint.best):
        yield "checkpoint.best", problem
    for place, optimizer in _optimizers(recipe):
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            yield f"{place}.betas", f"both betas must lie in [0, 1), not {list(optimizer.betas)}."


def _lora(recipe: Recipe) -> Iterator[Problem]:
    lora, none = recipe.model.lora, LoraSection()
    if lora.rank == 0:
        for key in LoraSection.model_fields:
            if getattr(lora, key) != getattr(none, key):
                yield f"model.lora.{key}", f"{key} does nothing at rank 0; give model.lora.rank, or leave {key} out."
        return
    if not lora.groups:
        yield "model.lora.groups", "groups names no part of the model to adapt; name one, or set rank to 0."
    for i, group in enumerate(lora.groups):
        yield from _group(group, f"model.lora.groups.{i}")
        if group in recipe.model.freeze:
            yield f"model.lora.groups.{i}", f"'{group}' is adapted here and frozen by model.freeze; drop one of the two."
    for place, optimizer in (("optimizer", recipe.optimizer), ("warm_start.optimizer", recipe.warm_start.optimizer)):
        for group in optimizer.group_lr:
            if group in PARAMETER_GROUPS and group not in lora.groups:
                only = f"under model.lora only those of {', '.join(lora.groups)} learn"
                yield f"{place}.group_lr.{group}", f"'{group}' has a learning rate here, but no adapters; {only}."


def _rewards(recipe: Recipe) -> Iterator[Problem]:
    names = [str(term.options.get("name", term.name)) for term in recipe.rewards.terms]
    for i, name in enumerate(names):
        if name in names[:i]:
            once = "metrics are named by term, so keep one, or give one the option 'name'"
            yield f"rewards.terms.{i}.name", f"the term '{name}' occurs twice; {once}."
    if recipe.steps and not any(term.weight for term in recipe.rewards.terms):
        yield "rewards.terms", "every term has weight 0, so every reward is 0; give one of them a weight."


def _sources(recipe: Recipe) -> Iterator[tuple[str, SourceSection]]:
    for i, section in enumerate(recipe.tasks.train):
        yield f"tasks.train.{i}", section
    for i, section in enumerate(recipe.tasks.evaluate):
        yield f"tasks.evaluate.{i}", section


def _optimizers(recipe: Recipe) -> Iterator[tuple[str, OptimizerSection]]:
    yield "optimizer", recipe.optimizer
    yield "warm_start.optimizer", recipe.warm_start.optimizer
