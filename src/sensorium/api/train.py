"""Training, evaluating, scoring again and recording: ``run = sn.train(recipe, steps=100)``, ``sn.evaluate(run)``."""

import asyncio
import contextvars
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_args

from sensorium.api.recipes import data_of, recipe_of
from sensorium.api.run import Run, Table
from sensorium.cluster.event_loop import forget, interrupt
from sensorium.data.demonstrations import Recording, RecordingSummary, summary_of
from sensorium.data.mixture import resolve_epochs
from sensorium.evaluation.folder import default_folder, evaluated_model
from sensorium.recipe.load import check_recipe
from sensorium.recipe.schema import Recipe
from sensorium.report.console import ConsoleWatcher, EvaluationBar, WorkBar
from sensorium.report.tables import markdown, rescoring_grids, summary_grid
from sensorium.report.terminal import Terminal, say
from sensorium.report.watcher import Watcher
from sensorium.runs.checkpoint_layout import CheckpointFolder
from sensorium.runs.durable import read_rows
from sensorium.runs.run_directory import RunDirectory, lock_run
from sensorium.trainer.run_claim import Fork, go_on
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.errors import RecipeError, nearest

Result = TypeVar("Result")
LOOK_S = 0.1


def outside_loop(work: Callable[[], Result]) -> Result:
    """Run ``work``, inside an event loop (a notebook) in a second thread with a loop of its own while this thread waits.

    Ctrl-C (a notebook's stop button) reaches this thread and is forwarded. A second Ctrl-C does not wait for the work.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    results: list[Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            forget(threading.get_ident())
            done.set()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="sensorium", daemon=True)
    thread.start()
    assert thread.ident is not None
    interrupted = False
    while not done.is_set():
        try:
            while not done.wait(LOOK_S):  # not join(): an interrupted join takes a running thread for ended (CPython 3.11)
                pass
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            interrupt(thread.ident)
    forget(thread.ident)  # it may have been interrupted after it forgot
    if errors:
        raise errors[0]
    return results[0]


def train(
    recipe: Any,
    *,
    overwrite: bool = False,
    show: bool = True,
    watchers: Iterable[Watcher] = (),
    **changes: Any,
) -> Run:
    """Train by a recipe: a path, a shipped name, a dict, a Recipe or a Run, with ``changes`` to it; returns the run.

    ``rewards`` may hold functions, ``tasks`` rows, Task objects or data sets. ``overwrite`` removes an earlier run in the
    same directory first. ``show``: print progress.
    """
    checked = recipe_of(recipe, changes)
    directory = RunDirectory(checked.directory)
    if overwrite and directory.path.exists():
        if not directory.exists():
            raise RecipeError(f"overwrite: '{directory.path}' holds no run, so it is not removed; remove it yourself.")
        with lock_run(directory.path):  # not a run that a process still works in
            shutil.rmtree(directory.path)
    return train_checked(checked, show=show, watchers=watchers)


def resume(run: str | Path | Run, *, show: bool = True, watchers: Iterable[Watcher] = (), **changes: Any) -> Run:
    """Resume a run from its last checkpoint. Functions and rows that are in no file must be passed again, as to train."""
    directory = run.directory if isinstance(run, Run) else Path(run)
    return train_checked(recipe_of(Run(directory), changes), resume=True, show=show, watchers=watchers)


def fork(
    run: str | Path | Run,
    step: int,
    name: str,
    *,
    fresh_optimizer: bool = False,
    show: bool = True,
    watchers: Iterable[Watcher] = (),
    **changes: Any,
) -> Run:
    """Go on from a run's checkpoint of a step as a new run, with ``changes`` to anything but the model's shape."""
    directory = run.directory if isinstance(run, Run) else Path(run)
    recipe = recipe_of(Run(directory), {**changes, "name": name})
    return train_checked(recipe, fork=Fork(directory, step, fresh_optimizer), show=show, watchers=watchers)


def train_checked(
    recipe: Recipe,
    *,
    resume: bool = False,
    restart: bool = False,
    fork: Fork | None = None,
    show: bool,
    watchers: Iterable[Watcher],
) -> Run:
    """Train a checked recipe; progress is printed if it is to ``show``."""
    recipe = resolve_epochs(recipe)  # the console shows the number of steps
    if resume:
        go_on(recipe, RunDirectory(recipe.directory))  # before torch is imported, which takes seconds
    from sensorium.trainer.run import train as run_recipe

    observers = list(watchers)
    if show:
        from sensorium.cli.dry_run import show_plan

        console = Terminal()
        observers.insert(0, ConsoleWatcher(console, lambda: show_plan(recipe, console)))
    try:
        return Run(outside_loop(lambda: run_recipe(recipe, resume=resume, restart=restart, fork=fork, watchers=observers)))
    except KeyboardInterrupt:
        directory = recipe.directory
        saved = CheckpointFolder(RunDirectory(directory).checkpoints).steps()
        way_on = (
            f"the run in '{directory}' has no checkpoint yet (checkpoint.every); sn.train(…, overwrite=True) starts over"
        )
        if saved:
            way_on = f"the run lies in '{directory}'; sn.resume('{directory}') goes on from step {saved[-1]}"
        raise KeyboardInterrupt(way_on) from None  # without the event loop's own tracebacks


class Evaluation(Mapping[str, Any]):
    """The summary of an evaluation, by name (``accuracy``, ``interval``, ``reward``, ``terms``, ``categories``, …)."""

    def __init__(self, summary: Mapping[str, Any], folder: Path) -> None:
        self.summary, self.folder = dict(summary), folder

    @property
    def accuracy(self) -> float | None:
        """The share of right answers; None where no term judges right or wrong."""
        return self.summary["accuracy"]

    @property
    def samples(self) -> Table:
        """One row a sample: prompt, response and scores."""
        return Table(list(read_rows(self.folder / "samples.jsonl")))

    def __getitem__(self, key: str) -> Any:
        return self.summary[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary)

    def __len__(self) -> int:
        return len(self.summary)

    def __repr__(self) -> str:
        return markdown(summary_grid(self.summary))


def evaluate(
    recipe: Any,
    model: str | Path | Run | None = None,
    *,
    greedy: bool = True,
    samples: int = 1,
    limit: int = 0,
    blank: MediaKind | Sequence[MediaKind] = (),
    out: str | Path | None = None,
    fresh: bool = False,
    show: bool = True,
    **changes: Any,
) -> Evaluation:
    """Evaluate on a recipe's or run's held-out tasks: ``model``, else the run's best checkpoint, else the recipe's model.

    Greedy by default, else at ``evaluation.temperature``. ``blank``: kinds of media ("picture", "video", "sound") that are
    shown grey or silent. An evaluation that was interrupted continues when it is called again; ``fresh`` removes it.
    ``show``: print progress.
    """
    from sensorium.evaluation.evaluate import Progress, evaluate_into

    is_run = isinstance(recipe, str | Path) and (Path(recipe) / "recipe.yaml").is_file()
    run = recipe if isinstance(recipe, Run) else Run(recipe) if is_run else None
    section: dict[str, Any] = {"samples": samples, "limit": limit} | ({"temperature": 0.0} if greedy else {})
    if not greedy and recipe_of(run or recipe, dict(changes)).evaluation.temperature == 0:
        raise RecipeError(
            "greedy=False: evaluation.temperature of the recipe is 0, so this would be greedy all the same. Add "
            'evaluation={"temperature": 1.0}.'
        )
    checked = recipe_of(run or recipe, {**changes, "evaluation": {**section, **changes.get("evaluation", {})}})
    if not checked.tasks.evaluate:
        raise RecipeError("tasks.evaluate names no source, so there is nothing to evaluate on.")
    wanted = model.directory if isinstance(model, Run) else model
    path = evaluated_model(None if wanted is None else str(wanted), checked, None if run is None else run.directory)
    kinds = (blank,) if isinstance(blank, str) else tuple(blank)
    if unknown := [kind for kind in kinds if kind not in get_args(MediaKind)]:
        raise RecipeError(
            f"blank: there is no kind of media '{unknown[0]}'{nearest(str(unknown[0]), list(get_args(MediaKind)))}"
        )
    folder = Path(out) if out is not None else default_folder(checked, path, kinds)

    def play(progress: Progress | None) -> dict[str, Any]:
        return outside_loop(lambda: evaluate_into(folder, checked, path, blank=kinds, fresh=fresh, progress=progress))

    if not show:
        return Evaluation(play(None), folder)
    from sensorium.report.terminal import say

    console = Terminal()
    with suppress(OSError, ValueError):  # as in ``EvaluationBar``
        say(f"evaluating {path} into {folder}", console)
    with EvaluationBar(console) as bar:
        return Evaluation(play(bar.tell), folder)


class Rescoring(Mapping[str, Any]):
    """What other rewards change, by name (``reward``, ``terms``, ``signs``, ``learning``, ``correlation``, ``changed``, …).

    Pairs are old and new. A notebook shows the tables.
    """

    def __init__(self, summary: Mapping[str, Any], folder: Path) -> None:
        self.summary, self.folder = dict(summary), folder

    @property
    def episodes(self) -> Table:
        """One row an episode: reward, correct, scores and advantages by turn, each old and new."""
        return Table(list(read_rows(self.folder / "episodes.jsonl")))

    def __getitem__(self, key: str) -> Any:
        return self.summary[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary)

    def __len__(self) -> int:
        return len(self.summary)

    def __repr__(self) -> str:
        return "\n".join(map(markdown, rescoring_grids(self.summary)))

    def _repr_markdown_(self) -> str:
        return repr(self)


def rescore(
    run: str | Path | Run,
    rewards: Any = None,
    *,
    judges: Mapping[str, Any] | None = None,
    steps: int | str | tuple[int, int] = "",
    evaluations: bool = False,
    limit: int = 0,
    out: str | Path | None = None,
    show: bool = True,
) -> Rescoring:
    """Score a run's stored episodes again; the run is not changed.

    ``rewards``: as in ``train``, or a YAML file with the section; None for the run's own. ``judges``: changes to that
    section. ``steps``: "A..B", (A, B) or one. ``evaluations``: held-out episodes. ``limit``: groups at most.
    ``show``: print progress.
    """
    from sensorium.trainer.rescoring import SECTIONS, RescoringOrder, rescoring_folder, rescoring_recipe, steps_of
    from sensorium.trainer.rescoring import rescore as score_again

    seen = run if isinstance(run, Run) else Run(run)
    span = "..".join(map(str, steps)) if isinstance(steps, tuple) else str(steps)
    order = RescoringOrder(*(steps_of(span) if span else (0, 0)), limit, evaluations)
    is_file = isinstance(rewards, Path) or (isinstance(rewards, str) and Path(rewards).exists())
    if is_file and not judges:
        recipe = rescoring_recipe(seen.directory, rewards)
    else:
        if is_file:
            raise RecipeError("judges is given beside a file of rewards; write the section judges into that file.")
        given = {"rewards": rewards, "judges": judges}
        changes = {name: value for name, value in given.items() if value is not None}
        recipe = check_recipe(*data_of(seen, changes), SECTIONS)
    terms = Path(rewards).stem if is_file else "_".join(term.name for term in recipe.rewards.terms)
    folder = Path(out) if out is not None else rescoring_folder(seen.directory, f"by_{terms}", order)
    with WorkBar(silent=not show) as bar:

        def tell(done: int, of: int) -> None:
            if not done:
                bar.begin(f"scoring the episodes of {of} steps of {seen.directory} again, into {folder}", of)
            bar.tell(done)

        return Rescoring(outside_loop(lambda: score_again(seen.directory, recipe, folder, order, tell)), folder)


class Demonstrations(Sequence[dict[str, Any]]):
    """Recorded episodes, one row each: ``warm_start={"demonstrations": found.folder, "steps": …}`` learns them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._rows = list(read_rows(Recording(self.folder).rows))

    @property
    def summary(self) -> RecordingSummary:
        """How many episodes were kept, left out by reason, and are missing."""
        return summary_of(Recording(self.folder))

    @property
    def left_out(self) -> Table:
        """The episodes that were not kept, with reward and reason."""
        return Table(list(read_rows(Recording(self.folder).left_out)))

    def __getitem__(self, place: Any) -> Any:
        return self._rows[place]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return "\n".join([*self.summary.lines, f"in {self.folder}"])


def record(
    recipe: Any,
    by: str | Path | Run = "demonstrate",
    *,
    to: str | Path | None = None,
    limit: int = 0,
    samples: int = 1,
    min_reward: float | None = None,
    temperature: float | None = None,
    model: str = "",
    api_key_env: str = "",
    show: bool = True,
    **changes: Any,
) -> Demonstrations:
    """Record demonstrations of a recipe's training tasks: by themselves, ``"person"``, a checkpoint, a Run or a URL.

    Arguments are as on the command line, and ``changes`` as to train. A recording that was interrupted goes on when it is
    called again. ``show``: print progress.
    """
    from sensorium.cli.record import RecordingOrder
    from sensorium.cli.record import record as record_order

    who = str(by.directory if isinstance(by, Run) else by)
    order = RecordingOrder(
        who, None if to is None else Path(to), limit, samples, min_reward, temperature, model, api_key_env
    )
    checked = recipe_of(recipe, changes)
    with WorkBar(silent=not show) as bar:
        found = outside_loop(lambda: record_order(checked, order, bar))
    if show:
        for line in found.lines:
            say(line, Terminal())
    return Demonstrations(order.folder(checked))
