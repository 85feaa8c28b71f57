"""Train a recipe: build everything, restore a checkpoint, run the loop, and report however the run ends."""

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
from sensorium.assembly.models import load_trained, recorded_sampling, write_source
from sensorium.assembly.out_of_memory import memory_exhausted, memory_note
from sensorium.assembly.playing import make_stream, open_store
from sensorium.assembly.session import open_session, refuse_strange_tasks, refuse_unanswered
from sensorium.cluster.event_loop import run_async
from sensorium.cluster.ray_host import found_cluster
from sensorium.data.causal_history import CausalSource
from sensorium.data.demonstrations import demonstrations_of
from sensorium.data.media_store import FilesRead
from sensorium.data.mixture import a_few, each_once, make_sources, resolve_epochs
from sensorium.data.planner import make_planner
from sensorium.data.row_format import placeholder_notes, unread_notes
from sensorium.data.task_content import row_notes
from sensorium.evaluation.evaluate import Variant, measure
from sensorium.recipe.algorithm_checks import cautions
from sensorium.recipe.checks import cluster_notes, context_note, general_note
from sensorium.recipe.plan import for_tasks, make_plan, placed_processes
from sensorium.recipe.registry import build
from sensorium.recipe.schema import Recipe
from sensorium.report.page import write_report
from sensorium.report.tables import disk_note
from sensorium.report.watcher import BackgroundLogger, Watcher, Watchers
from sensorium.rewards.scorer import trial_notes
from sensorium.runs.checkpoint_layout import listed_files, refuse_foreign
from sensorium.runs.durable import cannot_write, full_disk_error, read_rows, refuse_full
from sensorium.runs.ledger import Ledger
from sensorium.runs.run_directory import NAME as LOCK
from sensorium.runs.run_directory import RunDirectory, lock_run, refuse_moved
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.fork import begin_fork
from sensorium.trainer.health.start_checks import long_demonstrations, refuse_without_demonstrations, start_notes
from sensorium.trainer.loop import Trainer
from sensorium.trainer.run_claim import Fork, begin, begin_again, change_recipe, go_on, no_checkpoint, refuse_fewer_steps
from sensorium.trainer.task_loader import changed_tasks, media_files, refuse_other_frames, remember_tasks
from sensorium.vocabulary.errors import CheckpointError, RecordError, SensoriumError, WriteFailed
from sensorium.vocabulary.plain import counted


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    restart: bool = False,
    fork: Fork | None = None,
    watchers: Iterable[Watcher] = (),
) -> Path:
    """Run a recipe to its end and write its report; returns the run directory. One process at a time may do so.

    ``resume``: from the last good checkpoint. ``restart``: from the beginning, in a directory whose run has none. ``fork``:
    from a checkpoint of another run.
    """
    recipe = resolve_epochs(recipe)
    directory = RunDirectory(recipe.directory.absolute())  # a reward or an environment may change the working directory
    made = _first_missing(directory.path)
    with lock_run(directory.path), _plain_errors(recipe, directory), _beside_others(directory) as notes:
        with _removed_if_it_fails(directory.path, made):
            if fork is not None:
                notes += begin_fork(recipe, directory, fork)
                resume = True
            elif resume:
                notes += go_on(recipe, directory)
            else:
                (begin_again if restart else begin)(recipe, directory)
            refuse_full(directory.path)  # a resumed run writes nothing else until its engines are up
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
    """Build everything and, on resume, restore it; nothing is spent yet. ``notes`` go to the watchers first.

    The learner is that of this process, unless ``make_learner`` makes another.
    """
    make_deterministic(recipe)
    checkpoints = Checkpoints(directory.checkpoints, recipe.checkpoint.keep)
    last, found = _last_good(recipe, directory, checkpoints) if resume else (None, [])
    ledger = Ledger(directory.ledger)
    saved = None if last is None else checkpoints.path(last)
    store = open_store(recipe, directory.media)
    store.files_read = FilesRead(media_files(directory) if resume else ())
    watchers = tuple(watchers)
    early = Watchers(watchers)  # nothing else is reported until the processes are up
    if parts := placed_processes(recipe.model_dump(include={"cluster", "rollout"})):
        early.noted(f"starting {', '.join(parts)}; that may take minutes")
        if recipe.cluster.address == "auto" and (joined := found_cluster()):
            early.noted(joined)
        for note in cluster_notes(recipe, gpus=torch.cuda.is_available()):
            early.noted(note)
    # Rows are read before the model, which may take minutes to load.
    stream = make_stream(recipe, store)
    planner = make_planner(recipe.tasks.planner, stream, store)
    sources = make_sources(recipe.tasks, "evaluate", store)
    held_out, skipped = each_once(sources, limit=recipe.evaluation.limit, on_bad_row=recipe.tasks.on_bad_row)
    needs_history = any(isinstance(source, CausalSource) for source in stream.sources)
    few = a_few(stream.sources, on_bad_row="skip" if resume or needs_history else recipe.tasks.on_bad_row)
    recorded = demonstrations_of(recipe, store)
    shown = few if recorded is None else a_few([recorded], on_bad_row="skip" if resume else recipe.tasks.on_bad_row)
    refuse_without_demonstrations(recipe, shown)
    looked_at = [*few, *held_out, *(() if recorded is None else shown)]
    rows = [*stream.sources, *sources, *(() if recorded is None else (recorded,))]
    if not resume:
        found += row_notes(stream.sources, sources, recipe.tasks.on_bad_row)
    with _closed_if_it_fails() as closings:
        session = open_session(recipe, load_trained(recipe, store, saved), ledger, directory.path)
        closings.append(lambda _: session.close())
        if recipe.cluster.shared and session.processes:
            early.noted(f"{len(session.processes)} of them are up; the learner's ranks come last")
        refuse_strange_tasks(session, looked_at)
        unanswered = refuse_unanswered(session, few if recipe.steps else (), held_out)  # a warm start alone has no reward
        sampling = session.policy.chat.media_format.frame_rule.sampling
        if resume:
            refuse_other_frames(directory, recorded_sampling(directory), sampling, looked_at)
        if not resume or not directory.source.exists():
            write_source(recipe, directory, sampling)
        if resume and directory.tasks.exists():
            found += changed_tasks(directory, looked_at, rows)
        else:
            remember_tasks(directory, looked_at, rows)
        plan = for_tasks(make_plan(recipe, session.policy.model.config.to_dict()), looked_at)
        found += filter(None, [disk_note(recipe, plan), memory_note(recipe, plan)])
        if recipe.environments.pool and not any(session.rollout.takes_instance(task) for task in looked_at):
            found.append("environments.pool has no effect: no task looked at is played in an environment that waits")
        if session.policy.general is not None:
            found += [general_note(recipe), *(f"model: {note}" for note in session.policy.general.notes)]
        given = {"run_dir": directory.path, "logging": recipe.logging}
        loggers = [
            BackgroundLogger(name, build("logger", name, {}, "logging.loggers", **given)) for name in recipe.logging.loggers
        ]
        watcher = Watchers([*loggers, *watchers])
        for logger in loggers:
            logger.tell = watcher.attention
        for note in (*notes, *found):
            (watcher.attention if note.startswith("ATTENTION") else watcher.noted)(note)
        if skipped:
            watcher.noted(f"skipped {counted(len(skipped), 'held-out row')}; the first because: {skipped[0].reason}")
        for _, ids, advice in placeholder_notes(held_out):  # TaskLoader notes those of tasks.train
            watcher.noted(f"tasks.evaluate: {len(ids)} of {len(held_out)} tasks, the first {ids[0]}: {advice}.")
        if not resume or notes:  # an unchanged resumed run has reported them
            long = long_demonstrations(recipe, shown, lambda text: len(session.rollout.chat.respond(text, "").tokens))
            for place, of_place in {"train": stream.sources, "evaluate": sources}.items():
                for i, source in enumerate(of_place):
                    for note in unread_notes(source):
                        watcher.noted(f"tasks.{place}.{i}: {note}")
            recording = () if recorded is None else [f"warm_start.demonstrations: {n}" for n in recorded.summary.lines]
            beyond = context_note(recipe, plan.model) if plan.model is not None else ""
            for note in (
                *cautions(recipe),
                *filter(None, [beyond]),
                *start_notes(recipe, few, shown),
                *recording,
                *long,
                *unanswered,
            ):
                watcher.noted(note)
            for note in trial_notes(session.scorer.terms, few) if recipe.steps else ():
                watcher.attention(f"ATTENTION: {note}")
        learner = (make_learner or _learner_maker(recipe))(recipe, session, directory, saved)
        closings.append(lambda _: learner.close())
        trainer = Trainer(recipe, session, learner, planner, held_out, directory, ledger, watcher, recorded)
        closings[:] = [trainer.close]
        if last is not None:
            try:
                trainer.restore(checkpoints.load(last))
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise CheckpointError(
                    f"the trainer's state in '{checkpoints.path(last)}' is whole, but this version cannot go on from it "
                    f"({type(error).__name__}: {error}). Go on with the version that wrote it, or start a new run from the "
                    "weights beside it (model.path)."
                ) from error
    return trainer


@contextmanager
def _closed_if_it_fails() -> Iterator[list[Callable[[BaseException], None]]]:
    """Close what a run has started, the last first, if the run cannot start."""
    closings: list[Callable[[BaseException], None]] = []
    try:
        yield closings
    except BaseException as error:
        _end(*(partial(close, error) for close in reversed(closings)))
        raise


def _first_missing(path: Path) -> Path | None:
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    return missing[-1] if missing else None


@contextmanager
def _removed_if_it_fails(path: Path, made: Path | None) -> Iterator[None]:
    """Remove the folders that a run made, ``made`` the first of them, if the run cannot start.

    Another process may have made them meanwhile, for a run that is over: then they hold more than the lock.
    """
    fresh = made is not None and [entry.name for entry in path.iterdir()] == [LOCK]
    try:
        yield
    except BaseException as error:
        if fresh and made is not None:
            shutil.rmtree(path, ignore_errors=True)
            for folder in path.parents:  # runs/, if it was made here and is empty
                if not folder.is_relative_to(made) or any(folder.iterdir()):
                    break
                folder.rmdir()
            error.add_note(f"Nothing was left behind: '{path}' was not kept.")
        raise


def _learner_maker(recipe: Recipe) -> LearnerMaker:
    if not recipe.cluster.shared:
        return local_learner
    from sensorium.assembly.ranks import sharded_learner  # importing torch.distributed takes seconds

    return sharded_learner


_going_on: list[Path] = []  # the runs of this process; more than one where threads train at the same time


@contextmanager
def _beside_others(directory: RunDirectory) -> Iterator[list[str]]:
    """A note for a run that starts while another is running in the same process: they share global state."""
    others = [
        f"ATTENTION: the run in '{path}' goes on in this process too. The global random numbers of Python, numpy and "
        "torch belong to both, and so does torch's number of threads: a reward, an environment or a model's first "
        "weights that draw from them may not repeat. For runs that repeat bit for bit start each in its own process."
        for path in _going_on
        if path != directory.path
    ]
    _going_on.append(directory.path)
    try:
        yield others[:1]
    finally:
        _going_on.remove(directory.path)


def _last_good(recipe: Recipe, directory: RunDirectory, checkpoints: Checkpoints) -> tuple[int, list[str]]:
    """The newest good checkpoint, with notes about it, about damaged newer ones, and about lost files of the run."""
    damaged = checkpoints.set_damaged_aside()
    notes = list(damaged)
    complete = checkpoints.complete()
    if not complete:
        raise RecordError(" ".join(notes) + " " + str(no_checkpoint(directory))) if notes else no_checkpoint(directory)
    last = complete[-1]
    refuse_fewer_steps(recipe, directory, last)
    if foreign := refuse_foreign(checkpoints.path(last)):
        notes.append(
            f"the checkpoint of step {last} holds {counted(len(foreign), 'file')} that the run did not write, the first "
            f"'{foreign[0]}'; they are not read."
        )
    if damaged:
        notes.append(f"ATTENTION: the run goes on from the last good checkpoint, of step {last}.")
    written = {row.get("step") for row in read_rows(directory.metrics)}
    lost = [step for step in range(1, last + 1) if step not in written]
    if lost:
        notes.append(
            f"ATTENTION: '{directory.metrics}' lacks the rows of {counted(len(lost), 'step')}, the first of step "
            f"{lost[0]}: they were lost or removed. The model does not depend on them; curves and report have a gap, and "
            "health rules that look back, such as whether anything was trained, know of no earlier step."
        )
    if not directory.ledger.exists():
        notes.append(
            f"ATTENTION: '{directory.ledger}' is missing: judges are asked again for judgements that were in it, and the "
            "fates of earlier episodes are no longer on record."
        )
    forked = directory.forked_at()
    own = forked is None or forked[1] != last  # the episodes before a fork are its ancestor's
    if own and last > recipe.warm_start.steps and not directory.episodes_of(last).exists():
        notes.append(
            f"ATTENTION: '{directory.episodes_of(last)}' is missing: episodes were lost or removed. The model does not "
            "depend on them; the report cannot show them."
        )
    if not all(content.digest for content in listed_files(checkpoints.path(last)).values()):
        notes.append(f"the checkpoint of step {last} has no digests (an older version wrote it); only sizes were checked.")
    if last == recipe.warm_start.steps + recipe.steps:
        notes.append(
            f"the run is finished, with all its {recipe.steps} steps; to go on give it more: --resume steps=…, in Python "
            "sn.resume(run, steps=…)"
        )
    return last, notes


@contextmanager
def _reported(directory: RunDirectory, trainer: Trainer) -> Iterator[None]:
    """Close the run and write its report, however it ends."""
    try:
        yield
    except BaseException as error:
        _end(partial(trainer.close, error), partial(_report_in_place, directory))
        raise
    trainer.close()
    write_report(directory)


def _end(*last_things: Callable[[], object]) -> None:
    """Do the last things of a failed run; what fails then is printed, and does not hide why the run ended."""
    for last_thing in last_things:
        try:
            last_thing()
        except Exception as another:
            print(f"and at the end of the failed run: {another}", file=sys.stderr)


def _report_in_place(directory: RunDirectory) -> None:
    """Write the report of a failed run, unless its directory is gone: that was reported, and it is not made again."""
    try:
        refuse_moved(directory.path)
    except RecordError:
        return
    write_report(directory)


@contextmanager
def _plain_errors(recipe: Recipe, directory: RunDirectory) -> Iterator[None]:
    """Explain exhausted memory, a full disk, and an unusable file of the run in one paragraph."""
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
    """Summaries by variant, before and after a run, and its directory."""

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
