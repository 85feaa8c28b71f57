"""The processes that a recipe places beside the driver, in words, and what they take before they hold anything."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sensorium.recipe.activations import (
    LEAST_ROOM,
    TowerRoom,
    activation_bytes,
    gathered_bytes,
    head_bytes,
    kept_tower_bytes,
    longest_prompt,
    may_keep_tower,
    tower_bytes,
    tower_learns,
    tower_room,
)
from sensorium.recipe.names import table
from sensorium.recipe.schema import OptimizerSection, Recipe
from sensorium.recipe.shape import IncompleteConfig, ModelShape, read_shape
from sensorium.recipe.traits import estimator_traits
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import Task

MIB = 1 << 20
WITH_TORCH = 460 * MIB
"""Of a driver, a learner rank or an engine of ours: 450 to 466 MiB resident after steps of a tiny model."""
WORKER = 75 * MIB
"""Of a worker, which imports no torch: 57 (rewards) and 76 MiB (environments)."""
VLLM_ACTOR, VLLM_WORKER = 710 * MIB, 640 * MIB
"""Of vLLM 0.32 on a CPU: our actor, and each process that computes. Measured on Linux x86-64, as the others."""


def interpreter_bytes(recipe: Mapping[str, Any]) -> dict[str, int]:
    """The machine's memory that Python and its libraries take, by part; weights and all else come on top."""
    taken = {"driver": WITH_TORCH}
    engine = (recipe.get("rollout") or {}).get("engine")
    for kind, count, told in _placed(recipe.get("cluster") or {}, section_name(engine, "native")):
        if kind == "vllm":
            sharing = (engine.get("options") or {}).get("tensor_parallel") if isinstance(engine, Mapping) else None
            taken[told] = count * (VLLM_ACTOR + (sharing if isinstance(sharing, int) else 1) * VLLM_WORKER)
        else:
            taken[told] = count * (WORKER if kind == "worker" else WITH_TORCH)
    return taken


def placed_processes(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """What a recipe, as a mapping, places beside the driver, as in ``2 engines (vllm)``; often nothing."""
    engine = section_name((recipe.get("rollout") or {}).get("engine"), "native")
    return tuple(told for _, _, told in _placed(recipe.get("cluster") or {}, engine))


def computing_processes(recipe: Mapping[str, Any]) -> dict[str, int]:
    """Those of them that compute with a model, by what they are called: learner ranks and engines, not workers."""
    engine = section_name((recipe.get("rollout") or {}).get("engine"), "native")
    return {told: count for kind, count, told in _placed(recipe.get("cluster") or {}, engine) if kind != "worker"}


def placed_by(recipe: Mapping[str, Any]) -> str:
    """Who places them, where it is not the driver itself: an addition to the list."""
    return ", placed by Ray" if (recipe.get("cluster") or {}).get("placement") == "ray" else ""


def section_name(section: Any, default: str) -> str:
    """The name of a section that may be given by its name alone."""
    return str(section.get("name", default)) if isinstance(section, Mapping) else str(section or default)


def _placed(cluster: Mapping[str, Any], engine: str) -> Iterator[tuple[str, int, str]]:
    """Kind, number and words of each part: learner, vllm, engine or worker."""
    learners = int(cluster.get("learners", 1))
    if learners > 1 or cluster.get("placement") == "ray":
        yield "learner", learners, _counted(learners, "learner rank")
    if engine != "native":
        engines = int(cluster.get("engines", 1))
        yield "vllm" if engine == "vllm" else "engine", engines, f"{_counted(engines, 'engine')} ({engine})"
    for kind in ("environments", "rewards"):
        if count := int(cluster.get(kind, 0)):
            yield "worker", count, _counted(count, f"{kind[:-1]} worker")


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


# Memory is an upper estimate: caches and activations are taken as full as the recipe's budgets allow.


BYTES = {"float32": 4, "bfloat16": 2}
MOMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "8-bit": 1 + 4 / 256}  # the last: a code, and a float32 for 256 of them
GIB = 1 << 30
NATIVE_ROWS, VLLM_ROWS = 512, 256  # max_rows of engines where a recipe does not say
CLIPS_AT_ONCE = 64  # distinct videos and sounds of the held-out tasks that are played at once: all of them are decoded
EPISODE_BYTES, TOKEN_BYTES = 2500, 60
METRICS_BYTES, LEDGER_BYTES = 2500, 60
"""Estimates, not measurements: bytes of an episode's log without its tokens, of a token in it, of a row in each file."""

MATCHED = (
    "matched: engine and learner agree on log-probs bit for bit; slower, more activations (docs/internals/exactness.md)"
)
REPEATS = "rollout.schedule=lockstep repeats bit for bit on CPU"
ONE_STEP_OFF = (
    "one step off: scoring overlaps with updates; given up: but for the first step and those after a checkpoint or an "
    "evaluation, a step trains on what the policy wrote before its last update, weighed by algorithm.correction"
)

ASYNCHRONOUS = (
    "asynchronous: groups are played all the time, across updates{beside}; a step trains on those that are complete, at "
    "most {staleness} steps old, weighed by algorithm.correction, and waits for any that would grow older. Given up: "
    "bit-exact repetition, also of a resumed run; what was drawn is still trained once or on record "
    "as dropped (ledger, table draws)"
)

TOWER = "vision tower"


@dataclass(frozen=True)
class Plan:
    """The resolved numbers of a run. ``memory`` is in bytes by use, empty where the model is not on this disk; prompts are
    taken to have ``longest_prompt`` tokens, all of them of pictures.
    ``interpreters`` comes on top of it, by process, in the machine's memory: Python, torch and other libraries; so does
    ``media``: what is kept of decoded and preprocessed media at most.

    ``prompts_at_most`` is how many a step may play, all rounds together; ``selection`` says what is done with them where
    that is more than to train on each. ``disk`` is in bytes by use, ``free_disk`` what the run may take where it lies.

    ``epochs`` is set where the number of steps follows from rows that were not counted: then ``steps`` and all numbers of
    the whole run say nothing, and ``disk`` is empty.
    """

    warm_start_updates: int
    steps: int
    episodes_per_step: int
    groups_per_update: int
    updates_per_step: int
    total_updates: int
    total_episodes: int
    prompts_at_most: int
    selection: str
    sampled_tokens_per_step: int
    evaluations: int
    model: ModelShape | None
    trainable: int
    memory: dict[str, int]
    deterministic: bool
    determinism: str
    disk: dict[str, int] = field(default_factory=dict)
    free_disk: int | None = None
    sight_check: str = ""
    schedule: str = ""
    precision: str = ""
    sharing: str = ""
    processes: str = ""
    interpreters: dict[str, int] = field(default_factory=dict)
    media: int = 0
    longest_prompt: int = 0
    epochs: float = 0


def make_plan(recipe: Recipe, config: dict[str, Any] | None = None) -> Plan:
    """The plan of a recipe. Reads files of the checkpoint if they are on this disk; imports no torch.

    ``config`` stands for the checkpoint's config.json, where that leaves keys to defaults.
    """
    batch, rollout, model = recipe.batch, recipe.rollout, recipe.model
    shape = read_shape(model.path, model.revision, config, model.unused_weights)
    episodes = batch.prompts_per_step * batch.group_size
    updates = batch.epochs_per_step * batch.updates_per_epoch
    written = rollout.max_new_tokens * rollout.max_turns
    if rollout.max_episode_tokens:
        written = min(written, rollout.max_episode_tokens)
    prompts = recipe.selection.rounds * recipe.selection.played(batch.prompts_per_step)
    plays = batch.group_size + estimator_traits(recipe.algorithm.advantage.name).greedy
    deterministic, why = _determinism(recipe)
    return Plan(
        warm_start_updates=recipe.warm_start.steps,
        steps=recipe.steps,
        episodes_per_step=episodes,
        groups_per_update=-(-recipe.selection.kept(batch.prompts_per_step) // batch.updates_per_epoch),
        updates_per_step=updates,
        total_updates=recipe.steps * updates + recipe.warm_start.steps,
        total_episodes=recipe.steps * episodes,
        prompts_at_most=prompts,
        selection=_selection(recipe, prompts, plays),
        sampled_tokens_per_step=prompts * plays * written,
        evaluations=_evaluations(recipe),
        model=shape,
        trainable=trained_parameters(recipe, shape) if shape else 0,
        memory=estimate_memory(recipe, shape) if shape else {},
        longest_prompt=longest_prompt(recipe),
        epochs=recipe.epochs if recipe.counts_rows else 0,
        disk={} if recipe.counts_rows else estimate_disk(recipe, shape, episodes, written),
        free_disk=free_disk(recipe.directory),
        deterministic=deterministic,
        determinism=why,
        sight_check=_sight_check(recipe),
        schedule=_schedule(recipe),
        processes=_processes(recipe),
        interpreters=interpreter_bytes(recipe.model_dump(include={"cluster", "rollout"})),
        media=0 if shape is not None and not shape.tower_depth else round(recipe.media.memory_gib * GIB),
        precision=MATCHED if recipe.model.precision == "matched" else "",
        sharing=_sharing(recipe),
    )


def for_tasks(plan: Plan, tasks: Sequence[Task]) -> Plan:
    """The plan for tasks like these, without a vision tower's activations where they need none."""
    if plan.model is None or (shape := shape_for_tasks(plan.model, tasks)) is plan.model:
        return plan
    return replace(plan, model=shape, memory={use: amount for use, amount in plan.memory.items() if use != TOWER})


def shape_for_tasks(shape: ModelShape, tasks: Sequence[Task]) -> ModelShape:
    """The shape to forecast with: where no task shows a picture or video, the vision tower is held but computes nothing.

    What environments will show is not known, so with one of them, or without any task, every tower counts.
    """
    kinds = {item.kind for task in tasks for message in task.messages for item in message.media}
    if not tasks or kinds & {"picture", "video"} or any(task.environment is not None for task in tasks):
        return shape
    return replace(shape, tower_depth=0)


def trained_parameters(recipe: Recipe, shape: ModelShape) -> int:
    """How many parameters learn: those of the adapters, or all that are not frozen."""
    lora = recipe.model.lora
    return shape.adapters(lora) if lora.rank else shape.trainable(recipe.model.freeze)


def estimate_memory(recipe: Recipe, shape: ModelShape) -> dict[str, int]:
    """Bytes by use, each as high as the recipe's budgets allow. Gradients are summed in float32 whatever the dtype.

    Without what vLLM takes, which is a share of the GPU.
    """
    size = BYTES[recipe.model.dtype]
    trainable = trained_parameters(recipe, shape)
    adapters = trainable if recipe.model.lora.rank else 0
    vllm, cached = recipe.rollout.engine.name == "vllm", cached_tokens(recipe, recipe.cluster.engines)
    uses = {
        "weights": (shape.total + adapters) * size,
        "gradients": trainable * 4,
        "optimizer moments": round(trainable * 2 * MOMENT_BYTES[recipe.optimizer.moments]),
        "remainders of fp32 masters": trainable * 2 if size < 4 else 0,
        "reference model": shape.total * size if recipe.algorithm.kl.coef and not adapters else 0,
        "former adapters": adapters * size if recipe.algorithm.kl.coef and recipe.warm_start.steps else 0,
        "critic": _critic_bytes(recipe, shape),
        "keys and values": 0 if vllm else cached * 2 * shape.layers * shape.key_values * size,
        "activations": activation_bytes(recipe, shape),
        "gathered keys and values": gathered_bytes(recipe, shape),
        "logits": head_bytes(recipe, shape),
        TOWER: tower_bytes(recipe, shape),
    }
    return {use: amount for use, amount in uses.items() if amount}


def estimate_disk(recipe: Recipe, shape: ModelShape | None, episodes: int, written: int) -> dict[str, int]:
    """Bytes on disk by use, at most. Pictures of tasks and environments come on top: how many differ shows in the run."""
    keep, logging = recipe.checkpoint.keep, recipe.logging
    # A full disk is met while a checkpoint is written, so the draft counts: the kept ones, the best one, and one more.
    saved = _checkpoint_bytes(recipe, shape) * (keep + bool(recipe.checkpoint.best) + 1) if shape else 0
    warm = shape is not None and recipe.algorithm.kl.coef and recipe.warm_start.steps
    whole = min(recipe.steps, logging.full_steps or recipe.steps)
    logged = min(episodes, logging.episodes or episodes) * whole
    sampled = min(max(0, recipe.steps - whole), logging.sampled_steps) * recipe.batch.group_size
    budget = round(logging.episodes_gib * GIB)
    uses = {
        "checkpoints": saved,
        "reference": shape.total * BYTES[recipe.model.dtype] if shape and warm else 0,
        "episode logs": min(budget, (logged + sampled) * (EPISODE_BYTES + TOKEN_BYTES * written)),
        "metrics, ledger": recipe.total_steps * (METRICS_BYTES + LEDGER_BYTES) + min(recipe.steps, whole) * episodes * 200,
    }
    return {use: amount for use, amount in uses.items() if amount}


def free_disk(directory: Path) -> int | None:
    """Bytes that a run may take where it lies: those that are free there, and those that it has taken already."""
    place = next((folder for folder in (directory, *directory.absolute().parents) if folder.is_dir()), None)
    try:
        taken = sum(path.lstat().st_size for path in directory.rglob("*")) if directory.is_dir() else 0
        return None if place is None else shutil.disk_usage(place).free + taken
    except OSError:  # a file went while it was looked at, or the place does not tell
        return None


def _checkpoint_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Weights, moments, and remainders where weights are not float32; a critic has its own of each."""
    size = BYTES[recipe.model.dtype]
    trainable = trained_parameters(recipe, shape)
    own = shape.total * size + round(trainable * _state_bytes(recipe.optimizer, size))
    section = recipe.algorithm.critic
    if estimator_traits(recipe.algorithm.advantage.name).critic and section.trunk == "own":
        own += shape.total * size + round(shape.trainable(section.freeze) * _state_bytes(section.optimizer, size))
    return own


def _critic_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """A critic with a trunk of its own: weights, gradients, moments, remainders. A head alone is next to nothing."""
    section = recipe.algorithm.critic
    if not estimator_traits(recipe.algorithm.advantage.name).critic or section.trunk == "shared":
        return 0
    size = BYTES[recipe.model.dtype]
    trainable = shape.trainable(section.freeze)
    return shape.total * size + round(trainable * (4 + _state_bytes(section.optimizer, size)))


def _state_bytes(section: OptimizerSection, size: int) -> float:
    """Bytes of the optimizer for each trained number: two moments, and the remainder of a weight that is not float32."""
    return 2 * MOMENT_BYTES[section.moments] + (2 if size < 4 else 0)


def engine_rows(recipe: Recipe) -> int:
    """Responses that one engine writes at once; others wait."""
    engine = recipe.rollout.engine
    return int(engine.options.get("max_rows", VLLM_ROWS if engine.name == "vllm" else NATIVE_ROWS))


def cached_tokens(recipe: Recipe, engines: int = 1) -> int:
    """Tokens in the caches of all engines at most: a single-turn prompt is cached once for its group."""
    batch, rollout = recipe.batch, recipe.rollout
    in_flight = min(rollout.concurrency or 10**9, recipe.selection.played(batch.prompts_per_step) * batch.group_size)
    if rollout.max_turns > 1:  # episodes keep theirs while an environment answers
        return max(in_flight * rollout.max_context_tokens, _evaluated_tokens(recipe, engines))
    if rollout.engine.name in ("native", "process"):
        in_flight = min(in_flight, engines * engine_rows(recipe))
    groups = -(-in_flight // batch.group_size)
    trained = groups * (rollout.max_context_tokens - rollout.max_new_tokens) + in_flight * rollout.max_new_tokens
    return max(trained, _evaluated_tokens(recipe, engines))


def _evaluated_tokens(recipe: Recipe, engines: int) -> int:
    """Tokens in the caches while held-out tasks are played, where evaluation has a longer context than training.

    As many tasks as show ``CLIPS_AT_ONCE`` clips are played at once.
    """
    rollout, section = recipe.held_out_rollout, recipe.evaluation
    if not _evaluations(recipe) or rollout.max_context_tokens <= recipe.rollout.max_context_tokens:
        return 0
    tasks = min(CLIPS_AT_ONCE, section.limit or CLIPS_AT_ONCE)
    in_flight = min(rollout.concurrency or 10**9, tasks * section.samples, engines * engine_rows(recipe))
    groups = -(-in_flight // section.samples)
    return groups * (rollout.max_context_tokens - rollout.max_new_tokens) + in_flight * rollout.max_new_tokens


def _evaluations(recipe: Recipe) -> int:
    """How many times the held-out tasks are played."""
    if not recipe.tasks.evaluate:
        return 0
    every, warm, total = recipe.evaluation.every, recipe.warm_start.steps, recipe.total_steps
    counted = recipe.evaluates_after(0) + (warm > 0 and recipe.evaluates_after(warm))
    if every and total > warm:
        counted += total // every - warm // every + (total % every > 0)  # and the last step is always measured
    return counted


def _sight_check(recipe: Recipe) -> str:
    """What the sight check plays, in a phrase."""
    if not recipe.checks_sight:
        return "none: health.sight_tasks is 0" if not recipe.health.sight_tasks else "none: nothing is evaluated"
    limit, asked = recipe.evaluation.limit, recipe.health.sight_tasks
    tasks = min(asked, limit) if limit else asked
    played = f"{tasks} held-out tasks, or all if there are fewer, at start and end"
    return f"{played}, and once more for each of picture, video and sound that they have"


def _selection(recipe: Recipe, prompts: int, plays: int) -> str:
    """What a step plays beside the groups it trains on, in a sentence; ``plays`` of each of at most ``prompts``."""
    section, wanted = recipe.selection, recipe.batch.prompts_per_step
    parts = []
    if section.dynamic:
        parts.append(f"draws until {wanted} groups have signal, in {section.rounds} rounds at most")
    if section.oversample > 1:
        parts.append(f"plays {section.played(wanted)} prompts for {wanted} groups and cancels the last")
    if section.variance_share < 1:
        parts.append(f"trains on the {section.kept(wanted)} groups whose rewards vary most")
    if plays > recipe.batch.group_size:
        parts.append("plays each prompt once more greedily")
    return f"{'; '.join(parts)}; at most {prompts:,} prompts, {prompts * plays:,} episodes a step" if parts else ""


def _schedule(recipe: Recipe) -> str:
    """What a schedule other than synchronous does, and what is given up for it."""
    if recipe.schedule.name == "asynchronous":
        still = " (the native engine samples with the learner's own weights, so it stands still while they are updated)"
        beside = still if recipe.rollout.engine.name == "native" else ""
        return ASYNCHRONOUS.format(staleness=recipe.schedule.max_staleness, beside=beside)
    return ONE_STEP_OFF if recipe.schedule.name == "one_step_off" else ""


def _sharing(recipe: Recipe) -> str:
    """Who shares the tokens of a micro-batch, and what the memory below is of."""
    sharing, learners = recipe.cluster.sequence_parallel, recipe.cluster.learners
    if sharing == 1:
        return ""
    groups = learners // sharing
    among = f"all {learners} learners" if groups == 1 else f"{sharing} learners, in {groups} such groups"
    return (
        f"{among} share the tokens of each micro-batch; activations and gathered keys and values are those of one learner, "
        "other memory that of one process: sensorium plan has a learner's"
    )


def _processes(recipe: Recipe) -> str:
    """The processes of a run of several, and ranks that have nothing to do."""
    told = recipe.model_dump(include={"cluster", "rollout"})
    parts = placed_processes(told)
    if not parts:
        return ""
    section, batch = recipe.cluster, recipe.batch
    sharing, groups = section.learners // section.sequence_parallel, batch.prompts_per_step // batch.updates_per_epoch
    idle = f". An update has {groups} groups, a group is one rank's: {sharing - groups} of {sharing} have nothing to do"
    memory = "; memory as if one process held and did all" if section.sequence_parallel == 1 else ""
    return f"the driver, {', '.join(parts)}{placed_by(told)}{memory}{idle if sharing > groups else ''}"


def _determinism(recipe: Recipe) -> tuple[bool, str]:
    if recipe.schedule.name == "asynchronous":
        return False, "no: schedule asynchronous trains on the groups that it sees complete first; synchronous repeats"
    if recipe.rollout.engine.name == "vllm":
        return False, f"no: vLLM batches by the clock; rollout.engine: native with {REPEATS}"
    if recipe.cluster.engines > 1:
        return False, f"no: several engines follow the clock; cluster.engines=1 with {REPEATS}"
    if not recipe.lockstep:
        chosen = "" if recipe.selection.oversample == 1 else " and trains on the groups that it sees complete first"
        return False, f"no: the eager schedule batches by the clock{chosen}; {REPEATS}"
    if recipe.model.device.startswith("cuda"):
        summed = "flash attention's backward pass, and cuDNN's, sums gradients in no fixed order on a GPU"
        return False, f"in order of work, not in last bits: {summed}; on CPU it repeats bit for bit"
    if foreign := _foreign_environments(recipe):
        return False, (f"on CPU, if {foreign} repeats, which is not known here: sensorium validate plays it twice to see")
    return True, "yes: on CPU the run, and a resumed run, repeats bit for bit"


def _foreign_environments(recipe: Recipe) -> str:
    """The environments of the recipe's sources that are the user's own or another project's, in words."""
    known = table("environment")
    named = [source.options.get("environment") for source in (*recipe.tasks.train, *recipe.tasks.evaluate)]
    names = dict.fromkeys(name if isinstance(name, str) else getattr(name, "__name__", "") for name in named if name)
    foreign = [n for n in names if n not in known or any(part in known[n] for part in (".adapters.", ".remote."))]
    return " and ".join(f"environment '{name}'" for name in foreign)


Way = bool | Literal["selective"]
WAYS: tuple[Way, ...] = (False, "selective", True)
SHARE = 0.9  # of the GPU that a forecast may fill: it is within 15 % of what was measured, and torch keeps some for itself


VLLM_SHARE = 0.4
"""The part of a GPU's memory that vLLM may take where a recipe does not say."""


def vllm_share(recipe: Recipe) -> float:
    """The part of a GPU's memory that vLLM may take, weights included."""
    return float(recipe.rollout.engine.options.get("gpu_share", VLLM_SHARE))


def learners_memory(recipe: Recipe, memory: int) -> int:
    """What the learner has of a GPU of ``memory`` bytes: all of it, or what vLLM leaves where it is on the same GPU."""
    cluster = recipe.cluster
    alone = not cluster.share_gpus and (cluster.engines > 1 or cluster.placement == "ray")
    if recipe.rollout.engine.name != "vllm" or alone:
        return memory
    return round(memory * (1 - vllm_share(recipe)))


@dataclass(frozen=True)
class Choice:
    """What is recomputed of the language model, and the forecast in bytes.

    ``room`` is what is left for the vision tower; None if it does not learn, or is shared by ranks.
    """

    way: Way
    forecast: int
    room: TowerRoom | None = None


def least_recomputation(recipe: Recipe, shape: ModelShape, memory: int) -> Choice:
    """The way that recomputes least of those whose forecast fits a GPU of ``memory`` bytes, beside vLLM if it is there.

    Where none fits it is whole layers: the run may still go through, since forecasts take every budget as full. What is
    free is the vision tower's, which may keep its activations where no layer is recomputed.
    """
    limit = _limit(recipe, memory)
    for way in WAYS:
        forecast, free = _forecast(recipe, shape, memory, way)
        kept = kept_tower_bytes(recipe, shape) if way is False and may_keep_tower(recipe, shape) else 0
        if kept and kept <= free:  # also where many pictures take less by micro-batch than recomputed
            return Choice(way, limit - free + kept, tower_room(shape, free))
        if forecast <= limit:
            break
    return Choice(way, forecast, _room(recipe, shape, free, keeps=kept > 0))


def given_recomputation(recipe: Recipe, shape: ModelShape, memory: int, way: Way) -> Choice:
    """What the recipe says is recomputed, and the vision tower in any case."""
    forecast, free = _forecast(recipe, shape, memory, way)
    return Choice(way, forecast, _room(recipe, shape, free, keeps=False))


def _limit(recipe: Recipe, memory: int) -> int:
    return round(SHARE * learners_memory(recipe, memory))


def _forecast(recipe: Recipe, shape: ModelShape, memory: int, way: Way) -> tuple[int, int]:
    """Bytes on a GPU of ``memory`` bytes, and how many of those that may be filled all but the vision tower leaves free."""
    model = recipe.model.model_copy(update={"gradient_checkpointing": way})
    uses = estimate_memory(recipe.model_copy(update={"model": model}), shape)
    forecast = sum(uses.values())
    return forecast, _limit(recipe, memory) - forecast + uses.get("vision tower", 0)


def _room(recipe: Recipe, shape: ModelShape, free: int, *, keeps: bool) -> TowerRoom | None:
    if not tower_learns(recipe, shape) or recipe.cluster.shared:
        return None
    return tower_room(shape, max(free, LEAST_ROOM), keeps=keeps)


ROWS = (256, 128, 64, 32)
LORA_RANK = 16


def lowering_settings(recipe: Recipe, ranks: int, *, samples: bool) -> dict[str, tuple[Any, ...]]:
    """Settings that lower memory, each with ever stronger values; first those that leave the result as it is."""
    model, tokens = recipe.model, recipe.batch.tokens_per_microbatch
    context = recipe.rollout.max_context_tokens  # which is a micro-batch of its own where it is longer
    halved = [max(context, tokens // part) for part in (2, 4)]
    moments = {"float32": ("bfloat16", "8-bit"), "bfloat16": ("8-bit",)}.get(recipe.optimizer.moments, ())
    rows = engine_rows(recipe) if samples and recipe.rollout.engine.name != "vllm" else 0
    found: dict[str, tuple[Any, ...]] = {
        "model.gradient_checkpointing": () if model.gradient_checkpointing in (True, "auto") else ("auto",),
        "batch.tokens_per_microbatch": tuple(fewer for fewer in dict.fromkeys(halved) if fewer < tokens),
        "rollout.engine.options.max_rows": tuple(fewer for fewer in ROWS if fewer < rows),
    }
    if ranks > 1:
        sharing = (n for n in range(recipe.cluster.sequence_parallel + 1, ranks + 1) if ranks % n == 0)
        found["cluster.sequence_parallel"] = tuple(sharing)[:1]
        found["cluster.offload"] = (True,)
        moments = tuple(held for held in moments if held != "8-bit")  # ranks do not hold them so
    found["optimizer.moments"] = moments
    found["model.lora.rank"] = () if model.lora.rank else (LORA_RANK,)
    return found


EIGHT_BITS_APART = (
    "optimizer.moments is '8-bit', and the learner is spread over ranks: blocks of 256 numbers would be cut where its rows "
    "are. Use optimizer.moments: bfloat16."
)


def computing_notes(recipe: Recipe) -> Iterator[str]:
    """Refuse what ``model.precision: matched`` or ranks have no way to compute; say what runs without a fast path."""
    try:
        shape = read_shape(recipe.model.path, recipe.model.revision)
    except IncompleteConfig:  # sizes are left to defaults: then the load tells
        shape = None
    experts = shape is not None and "moe" in shape.family
    if recipe.model.precision == "matched":
        engine = recipe.rollout.engine.name
        if experts:
            raise RecipeError(
                "model.precision is 'matched', and a mixture of experts computes a token together with others. Use "
                "model.precision: fast."
            )
        if engine == "vllm":
            raise RecipeError(
                f"model.precision is 'matched', and engine '{engine}' does not compute as the learner does. Use "
                "rollout.engine: native or process, or model.precision: fast."
            )
        if recipe.cluster.shared:
            why = f"learners is {recipe.cluster.learners}" if recipe.cluster.learners > 1 else "placement is 'ray'"
            raise RecipeError(
                f"model.precision is 'matched', and cluster.{why}: a sharded learner runs the stock layers. Use "
                "model.precision: fast."
            )
        if recipe.rollout.engine.options.get("kv") == "rows":
            raise RecipeError(
                "rollout.engine.options.kv is 'rows', and model.precision: matched attends over pages. Use auto or pages."
            )
    sections = (recipe.optimizer, recipe.warm_start.optimizer, recipe.algorithm.critic.optimizer)
    if recipe.cluster.shared and any(section.moments == "8-bit" for section in sections):
        raise RecipeError(EIGHT_BITS_APART)
    if experts and recipe.model.device != "cpu":
        yield (
            "model: on a GPU, decode steps of a mixture of experts run without CUDA graphs, which is slower: its routing "
            "is read on the host"
        )
    if shape is not None and (beyond := context_note(recipe, shape)):
        yield beyond
    frozen = {"vision", "audio"} & set(recipe.model.freeze)
    if frozen and "projector" not in recipe.model.freeze and not recipe.model.lora.rank:
        named = " and ".join(sorted(frozen, reverse=True))
        yield (
            f"model.freeze has {named} without projector, so media go through their tower in every step: features are kept "
            "only where the projector, which is a part of the tower, does not learn either. Freeze both to have each "
            "medium encoded once"
        )


def context_note(recipe: Recipe, shape: ModelShape) -> str:
    """What is said where prompts and responses may be longer than the model was made for; empty where they may not."""
    held_out = recipe.tasks.evaluate and recipe.held_out_rollout.max_context_tokens > recipe.rollout.max_context_tokens
    section = recipe.held_out_rollout if held_out else recipe.rollout
    longest = section.max_context_tokens
    if not shape.positions or longest <= shape.positions:
        return ""
    return (
        f"{section.context_key} is {longest}, and the model was made for {shape.positions} "
        "(max_position_embeddings in its config.json): what it writes behind that is likely to be noise. Lower it"
    )
