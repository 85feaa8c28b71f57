"""The resolved numbers of a run, without torch: steps, processes, disk, and what fits a GPU.

Memory by use is an upper estimate (``memory_estimate.py``).
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.memory_estimate import (
    BYTES,
    LEAST_ROOM,
    TOWER,
    TowerRoom,
    critic_bytes,
    engine_rows,
    estimate_memory,
    kept_tower_bytes,
    longest_prompt,
    may_keep_tower,
    optimizer_bytes,
    tower_learns,
    tower_room,
    trained_parameters,
)
from sensorium.recipe.model_shape import IncompleteConfig, ModelShape, on_general_path, read_shape
from sensorium.recipe.registry import table
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.plain import counted
from sensorium.vocabulary.task import Task

MIB, GIB = 1 << 20, 1 << 30
# Resident memory of Python and its libraries, measured on Linux x86-64: a process with torch (driver, rank, own engine), a
# worker without it, vLLM 0.32's actor, and each of its computing processes.
WITH_TORCH, WORKER, VLLM_ACTOR, VLLM_WORKER = 460 * MIB, 75 * MIB, 710 * MIB, 640 * MIB

# Estimated, not measured: bytes of an episode's log without its tokens, of a token in it, of a row of each file.
EPISODE_BYTES, TOKEN_BYTES, METRICS_BYTES, LEDGER_BYTES = 2500, 80, 2500, 60
VLLM_SHARE = 0.4  # of a GPU's memory, unless the recipe sets gpu_share
SHARE = 0.9  # of a GPU that a forecast may fill: forecasts are within 15 % of measurements, and torch keeps some memory
Way = bool | Literal["selective"]
WAYS: tuple[Way, ...] = (False, "selective", True)
ROWS = (256, 128, 64, 32)
LORA_RANK = 16

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
STANDS_STILL = (
    " (the native engine samples with the learner's own weights and pauses while they are updated, so only responses of "
    "unequal length or slow environments make this faster than schedule: synchronous)"
)


@dataclass(frozen=True)
class Plan:
    """The resolved numbers of a run.

    ``memory`` is in bytes by use, empty if the model is not on this disk; prompts are assumed to have ``longest_prompt``
    tokens, all of pictures. ``interpreters`` (Python and its libraries, by process) and ``media`` (caches) are additional
    memory of the machine. ``prompts_at_most``: prompts that a step may play, in all rounds. ``free_disk``: bytes available
    to the run. With ``epochs`` the number of steps is unknown: ``steps`` and the totals mean nothing, ``disk`` is empty.
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
    """The plan of a recipe. Reads files of the checkpoint if they are on this disk.

    ``config`` replaces the checkpoint's config.json if that omits sizes.
    """
    batch, rollout, model = recipe.batch, recipe.rollout, recipe.model
    try:
        shape = read_shape(model.path, model.revision, config, model.unused_weights)
    except IncompleteConfig:  # with the library's defaults too: a layout that is not known here
        if config is None or not on_general_path(model):
            raise
        shape = None
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
        evaluations=recipe.evaluation_count,
        model=shape,
        trainable=trained_parameters(recipe, shape) if shape else 0,
        memory=estimate_memory(recipe, shape) if shape else {},
        longest_prompt=longest_prompt(recipe),
        epochs=recipe.epochs if recipe.counts_rows else 0,
        disk={} if recipe.counts_rows else _estimate_disk(recipe, shape, episodes, written),
        free_disk=free_disk(recipe.directory),
        deterministic=deterministic,
        determinism=why,
        sight_check=_sight_check(recipe),
        schedule=_schedule(recipe),
        processes=_processes(recipe),
        interpreters=_interpreter_bytes(recipe),
        media=0 if shape is not None and not shape.tower_depth else round(recipe.media.memory_gib * GIB),
        precision=MATCHED if recipe.model.precision == "matched" else "",
        sharing=_sharing(recipe),
    )


def for_tasks(plan: Plan, tasks: Sequence[Task]) -> Plan:
    """The plan for tasks like these: without a vision tower's activations if they show no pictures."""
    if plan.model is None or (shape := shape_for_tasks(plan.model, tasks)) is plan.model:
        return plan
    return replace(plan, model=shape, memory={use: amount for use, amount in plan.memory.items() if use != TOWER})


def shape_for_tasks(shape: ModelShape, tasks: Sequence[Task]) -> ModelShape:
    """The shape to forecast with: if no task shows a picture or video, the vision tower is loaded but computes nothing.

    What environments will show is unknown, so with one of them, or without any task, every tower counts.
    """
    kinds = {item.kind for task in tasks for message in task.messages for item in message.media}
    if not tasks or kinds & {"picture", "video"} or any(task.environment is not None for task in tasks):
        return shape
    return replace(shape, tower_depth=0)


def section_name(section: Any, default: str) -> str:
    """The name of a section of a stored recipe, which may be its name alone."""
    return str(section.get("name", default)) if isinstance(section, Mapping) else str(section or default)


def _placed(recipe: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Kind (learner, vllm, engine or worker), count and description of the processes beside the driver."""
    cluster = recipe.get("cluster") or {}
    engine = section_name((recipe.get("rollout") or {}).get("engine"), "native")
    learners, engines = int(cluster.get("learners", 1)), int(cluster.get("engines", 1))
    if learners > 1 or cluster.get("placement") == "ray":
        yield "learner", learners, counted(learners, "learner rank")
    if engine != "native":
        yield "vllm" if engine == "vllm" else "engine", engines, f"{counted(engines, 'engine')} ({engine})"
    for kind in ("environments", "rewards"):
        if count := int(cluster.get(kind, 0)):
            yield "worker", count, counted(count, f"{kind[:-1]} worker")


def placed_processes(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """The processes that a recipe (as a mapping) places beside the driver, as in ``2 engines (vllm)``; often none."""
    return tuple(words for _, _, words in _placed(recipe))


def computing_processes(recipe: Mapping[str, Any]) -> dict[str, int]:
    """Those of them that compute with a model: learner ranks and engines, not workers."""
    return {words: count for kind, count, words in _placed(recipe) if kind != "worker"}


def placed_by(recipe: Mapping[str, Any]) -> str:
    """An addition to the list of processes where Ray places them."""
    return ", placed by Ray" if (recipe.get("cluster") or {}).get("placement") == "ray" else ""


def _interpreter_bytes(recipe: Recipe) -> dict[str, int]:
    sharing = recipe.rollout.engine.options.get("tensor_parallel")
    vllm = VLLM_ACTOR + (sharing if isinstance(sharing, int) else 1) * VLLM_WORKER
    sizes = {"learner": WITH_TORCH, "engine": WITH_TORCH, "worker": WORKER, "vllm": vllm}
    placed = _placed(recipe.model_dump(include={"cluster", "rollout"}))
    return {"driver": WITH_TORCH} | {words: count * sizes[kind] for kind, count, words in placed}


def _estimate_disk(recipe: Recipe, shape: ModelShape | None, episodes: int, written: int) -> dict[str, int]:
    """Bytes on disk by use, at most, without pictures of tasks and environments: how many differ shows only in the run."""
    size, logging, saved, reference = BYTES[recipe.model.dtype], recipe.logging, 0, 0
    if shape is not None:
        state = round(trained_parameters(recipe, shape) * optimizer_bytes(recipe.optimizer, size))
        checkpoint = shape.total * size + state + critic_bytes(recipe, shape, gradients=False)
        # The latest, the best one, and one more that is being written.
        saved = checkpoint * (recipe.checkpoint.keep + bool(recipe.checkpoint.best) + 1)
        reference = shape.total * size if recipe.algorithm.kl.coef and recipe.warm_start.steps else 0
    whole = min(recipe.steps, logging.full_steps or recipe.steps)
    logged = min(episodes, logging.episodes or episodes) * whole
    sampled = min(max(0, recipe.steps - whole), logging.sampled_steps) * recipe.batch.group_size
    logs = (logged + sampled) * (EPISODE_BYTES + TOKEN_BYTES * written)
    uses = {
        "checkpoints": saved,
        "reference": reference,
        "episode logs": min(round(logging.episodes_gib * GIB), logs),
        "metrics, ledger": recipe.total_steps * (METRICS_BYTES + LEDGER_BYTES) + whole * episodes * 200,
    }
    return {use: amount for use, amount in uses.items() if amount}


def free_disk(directory: Path) -> int | None:
    """Bytes that a run may take in its directory: those that are free, and those that it has taken already."""
    place = next((folder for folder in (directory, *directory.absolute().parents) if folder.is_dir()), None)
    try:
        taken = sum(path.lstat().st_size for path in directory.rglob("*")) if directory.is_dir() else 0
        return None if place is None else shutil.disk_usage(place).free + taken
    except OSError:  # a file was removed meanwhile, or the file system does not know
        return None


def free_memory() -> int | None:
    """Bytes that a process may still take, swap included, within the limit of its container; None if unknown."""
    bounds = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
        bounds.append(found["MemAvailable"] + found.get("SwapFree", 0))
    except (OSError, KeyError):
        pass
    container = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((container / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (container / "memory.stat").read_text().splitlines())
        cached = int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))
        bounds.append(limit - used + cached)
    except (OSError, ValueError):  # no cgroups of version 2, or no limit ('max')
        pass
    return min(bounds, default=None)


def _sight_check(recipe: Recipe) -> str:
    if not recipe.checks_sight:
        return "none: health.sight_tasks is 0" if not recipe.health.sight_tasks else "none: nothing is evaluated"
    limit, asked = recipe.evaluation.limit, recipe.health.sight_tasks
    played = f"{min(asked, limit) if limit else asked} held-out tasks, or all if there are fewer, at start and end"
    return f"{played}, and once more for each of picture, video and sound that they have"


def _selection(recipe: Recipe, prompts: int, plays: int) -> str:
    """What a step plays beside the groups it trains on; ``plays`` of each of at most ``prompts``."""
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
    if recipe.schedule.name == "asynchronous":
        beside = STANDS_STILL if recipe.rollout.engine.name == "native" else ""
        return ASYNCHRONOUS.format(staleness=recipe.schedule.max_staleness, beside=beside)
    return ONE_STEP_OFF if recipe.schedule.name == "one_step_off" else ""


def _sharing(recipe: Recipe) -> str:
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
    """The processes of a run, and ranks that have nothing to do."""
    sections = recipe.model_dump(include={"cluster", "rollout"})
    parts = placed_processes(sections)
    if not parts:
        return ""
    section, batch = recipe.cluster, recipe.batch
    sharing, groups = section.learners // section.sequence_parallel, batch.prompts_per_step // batch.updates_per_epoch
    idle = f". An update has {groups} groups, a group is one rank's: {sharing - groups} of {sharing} have nothing to do"
    memory = "; memory as if one process held and did all" if section.sequence_parallel == 1 else ""
    return f"the driver, {', '.join(parts)}{placed_by(sections)}{memory}{idle if sharing > groups else ''}"


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
        known = "repeats, which is not known here (sensorium validate plays it twice to see), and is not slow"
        return False, f"on CPU, if {foreign} {known}"
    return True, "yes: on CPU the run, and a resumed run, repeats bit for bit"


def _foreign_environments(recipe: Recipe) -> str:
    """The environments of the recipe's sources that are the user's own or another project's."""
    known = table("environment")
    named = [source.options.get("environment") for source in (*recipe.tasks.train, *recipe.tasks.evaluate)]
    names = dict.fromkeys(name if isinstance(name, str) else getattr(name, "__name__", "") for name in named if name)
    foreign = [n for n in names if n not in known or any(part in known[n] for part in (".adapters.", ".remote."))]
    return " and ".join(f"environment '{name}'" for name in foreign)


def vllm_share(recipe: Recipe) -> float:
    """The share of a GPU's memory that vLLM may take, weights included."""
    return float(recipe.rollout.engine.options.get("gpu_share", VLLM_SHARE))


def learners_memory(recipe: Recipe, memory: int) -> int:
    """The learner's part of a GPU of ``memory`` bytes: all, or what vLLM leaves on the same GPU."""
    cluster = recipe.cluster
    alone = not cluster.share_gpus and (cluster.engines > 1 or cluster.placement == "ray")
    if recipe.rollout.engine.name != "vllm" or alone:
        return memory
    return round(memory * (1 - vllm_share(recipe)))


@dataclass(frozen=True)
class Choice:
    """What is recomputed of the language model (``way``), and the forecast in bytes.

    ``room`` is what is left for the vision tower; None if it does not learn, or is shared by ranks.
    """

    way: Way
    forecast: int
    room: TowerRoom | None = None


def least_recomputation(recipe: Recipe, shape: ModelShape, memory: int) -> Choice:
    """The way that recomputes least of those whose forecast fits a GPU of ``memory`` bytes, beside vLLM if it is there.

    If none fits, whole layers are recomputed: the run may still succeed, since forecasts take every budget as full. The
    vision tower gets the free memory, and may keep its activations if no layer is recomputed.
    """
    for way in WAYS:
        forecast, limit, free = _forecast(recipe, shape, memory, way)
        kept = kept_tower_bytes(recipe, shape) if way is False and may_keep_tower(recipe, shape) else 0
        if kept and kept <= free:  # also where many pictures take less by micro-batch than recomputed
            return Choice(way, limit - free + kept, tower_room(shape, free))
        if forecast <= limit:
            break
    return Choice(way, forecast, _room(recipe, shape, free, keeps=kept > 0))


def given_recomputation(recipe: Recipe, shape: ModelShape, memory: int, way: Way) -> Choice:
    """What the recipe recomputes; the vision tower is always recomputed."""
    forecast, _, free = _forecast(recipe, shape, memory, way)
    return Choice(way, forecast, _room(recipe, shape, free, keeps=False))


def _forecast(recipe: Recipe, shape: ModelShape, memory: int, way: Way) -> tuple[int, int, int]:
    """Bytes on a GPU of ``memory`` bytes, how many may be filled, and how many of those all but the tower leaves free."""
    limit = round(SHARE * learners_memory(recipe, memory))
    model = recipe.model.model_copy(update={"gradient_checkpointing": way})
    uses = estimate_memory(recipe.model_copy(update={"model": model}), shape)
    forecast = sum(uses.values())
    return forecast, limit, limit - forecast + uses.get(TOWER, 0)


def _room(recipe: Recipe, shape: ModelShape, free: int, *, keeps: bool) -> TowerRoom | None:
    if not tower_learns(recipe, shape) or recipe.cluster.shared:
        return None
    return tower_room(shape, max(free, LEAST_ROOM), keeps=keeps)


def lowering_settings(recipe: Recipe, ranks: int, *, samples: bool) -> dict[str, tuple[Any, ...]]:
    """Settings that lower memory, each with increasingly strong values; first those that leave the result unchanged."""
    model, tokens = recipe.model, recipe.batch.tokens_per_microbatch
    context = recipe.rollout.max_context_tokens  # a longer one is a micro-batch of its own
    halved = [max(context, tokens // part) for part in (2, 4)]
    moments = {"float32": ("bfloat16", "8-bit"), "bfloat16": ("8-bit",)}.get(recipe.optimizer.moments, ())
    rows = engine_rows(recipe) if samples and recipe.rollout.engine.name != "vllm" else 0
    found: dict[str, tuple[Any, ...]] = {
        "model.gradient_checkpointing": () if model.gradient_checkpointing in (True, "auto") else ("auto",),
        "batch.tokens_per_microbatch": tuple(fewer for fewer in dict.fromkeys(halved) if fewer < tokens),
        "model.lora.merge": (False,) if model.lora.rank and model.lora.merge and ranks == 1 else (),
        "rollout.engine.options.max_rows": tuple(fewer for fewer in ROWS if fewer < rows),
    }
    if ranks > 1:
        sharing = (n for n in range(recipe.cluster.sequence_parallel + 1, ranks + 1) if ranks % n == 0)
        found["cluster.sequence_parallel"] = tuple(sharing)[:1]
        found["cluster.offload"] = (True,)
        moments = tuple(stored for stored in moments if stored != "8-bit")  # not supported on ranks
    found["optimizer.moments"] = moments
    found["model.lora.rank"] = () if model.lora.rank else (LORA_RANK,)
    return found
