"""Whose a run directory is: taken by a fresh run, gone on with by its own recipe, or started over.

A run is where its directory is, so ``run_dir`` is not part of what must be the same. Neither is what cannot change what has
been computed: how long the run goes on, how often it is measured and saved, what is logged, where it is computed, and by
which engine; another engine is told, since its log-probs may differ in their last bits.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sensorium.recipe.load import dump_recipe, load_recipe
from sensorium.recipe.names import own_modules, refuse_loaded_elsewhere
from sensorium.recipe.schema import EngineSection, OptimizerSection, Recipe
from sensorium.recipe.traits import estimator_traits
from sensorium.runs.checkpoint_layout import CheckpointFolder, why_taken
from sensorium.runs.durable import read_rows, write_whole
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import CheckpointError, RecipeError

MAY_CHANGE = (
    "run_dir", "steps", "epochs", "threads", "model.device", "media", "judges", "evaluation.every",
    "evaluation.max_context_tokens", "evaluation.max_new_tokens", "checkpoint.every",
    "checkpoint.keep", "logging", "health", "cluster", "rollout.engine", "rollout.schedule", "tasks.on_bad_row",
    "tasks.on_long_prompt",
)  # fmt: skip
"""Keys, or sections, that may differ when a run is gone on with."""


def begin(recipe: Recipe, directory: RunDirectory) -> None:
    """Take a fresh run directory; one that holds a run is refused, unless that run never finished a step."""
    if problem := why_taken(directory):
        raise RecipeError(problem)
    directory.clear()
    directory.create()
    write_recipe(recipe, directory)


def write_recipe(recipe: Recipe, directory: RunDirectory) -> None:
    """Write the recipe into its run; where the run lies is not written down, so that it may be moved.

    Where the user's own modules lie stands in a file of its own: it may change, and is no part of what the run computes.
    """
    write_whole(directory.recipe, dump_recipe(recipe.model_copy(update={"run_dir": None})))
    if modules := own_modules(recipe.model_dump(mode="json")):
        write_whole(directory.modules, json.dumps(modules, indent=1) + "\n")
    else:
        directory.modules.unlink(missing_ok=True)


def change_recipe(recipe: Recipe, directory: RunDirectory, step: int) -> None:
    """Write the recipe of a run that goes on after ``step``; another one that it had until then is kept beside it."""
    before = directory.recipe.read_bytes()
    write_recipe(recipe, directory)
    if directory.recipe.read_bytes() != before:
        write_whole(directory.recipe_until(step), before.decode())


def begin_again(recipe: Recipe, directory: RunDirectory) -> None:
    """Forget what a run without a usable checkpoint has written, and take its directory as a fresh run.

    Judgements that were paid for stay, if the recipe is the same.
    """
    if directory.exists():
        checkpoints = CheckpointFolder(directory.checkpoints)
        checkpoints.set_damaged_aside()
        complete = checkpoints.complete()
        if complete:
            raise CheckpointError(
                f"'{directory.path}' has a complete checkpoint of step {complete[-1]}, which starting over would throw "
                "away. Go on from it (--resume), choose another directory (name=… or run_dir=…), or remove this one."
            )
        same = not list(_forbidden(recipe, directory))
        directory.forget(ledger=not same)
    directory.create()
    write_recipe(recipe, directory)


def go_on(recipe: Recipe, directory: RunDirectory) -> list[str]:
    """Check that a run may go on with a recipe; returns what is worth saying about keys that differ."""
    if not directory.exists():
        raise CheckpointError(f"nothing to resume: '{directory.path}' holds no run. Start it without --resume.")
    changed = list(_forbidden(recipe, directory))
    if changed:
        more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise CheckpointError(
            f"'{directory.path}' was run with another recipe: {'; '.join(changed[:3])}{more}. Going on would not be the "
            f"same run. Resume it by its directory ('sensorium train {directory.path} --resume'), or start a new run. Only "
            f"these may change: {', '.join(key for key in MAY_CHANGE if key != 'run_dir')}."
        )
    refuse_loaded_elsewhere(directory.path, recipe.model_dump(mode="json"))
    for _ in read_rows(directory.metrics):  # a damaged row is said now, not when the report is written
        pass
    directory.summaries()
    then = load_recipe(directory.recipe)
    return [*_schedule_notes(recipe, then), *_engine_notes(recipe, then), *_cluster_notes(recipe, then)]


def refuse_fewer_steps(recipe: Recipe, directory: RunDirectory, done: int) -> None:
    """A run cannot end before where it is."""
    warm = recipe.warm_start.steps
    if done > warm + recipe.steps:
        raise CheckpointError(
            f"'{directory.path}' has made {done - warm} steps of RL, so it cannot end at steps={recipe.steps}. Give more."
        )


def no_checkpoint(directory: RunDirectory) -> CheckpointError:
    """There is nothing to go on from."""
    return CheckpointError(
        f"'{directory.path}' has no complete checkpoint, so there is nothing to go on from. Start over in it with "
        "--restart, which forgets the rows and episodes it has written (checkpoint.every says how often a run is saved)."
    )


def _forbidden(recipe: Recipe, directory: RunDirectory) -> Iterator[str]:
    """Keys that differ from those of the run and may not."""
    then = load_recipe(directory.recipe).model_dump(mode="json")
    for key, before, now in _differences(then, recipe.model_dump(mode="json"), ""):
        if not any(key == known or key.startswith(f"{known}.") for known in MAY_CHANGE):
            yield f"{key} was {before!r} and is now {now!r}"


def _differences(then: Any, now: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*then, *now]):
            yield from _differences(then.get(key), now.get(key), f"{place}.{key}".lstrip("."))
    elif then != now:
        yield place, then, now


def _schedule_notes(recipe: Recipe, then: Recipe) -> list[str]:
    """A learning rate that falls towards the last step falls otherwise when the last step moves."""
    if recipe.steps == then.steps:
        return []
    optimizers = {"optimizer": recipe.optimizer}
    if estimator_traits(recipe.algorithm.advantage.name).critic:
        optimizers["algorithm.critic.optimizer"] = recipe.algorithm.critic.optimizer
    notes = [f"the run now ends at {recipe.steps} steps of RL instead of {then.steps}."]
    notes += [
        f"ATTENTION: {name}.schedule is {section.schedule}, which depends on the number of steps. The steps so far were "
        f"made for a total of {then.steps}, the next ones follow the schedule of {recipe.steps}: the learning rate jumps "
        f"here, and the run is not the one that steps={recipe.steps} would have made from the start."
        for name, section in optimizers.items()
        if _depends_on_total(section)
    ]
    return notes


def _engine_notes(recipe: Recipe, then: Recipe) -> Iterator[str]:
    """Another engine, or other options of it, may round otherwise."""
    now, before = recipe.rollout.engine, then.rollout.engine
    if now != before:
        yield (
            f"ATTENTION: steps so far were sampled by rollout.engine {_engine(before)}, the next ones by {_engine(now)}. "
            "What is batched together, and so the last bits of log-probs, may differ from the run that was never changed."
        )
    elif recipe.lockstep != then.lockstep:
        yield (
            f"ATTENTION: rollout.schedule was {_schedule(then)} and is now {_schedule(recipe)}: the next steps do not "
            "repeat those of the run that was never changed."
        )


def _schedule(recipe: Recipe) -> str:
    return "lockstep" if recipe.lockstep else "eager"


def _cluster_notes(recipe: Recipe, then: Recipe) -> Iterator[str]:
    """Another number of ranks sums in another order."""
    changed = [
        (before, now, key)
        for key in ("learners", "sequence_parallel")
        if (now := getattr(recipe.cluster, key)) != (before := getattr(then.cluster, key))
    ]
    for before, now, key in changed[:1]:
        who = "learner" if before == 1 else "learners"
        sharing = "" if key == "learners" else " that share tokens"
        yield (
            f"ATTENTION: steps so far were trained by {before} {who}{sharing}, the next ones by {now} (cluster.{key}). "
            "Sums are taken in another order, so the last bits may differ from the run that was never changed."
        )


def _engine(section: EngineSection) -> str:
    options = ", ".join(f"{key}: {value}" for key, value in section.options.items())
    return f"{section.name} ({options})" if options else section.name


def _depends_on_total(section: OptimizerSection) -> bool:
    return section.schedule != "constant"
