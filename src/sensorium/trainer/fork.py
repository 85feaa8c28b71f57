"""A fork: a new run that goes on from a checkpoint of another, with anything changed but the model's shape.

    runs/a  step 1 … 60 … 100            optimizer.lr 1e-4
                     └─ runs/b  61 … 100     optimizer.lr 3e-5

Its steps count on, its directory begins with the ancestor's metrics and evaluations up to the fork, and ``ancestor.json``
says where it came from. The checkpoint is linked, not copied, but for what the change leaves out of it: an optimizer's or a
critic's state that no longer fits, the KL's coefficient, the order of the tasks.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from sensorium.learner.saved_state import load_state, save_state
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.runs.checkpoint_layout import (
    ADAPTER_FOLDER,
    LEARNER_STATE,
    MARKER,
    TRAINER_FOLDER,
    TRAINER_STATE,
    checkpoint_of_run,
    contents_of,
    refuse_damaged,
)
from sensorium.runs.durable import drafted, flush, read_rows, write_rows, write_whole, writing
from sensorium.runs.ledger import Ledger
from sensorium.runs.run_directory import RunDirectory, step_of
from sensorium.trainer.run_claim import SHAPE, Fork, begin, change_notes, is_under
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.plain import differences

NO_CHANGE = ("name", "run_dir")  # every fork has its own
OPTIMIZER = ("model.freeze", "model.dtype", "optimizer.moments")
WARM_OPTIMIZER = ("model.freeze", "model.dtype", "warm_start.optimizer.moments")
CRITIC = (
    "algorithm.advantage.name", "algorithm.critic.trunk", "algorithm.critic.path", "algorithm.critic.freeze",
    "algorithm.critic.optimizer.moments", "model.dtype",
)  # fmt: skip
TASKS = ("tasks.train", "tasks.planner")


def begin_fork(recipe: Recipe, directory: RunDirectory, fork: Fork) -> list[str]:
    """Make the directory of a fork, from which a run is resumed; returns notes about what it keeps and what it does not."""
    source = RunDirectory(fork.ancestor)
    checkpoint = checkpoint_of_run(fork.ancestor, step=fork.step)
    refuse_damaged(checkpoint)
    then, changed = _changes(recipe, fork)
    begin(recipe, directory)
    dropped, notes = _dropped(then, [key for key, *_ in changed], fork)
    for name in ("source", "modules", *(() if _any(changed, ("tasks",)) else ("tasks", "media_files"))):
        if (file := getattr(source, name)).exists() and not getattr(directory, name).exists():
            shutil.copy(file, getattr(directory, name))
    for file in (source.metrics, source.health):
        if rows := [row for row in read_rows(file) if row.get("step", 0) <= fork.step]:
            write_rows(directory.path / file.name, rows)
    for folder in (source.eval, source.outcomes):
        for file in sorted(folder.glob("step_*.json*")):
            if step_of(file) <= fork.step and (folder == source.outcomes or file.suffix == ".json"):
                _link(file, directory.path / file.relative_to(source.path))
    Ledger(directory.ledger).close()
    notes += list(_keep_reference(then, recipe, source, directory, checkpoint, fork.step))
    record = {
        "run": str(source.path.resolve()),
        "step": fork.step,
        "changed": {key: [old, new] for key, old, new in changed},
        "optimizer": notes[0],
    }
    write_whole(directory.ancestor, json.dumps(record, indent=1) + "\n")
    _copy_checkpoint(checkpoint, directory.checkpoint_of(fork.step), dropped)  # the last: from here on it can be resumed
    keys = ", ".join(key for key, *_ in changed[:6]) + (f" and {len(changed) - 6} more" if len(changed) > 6 else "")
    head = f"forked from '{source.path}' after step {fork.step}; {f'changed: {keys}' if keys else 'nothing is changed'}"
    return [head, *notes, *change_notes(recipe, then)]


def look_at_fork(recipe: Recipe, fork: Fork) -> list[str]:
    """What a fork would keep and what not; what it would be refused for is refused here."""
    then, changed = _changes(recipe, fork)
    return [*_dropped(then, [key for key, *_ in changed], fork)[1], *change_notes(recipe, then)]


def _changes(recipe: Recipe, fork: Fork) -> tuple[Recipe, list[tuple[str, Any, Any]]]:
    """The ancestor's recipe, and the keys that the fork changes with their values then and now."""
    then = load_recipe(fork.ancestor)
    before, now = then.model_dump(mode="json"), recipe.model_dump(mode="json")
    changed = [change for change in differences(before, now) if not is_under(change[0], NO_CHANGE)]
    _refuse(then, recipe, changed, fork)
    return then, changed


def _refuse(then: Recipe, recipe: Recipe, changed: Sequence[tuple[str, Any, Any]], fork: Fork) -> None:
    """Refuse what a checkpoint cannot go on as."""
    run = fork.ancestor
    for key, old, new in changed:
        if is_under(key, SHAPE):
            raise RecipeError(
                f"{key} was {old!r} and is now {new!r}, and a fork keeps the shape and the family of its ancestor's model. "
                f"For another model begin a new run from the weights: sensorium train {run} name=… "
                f"model.path={checkpoint_of_run(run, step=fork.step)} {key}=…"
            )
    warm, was = recipe.warm_start.steps, then.warm_start.steps
    if warm != was and fork.step >= min(warm, was):
        raise RecipeError(
            f"warm_start.steps was {was} and is now {warm}, and the checkpoint of step {fork.step} is past that: leave it "
            "unchanged, or fork from a step of the warm start."
        )
    if fork.step >= recipe.total_steps:
        raise RecipeError(
            f"'{run}@{fork.step}' has made all {recipe.steps} steps of RL, so the fork has none to make. Give more: steps=…"
        )


def _dropped(then: Recipe, keys: Sequence[str], fork: Fork) -> tuple[set[str], list[str]]:
    """The parts of the saved state that the fork leaves out, and why; the first note is about the optimizer."""
    dropped: set[str] = set()
    own = WARM_OPTIMIZER if fork.step <= then.warm_start.steps else OPTIMIZER
    misfits = [key for key in keys if is_under(key, own)]
    if misfits or fork.fresh_optimizer:
        dropped.add("optimizer")
        why = f"{', '.join(misfits)} changed, and its moments are of the former" if misfits else "as asked for"
        notes = [f"the optimizer starts afresh: {why}"]
    else:
        notes = [
            "the optimizer's moments are kept; new rates and betas hold from the first step (--fresh-optimizer drops them)"
        ]
    if misfits := [key for key in keys if is_under(key, CRITIC)]:
        dropped.add("critic")
        notes += [f"a critic starts afresh: {', '.join(misfits)} changed"] if fork.step > then.warm_start.steps else []
    if any(is_under(key, ("algorithm.kl",)) for key in keys):
        dropped.add("kl")
    if misfits := [key for key in keys if is_under(key, TASKS)]:
        dropped.add("tasks")
        notes.append(f"tasks are drawn from the beginning: {', '.join(misfits[:3])} changed")
    return dropped, notes


def _keep_reference(
    then: Recipe, recipe: Recipe, source: RunDirectory, directory: RunDirectory, checkpoint: Path, step: int
) -> Iterator[str]:
    """Give the fork the KL's reference: its ancestor's, else, after a warm start, the policy that it begins with."""
    if not recipe.algorithm.kl.coef or step <= then.warm_start.steps or not then.warm_start.steps:
        return  # there is none, it comes when RL begins, or it is model.path
    kept = source.reference
    if not kept.is_dir():
        kept = checkpoint / ADAPTER_FOLDER if recipe.model.lora.rank else checkpoint
        yield (
            f"the KL is to the policy of step {step}: its ancestor had no KL, and kept no policy from the warm start's end"
        )
    with drafted(directory.reference) as draft:
        for file in sorted(path for path in kept.rglob("*") if path.is_file()):
            inside = file.relative_to(kept)
            if inside.parts[0] not in (TRAINER_FOLDER, MARKER) and (kept == source.reference or len(inside.parts) == 1):
                _link(file, draft / inside)


def _copy_checkpoint(checkpoint: Path, target: Path, dropped: Collection[str]) -> None:
    """The checkpoint under the fork, linked where the file systems allow it, without the parts that are dropped."""
    learner = f"{TRAINER_FOLDER}/{LEARNER_STATE}"
    with drafted(target) as draft:
        for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
            name = file.relative_to(checkpoint).as_posix()
            if name not in (MARKER, learner, TRAINER_STATE):
                _link(file, draft / name)
        state = load_state(checkpoint / TRAINER_FOLDER / LEARNER_STATE)
        state["learner"] |= {part: None for part in ("optimizer", "critic", "kl") if part in dropped}
        (draft / TRAINER_FOLDER).mkdir(exist_ok=True)
        save_state(state, draft / learner)
        trainer = load_state(checkpoint / TRAINER_STATE)
        best = trainer["best"]
        trainer |= {"sound_at": trainer["step"], "best": best if best and best["step"] == trainer["step"] else None}
        trainer |= {"tasks": None, "open": ()} if "tasks" in dropped else {}
        save_state(trainer, draft / TRAINER_STATE)
        files = {name: {"size": one.size, "digest": one.digest} for name, one in contents_of(draft).items()}
        (draft / MARKER).write_text(json.dumps({"step": trainer["step"], "files": files}, indent=1))
        for name in (learner, TRAINER_STATE, MARKER):
            flush(draft / name)


def _link(file: Path, target: Path) -> None:
    """A file that is never written again, under a second name; on another disk a copy."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, target)
        except OSError:
            shutil.copy(file, target)


def _any(changed: Sequence[tuple[str, Any, Any]], sections: Sequence[str]) -> bool:
    return any(is_under(key, sections) for key, *_ in changed)
