"""The processes of a sweep: each run is ``sensorium train`` in a process of its own, so many of them at a time.

Invariants: a run that failed does not stop the others. However this process ends, all that it started end: after Ctrl-C and
SIGTERM they are waited for, and by kill -9 they notice that the pipe to their parent is closed. What they have saved stays,
and the same command goes on from there.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sensorium.cluster.python_process import ENDS_WITH
from sensorium.experiments.experiment import Experiment, PlannedRun, is_finished
from sensorium.recipe.checks import gpus_seen
from sensorium.recipe.plan import Plan, free_memory, make_plan, placed_processes
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import IncompleteConfig, is_ours
from sensorium.recipe.yaml import read_yaml
from sensorium.report.tables import bytes_text
from sensorium.runs.checkpoint_layout import CheckpointFolder
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory, lock_run
from sensorium.vocabulary.errors import RecordError, SensoriumError
from sensorium.vocabulary.plain import counted

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
