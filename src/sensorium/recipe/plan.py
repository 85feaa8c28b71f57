"""What a recipe will do and need, told before anything is spent: batch numbers, memory, and whether it repeats exactly.

Memory is an upper estimate: caches and activations are taken as full as the recipe's budgets allow.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sensorium.recipe.activations import activation_bytes, gathered_bytes, head_bytes, longest_prompt, tower_bytes
from sensorium.recipe.algorithm_sections import OptimizerSection
from sensorium.recipe.names import table
from sensorium.recipe.processes import interpreter_bytes, placed_by, placed_processes
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import ModelShape, read_shape
from sensorium.recipe.traits import estimator_traits
from sensorium.vocabulary.task import Task

BYTES = {"float32": 4, "bfloat16": 2}
MOMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "8-bit": 1 + 4 / 256}  # the last: a code, and a float32 for 256 of them
GIB = 1 << 30
NATIVE_ROWS, VLLM_ROWS = 512, 256  # max_rows of engines where a recipe does not say
# The native engine's second copy of weights: of layers from a size on, at most a share of a GPU's memory, for so many rows.
PACKED, LEAST_PACKED, PACKED_SHARE, PACKED_ROWS = "weights in 12 bits", 1 << 24, 1 / 16, 40
CLIPS_AT_ONCE = 64  # distinct videos and sounds of the held-out tasks that are played at once: all of them are decoded
EPISODE_BYTES, TOKEN_BYTES = 2500, 60
METRICS_BYTES, LEDGER_BYTES = 2500, 60
"""Estimates, not measurements: bytes of an episode's log without its tokens, of a token in it, of a row in each file."""

MATCHED = "matched: engine and learner agree on log-probs bit for bit; slower, and more activations (docs/performance.md)"
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
        PACKED: packed_bytes(recipe, shape),
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


def packed_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """The second copy of decoder weights that the native engine reads on a GPU when few responses are left, at most.

    It has none of small layers, or of layers with adapters or experts.
    """
    engine, model = recipe.rollout.engine, recipe.model
    inside = (
        engine.name in ("native", "process") and engine.options.get("compile", True) and engine.options.get("record", True)
    )
    plain = model.dtype == "bfloat16" and model.precision == "fast" and not model.lora.rank and model.device != "cpu"
    weights = shape.hidden * (2 * shape.queries + 2 * shape.key_values + 3 * shape.mlp)
    experts = shape.parameters["language"] > 1.5 * shape.layers * weights + 2 * shape.vocabulary * shape.hidden
    if not inside or not plain or experts or weights < LEAST_PACKED:
        return 0
    return shape.layers * weights * 3 // 2


def without_large_copies(uses: dict[str, int], memory: float) -> dict[str, int]:
    """The uses on a GPU of so much memory: a second copy of weights that is too large for it is not made."""
    return {use: amount for use, amount in uses.items() if use != PACKED or amount <= PACKED_SHARE * memory}


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
