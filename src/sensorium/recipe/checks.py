"""Which metrics a recipe can produce, as far as shows before it runs: for keys that name one (``checkpoint.best``)."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sensorium.recipe.algorithm_checks import algorithm_problems
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.names import PARAMETER_GROUPS, SCHEME, wrong_name, wrong_options
from sensorium.recipe.plan import computing_processes
from sensorium.recipe.schema import (
    CheckpointSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    SelectionSection,
    SourceSection,
)
from sensorium.recipe.shape import read_shape
from sensorium.recipe.traits import estimator_traits
from sensorium.vocabulary.errors import RecipeError, nearest

OF_A_STEP = (
    "reward/mean", "reward/greedy", "accuracy", "tasks/skipped_bad", "tasks/skipped_long", "groups/zero_variance",
    "groups/trained", "groups/dropped", "groups/rounds", "groups/without_signal", "groups/short", "groups/cancelled",
    "groups/unused", "groups/too_alike", "episodes/length_mean", "episodes/length_max", "episodes/turns_mean",
    "episodes/truncated", "episodes/out_of_context", "episodes/empty", "episodes/failed", "episodes/dropped",
    "episodes/masked", "episodes/kept_length_mean", "episodes/kept_length_max", "episodes/dropped_length_mean",
    "episodes/dropped_length_max", "groups/open",
    "policy/loss", "policy/clip_fraction", "policy/entropy", "policy/grad_norm", "policy/kl_old", "policy/kl_ref",
    "policy/kl_coef", "policy/learning_share", "policy/lr", "policy/ratio_max", "policy/skipped",
)  # fmt: skip
OF_A_CRITIC = ("value/loss", "value/explained_variance", "value/mean", "value/clip_fraction", "value/grad_norm")
OPEN = (
    "mismatch", "correction", "router", "packing", "media", "time", "throughput", "memory", "health", "retries", "sight",
    "environment", "engine", "staleness", "wait", "worker",
)  # fmt: skip
"""Families that no recipe would choose a checkpoint by; any name in them is taken."""

OF_AN_EVALUATION = ("accuracy", "reward", "length_mean", "turns_mean", "failed", "missing")
OWN_NAMES = ("environment", "accuracy_by_type")  # these terms may name their scores themselves, as a user's own terms may


def wrong_metric(recipe: Recipe, metric: str) -> str:
    """What is wrong with a metric that is to choose the best checkpoint, in a sentence; empty if it can be produced."""
    if not metric or metric == CheckpointSection.model_fields["best"].default:
        return ""
    family, _, rest = metric.partition("/")
    if family == "eval":
        return _wrong_evaluation(recipe, metric, rest)
    known = [*OF_A_STEP, *_terms(recipe, "reward/"), *_terms(recipe, "missing/")]
    if estimator_traits(recipe.algorithm.advantage.name).critic:
        known += OF_A_CRITIC
    if metric in known or family in OPEN or (family in ("reward", "missing") and _names_its_own(recipe)):
        return ""
    return f"this recipe never has the metric '{metric}'{nearest(metric, [*known, 'eval/accuracy', 'eval/reward'])}"


def _wrong_evaluation(recipe: Recipe, metric: str, rest: str) -> str:
    if not recipe.evaluation.every or not recipe.tasks.evaluate:
        return f"'{metric}' is never measured: give tasks.evaluate a source and set evaluation.every."
    known = [*OF_AN_EVALUATION, *_terms(recipe, "reward/")]
    if recipe.evaluation.samples > 1:
        known += [f"{name}@{recipe.evaluation.samples}" for name in ("mean", "best", "majority")]
    if rest in known or rest.startswith("accuracy/") or (rest.startswith("reward/") and _names_its_own(recipe)):
        return ""
    return f"no evaluation has the metric '{metric}'{nearest(metric, [f'eval/{name}' for name in known])}"


def _terms(recipe: Recipe, prefix: str) -> list[str]:
    return [f"{prefix}{term.options.get('name', term.name)}" for term in recipe.rewards.terms]


def _names_its_own(recipe: Recipe) -> bool:
    """True if a term's scores may have names that the recipe does not tell, such as the parts an environment pays."""
    return any(":" in term.name or term.name in OWN_NAMES for term in recipe.rewards.terms)


ADDRESS = re.compile(r"(\w+://)?([^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
OWN_WEIGHTS = ("process", "vllm")
QUESTIONS = ("shapes", "intent", "daily_omni", "caprl", "captioned_shapes", "caption_reading", "sight_and_sound")
"""Sources whose tasks have no environment of their own."""


def cluster_problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Several engines need weights of their own each, and episodes that do not wait for each other."""
    section, rollout = recipe.cluster, recipe.rollout
    if section.engines > 1 and rollout.engine.name == "native":
        yield (
            "cluster.engines",
            f"{section.engines} engines need weights of their own each, and the native engine samples with the learner's: "
            f"use rollout.engine: {' or '.join(OWN_WEIGHTS)}.",
        )
    elif section.engines > 1 and rollout.schedule == "lockstep":
        yield (
            "cluster.engines",
            "lockstep is one order of all episodes in one engine, and several engines follow the clock: set "
            "rollout.schedule: eager.",
        )
    if section.sequence_parallel > 1:
        yield from _undivided_tokens(recipe)
    if section.address and section.placement != "ray":
        yield (
            "cluster.address",
            f"'{section.address}' is where a Ray cluster runs, and cluster.placement is '{section.placement}': nothing "
            "would go there. Set cluster.placement=ray, or cluster.address=''.",
        )
    elif section.address == "local":
        yield "cluster.address", "a cluster is started on this machine where no address is given: leave it out."
    elif section.address and not is_address(section.address):
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
    if section.rewards:
        yield from _unplaced_rewards(recipe)


def is_address(text: str) -> bool:
    """True for 'auto' and for HOST:PORT, also of Ray's client (``ray://``) and of IPv6 (``[::1]:6379``)."""
    found = ADDRESS.fullmatch(text)
    return text == "auto" or (found is not None and 0 < int(found["port"]) < 65536)


def cluster_notes(recipe: Recipe, *, gpus: bool, cpus: int | None = None) -> Iterator[str]:
    """What runs, but not as fast as its numbers promise. ``gpus``: this machine has some; ``cpus``: so many, if given."""
    device, cpus = recipe.model.device, cpus or _usable_cpus()
    if recipe.cluster.address or not (device == "cpu" or (device == "auto" and not gpus)):
        return  # other machines have CPUs of their own, and beside a GPU a process needs few
    parts = computing_processes(recipe.model_dump(include={"cluster", "rollout"}))
    # Of a synchronous run, engines wait while learners compute, and the other way round.
    at_once = max(parts.values(), default=0) if recipe.schedule.name == "synchronous" else sum(parts.values())
    if at_once > cpus:
        yield (
            f"cluster: {sum(parts.values())} processes ({', '.join(parts)}) share {cpus} CPU{'s' if cpus > 1 else ''} of "
            "this machine and take turns, so they are no faster than fewer would be; ask for fewer, or name a Ray cluster "
            "of more machines (cluster.placement=ray cluster.address=…)."
        )


def gpus_seen() -> bool:
    """True if this machine has GPUs, as far as that is known without torch."""
    return any(any(Path("/dev").glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd", "dxg"))


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _undivided_tokens(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What keeps the tokens of a micro-batch from being shared by several learners."""
    section = recipe.cluster
    sharing, learners = section.sequence_parallel, section.learners
    if learners % sharing:
        several = f"{learners} learners are" if learners > 1 else "there is one learner, which is"
        yield (
            "cluster.sequence_parallel",
            f"{sharing} learners are to share the tokens of a micro-batch, and {several} not a multiple of that: set "
            f"cluster.learners to {sharing}, {2 * sharing}, …, or leave cluster.sequence_parallel out.",
        )
    if recipe.model.precision == "matched":
        yield (
            "cluster.sequence_parallel",
            "model.precision is 'matched': attention would have to sum as the engine does, which is not built for tokens "
            "on several learners. Use model.precision: fast.",
        )


def _unplaced_environments(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What keeps a recipe's environments from being played by workers."""
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
        yield (
            "cluster.environments",
            "all tasks are questions, which are played in place: there is nothing for workers to do. Leave it out.",
        )


def _unplaced_rewards(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What keeps a recipe's terms from being asked in workers."""
    if passed := [term.name for term in recipe.rewards.terms if term.name.startswith(SCHEME)]:
        yield (
            "cluster.rewards",
            f"the term '{passed[0]}' is an object of this process, which no other can import. Put it into a module and "
            "name it module:name.",
        )


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


# Each check yields the place of a problem and a sentence; nothing is built, and no check needs torch.


Problem = tuple[str, str]
"""A dotted place in the recipe, and what is wrong there."""

MOST, LARGEST = 10**12, 1e30
MOST_EPISODES = 10**6
ENGINES_WITH_CONTEXT = ("native", "process", "vllm")
LEAST_CONTEXT = 16
"""Tokens; an engine's own check refuses fewer."""
DEVICES = ("auto", "cpu", "cuda")
ASSETS = Path(__file__).resolve().parents[1] / "assets"


def problems(recipe: Recipe) -> list[Problem]:
    """Everything wrong with a recipe that its types do not show; names first, since the rest leans on them."""
    return list(_names(recipe)) or [
        *_sizes(recipe.model_dump(), ""),
        *_options(recipe),
        *_batch(recipe),
        *_selection(recipe),
        *_rollout(recipe),
        *_training(recipe),
        *_logging(recipe),
        *algorithm_problems(recipe),
        *cluster_problems(recipe),
        *_lora(recipe),
        *_pay(recipe),
    ]


def _sizes(section: Mapping[str, Any], at: str) -> Iterator[Problem]:
    """Numbers that no run can mean, and that would overflow somewhere in the middle of one."""
    for key, value in section.items():
        place = f"{at}{key}"
        if isinstance(value, Mapping) and key != "options":
            yield from _sizes(value, f"{place}.")
        elif isinstance(value, int) and place != "seed" and abs(value) > MOST:
            yield place, f"'{place}' is {value!r:.40}; it must be at most {MOST:,}."
        elif isinstance(value, float) and value and not 1 / LARGEST <= abs(value) <= LARGEST:
            yield place, f"'{place}' is {value:g}; a number here lies between {1 / LARGEST:g} and {LARGEST:g}, or is 0."


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
    for i, group in enumerate(model.freeze):
        yield from _group(group, f"model.freeze.{i}")
    if model.freeze and _parts(model) <= set(model.freeze):
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
    """The groups of a model that have parameters: counted where it is on this disk, else by its family."""
    shape = None
    with suppress(RecipeError):  # what is wrong with its files is told when they are loaded
        shape = read_shape(model.path, model.revision)
    if shape:
        return {group for group, count in shape.parameters.items() if count}
    scheme, _, name = model.path.partition(":")
    family = name if scheme == "tiny" else model.family
    facts = FAMILIES.get(family)  # of one that is not known, any part may be there
    return {"language"} | ({"vision", "audio", "projector"} if facts is None else {group for _, group in facts.parts})


def _group(name: str, place: str) -> Iterator[Problem]:
    if name not in PARAMETER_GROUPS:
        yield place, f"unknown parameter group '{name}'{nearest(name, list(PARAMETER_GROUPS))}"


def _options(recipe: Recipe) -> Iterator[Problem]:
    """Options of sources, environments, planners and reward terms against what they are; those packages are free of torch.

    What cannot be loaded is told once, though training and evaluation name it both.
    """
    told = set()
    for place, problem in _each_option(recipe):
        if not place.endswith((".source", ".environment", ".name")) or problem not in told:
            yield place, problem
        told.add(problem)


def _each_option(recipe: Recipe) -> Iterator[Problem]:
    for place, section in _sources(recipe):
        yield from _unfit("source", section.source, section.options, f"{place}.source", f"{place}.options")
        if section.source == "environments" and "environment" in section.options:
            environment, options = section.options["environment"], section.options.get("options") or {}
            if not isinstance(environment, str) or not isinstance(options, Mapping):
                given = f"{environment!r:.40} with {options!r:.40}"
                yield f"{place}.options", f"an environment is a name with an object of options, not {given}"
                continue
            yield from _unfit(
                "environment", environment, options, f"{place}.options.environment", f"{place}.options.options"
            )
    planner = recipe.tasks.planner
    yield from _unfit("planner", planner.name, planner.options, "tasks.planner.name", "tasks.planner.options")
    for i, term in enumerate(recipe.rewards.terms):
        yield from _unfit("reward", term.name, term.options, f"rewards.terms.{i}.name", f"rewards.terms.{i}.options")


def _unfit(kind: str, name: str, options: Mapping[str, Any], name_place: str, options_place: str) -> Iterator[Problem]:
    try:
        option, problem = wrong_options(kind, name, options)
    except RecipeError as error:
        yield name_place, str(error)
        return
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


def _selection(recipe: Recipe) -> Iterator[Problem]:
    section, default = recipe.selection, SelectionSection()
    if section.max_rounds != default.max_rounds and not section.dynamic:
        nothing = f"max_rounds {section.max_rounds} does nothing: only dynamic sampling draws in rounds"
        yield "selection.max_rounds", f"{nothing}. Set selection.dynamic: true, or leave it out."
    if section.dynamic and section.variance_share < 1:
        both = "dynamic fills a step with groups that have signal, and variance_share drops some of them again"
        yield "selection.variance_share", f"{both}. Keep one of the two."
    if recipe.batch.group_size > 1:
        return
    if section.variance_share < 1:
        yield "selection.variance_share", "the rewards of a group of one never vary; set batch.group_size to 2 or more."
    if section.dynamic and not estimator_traits(recipe.algorithm.advantage.name).greedy:
        way_out = "set batch.group_size to 2 or more"
        yield "selection.dynamic", f"a group of one is always paid the same, so none would ever have signal; {way_out}."


def _rollout(recipe: Recipe) -> Iterator[Problem]:
    rollout, evaluation = recipe.rollout, recipe.evaluation
    yield from _limits(recipe)
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


def _limits(recipe: Recipe) -> Iterator[Problem]:
    """Limits of a context and of a turn, in training and in evaluation, that leave no room for each other."""
    evaluation, most = recipe.evaluation, recipe.rollout.max_episode_tokens
    own = evaluation.max_context_tokens or evaluation.max_new_tokens
    for section in (recipe.rollout, *([recipe.held_out_rollout] if own else [])):
        if section.max_new_tokens >= section.max_context_tokens:
            long = f"max_new_tokens {section.max_new_tokens} leaves no room for a prompt"
            keys = (section.new_tokens_key, section.context_key)
            key = next((key for key in keys if key.startswith("evaluation")), keys[0])  # of two, the one that differs
            yield key, f"{long} in max_context_tokens {section.max_context_tokens}."
    if recipe.rollout.count_observations and not most:
        nothing = "rollout.count_observations counts what is shown into rollout.max_episode_tokens, which is 0: no limit"
        yield "rollout.count_observations", f"{nothing}. Give max_episode_tokens, or set count_observations: false."
    if recipe.rollout.count_observations and recipe.rollout.window:
        gone = (
            "rollout.count_observations counts the tokens of an episode's one thread, and rollout.window drops older turns"
        )
        yield "rollout.count_observations", f"{gone}. Set window: 0, or count_observations: false."
    if 0 < evaluation.max_context_tokens < LEAST_CONTEXT:
        yield "evaluation.max_context_tokens", f"it must be {LEAST_CONTEXT} at least, or 0 for that of rollout."
    if 0 < most < evaluation.max_new_tokens:
        ends = f"rollout.max_episode_tokens ends episodes of evaluation at {most} tokens, too"
        yield (
            "evaluation.max_new_tokens",
            f"{ends}, so {evaluation.max_new_tokens} is out of reach. Raise that, or lower this.",
        )


def _logging(recipe: Recipe) -> Iterator[Problem]:
    asked, loggers = recipe.logging.generations, recipe.logging.loggers
    if asked and not any(name == "wandb" or ":" in name for name in loggers):
        alone = f"generations {asked} are shown by wandb only, and logging.loggers is {list(loggers)}"
        yield (
            "logging.generations",
            f"{alone}. Add wandb to it, or set generations: 0; sensorium report shows episodes too.",
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
    """What can be seen of adapters before the model is: which groups have some, and who learns."""
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


def _pay(recipe: Recipe) -> Iterator[Problem]:
    names = [str(term.options.get("name", term.name)) for term in recipe.rewards.terms]
    for i, name in enumerate(names):
        if name in names[:i]:
            way_out = "metrics are named by term, so keep one, or give one the option 'name'"
            yield f"rewards.terms.{i}.name", f"the term '{name}' stands twice; {way_out}."
    if recipe.steps and not any(term.weight for term in recipe.rewards.terms):
        yield "rewards.terms", "every term has weight 0, so nothing is ever paid; give one of them a weight."


def _sources(recipe: Recipe) -> Iterator[tuple[str, SourceSection]]:
    for i, section in enumerate(recipe.tasks.train):
        yield f"tasks.train.{i}", section
    for i, section in enumerate(recipe.tasks.evaluate):
        yield f"tasks.evaluate.{i}", section


def _optimizers(recipe: Recipe) -> Iterator[tuple[str, OptimizerSection]]:
    yield "optimizer", recipe.optimizer
    yield "warm_start.optimizer", recipe.warm_start.optimizer
