"""What a dry run looks at beside the recipe: data are opened, first rows read, terms built, names found; without torch."""

from collections.abc import Iterator, Sequence
from importlib import import_module

from sensorium.media.store import MediaStore
from sensorium.recipe.names import build, resolve, table, wrong_options
from sensorium.recipe.schema import Recipe, SourceSection
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import MediaError, RecipeError, SensoriumError, TaskError
from sensorium.vocabulary.task import Task

ROWS = 8


def look_at(recipe: Recipe, *, train: bool = True) -> Iterator[str]:
    """Open what a recipe names and say what was found, a line each; whatever a run would refuse is refused here.

    Without ``train`` only what an evaluation needs is looked at.
    """
    _find_names(recipe)
    _build_terms(recipe)
    if train:
        yield from _look_at_sources(recipe, recipe.tasks.train, "tasks.train")
    yield from _look_at_sources(recipe, recipe.tasks.evaluate, "tasks.evaluate")


def _find_names(recipe: Recipe) -> None:
    """Names of the user's own are imported; shipped ones are in the table, and importing them would load torch."""
    named = [("advantage", recipe.algorithm.advantage.name, "algorithm.advantage.name")]
    named += [("loss", recipe.algorithm.loss.name, "algorithm.loss.name")]
    named += [("engine", recipe.rollout.engine, "rollout.engine")]
    for kind, name, place in named:
        if name not in table(kind):
            resolve(kind, name, place)
    for i, name in enumerate(recipe.logging.loggers):
        resolve("logger", name, f"logging.loggers.{i}")
        if name in table("logger"):
            try:
                import_module(name)
            except ImportError as error:
                raise RecipeError(f"logging.loggers.{i}: '{name}' is not installed; run: pip install {name}") from error


def _build_terms(recipe: Recipe) -> None:
    for i, term in enumerate(recipe.rewards.terms):
        place = f"rewards.terms.{i}"
        try:
            build("reward", term.name, term.options, place)
        except SensoriumError:
            raise
        except Exception as error:
            raise RecipeError(f"{place}: '{term.name}' cannot be built: {type(error).__name__}: {error}") from error


def _look_at_sources(recipe: Recipe, sections: Sequence[SourceSection], place: str) -> Iterator[str]:
    store = MediaStore()
    for i, section in enumerate(sections):
        at = f"{place}.{i}"
        source = build("source", section.source, section.options, at, store=store)
        if len(source) == 0:
            raise TaskError(f"{at} ({section.source}): the source has no rows. {section.options or ''}")
        first = min(ROWS, len(source))
        bad: list[str] = []
        tasks: list[Task] = []
        for row in range(first):
            try:
                tasks.append(source[row])
            except (TaskError, MediaError) as error:
                if recipe.tasks.on_bad_row == "refuse":
                    raise
                bad.append(str(error))
        _find_environments(tasks, at)
        skipped = f"; {len(bad)} of them would be skipped, the first because: {bad[0]}" if bad else ""
        yield f"{at}: {section.source}, {len(source):,} rows; the first {first} were read{skipped}{_pictures(store, tasks)}"


def _pictures(store: MediaStore, tasks: Sequence[Task]) -> str:
    """What the pictures of a task take on disk, each kept once; videos and sounds are linked where they can be."""
    blocks = [block for task in tasks for message in task.messages for block in message.content]
    sizes = {block.hash: store.size_of(block) for block in blocks if isinstance(block, Media) and block.kind == "picture"}
    return f"; their pictures take {sum(sizes.values()) / len(tasks) / 1024:.1f} KiB a task" if sizes else ""


def _find_environments(tasks: Sequence[Task], place: str) -> None:
    for task in tasks:
        if task.environment is not None:
            option, problem = wrong_options("environment", task.environment.name, task.environment.options)
            if problem:
                raise RecipeError(f"{place}, task {task.id}, environment option '{option}': {problem}")
