"""What a dry run looks at beside the recipe: data are opened, first rows read, terms built, names found, the model checked.

torch is loaded only to check a checkpoint that is on this disk; models that are shipped or made on the spot need no check.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from importlib import import_module
from inspect import signature
from shlex import quote

from sensorium.cluster.ray_host import found_cluster, refuse_without_ray, unanswered, unfound
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import TaskSource, TaskStream, bounded
from sensorium.data.planner import make_planner, without_history
from sensorium.recipe.checks import cluster_notes, gpus_seen
from sensorium.recipe.names import build, resolve, table, wrong_options
from sensorium.recipe.plan import computing_notes
from sensorium.recipe.schema import Recipe, SourceSection
from sensorium.recipe.shape import is_ours
from sensorium.rewards.functions import build_term
from sensorium.rewards.judges.client import JudgeClient
from sensorium.rewards.placed import placeable
from sensorium.rewards.reward_term import RewardContext, Term, without_answer
from sensorium.trainer.health.start_checks import refuse_without_demonstrations, start_notes
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import MediaError, RecipeError, SensoriumError, TaskError, UnknownJudge
from sensorium.vocabulary.task import Task

ROWS = 8
ENGINE_CHECKS = {"vllm": "sensorium.engines.vllm.recipe_checks"}
"""Modules that say, without torch, what of a recipe an engine cannot do."""


def check_model(recipe: Recipe, path: str = "") -> list[str]:
    """Refuse a checkpoint that a run would refuse, without reading its weights; returns what was not checked."""
    if is_ours(path or recipe.model.path):
        return []
    from sensorium.models.checkpoint_check import check_checkpoint

    return check_checkpoint(recipe.model, path)


def look_at(recipe: Recipe, *, train: bool = True, named: str = "RECIPE", seen: list[Task] | None = None) -> Iterator[str]:
    """Open what a recipe names and say what was found, a line each; what a run would refuse of it is refused here.

    Of each source only the first rows are read, and no prompt is measured: ``sensorium validate`` does both for all.
    Without ``train`` only what an evaluation needs is looked at. ``named`` is how a command names the recipe.
    The tasks that were read are added to ``seen``.
    """
    seen = [] if seen is None else seen
    find_names(recipe)
    engine = recipe.rollout.engine.name
    if engine in ENGINE_CHECKS:
        yield from import_module(ENGINE_CHECKS[engine]).look_at(recipe)
    yield from computing_notes(recipe)
    terms, unknown = _build_terms(recipe)
    if unknown:
        yield unknown
    if train and recipe.cluster.placement == "ray":
        refuse_without_ray()
        if problem := unfound() if recipe.cluster.address == "auto" else unanswered(recipe.cluster.address):
            yield (
                f"cluster.address '{recipe.cluster.address}' does not answer from here: {problem}. A run from here would "
                "be refused; one from another machine may not be."
            )
        elif recipe.cluster.address == "auto" and (found := found_cluster()):
            yield found
    if train:
        yield from cluster_notes(recipe, gpus=gpus_seen())
    if train and recipe.cluster.environments and recipe.cluster.hang_s >= recipe.rollout.environment_deadline_s:
        yield (
            f"cluster.hang_s is {recipe.cluster.hang_s:g}, and rollout.environment_deadline_s "
            f"{recipe.rollout.environment_deadline_s:g}: episodes of a worker that hangs fail by that first, and are not "
            "rolled again. Set hang_s below it."
        )
    if train and recipe.cluster.rewards:
        placeable(recipe.rewards, [term for term, _ in terms])
    if train:
        sources: list[TaskSource] = []
        few = yield from _look_at_sources(recipe, recipe.tasks.train, "tasks.train", named, sources)
        seen += few
        weights = [section.weight for section in recipe.tasks.train]
        section = recipe.tasks
        stream = TaskStream(sources, weights, seed=recipe.seed, shuffle=section.shuffle, on_bad_row=section.on_bad_row)
        make_planner(recipe.tasks.planner, stream, MediaStore())
        refuse_without_demonstrations(recipe, few)
        yield from start_notes(recipe, few)
        if recipe.steps and (problem := without_answer(terms, few)):
            weighty = [(term, weight) for term, weight in terms if weight]
            if all(task.answer is None for task in few) and without_answer(weighty, few):
                raise TaskError(f"tasks.train: {problem}")
            yield f"tasks.train: {problem}"
    held_out = yield from _look_at_sources(recipe, recipe.tasks.evaluate, "tasks.evaluate", named)
    seen += held_out
    if problem := without_answer(terms, held_out):
        yield f"tasks.evaluate: {problem}"


def find_names(recipe: Recipe) -> None:
    """Names of the user's own are imported; shipped ones are in the table, and importing them would load torch."""
    named = [("advantage", recipe.algorithm.advantage.name, "algorithm.advantage.name")]
    named += [("loss", recipe.algorithm.loss.name, "algorithm.loss.name")]
    named += [("engine", recipe.rollout.engine.name, "rollout.engine.name")]
    for kind, name, place in named:
        if name not in table(kind):
            resolve(kind, name, place)
    engine = recipe.rollout.engine
    if engine.name not in table("engine"):
        target = resolve("engine", engine.name)
        lacks = [part for part in ("generate", "update_weights", "close") if not hasattr(target, part)]
        if (isinstance(target, type) and lacks) or "policy" not in signature(target).parameters:
            what = f"has no {lacks[0]}()" if isinstance(target, type) and lacks else "does not take a policy"
            raise RecipeError(
                f"rollout.engine: '{engine.name}' {what}, so it is no engine; docs/guides/engines.md shows one."
            )
    if engine.options:
        option, problem = wrong_options("engine", engine.name, engine.options)
        if problem:
            raise RecipeError(f"rollout.engine.options.{option}: {problem}".replace("options.:", "options:"))
        try:
            getattr(resolve("engine", engine.name), "check_options", lambda options: None)(engine.options)
        except ValueError as error:
            raise RecipeError(f"rollout.engine.options: {error}.") from error
    for i, name in enumerate(recipe.logging.loggers):
        resolve("logger", name, f"logging.loggers.{i}")
        if name in table("logger"):
            try:
                import_module(name)
            except ImportError as error:
                raise RecipeError(
                    f"logging.loggers.{i}: '{name}' is not installed; run: pip install 'sensorium[{name}]'"
                ) from error


def _build_terms(recipe: Recipe) -> tuple[list[tuple[Term, float]], str]:
    """The reward terms; and, where a judge cannot be reached as things are, what a run started now would be told."""
    section = recipe.judges.model_copy(update={"requests_per_minute": {}, "tokens_per_minute": {}})
    try:
        return _terms(recipe, RewardContext(MediaStore(), JudgeClient(section))), ""
    except UnknownJudge as error:
        return _terms(recipe, RewardContext(MediaStore())), f"a run started now would be refused: {error}"


def _terms(recipe: Recipe, context: RewardContext) -> list[tuple[Term, float]]:
    terms = []
    for i, term in enumerate(recipe.rewards.terms):
        place = f"rewards.terms.{i}"
        try:
            terms.append((build_term(term.name, term.options, place, context), term.weight))
        except SensoriumError:
            raise
        except Exception as error:
            raise RecipeError(f"{place}: '{term.name}' cannot be built: {type(error).__name__}: {error}") from error
    return terms


def _look_at_sources(
    recipe: Recipe, sections: Sequence[SourceSection], place: str, named: str, opened: list[TaskSource] | None = None
) -> Generator[str, None, list[Task]]:
    """Read the first rows of each source; the sources themselves are added to ``opened``."""
    store = MediaStore()
    looked_at: list[Task] = []
    for i, section in enumerate(sections):
        at = f"{place}.{i}"
        source = bounded(build("source", section.source, section.options, at, store=store), section.source, at)
        if len(source) == 0:
            raise TaskError(f"{at} ({section.source}): the source has no rows. {section.options or ''}")
        if opened is not None:
            opened.append(source)
        first = min(ROWS, len(source))
        bad: list[str] = []
        tasks: list[Task] = []
        for row in range(first):
            try:
                tasks.append(without_history(source, row, recipe.tasks.planner.name if opened is not None else ""))
            except (TaskError, MediaError) as error:
                if recipe.tasks.on_bad_row == "refuse":
                    raise
                bad.append(str(error))
        _find_environments(tasks, at)
        looked_at += tasks
        skipped = f"; {len(bad)} of them would be skipped, the first because: {bad[0]}" if bad else ""
        clips = _clips(tasks)
        reads = f"reads and measures all{' and decodes media' if clips else ''}"
        rest = f"; `sensorium validate {quote(named)}` {reads}" if clips or first < len(source) else ""
        told = f"the first {first} were read{skipped}{_pictures(store, tasks)}{clips}{rest}"
        yield f"{at}: {section.source}, {len(source):,} rows; {told}"
    return looked_at


def _pictures(store: MediaStore, tasks: Sequence[Task]) -> str:
    """What the pictures of a task take on disk, each kept once; videos and sounds are linked where they can be."""
    blocks = [block for task in tasks for message in task.messages for block in message.content]
    sizes = {block.hash: store.size_of(block) for block in blocks if isinstance(block, Media) and block.kind == "picture"}
    return f"; their pictures take {sum(sizes.values()) / len(tasks) / 1024:.1f} KiB a task" if sizes else ""


def _clips(tasks: Sequence[Task]) -> str:
    """How many videos and sounds there are, of which only the files' bytes were looked at."""
    kinds = Counter(item.kind for task in tasks for message in task.messages for item in message.media)
    counts = [f"{kinds[kind]} {kind}{'s' * (kinds[kind] > 1)}" for kind in ("video", "sound") if kinds[kind]]
    return f"; {' and '.join(counts)} found and not decoded" if counts else ""


def _find_environments(tasks: Sequence[Task], place: str) -> None:
    for task in tasks:
        if task.environment is not None:
            option, problem = wrong_options("environment", task.environment.name, task.environment.options)
            if problem:
                raise RecipeError(f"{place}, task {task.id}, environment option '{option}': {problem}")
