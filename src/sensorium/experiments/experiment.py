"""A sweep: the grid of its settings, its folder, its runs, their processes and the state of each.

    sweeps/lr/experiment.json            the keys that are swept, and every run with its settings and state
              recipe.yaml                the recipe that they share, as it was given
              recipes/lr=1e-4,seed=0.yaml    what each run is, resolved, every default written out
              logs/lr=1e-4,seed=0.log    what each run printed
              lr=1e-4,seed=0/            a run directory as any other
              report.html results.json   what is known so far

What is true of a run is read from its own directory; the states here say how its process ended.

A grid has the values of recipe keys, which make settings, and the names of their runs:

optimizer.lr=1e-4,3e-4 seed=0..2     six settings, from lr=1e-4,seed=0 to lr=3e-4,seed=2
rollout.stop=[a,b],[c]               two values, each a list
steps=20                             one value: a change that all runs share

Each run is ``sensorium train`` in a process of its own, so many of them at a time. Invariants: a run that failed does
not stop the others. However this process ends, all that it started end: after Ctrl-C and SIGTERM they are waited for,
and by kill -9 they notice that the pipe to their parent is closed. What they have saved stays, and the same command
goes on from there.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from sensorium.cluster.python_process import ENDS_WITH
from sensorium.recipe.checks import gpus_seen
from sensorium.recipe.load import check_recipe, dump_recipe, set_value
from sensorium.recipe.model_shape import IncompleteConfig, is_ours
from sensorium.recipe.plan import Plan, free_memory, make_plan, placed_processes
from sensorium.recipe.registry import own_modules
from sensorium.recipe.schema import Recipe
from sensorium.recipe.yaml import Path as Place
from sensorium.recipe.yaml import read_yaml, value_text, write_yaml
from sensorium.report.tables import bytes_text
from sensorium.runs.checkpoint_layout import CheckpointFolder
from sensorium.runs.durable import read_json, write_whole
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory, lock_run
from sensorium.vocabulary.errors import RecipeError, RecordError, SensoriumError
from sensorium.vocabulary.plain import counted, differences

RANGE = re.compile(r"\s*([-+]?\d+)\s*\.\.\s*([-+]?\d+)\s*")
MOST_RUNS = 1000
LONGEST = 40
SEED = "seed"
Grid = Mapping[str, Sequence[Any]]


def read_arguments(arguments: Sequence[str], keys: Sequence[str] = ()) -> tuple[list[str], dict[str, list[Any]]]:
    """The changes that all runs share, as they were given, and the values of the keys that are swept.

    One value is enough for ``keys``, which an experiment sweeps already, and for a seed, so that others can be added.
    """
    shared: list[str] = []
    grid: dict[str, list[Any]] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise RecipeError(f"'{argument}': write it as key=value, or key=value,value for several.")
        values = list(_values(text, argument))
        if key in grid or any(earlier.partition("=")[0].strip() == key for earlier in shared):
            raise RecipeError(f"'{argument}': {key} is given twice; write all its values in one argument, with commas.")
        if len(values) > 1 or key == SEED or key in keys:
            grid[key] = values
        else:
            shared.append(argument)
    return shared, grid


def points_of(grid: Grid) -> list[dict[str, Any]]:
    """Every combination of the values, the last key fastest."""
    for key, values in grid.items():
        seen: list[Any] = []
        for value in values:
            if value in seen:
                raise RecipeError(f"{key} has the value {value_text(value)} twice.")
            seen.append(value)
        if not seen:
            raise RecipeError(f"{key} has no values.")
    count = 1
    for values in grid.values():
        count *= len(values)
    if count > MOST_RUNS:
        raise RecipeError(f"these are {count:,} runs; {MOST_RUNS:,} are the most of one experiment.")
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or as many as tell it from the others: optimizer.lr and critic.lr."""
    names = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            names[key] = ".".join(parts[-count:])
            if sum(other == names[key] or other.endswith(f".{names[key]}") for other in keys) == 1:
                break
    return names


def name_of(settings: Mapping[str, Any], keys: Sequence[str]) -> str:
    """``lr=1e-4,seed=0``, as a folder's name."""
    names = short_names(keys)
    return ",".join(f"{names[key]}={_in_a_name(settings[key])}" for key in keys)


def label_of(settings: Mapping[str, Any], keys: Sequence[str]) -> str:
    """``lr=1e-4 group_size=8``, for people; empty where nothing but the seed is swept."""
    names = short_names(keys)
    return " ".join(f"{names[key]}={_cut(value_text(settings[key]))}" for key in keys if key != SEED)


def _in_a_name(value: Any) -> str:
    text = value_text(value)
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")
    if name == text and len(name) <= LONGEST:
        return name
    return f"{name[:24]}-{hashlib.blake2b(text.encode(), digest_size=3).hexdigest()}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _values(text: str, argument: str) -> Iterator[Any]:
    parts = list(_parts(text))
    for part in parts:
        if found := RANGE.fullmatch(part):
            first, last = int(found[1]), int(found[2])
            if last < first:
                raise RecipeError(f"'{argument}': the range {part.strip()} ends before it begins.")
            if last - first >= MOST_RUNS:
                raise RecipeError(f"'{argument}': the range {part.strip()} has more than {MOST_RUNS:,} values.")
            yield from range(first, last + 1)
            continue
        if re.fullmatch(r"\s*[-+.\deE]+\.\.[-+.\deE]+\s*", part):
            raise RecipeError(f"'{argument}': a range a..b is of whole numbers; write other values out, with commas.")
        if not part.strip() and len(parts) > 1:
            raise RecipeError(f"'{argument}': there is nothing between two commas; an empty text is ''.")
        yield read_yaml(part, f"'{argument}'")[0]


def _parts(text: str) -> Iterator[str]:
    """The text cut at its commas, but not inside brackets and quotes."""
    start, depth, quote = 0, 0, ""
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and not text[start:place].strip(" [{,:"):
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


State = Literal["waiting", "running", "finished", "untrained", "failed", "stopped"]
WAY_OUT = "Put back a copy, or begin another experiment (--name)."
NOT_COMPARED = ("name", "run_dir")


@dataclass
class PlannedRun:
    """A run of an experiment. ``why`` it failed; ``seconds`` that its processes took."""

    name: str
    settings: dict[str, Any]
    state: State = "waiting"
    why: str = ""
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        """True if there is nothing more to do for it."""
        return self.state in ("finished", "untrained")


class Experiment:
    """The folder of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.record = self.path / "experiment.json"
        self.recipe = self.path / "recipe.yaml"
        self.report = self.path / "report.html"
        self.results = self.path / "results.json"
        self.keys: list[str] = []
        self.runs: list[PlannedRun] = []
        if self.record.exists():
            data = read_json(self.record, WAY_OUT)
            try:
                self.keys = list(data["keys"])
                self.runs = [PlannedRun(**run) for run in data["runs"]]
            except (KeyError, TypeError) as error:
                raise RecordError(f"'{self.record}' is damaged ({error!r}). {WAY_OUT}") from error

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def left(self) -> list[PlannedRun]:
        return [run for run in self.runs if not run.over]

    def directory(self, run: PlannedRun) -> RunDirectory:
        return RunDirectory(self.path / run.name)

    def recipe_file(self, run: PlannedRun) -> Path:
        return self.path / "recipes" / f"{run.name}.yaml"

    def log(self, run: PlannedRun) -> Path:
        return self.path / "logs" / f"{run.name}.log"

    def label(self, run: PlannedRun) -> str:
        """The setting that a run belongs to, without its seed."""
        return label_of(run.settings, self.keys) or self.name

    def plan(self, data: Mapping[str, Any], name: str, grid: Grid, origins: Mapping[Place, str]) -> dict[str, Recipe]:
        """The recipes of a grid's new runs by the runs' names, all checked; ``data`` is what they share.

        A grid of the same keys on the same recipe adds runs; of a key that it leaves out all values so far are taken.
        Another one is refused.
        """
        shared = {key: value for key, value in data.items() if key not in NOT_COMPARED}
        used = {
            key: list({json.dumps(run.settings[key]): run.settings[key] for run in self.runs}.values()) for key in self.keys
        }
        grid = {**(used or {SEED: [data.get(SEED, 0)]}), **grid}
        keys = [key for key in grid if key != SEED] + [SEED]  # neighbours in a listing differ in the seed
        if self.keys:
            self._refuse_other(shared, keys)
            keys = self.keys
        known = [run.settings for run in self.runs]
        recipes: dict[str, Recipe] = {}
        for point in points_of({key: grid[key] for key in keys}):
            if point in known:
                continue
            run, own = name_of(point, keys), dict(origins)
            whole = deepcopy(shared)
            for key, value in point.items():
                set_value(whole, key, value, f"'{key}={value_text(value)}'", own)
            whole |= {"name": re.sub(r"[^A-Za-z0-9._-]+", "-", f"{self.name}.{run}"), "run_dir": str(self.path / run)}
            recipes[run] = check_recipe(whole, name, own)
            self.runs.append(PlannedRun(run, point))
        self.keys = keys
        return recipes

    def begin(self, data: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> None:
        """Write what was planned."""
        if not self.record.exists() and self.path.is_dir() and any(p.name != "run.lock" for p in self.path.iterdir()):
            raise RecipeError(f"'{self.path}' exists and holds no experiment. Choose another folder (--name).")
        for folder in ("recipes", "logs"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        for run in self.runs:
            if run.name in recipes:
                write_whole(self.recipe_file(run), dump_recipe(recipes[run.name]))
        if not self.recipe.exists():
            write_whole(self.recipe, write_yaml({key: v for key, v in data.items() if key not in NOT_COMPARED}))
            if modules := own_modules(data):
                write_whole(self.path / "modules.json", json.dumps(modules, indent=1) + "\n")
        self.save()

    def save(self) -> None:
        write_whole(
            self.record, json.dumps({"keys": self.keys, "runs": [asdict(run) for run in self.runs]}, indent=1) + "\n"
        )

    def look(self) -> None:
        """Take the state of each run from its directory: one whose process was killed may be finished, or gone."""
        for run in self.runs:
            directory = self.directory(run)
            if run.state != "untrained" and is_finished(directory):
                run.state, run.why = "finished", ""
            elif run.state == "finished" or (run.state == "untrained" and not directory.exists()):
                run.state = "waiting"
            elif run.state == "running":
                run.state = "stopped"

    def _refuse_other(self, shared: Mapping[str, Any], keys: Sequence[str]) -> None:
        """Refuse another recipe or other keys than those that the experiment was begun with."""
        if set(keys) != set(self.keys):
            raise RecipeError(
                f"the experiment '{self.path}' sweeps {', '.join(self.keys)}, and these arguments sweep {', '.join(keys)}. "
                "Sweep those alone, or begin another experiment (--name)."
            )
        begun, now = deepcopy(read_yaml(self.recipe.read_text(), str(self.recipe))[0]), json.loads(json.dumps(dict(shared)))
        for key in self.keys:
            for one in (begun, now):
                set_value(one, key, None, key, {})
        if found := list(differences(begun, now)):
            shown = "; ".join(f"{key} was {then!r:.60} and is now {new!r:.60}" for key, then, new in found[:3])
            raise RecipeError(
                f"the experiment '{self.path}' was begun with another recipe: {shown}. Its runs would not be comparable "
                f"with these. Begin another experiment (--name), or go on with its own recipe: sensorium sweep {self.path}"
            )


def is_finished(directory: RunDirectory) -> bool:
    """True if a run has the checkpoint of its last step."""
    if not directory.exists():
        return False
    recipe, _ = read_yaml(directory.recipe.read_text(), str(directory.recipe))
    complete = CheckpointFolder(directory.checkpoints).complete()
    return bool(complete) and complete[-1] >= recipe["warm_start"]["steps"] + recipe["steps"]


LOOK_S = 0.2
SHOW_EVERY_S = 60.0
END_S = 120.0  # for a run to end in order
FREE_S = 150.0  # longer than ENDING_S, for the process of a run that was killed with its sweep to end
UNTRAINED = 3  # the exit code of a run that learned nothing
MEMORY_SHARE = 0.9
MOST_NAMED = 24
Say = Callable[[str], None]


@dataclass(frozen=True)
class Room:
    """How many runs may go on at a time, why, and the GPU of each place; empty on a CPU."""

    jobs: int
    why: str
    gpus: tuple[str, ...] = ()


def room_for(recipes: Sequence[Recipe], asked: int = 0) -> Room:
    """So many jobs as were asked for, or as cores, GPUs and memory have room for by the forecast; at most one a run."""
    first, most = recipes[0], len(recipes)
    if processes := placed_processes(first.model_dump(include={"cluster", "rollout"})):
        what = f"one run at a time: each has processes of its own ({', '.join(processes)})"
        return Room(min(asked, most) or 1, what if not asked else "")
    gpus = _gpus() if not first.model.device.startswith("cpu") and gpus_seen() else ()
    if gpus:
        jobs = min(asked or len(gpus), len(gpus), most)
        less = f"; --jobs {asked} would put several on one" if asked > len(gpus) else ""
        return Room(jobs, f"{counted(jobs, 'run')} at a time, each with one of {counted(len(gpus), 'GPU')}{less}", gpus)
    needed, free = max(map(_needed, recipes)), free_memory()
    fitting = most if free is None else max(1, int(MEMORY_SHARE * free / needed))
    takes = f"a run takes about {bytes_text(needed)} by the forecast, and {bytes_text(free or 0)} are free"
    if asked:
        return Room(min(asked, most), f"ATTENTION: {takes}: {fitting} fit." if min(asked, most) > fitting else "")
    cores = max(1, _cores() // (first.threads or 1))
    jobs = min(most, cores, fitting)
    return Room(jobs, f"{counted(jobs, 'run')} at a time on {counted(_cores(), 'core')}; {takes}")


def opening(experiment: Experiment, left: Mapping[str, Recipe]) -> list[str]:
    """What will be done, and what will be missing in the end."""
    over = len(experiment.runs) - len(left)
    lines = [f"{counted(len(experiment.runs), 'run')} in {experiment.path}{f', {over} of them done' if over else ''}"]
    lines += [f"  {name}" for name in list(left)[:MOST_NAMED]] + (["  …"] if len(left) > MOST_NAMED else [])
    evaluated = [bool(recipe.tasks.evaluate) and recipe.evaluation.every > 0 for recipe in left.values()]
    if not all(evaluated):
        lines.append(
            "ATTENTION: the recipe has no evaluation at its end (tasks.evaluate, evaluation.every), so there will be "
            "nothing held out to compare settings by."
        )
    if any(not recipe.checkpoint.every for recipe in left.values()):
        lines.append("checkpoint.every is 0: a run that is killed starts over.")
    return lines


def with_threads(experiment: Experiment, recipes: dict[str, Recipe], jobs: int) -> dict[str, Recipe]:
    """The recipes with their share of the cores, where neither recipe nor environment says how many threads.

    Runs that are added take the threads of those before them: on a CPU the last bits depend on them.
    """
    files = [experiment.recipe_file(run) for run in experiment.runs if run.name not in recipes]
    share = 0 if jobs == 1 or "OMP_NUM_THREADS" in os.environ else max(1, _cores() // jobs)
    if files:
        share = read_yaml(files[0].read_text(), str(files[0]))[0]["threads"]
    return {name: one if one.threads else one.model_copy(update={"threads": share}) for name, one in recipes.items()}


def _needed(recipe: Recipe) -> int:
    try:
        plan: Plan = make_plan(recipe)
    except (IncompleteConfig, SensoriumError):  # the run reports it
        return 1 << 30
    model = 0 if is_ours(recipe.model.path) else sum(plan.memory.values())  # of ours the forecast is far too high
    return model + sum(plan.interpreters.values())


def _gpus() -> tuple[str, ...]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(filter(None, given.split(",")))
    return tuple(str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Job:
    """A run's process, the GPU that it has, and our end of the pipe by which it notices that this process is gone."""

    run: PlannedRun
    process: "subprocess.Popen[bytes]"
    began: float
    gpu: str
    pipe: int


class Jobs:
    """Trains all runs of an experiment that are not over. ``ended`` is called after each."""

    def __init__(self, experiment: Experiment, room: Room, say: Say, ended: Callable[[], object]) -> None:
        self.experiment, self.room, self.say, self.ended = experiment, room, say, ended
        self.active: list[Job] = []
        self._free = list(room.gpus)
        self._shown = time.monotonic()
        self._total = 0

    def run(self) -> None:
        waiting = self.experiment.left
        self._total = len(waiting)
        try:
            while waiting or self.active:
                while waiting and len(self.active) < self.room.jobs:
                    self._start(waiting.pop(0), len(waiting))
                time.sleep(LOOK_S)
                for job in [job for job in self.active if job.process.poll() is not None]:
                    self._finish(job, len(waiting))
                if time.monotonic() - self._shown > SHOW_EVERY_S:
                    self._show()
        except BaseException:
            self.end_all()
            raise

    def end_all(self) -> None:
        """End every process in order, and kill those that do not, or all at the second Ctrl-C."""
        if not self.active:
            return
        self.say(f"ending {counted(len(self.active), 'run')}; they go on from their last checkpoints with the same command")
        try:
            for job in self.active:
                with suppress(ProcessLookupError):
                    job.process.send_signal(signal.SIGTERM)
            until = time.monotonic() + END_S
            for job in self.active:
                with suppress(subprocess.TimeoutExpired):
                    job.process.wait(max(0.0, until - time.monotonic()))
        finally:
            for job in self.active:
                if job.process.poll() is None:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(job.process.pid, signal.SIGKILL)
                    with suppress(ProcessLookupError):
                        job.process.kill()
                    job.process.wait()
                os.close(job.pipe)
                job.run.seconds += time.monotonic() - job.began
                job.run.state = "finished" if is_finished(self.experiment.directory(job.run)) else "stopped"
            self.active.clear()
            self.experiment.save()

    def _start(self, run: PlannedRun, left: int) -> None:
        directory = self.experiment.directory(run)
        how = how_to_go_on(directory)
        source = directory.path if how == "--resume" else self.experiment.recipe_file(run)
        try:
            wait_until_free(directory, self.say)
        except RecordError as error:
            self._failed(run, str(error))
            return
        command = [sys.executable, "-m", "sensorium", "train", str(source)]
        command.append(how if how == "--resume" else f"run_dir={json.dumps(str(directory.path))}")  # it may have been moved
        command += [how] if how == "--restart" else []
        gpu = self._free.pop(0) if self._free else ""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        theirs, ours = os.pipe()
        try:
            with self.experiment.log(run).open("ab") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs,), start_new_session=True,
                    env={**environment, ENDS_WITH: str(theirs)},
                )  # fmt: skip
        finally:
            os.close(theirs)
        run.state, run.why = "running", ""
        self.active.append(Job(run, process, time.monotonic(), gpu, ours))
        self.experiment.save()
        self.say(f"{run.name} {'goes on' if how == '--resume' else 'begins'}; {left} wait")

    def _finish(self, job: Job, left: int) -> None:
        self.active.remove(job)
        self._free += [job.gpu] if job.gpu else []
        os.close(job.pipe)
        run, code = job.run, job.process.returncode
        run.seconds += time.monotonic() - job.began
        if code == UNTRAINED:
            run.state, run.why = "untrained", last_error(self.experiment.log(run)) or "it made no update"
            self.say(f"{run.name} ended and nothing was learned: {run.why}")
        elif code == 0 and is_finished(self.experiment.directory(run)):
            run.state = "finished"
            self.say(f"{run.name} finished after {run.seconds:,.0f} s{self._outlook(left)}")
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._failed(run, last_error(self.experiment.log(run)) or how)
            return
        self.experiment.save()
        self.ended()

    def _failed(self, run: PlannedRun, why: str) -> None:
        run.state, run.why = "failed", why
        self.say(f"ATTENTION: {run.name} failed: {why} (all it printed: {self.experiment.log(run)})")
        self.experiment.save()
        self.ended()

    def _outlook(self, left: int) -> str:
        done = [run.seconds for run in self.experiment.runs if run.state == "finished" and run.seconds]
        if not left or not done:
            return ""
        minutes = sum(done) / len(done) * left / self.room.jobs / 60
        return f"; {left} wait, about {minutes:,.0f} min" if minutes >= 1 else f"; {left} wait"

    def _show(self) -> None:
        self._shown = time.monotonic()
        parts = []
        for job in self.active:
            rows = read_metrics(self.experiment.directory(job.run).metrics)
            reward = f", reward {rows[-1]['reward/mean']:.3f}" if rows and "reward/mean" in rows[-1] else ""
            parts.append(f"{job.run.name} step {rows[-1]['step'] if rows else 0}{reward}")
        self.say("; ".join(parts))


def how_to_go_on(directory: RunDirectory) -> str:
    """The option by which a run goes on from its last checkpoint, or starts over; empty for one that begins."""
    if not directory.exists():
        return ""
    if CheckpointFolder(directory.checkpoints).complete():
        return "--resume"
    return "" if directory.is_barren() else "--restart"


def wait_until_free(directory: RunDirectory, say: Say) -> None:
    """Wait until no process holds a run: one whose sweep was killed needs a moment to notice and to end."""
    until, told = time.monotonic() + FREE_S, False
    while directory.path.is_dir():
        try:
            with lock_run(directory.path):
                return
        except RecordError as error:
            if time.monotonic() > until:
                raise
            if not told:
                say(f"waiting for its end: {error}")
                told = True
        time.sleep(LOOK_S)


def last_error(log: Path) -> str:
    """The last error in a log, without its first word."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else next((line.strip() for line in reversed(lines) if line.strip()), "")
