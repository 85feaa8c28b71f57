"""Starting, resuming and finishing a run."""

from collections.abc import Iterable
from pathlib import Path

from sensorium.media.store import MediaStore
from sensorium.recipe.algorithm_checks import cautions
from sensorium.recipe.load import dump_recipe
from sensorium.recipe.names import build
from sensorium.recipe.schema import Recipe
from sensorium.record.durable import write_whole
from sensorium.record.run_directory import RunDirectory
from sensorium.report.html import write_report
from sensorium.report.metrics import MetricsFile
from sensorium.report.watcher import Watcher, Watchers
from sensorium.tasks.mixture import a_few, each_once
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.determinism import settle
from sensorium.trainer.event_loop import run_async
from sensorium.trainer.health.at_start import refuse_without_demonstrations, start_notes
from sensorium.trainer.ledger import Ledger
from sensorium.trainer.loop import Trainer
from sensorium.trainer.models import load_trained
from sensorium.trainer.session import make_sources, make_stream, open_session, refuse_strange_tasks
from sensorium.vocabulary.errors import CheckpointError, RecipeError


def train(recipe: Recipe, *, resume: bool = False, watchers: Iterable[Watcher] = ()) -> Path:
    """Run a recipe to its end and write its report; returns the run directory. ``resume``: from the last checkpoint."""
    directory = RunDirectory(recipe.directory)
    _claim(recipe, directory, resume)
    trainer = open_trainer(recipe, directory, resume=resume, watchers=watchers)
    try:
        run_async(trainer.run())
    finally:
        trainer.close()
        write_report(directory)
    return directory.path


def open_trainer(
    recipe: Recipe, directory: RunDirectory, *, resume: bool = False, watchers: Iterable[Watcher] = ()
) -> Trainer:
    """Everything built and, on resume, put back as it was; nothing spent yet."""
    settle(recipe)
    ledger = Ledger(directory.ledger)
    checkpoints = Checkpoints(directory.checkpoints, recipe.checkpoint.keep)
    last = checkpoints.complete()[-1] if resume and checkpoints.complete() else None
    saved = None if last is None else checkpoints.path(last)
    session = open_session(recipe, load_trained(recipe, MediaStore(directory.media), saved), ledger)
    stream = make_stream(recipe, session.store)
    sources = make_sources(recipe.tasks.evaluate, session.store, "tasks.evaluate")
    held_out, skipped = each_once(sources, limit=recipe.evaluation.limit, on_bad_row=recipe.tasks.on_bad_row)
    few = a_few(stream.sources)
    refuse_without_demonstrations(recipe, few)
    refuse_strange_tasks(session, [*held_out, *few])
    given = {"run_dir": directory.path, "logging": recipe.logging}
    loggers = [build("logger", name, {}, "logging.loggers", **given) for name in recipe.logging.loggers]
    watcher = Watchers([MetricsFile(directory.metrics), *loggers, *watchers])
    if skipped:
        watcher.noted(f"{len(skipped)} held-out rows were skipped; the first because: {skipped[0].reason}")
    for note in (*cautions(recipe), *start_notes(recipe, few)):
        watcher.noted(note)
    trainer = Trainer(recipe, session, stream, held_out, directory, ledger, watcher)
    if last is not None:
        trainer.restore(checkpoints.load(last))
    elif resume:
        directory.drop_after(-1)
        ledger.rewind(0)
    return trainer


def _claim(recipe: Recipe, directory: RunDirectory, resume: bool) -> None:
    """Take a fresh run directory, or the one to resume, which must hold the same recipe."""
    text = dump_recipe(recipe)
    if not resume:
        if directory.exists() and not directory.is_barren():
            raise RecipeError(
                f"run directory '{directory.path}' exists. Go on with it (--resume), choose another (name=… or run_dir=…), "
                "or remove it."
            )
        directory.clear()
        directory.create()
        write_whole(directory.recipe, text)
    elif not directory.exists():
        raise CheckpointError(f"nothing to resume: '{directory.path}' holds no run. Start it without --resume.")
    elif directory.recipe.read_text() != text:
        raise CheckpointError(
            f"'{directory.path}' was run with another recipe, so going on would not repeat it. Resume with its own recipe "
            f"('{directory.recipe}'), or start a new run."
        )
