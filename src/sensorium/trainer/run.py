"""Whose a run directory is: taken by a fresh run, gone on with by its own recipe, or started over.

A run is where its directory is, so ``run_dir`` is not part of what must be the same. Neither is what cannot change what has
been computed: how long the run goes on, how often it is measured and saved, what is logged, where it is computed, and by
which engine; another engine is told, since its log-probs may differ in their last bits.
"""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sensorium.assembly.determinism import make_deterministic
from sensorium.assembly.local_learner import LearnerMaker, local_learner
from sensorium.assembly.memory import memory_exhausted, memory_note
from sensorium.assembly.models import load_trained, recorded_sampling, write_source
from sensorium.assembly.session import (
    make_stream,
    open_session,
    open_store,
    refuse_strange_tasks,
    refuse_unanswered,
)
from sensorium.cluster.event_loop import run_async
from sensorium.cluster.ray_host import found_cluster
from sensorium.data.mixture import a_few, each_once, make_sources, resolve_epochs
from sensorium.data.planner import make_planner
from sensorium.evaluation.evaluate import Variant, measure
from sensorium.recipe.algorithm_checks import cautions
from sensorium.recipe.checks import cluster_notes, context_note
from sensorium.recipe.names import build
from sensorium.recipe.plan import for_tasks, make_plan, placed_processes
from sensorium.recipe.schema import Recipe
from sensorium.report.page import write_report
from sensorium.report.tables import disk_note
from sensorium.report.watcher import Watcher, Watchers
from sensorium.runs.checkpoint_layout import listed_files, refuse_foreign
from sensorium.runs.durable import cannot_write, full_disk_error, read_rows, refuse_full
from sensorium.runs.ledger import Ledger
from sensorium.runs.run_directory import NAME as LOCK
from sensorium.runs.run_directory import RunDirectory, lock_run, refuse_moved
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.health.start_checks import long_demonstrations, refuse_without_demonstrations, start_notes
from sensorium.trainer.loop import Trainer
from sensorium.trainer.run_claim import begin, begin_again, change_recipe, go_on, no_checkpoint, refuse_fewer_steps
from sensorium.trainer.task_loader import changed_tasks, refuse_other_frames, remember_tasks
from sensorium.vocabulary.errors import CheckpointError, RecordError, SensoriumError, WriteFailed


def train(recipe: Recipe, *, resume: bool = False, restart: bool = False, watchers: Iterable[Watcher] = ()) -> Path:
    """Run a recipe to its end and write its report; returns the run directory.

    ``resume``: from the last good checkpoint. ``restart``: from the beginning, in a directory whose run has none. One
    process at a time may do so.
    """
    recipe = resolve_epochs(recipe)
    directory = RunDirectory(recipe.directory.absolute())  # a reward or an environment may change the working directory
    made = _first_missing(directory.path)
    with lock_run(directory.path), _errors_said(recipe, directory), _beside_others(directory) as notes:
        with _nothing_left(directory.path, made):
            if resume:
                notes += go_on(recipe, directory)
            else:
                (begin_again if restart else begin)(recipe, directory)
            refuse_full(directory.path)  # a run that goes on writes only when its engines are up
            trainer = open_trainer(recipe, directory, resume=resume, watchers=watchers, notes=notes)
        with _reported(directory, trainer):
            if resume:
                change_recipe(recipe, directory, trainer.step)
            elif restart:
                trainer.ledger.rewind(0)
            run_async(trainer.run())
    return recipe.directory


def open_trainer(
    recipe: Recipe,
    directory: RunDirectory,
    *,
    resume: bool = False,
    watchers: Iterable[Watcher] = (),
    notes: Iterable[str] = (),
    make_learner: LearnerMaker | None = None,
) -> Trainer:
    """Everything built and, on resume, put back as it was; nothing spent yet. ``notes`` are told to the watchers first.

    The learner is the one of this process, unless another is made.
    """
    make_deterministic(recipe)
    checkpoints = Checkpoints(directory.checkpoints, recipe.checkpoint.keep)
    last, found = _last_good(recipe, directory, checkpoints) if resume else (None, [])
    ledger = Ledger(directory.ledger)
    saved = None if last is None else checkpoints.path(last)
    store = open_store(recipe, directory.media)
    watchers = tuple(watchers)
    if parts := placed_processes(
        recipe.model_dump(include={"cluster", "rollout"})
    ):  # nothing else is told until they are up
        Watchers(watchers).noted(f"starting {', '.join(parts)}; that may take minutes")
        if recipe.cluster.address == "auto" and (joined := found_cluster()):
            Watchers(watchers).noted(joined)
        for note in cluster_notes(recipe, gpus=torch.cuda.is_available()):
            Watchers(watchers).noted(note)
    with _closed_if_it_fails() as closings:
        session = open_session(recipe, load_trained(recipe, store, saved), ledger, directory.path)
        closings.append(lambda _: session.close())
        if recipe.cluster.shared and session.processes:
            Watchers(watchers).noted(f"{len(session.processes)} of them are up; the learner's ranks come last")
        stream = make_stream(recipe, session.store)
        planner = make_planner(recipe.tasks.planner, stream, session.store)
        sources = make_sources(recipe.tasks.evaluate, session.store, "tasks.evaluate")
        held_out, skipped = each_once(sources, limit=recipe.evaluation.limit, on_bad_row=recipe.tasks.on_bad_row)
        few = a_few(stream.sources)
        refuse_without_demonstrations(recipe, few)
        refuse_strange_tasks(session, [*held_out, *few])
        unanswered = refuse_unanswered(session, few if recipe.steps else (), held_out)  # a warm start alone pays nothing
        sampling = session.policy.chat.media_format.frame_rule.sampling
        if resume:
            refuse_other_frames(directory, recorded_sampling(directory), sampling, [*few, *held_out])
        if not resume or not directory.source.exists():
            write_source(recipe, directory, sampling)
        if resume:
            found += changed_tasks(directory, [*few, *held_out], [*stream.sources, *sources])
        else:
            remember_tasks(directory, [*few, *held_out], [*stream.sources, *sources])
        plan = for_tasks(make_plan(recipe, session.policy.model.config.to_dict()), [*few, *held_out])
        found += filter(None, [disk_note(recipe, plan), memory_note(recipe, plan)])
        given = {"run_dir": directory.path, "logging": recipe.logging}
        loggers = [build("logger", name, {}, "logging.loggers", **given) for name in recipe.logging.loggers]
        watcher = Watchers([*loggers, *watchers])
        for note in (*notes, *found):
            (watcher.attention if note.startswith("ATTENTION") else watcher.noted)(note)
        if skipped:
            watcher.noted(f"{len(skipped)} held-out rows were skipped; the first because: {skipped[0].reason}")
        if not resume or notes:  # a run that goes on as it was has been told them
            long = long_demonstrations(recipe, few, lambda text: len(session.rollout.chat.respond(text, "").tokens))
            beyond = context_note(recipe, plan.model) if plan.model is not None else ""
            for note in (*cautions(recipe), *filter(None, [beyond]), *start_notes(recipe, few), *long, *unanswered):
                watcher.noted(note)
        learner = (make_learner or _learner_maker(recipe))(recipe, session, directory, saved)
        closings.append(lambda _: learner.close())
        trainer = Trainer(recipe, session, learner, planner, held_out, directory, ledger, watcher)
        closings[:] = [trainer.close]
        if last is not None:
            try:
                trainer.restore(checkpoints.load(last))
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise CheckpointError(
                    f"the trainer's state in '{checkpoints.path(last)}' is whole, but not one that this version can go on "
                    f"from ({type(error).__name__}: {error}). Go on with the version that wrote it, or start a new run "
                    "from the weights beside it (model.path)."
                ) from error
    return trainer


@contextmanager
def _closed_if_it_fails() -> Iterator[list[Callable[[BaseException], None]]]:
    """A run that cannot start ends the processes that it has started: the list closes them, the last first."""
    closings: list[Callable[[BaseException], None]] = []
    try:
        yield closings
    except BaseException as error:
        _end(*(partial(close, error) for close in reversed(closings)))
        raise


def _first_missing(path: Path) -> Path | None:
    """The first folder on the way to ``path`` that is not there yet; None if all are."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    return missing[-1] if missing else None


@contextmanager
def _nothing_left(path: Path, made: Path | None) -> Iterator[None]:
    """A run that cannot start takes the folders away again that it made; ``made`` is the first of them.

    Another process may have made them meanwhile, for a run that is over: then more than the lock is in there.
    """
    fresh = made is not None and [entry.name for entry in path.iterdir()] == [LOCK]
    try:
        yield
    except BaseException as error:
        if fresh and made is not None:
            shutil.rmtree(path, ignore_errors=True)
            for folder in path.parents:  # runs/, if it was made and nothing else is in it
                if not folder.is_relative_to(made) or any(folder.iterdir()):
                    break
                folder.rmdir()
            error.add_note(f"Nothing was left behind: '{path}' was not kept.")
        raise


def _learner_maker(recipe: Recipe) -> LearnerMaker:
    """The learner of this process, or ranks in others as the cluster section says."""
    if not recipe.cluster.shared:
        return local_learner
    from sensorium.assembly.sharded_learner import sharded_learner  # seconds of torch.distributed that others do not pay

    return sharded_learner


_going_on: list[Path] = []
"""The runs of this process; more than one where threads train at the same time."""


@contextmanager
def _beside_others(directory: RunDirectory) -> Iterator[list[str]]:
    """What to say to a run that starts while another one goes on in the same process: they share what is global."""
    others = [path for path in _going_on if path != directory.path]
    _going_on.append(directory.path)
    try:
        yield [_shared_with(others[0])] if others else []
    finally:
        _going_on.remove(directory.path)


def _shared_with(other: Path) -> str:
    return (
        f"ATTENTION: the run in '{other}' goes on in this process too. The global random numbers of Python, numpy and "
        "torch belong to both, and so does torch's number of threads: a reward, an environment or a model's first "
        "weights that draw from them may not repeat. For runs that repeat bit for bit start each in its own process."
    )


def _last_good(recipe: Recipe, directory: RunDirectory, checkpoints: Checkpoints) -> tuple[int, list[str]]:
    """The newest checkpoint that is as it was written, and what is worth saying about it and about damaged newer ones."""
    damaged = checkpoints.set_damaged_aside()
    notes = list(damaged)
    complete = checkpoints.complete()
    if not complete:
        raise RecordError(" ".join(notes) + " " + str(no_checkpoint(directory))) if notes else no_checkpoint(directory)
    last = complete[-1]
    refuse_fewer_steps(recipe, directory, last)
    if foreign := refuse_foreign(checkpoints.path(last)):
        notes.append(
            f"the checkpoint of step {last} holds {len(foreign)} files that the run did not write, the first "
            f"'{foreign[0]}'; they are not read."
        )
    if damaged:
        notes.append(f"ATTENTION: the run goes on from the last good checkpoint, of step {last}.")
    written = {row.get("step") for row in read_rows(directory.metrics)}
    lost = [step for step in range(1, last + 1) if step not in written]
    if lost:
        notes.append(
            f"ATTENTION: '{directory.metrics}' lacks the rows of {len(lost)} steps, the first of step {lost[0]}: they were "
            "lost or removed. The model does not depend on them; curves and report have a gap, and health rules that look "
            "back, such as whether anything was trained, know of no earlier step."
        )
    notes += _lost_files(recipe, directory, last)
    if not all(content.digest for content in listed_files(checkpoints.path(last)).values()):
        notes.append(f"the checkpoint of step {last} has no digests (an older version wrote it); only sizes were checked.")
    if last == recipe.warm_start.steps + recipe.steps:
        notes.append(
            f"the run is finished, with all its {recipe.steps} steps; to go on give it more: --resume steps=…, in Python "
            "sn.resume(run, steps=…)"
        )
    return last, notes


def _lost_files(recipe: Recipe, directory: RunDirectory, last: int) -> Iterator[str]:
    """What to say of other files of the run that were there when its last checkpoint was written."""
    if not directory.ledger.exists():
        yield (
            f"ATTENTION: '{directory.ledger}' is missing: judgements that were paid for are asked for again, and what "
            "became of earlier episodes is no longer on record."
        )
    if last > recipe.warm_start.steps and not directory.episodes_of(last).exists():
        yield (
            f"ATTENTION: '{directory.episodes_of(last)}' is missing: episodes were lost or removed. The model does not "
            "depend on them; the report cannot show them."
        )


@contextmanager
def _reported(directory: RunDirectory, trainer: Trainer) -> Iterator[None]:
    """However the run ends, close it and write its report; what fails then does not hide why the run ended."""
    try:
        yield
    except BaseException as error:
        _end(partial(trainer.close, error), partial(_report_in_place, directory))
        raise
    trainer.close()
    write_report(directory)


def _end(*last_things: Callable[[], object]) -> None:
    """Do what a run that failed has still to do; what fails then is said, and does not hide why the run ended."""
    for last_thing in last_things:
        try:
            last_thing()
        except Exception as another:
            print(f"and at the end of the failed run: {another}", file=sys.stderr)


def _report_in_place(directory: RunDirectory) -> None:
    """Write the report of a run that failed, unless its directory has gone: that has been said, and is not made anew."""
    try:
        refuse_moved(directory.path)
    except RecordError:
        return
    write_report(directory)


@contextmanager
def _errors_said(recipe: Recipe, directory: RunDirectory) -> Iterator[None]:
    """Memory that ran out, a disk without room, and a file of the run that cannot be used end it with one paragraph."""
    try:
        yield
    except WriteFailed as error:
        error.add_note(f"Then, {directory.how_to_continue()}.")
        raise
    except SensoriumError:
        raise
    except Exception as error:
        failed = full_disk_error(error)
        if failed is None and isinstance(error, OSError) and str(error.filename).startswith(str(directory.path)):
            failed = error
        if failed is not None:
            problem = cannot_write(failed.filename or directory.path, failed)
            problem.add_note(f"Then, {directory.how_to_continue()}.")
            raise problem from error
        if (exhausted := memory_exhausted(error, recipe)) is not None:
            for note in getattr(error, "__notes__", ()):
                exhausted.add_note(note)
            raise exhausted from error
        raise


@dataclass(frozen=True)
class Study:
    """What a run changed: summaries by variant, before and after, and where the run lies."""

    before: tuple[dict[str, Any], ...]
    after: tuple[dict[str, Any], ...]
    directory: Path


def study(recipe: Recipe, variants: Sequence[Variant], watchers: Iterable[Watcher] = ()) -> Study:
    """Measure, train, measure again on the same tasks with the same random numbers."""
    watchers = tuple(watchers)
    before = measure(recipe, recipe.model.path, variants)
    directory = train(recipe, watchers=watchers)
    checkpoints = Checkpoints(directory / "checkpoints", recipe.checkpoint.keep)
    after = measure(recipe, str(checkpoints.path(checkpoints.complete()[-1])), variants)
    return Study(before, after, directory)
