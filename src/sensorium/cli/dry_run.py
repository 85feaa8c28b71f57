"""The dry run: the resolved recipe, its plan, and what opening its data, terms, names and model finds; nothing is spent.

torch is loaded only to check a checkpoint that is on this disk, or versions that were not tried; with others, shipped and
generated models need no check.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from importlib import import_module
from inspect import signature
from shlex import quote
from typing import get_args

from rich.console import Console
from rich.syntax import Syntax

from sensorium.cluster.ray_host import found_cluster, refuse_without_ray, unanswered, unfound
from sensorium.data.causal_history import without_history
from sensorium.data.demonstrations import demonstrations_of
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import Side, TaskSource, TaskStream, a_few, all_bad, make_source, make_sources, with_way_out
from sensorium.data.planner import make_planner
from sensorium.data.row_format import placeholder_notes, unread_notes
from sensorium.models.tried_versions import untried
from sensorium.recipe.algorithm_checks import cautions
from sensorium.recipe.checks import cluster_notes, computing_notes, gpus_seen
from sensorium.recipe.load import dump_recipe
from sensorium.recipe.memory_estimate import TOWER
from sensorium.recipe.model_shape import IncompleteConfig, is_ours, on_general_path
from sensorium.recipe.plan import Plan, for_tasks, make_plan
from sensorium.recipe.registry import resolve, table, wrong_options
from sensorium.recipe.schema import Recipe, SourceSection
from sensorium.report.tables import disk_note, plan_table
from sensorium.report.terminal import say
from sensorium.rewards.judges.client import JudgeClient
from sensorium.rewards.placed import placeable
from sensorium.rewards.reward_term import RewardContext, Term, build_term, refuse_unreadable, without_answer
from sensorium.rewards.scorer import trial_notes
from sensorium.trainer.health.start_checks import long_demonstrations, refuse_without_demonstrations, start_notes
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import MediaError, RecipeError, SensoriumError, TaskError, UnknownJudge
from sensorium.vocabulary.task import Task

ROWS = 8
ENGINE_CHECKS = {"vllm": "sensorium.engines.vllm.recipe_checks"}  # what an engine cannot do, checked without torch


def show_dry_run(recipe: Recipe, console: Console, *, train: bool = True, model: str = "", named: str = "RECIPE") -> None:
    """Print the resolved recipe, its plan, and what was found; what a run would refuse is refused.

    ``model`` replaces the recipe's own, and ``named`` is how a command names the recipe.
    """
    found: list[str] = []
    if not is_ours(model or recipe.model.path) or untried():
        from sensorium.models.load import check_checkpoint

        found = check_checkpoint(recipe.model, model)
    seen: list[Task] = []
    lines = list(look_at(recipe, train=train, named=named, seen=seen))
    text = dump_recipe(recipe)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", theme="ansi_dark", background_color="default"))
    else:
        say(text, console)
    planned = recipe
    if model not in ("", recipe.model.path):  # the revision of a hub id belongs to the recipe's own model
        section = recipe.model.model_copy(update={"path": model, "revision": ""})
        planned = recipe.model_copy(update={"model": section})
    plan = for_tasks(_plan(planned), seen)
    if plan.model is None and on_general_path(planned.model):
        found = [
            *found,
            "model: the sizes in its config.json are named in a way that is not known here: no memory is forecast.",
        ]
    console.print(plan_table(plan))
    console.print()
    short = [disk_note(recipe, plan)] if train else []
    if train and not is_ours(recipe.model.path):
        from sensorium.assembly.out_of_memory import memory_note

        short.append(memory_note(recipe, plan))
    for caution in [*cautions(recipe), *found, *filter(None, short)]:
        console.print(caution, style="yellow", markup=False, highlight=False)
    for line in lines:
        say(line, console)


def show_plan(recipe: Recipe, console: Console) -> None:
    """Print the resolved numbers of a run. If tasks cannot be read, the run itself reports why."""
    plan = _plan(recipe)
    console.print(plan_table(for_tasks(plan, read_a_few(recipe)[0]) if TOWER in plan.memory else plan))
    console.print()


def _plan(recipe: Recipe) -> Plan:
    try:
        return make_plan(recipe)
    except IncompleteConfig:
        from sensorium.models.load_chat import read_config

        model = recipe.model
        return make_plan(recipe, read_config(model.path, model.family, model.revision, weights=False).config.to_dict())


def read_a_few(recipe: Recipe) -> tuple[list[Task], str]:
    """Two tasks of every source, to see which media they have; none and the reason, if those of one cannot be read."""
    tasks, store = list[Task](), MediaStore()
    for side in get_args(Side):
        try:
            for i, source in enumerate(make_sources(recipe.tasks, side, store)):
                if not (found := a_few([source], each=2)):
                    return [], f"tasks.{side}.{i}: the rows that were tried are bad; sensorium validate names them"
                tasks += found
        except (SensoriumError, TypeError) as error:  # the latter of a source without a length
            return [], str(error)
    return tasks, ""


def look_at(recipe: Recipe, *, train: bool = True, named: str = "RECIPE", seen: list[Task] | None = None) -> Iterator[str]:
    """Open what a recipe names and report what was found, a line each; what a run would refuse is refused here.

    Reads the first rows of each source and measures no prompt: ``sensorium validate`` does both for all. Without ``train``
    only what an evaluation needs is checked. The tasks that were read are added to ``seen``.
    """
    seen = [] if seen is None else seen
    cluster, section = recipe.cluster, recipe.tasks
    find_names(recipe)
    if recipe.rollout.engine.name in ENGINE_CHECKS:
        yield from import_module(ENGINE_CHECKS[recipe.rollout.engine.name]).look_at(recipe)
    yield from computing_notes(recipe)
    terms, unknown = _build_terms(recipe)
    if unknown:
        yield unknown
    if train and cluster.placement == "ray":
        refuse_without_ray()
        if problem := unfound() if cluster.address == "auto" else unanswered(cluster.address):
            yield (
                f"cluster.address '{cluster.address}' does not answer from here: {problem}. A run from here would "
                "be refused; one from another machine may not be."
            )
        elif cluster.address == "auto" and (found := found_cluster()):
            yield found
    if train:
        yield from cluster_notes(recipe, gpus=gpus_seen())
    if train and cluster.environments and cluster.hang_s >= recipe.rollout.environment_deadline_s:
        yield (
            f"cluster.hang_s is {cluster.hang_s:g}, and rollout.environment_deadline_s "
            f"{recipe.rollout.environment_deadline_s:g}: episodes of a worker that hangs fail by that first, and are not "
            "rolled again. Set hang_s below it."
        )
    if train and cluster.rewards:
        placeable(recipe.rewards, [term for term, _ in terms])
    if train:
        sources: list[TaskSource] = []
        few = yield from _look_at_sources(recipe, section.train, "tasks.train", named, sources)
        seen += few
        weights = [source.weight for source in section.train]
        stream = TaskStream(sources, weights, seed=recipe.seed, shuffle=section.shuffle, on_bad_row=section.on_bad_row)
        make_planner(section.planner, stream, MediaStore())
        recorded = demonstrations_of(recipe, MediaStore())
        shown = few if recorded is None else a_few([recorded], on_bad_row=section.on_bad_row)
        yield from () if recorded is None else recorded.summary.lines
        refuse_without_demonstrations(recipe, shown)
        yield from start_notes(recipe, few, shown)
        yield from _long_demonstrations(recipe, shown)
        if recipe.steps:
            for task in few:
                try:
                    refuse_unreadable(terms, task)
                except TaskError as error:
                    if section.on_bad_row == "refuse":
                        raise with_way_out(error) from error
                    yield f"tasks.train: {error} Such rows are skipped (tasks.on_bad_row)."
            yield from trial_notes(terms, few)
        if recipe.steps and (problem := without_answer(terms, few)):
            weighty = [(term, weight) for term, weight in terms if weight]
            if all(task.answer is None for task in few) and without_answer(weighty, few):
                raise TaskError(f"tasks.train: {problem}")
            yield f"tasks.train: {problem}"
    held_out = yield from _look_at_sources(recipe, section.evaluate, "tasks.evaluate", named)
    seen += held_out
    if problem := without_answer(terms, held_out):
        yield f"tasks.evaluate: {problem}"


def _long_demonstrations(recipe: Recipe, tasks: Sequence[Task]) -> Iterator[str]:
    """Demonstrations that take too many tokens. The model's tokenizer is loaded only if one has as many bytes."""
    if all(len(text.encode()) < recipe.rollout.max_new_tokens for task in tasks for text in task.demonstration):
        return
    from sensorium.cli.validation import chat_of

    chat, stand_in, _ = chat_of(recipe, MediaStore())
    if not stand_in:  # else the model is reported as one that cannot be looked at
        yield from long_demonstrations(recipe, tasks, lambda text: len(chat.respond(text, "").tokens))
    chat.decoder.close()


def find_names(recipe: Recipe) -> None:
    """Import names of the user's own; shipped ones are in the table, and importing them would load torch."""
    engine = recipe.rollout.engine
    named = [("advantage", recipe.algorithm.advantage.name, "algorithm.advantage.name")]
    named += [("loss", recipe.algorithm.loss.name, "algorithm.loss.name")]
    named += [("engine", engine.name, "rollout.engine.name")]
    for kind, name, place in named:
        if name not in table(kind):
            resolve(kind, name, place)
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
    """The reward terms; and, if a judge cannot be reached, why a run started now would be refused."""

    def built(context: RewardContext) -> list[tuple[Term, float]]:
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

    section = recipe.judges.model_copy(update={"requests_per_minute": {}, "tokens_per_minute": {}})
    try:
        return built(RewardContext(MediaStore(), JudgeClient(section))), ""
    except UnknownJudge as error:
        return built(RewardContext(MediaStore())), f"a run started now would be refused: {error}"


def _look_at_sources(
    recipe: Recipe, sections: Sequence[SourceSection], place: str, named: str, opened: list[TaskSource] | None = None
) -> Generator[str, None, list[Task]]:
    """Read the first rows of each source; the sources themselves are added to ``opened``."""
    store = MediaStore()
    tasks_of_all: list[Task] = []
    for i, section in enumerate(sections):
        at = f"{place}.{i}"
        source = make_source(recipe.tasks, "train" if place == "tasks.train" else "evaluate", i, store)
        if len(source) == 0:
            raise TaskError(f"{at} ({section.source}): the source has no rows. {section.options or ''}")
        if opened is not None:
            opened.append(source)
        first = min(ROWS, len(source))
        bad: list[TaskError | MediaError] = []
        tasks: list[Task] = []
        for row in range(first):
            try:
                tasks.append(without_history(source, row, recipe.tasks.planner.name if opened is not None else ""))
            except (TaskError, MediaError) as error:
                bad.append(error)
        if bad and recipe.tasks.on_bad_row == "refuse":
            raise bad[0] if tasks else all_bad(bad)
        for task in tasks:
            if task.environment is not None:
                option, problem = wrong_options("environment", task.environment.name, task.environment.options)
                if problem:
                    raise RecipeError(f"{at}, task {task.id}, environment option '{option}': {problem}")
        tasks_of_all += tasks
        for _, ids, advice in placeholder_notes(tasks):
            yield f"{at}: {len(ids)} of {len(tasks)} tasks looked at, the first {ids[0]}: {advice}."
        for note in unread_notes(source):
            yield f"{at}: {note}"
        skipped = f"; {len(bad)} of them would be skipped, the first because: {bad[0]}" if bad else ""
        media = [item for task in tasks for message in task.messages for item in message.media]
        clips = _clips(media)
        reads = f"reads and measures all{' and decodes media' if clips else ''}"
        rest = f"; `sensorium validate {quote(named)}` {reads}" if clips or first < len(source) else ""
        sizes = {item.hash: store.size_of(item) for item in media if item.kind == "picture"}
        pictures = f"; their pictures take {sum(sizes.values()) / len(tasks) / 1024:.1f} KiB a task" if sizes else ""
        yield f"{at}: {section.source}, {len(source):,} rows; the first {first} were read{skipped}{pictures}{clips}{rest}"
    return tasks_of_all


def _clips(media: Sequence[Media]) -> str:
    kinds = Counter(item.kind for item in media)
    counts = [f"{kinds[kind]} {kind}{'s' * (kinds[kind] > 1)}" for kind in ("video", "sound") if kinds[kind]]
    return f"; {' and '.join(counts)} found and not decoded" if counts else ""
