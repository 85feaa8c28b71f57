"""Train a model by a recipe: a YAML file, a shipped recipe by name, or a run directory to go on with."""

import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from sensorium.cli.show import say, show_dry_run, show_plan
from sensorium.cluster.event_loop import interrupt_here
from sensorium.data.mixture import resolve_epochs
from sensorium.recipe.load import load_recipe, shipped_recipes
from sensorium.recipe.names import import_system
from sensorium.recipe.schema import Recipe
from sensorium.report.terminal import Terminal
from sensorium.runs.checkpoint_layout import CheckpointFolder, why_taken
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import (
    CheckpointError,
    EngineLost,
    MediaError,
    MemoryExhausted,
    NothingTrained,
    RecipeError,
    RecordError,
    TaskError,
    nearest,
)

LINGER_S = 30.0
"""How long a command that is over waits for threads that others started before it ends without them."""


@dataclass
class Stop:
    """Which signal ended the command: the exit code that says so, and a word for people."""

    number: int = signal.SIGINT

    @property
    def code(self) -> int:
        """128 and the number of the signal, as shells count."""
        return 128 + self.number

    @property
    def word(self) -> str:
        """What happened."""
        return "terminated" if self.number == signal.SIGTERM else "interrupted"


@contextmanager
def stopping_in_order() -> Iterator[Stop]:
    """While this lasts, SIGTERM raises KeyboardInterrupt the way Ctrl-C does.

    A run that was started with SIGINT ignored (``nohup``, a background job of a script) still ignores it; SIGTERM ends it.
    """
    stop = Stop()
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is not signal.SIG_DFL:
        yield stop
        return

    def terminate(number: int, frame: object) -> None:
        stop.number = signal.SIGTERM
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # ignored, so asyncio has put no handler of its own in its place
            if interrupt_here():
                return
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)  # type: ignore[arg-type]  # an event loop's own, which ends its tasks first

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def end_without_hung_threads(code: int) -> None:
    """See to it that the process ends with this code soon, also if a thread of a user's code never does.

    At exit Python waits for every thread that is no daemon, such as those of a ``ThreadPoolExecutor`` in a reward term.
    """

    def leave() -> None:
        time.sleep(LINGER_S)
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        hung = [thread.name for thread in others if not thread.daemon]
        told = f"{len(hung)} threads that an environment, a reward or a source started do not end ({', '.join(hung[:5])})"
        print(f"{told}; the process ends without them.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)

    threading.Thread(target=leave, name="leave", daemon=True).start()


def tie_note(run: Path) -> str:
    """A sentence that names the steps that tie with the best; empty where there are none, or no run is there.

    It only informs, so a recipe or metrics that cannot be read are passed over here.
    """
    directory = RunDirectory(run)
    try:
        best = CheckpointFolder(directory.checkpoints).best()
        if best is None:
            return ""
        metric = best.metric or yaml.safe_load(directory.recipe.read_text())["checkpoint"]["best"]
        rows = [row for row in read_metrics(directory.metrics) if row["step"] > best.step]
        later = sorted({row["step"] for row in rows if row.get(metric) == best.value})
    except (OSError, UnicodeError, yaml.YAMLError, LookupError, TypeError, RecordError):
        return ""
    told = (
        f"step {best.step} is the first with the best {metric}, {best.value:.4g}; later steps tie with it: {_listed(later)}"
    )
    return told if later else ""


def _listed(steps: list[int], most: int = 8) -> str:
    more = f" and {len(steps) - most} more" if len(steps) > most else ""
    return f"{', '.join(map(str, steps[:most]))}{more}"


USAGE = "sensorium train RECIPE [key=value …] [--dry-run] [--resume | --restart]"
UNTRAINED = 3
"""Exit code of a short run that came to its end and trained nothing, which the run itself has said."""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("recipe", help="a YAML file, a shipped recipe (shapes), or a run directory")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe: batch.group_size=16")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and its plan, spend nothing")
    parser.add_argument("--resume", action="store_true", help="go on from the run's last good checkpoint")
    parser.add_argument(
        "--caprl-env", action="store_true", help="take CapRL's environment variables: CAPTION_MODEL, DATASET, …"
    )
    parser.add_argument("--restart", action="store_true", help="start over in the directory of a run without a checkpoint")


def run(arguments: Namespace) -> int:
    """Train."""
    console = Terminal()
    if arguments.resume and arguments.restart:
        raise RecipeError("--resume goes on from a checkpoint and --restart starts over; drop one of them.")
    if arguments.resume:
        refuse_no_run(arguments.recipe)
    overrides = list(arguments.overrides)
    if arguments.caprl_env:
        overrides = [*_from_environment(arguments.recipe, overrides), *overrides]
    recipe = resolve_epochs(load_recipe(arguments.recipe, overrides))
    if arguments.dry_run:
        notes = _resumable(recipe) if arguments.resume else []
        if not arguments.resume and not arguments.restart and (problem := why_taken(RunDirectory(recipe.directory))):
            notes.append(f"A run by this recipe would be refused: {problem}")
        show_dry_run(recipe, console, named=arguments.recipe)
        for note in notes:
            say(note, console)
        return 0
    if arguments.resume:
        _resumable(recipe)  # before torch is imported, which takes seconds
    from sensorium.report.console import ConsoleWatcher
    from sensorium.trainer.health.monitor import run_untrained
    from sensorium.trainer.run import train

    watcher = ConsoleWatcher(console, lambda: show_plan(recipe, console))
    try:
        directory = train(recipe, resume=arguments.resume, restart=arguments.restart, watchers=[watcher])
    except NothingTrained as error:
        raise NothingTrained(error.short) from error
    except (KeyboardInterrupt, EngineLost, MemoryExhausted, TaskError, MediaError) as error:
        ended = RunDirectory(recipe.directory)
        if isinstance(error, KeyboardInterrupt) or any(ended.checkpoints.glob("step_*")):
            say(ended.how_to_continue(), console)
        raise
    say(f"report  {directory / 'report.html'}", console)
    return UNTRAINED if run_untrained(RunDirectory(directory), recipe) else 0


def _resumable(recipe: Recipe) -> list[str]:
    """Refuse to go on with a run by another recipe, as the run itself would; returns what it would say."""
    from sensorium.trainer.run_claim import go_on

    return go_on(recipe, RunDirectory(recipe.directory))


def _from_environment(recipe: str, overrides: Sequence[str] = ()) -> list[str]:
    """What CapRL's environment variables change in a recipe; those without effect are printed."""
    caprl = import_system("sensorium.systems.caprl.settings", "--caprl-env")
    found = caprl.caprl_settings(os.environ, recipe, load_recipe(recipe), overrides)
    for notice in found.notices():
        say(notice, Terminal(stderr=True))
    return [override for taken in found.overrides.values() for override in taken]


def refuse_no_run(source: str) -> None:
    """Refuse to resume what is neither a recipe nor a run, in the words of who looks for a run."""
    place = Path(source)
    if place.exists() or source in shipped_recipes():
        return
    runs = sorted(path.parent.name for path in place.parent.glob("*/recipe.yaml")) if place.parent.is_dir() else []
    others = f"Runs in '{place.parent}'{nearest(place.name, runs)}" if runs else f"There are no runs in '{place.parent}'."
    raise CheckpointError(f"there is no run '{source}' to resume. {others}")
