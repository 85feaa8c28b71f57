"""Claim a run directory: for a fresh run, to resume it with its own recipe, or to start it over.

A resumed run may change keys that do not change what was computed: where the run is, how long it is, how often it is
evaluated and saved, what is logged, on which device and by which engine (with a note: log-probs may differ in last bits).
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.load import dump_recipe, load_recipe
from sensorium.recipe.registry import own_modules, refuse_loaded_elsewhere
from sensorium.recipe.schema import EngineSection, Recipe
from sensorium.recipe.yaml import value_text
from sensorium.runs.checkpoint_layout import CheckpointFolder, checkpoint_of_run, why_taken
from sensorium.runs.durable import read_rows, write_whole
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import CheckpointError, RecipeError
from sensorium.vocabulary.plain import counted, differences

MAY_CHANGE = (
    "run_dir", "steps", "epochs", "threads", "model.device", "media", "judges", "evaluation.every",
    "evaluation.max_context_tokens", "evaluation.max_new_tokens", "checkpoint.every",
    "checkpoint.keep", "logging", "health", "cluster", "rollout.engine", "rollout.schedule", "tasks.on_bad_row",
    "tasks.on_long_prompt",
)  # fmt: skip


# What a checkpoint's weights and adapters are made for.
SHAPE = (
    "model.path", "model.revision", "model.family", "model.dequantize", "model.lora.rank", "model.lora.alpha",
    "model.lora.groups", "model.lora.modules",
)  # fmt: skip
LONGEST_VALUE = 60
FORKED = re.compile(r"(.+)@(\d+)")


@dataclass(frozen=True)
class Fork:
    """A run that is to go on from a checkpoint of another: its ancestor's directory, the step of the checkpoint.

    ``fresh_optimizer``: the ancestor's moments stay behind in any case.
    """

    ancestor: Path
    step: int
    fresh_optimizer: bool = False


def fork_point(given: str) -> tuple[Path, int] | None:
    """The run and the step of ``RUN@STEP``, which must be there; None of anything else."""
    found = FORKED.fullmatch(given)
    if found is None or Path(given).exists():
        return None
    run, step = Path(found[1]), int(found[2])
    if not RunDirectory(run).exists():
        raise CheckpointError(f"there is no checkpoint '{given}' to fork: {RunDirectory(run).absence()}")
    checkpoint_of_run(run, step=step)
    return run, step


def begin(recipe: Recipe, directory: RunDirectory) -> None:
    """Take a fresh run directory; one that holds a run is refused, unless that run never finished a step."""
    if problem := why_taken(directory):
        raise RecipeError(problem)
    directory.clear()
    directory.create()
    write_recipe(recipe, directory)


def write_recipe(recipe: Recipe, directory: RunDirectory) -> None:
    """Write the recipe into its run, without ``run_dir``, so that the run may be moved.

    The places of the user's own modules are in a file of their own: they may change.
    """
    write_whole(directory.recipe, dump_recipe(recipe.model_copy(update={"run_dir": None})))
    if modules := own_modules(recipe.model_dump(mode="json")):
        write_whole(directory.modules, json.dumps(modules, indent=1) + "\n")
    else:
        directory.modules.unlink(missing_ok=True)


def change_recipe(recipe: Recipe, directory: RunDirectory, step: int) -> None:
    """Write the recipe of a run that is resumed after ``step``; one that differs from it is kept beside it."""
    before = directory.recipe.read_bytes()
    write_recipe(recipe, directory)
    if directory.recipe.read_bytes() != before:
        write_whole(directory.recipe_until(step), before.decode())


def begin_again(recipe: Recipe, directory: RunDirectory) -> None:
    """Delete what a run without a usable checkpoint has written, and claim its directory for a fresh run.

    Judgements stay, if the recipe is the same.
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
    """Check that a run may be resumed with a recipe; returns notes about keys that differ."""
    if not directory.exists():
        raise CheckpointError(f"nothing to resume: '{directory.path}' holds no run. Start it without --resume.")
    changed = list(_forbidden(recipe, directory))
    if changed:
        keys = [key for key, _, _ in changed[:3]]
        values = [f"{key} was {before!r} and is now {now!r}" for key, before, now in changed[:3]]
        more, others = (f", and {len(changed) - 3} more", " and the others") if len(changed) > 3 else ("", "")
        raise CheckpointError(
            f"'{directory.path}' was run with another recipe: {'; '.join(values)}{more}. Going on would not be the same "
            f"run. To resume it, leave {', '.join(keys)}{others} unchanged: 'sensorium train {directory.path} --resume' "
            f"takes the run's own recipe. {_fork_advice(directory, changed)}To train with the change from the start, "
            f"begin a new run: 'sensorium train {directory.path} name=… {keys[0]}=…', without --resume. On resume only "
            "these keys may change: "
            f"{', '.join(key for key in MAY_CHANGE if key != 'run_dir')}."
        )
    refuse_loaded_elsewhere(directory.path, recipe.model_dump(mode="json"))
    for _ in read_rows(directory.metrics):  # a damaged row is an error now, not when the report is written
        pass
    directory.summaries()
    then = load_recipe(directory.recipe)
    return list(change_notes(recipe, then))


def _fork_advice(directory: RunDirectory, changed: Sequence[tuple[str, Any, Any]]) -> str:
    """The command by which a run goes on from its last checkpoint with these changes, as a run of its own."""
    if any(is_under(key, SHAPE) for key, *_ in changed):
        return ""
    steps = CheckpointFolder(directory.checkpoints).complete()
    texts = {key: value_text(now) for key, _, now in changed}
    pairs = [shlex.quote(f"{key}={text}") if len(text) <= LONGEST_VALUE else f"{key}=…" for key, text in texts.items()]
    command = f"sensorium train {directory.path}@{steps[-1] if steps else 'STEP'} --as NAME {' '.join(pairs)}"
    return f"To go on with the change from where it is, fork the run: '{command}'. "


def is_under(key: str, sections: Sequence[str]) -> bool:
    """Whether a dotted key is one of these, or inside one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def refuse_fewer_steps(recipe: Recipe, directory: RunDirectory, done: int) -> None:
    warm = recipe.warm_start.steps
    if done > warm + recipe.steps:
        raise CheckpointError(
            f"'{directory.path}' has made {done - warm} steps of RL, so it cannot end at steps={recipe.steps}. Give more."
        )


def no_checkpoint(directory: RunDirectory) -> CheckpointError:
    """The error for a run without a complete checkpoint."""
    return CheckpointError(
        f"'{directory.path}' has no complete checkpoint, so there is nothing to go on from. Start over in it with "
        "--restart, which forgets the rows and episodes it has written (checkpoint.every says how often a run is saved)."
    )


def _forbidden(recipe: Recipe, directory: RunDirectory) -> Iterator[tuple[str, Any, Any]]:
    """Keys that differ from those of the run and may not, with their values then and now."""
    then = load_recipe(directory.recipe).model_dump(mode="json")
    for key, before, now in differences(then, recipe.model_dump(mode="json")):
        if not is_under(key, MAY_CHANGE):
            yield key, before, now


def change_notes(recipe: Recipe, then: Recipe) -> Iterator[str]:
    """Notes about changes that keep the resumed run from repeating the one that was never changed."""
    if recipe.steps != then.steps:
        yield f"the run now ends at {counted(recipe.steps, 'step')} of RL instead of {then.steps}."
        optimizers = {"optimizer": recipe.optimizer}
        if estimator_traits(recipe.algorithm.advantage.name).critic:
            optimizers["algorithm.critic.optimizer"] = recipe.algorithm.critic.optimizer
        for name, section in optimizers.items():
            if section.schedule != "constant":
                yield (
                    f"ATTENTION: {name}.schedule is {section.schedule}, which depends on the number of steps. The steps so "
                    f"far were made for a total of {then.steps}, the next ones follow the schedule of {recipe.steps}: the "
                    f"learning rate jumps here, and the run is not the one that steps={recipe.steps} would have made from "
                    "the start."
                )
    now, before = recipe.rollout.engine, then.rollout.engine
    if now != before:
        yield (
            f"ATTENTION: steps so far were sampled by rollout.engine {_engine(before)}, the next ones by {_engine(now)}. "
            "What is batched together, and so the last bits of log-probs, may differ from the run that was never changed."
        )
    elif recipe.lockstep != then.lockstep:
        names = {True: "lockstep", False: "eager"}
        yield (
            f"ATTENTION: rollout.schedule was {names[then.lockstep]} and is now {names[recipe.lockstep]}: the next steps "
            "do not repeat those of the run that was never changed."
        )
    for key in ("learners", "sequence_parallel"):
        ranks, earlier = getattr(recipe.cluster, key), getattr(then.cluster, key)
        if ranks != earlier:
            who = "learner" if earlier == 1 else "learners"
            sharing = "" if key == "learners" else " that share tokens"
            yield (
                f"ATTENTION: steps so far were trained by {earlier} {who}{sharing}, the next ones by {ranks} "
                f"(cluster.{key}). Sums are taken in another order, so the last bits may differ from the run that was "
                "never changed."
            )
            break


def _engine(section: EngineSection) -> str:
    options = ", ".join(f"{key}: {value}" for key, value in section.options.items())
    return f"{section.name} ({options})" if options else section.name
