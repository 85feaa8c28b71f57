"""Checks at the start of a run: refuse what cannot work, and note likely mistakes."""

from collections.abc import Callable, Iterator, Sequence

from sensorium.data.augmentation import augmentation_notes
from sensorium.recipe.registry import resolve
from sensorium.recipe.schema import Recipe
from sensorium.trainer.health.rules import LARGEST_RATE
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.task import Task

SMALLEST_RATE = 1e-10


def refuse_without_demonstrations(recipe: Recipe, tasks: Sequence[Task]) -> None:
    """Refuse a warm start if no task has a demonstration; ``tasks`` are a few of each source."""
    steps = recipe.warm_start.steps
    if steps and tasks and not any(has_demonstration(task) for task in tasks):
        raise TaskError(
            f"warm_start.steps is {steps}, but none of {len(tasks)} tasks looked at has a demonstration to learn from (the "
            f"first is {tasks[0].id}). Give the rows a 'demonstration' (the response to learn, such as "
            "'<answer>7</answer>'; with columns: columns.demonstration), their environment a method demonstrate (the "
            "adapters of Gymnasium and OpenEnv have none), or set warm_start.steps: 0."
        )


def start_notes(recipe: Recipe, tasks: Sequence[Task], shown: Sequence[Task] | None = None) -> Iterator[str]:
    """Notes about likely mistakes. The warm start learns from ``shown``, if recorded, else from the tasks.

    An augmentation of which nothing can come is refused.
    """
    yield from augmentation_notes(recipe.tasks.augment, tasks) if tasks else ()
    shown = tasks if shown is None else shown
    lacking = [task for task in shown if not has_demonstration(task)] if recipe.warm_start.steps else []
    if lacking:
        yield (
            f"{len(lacking)} of {len(shown)} tasks looked at have no demonstration; the warm start leaves such tasks out. "
            f"The first is {lacking[0].id}."
        )
    turns = max((len(task.demonstration) for task in shown if task.environment is not None), default=0)
    if turns > recipe.rollout.max_turns:
        yield (
            f"demonstrations of the {len(shown)} tasks looked at take up to {turns} turns, and rollout.max_turns is "
            f"{recipe.rollout.max_turns}: no episode can end as they do. Raise it to {turns} at least."
        )
    if recipe.cluster.environments and tasks and all(task.environment is None for task in tasks):
        yield (
            f"cluster.environments is {recipe.cluster.environments}, and the {len(tasks)} tasks looked at are questions, "
            "which the driver plays in place: unless later rows name an environment, the workers have nothing to do."
        )
    sections = {
        "optimizer": (recipe.optimizer, recipe.steps),
        "warm_start.optimizer": (recipe.warm_start.optimizer, recipe.warm_start.steps),
    }
    for name, (section, steps) in sections.items():
        if steps and section.lr > LARGEST_RATE:
            yield (
                f"{name}.lr {section.lr:g} is larger than most weights are, and AdamW moves every weight by about as much "
                "in each update: the model will be ruined. 1e-6 to 1e-5 is usual for whole models."
            )
        if steps and section.lr < SMALLEST_RATE:
            yield (
                f"{name}.lr {section.lr:g} is so small that no weight will change visibly: updates are made, nothing is "
                "learned. 1e-6 to 1e-5 is usual for whole models."
            )
        if steps and section.warmup_steps >= steps:
            yield (
                f"{name}.warmup_steps is {section.warmup_steps} and there are {steps} steps, so the learning rate never "
                f"reaches {section.lr:g}; the last step has {section.lr * steps / (section.warmup_steps + 1):.1g} or so."
            )


def long_demonstrations(recipe: Recipe, tasks: Sequence[Task], tokens: Callable[[str], int]) -> Iterator[str]:
    """Notes about demonstrations that are too long to be sampled; ``tokens`` counts a response with its stop token."""
    limit = recipe.rollout.max_new_tokens
    lengths = [tokens(text) for task in tasks for text in task.demonstration]
    if long := [length for length in lengths if length > limit]:
        yield (
            f"{len(long)} of {len(lengths)} demonstrations looked at take up to {max(long)} tokens with the stop token, "
            f"and rollout.max_new_tokens is {limit}: responses like them will be cut. Raise it to {max(long)} at least."
        )


def has_demonstration(task: Task) -> bool:
    """True if a task, or its environment, has a demonstration."""
    if task.demonstration or task.environment is None:
        return bool(task.demonstration)
    kind = resolve("environment", task.environment.name)
    able = hasattr(kind, "demonstrate") or not isinstance(kind, type)  # what a function builds is not known yet
    return able and bool(getattr(kind, "demonstrates", True))
