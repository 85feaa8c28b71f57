"""The runs that are looked at: which there are, how each does, its curves, in what their recipes differ, and how their
episodes were scored again (``sensorium rescore``)."""

import hashlib
import json
import math
import os
import re
import shlex
import socket
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic_core import from_json

from sensorium.recipe.yaml import read_yaml, value_text, write_yaml
from sensorium.report.charts import Series, line_chart
from sensorium.report.tables import rescoring_grids
from sensorium.runs.durable import read_json
from sensorium.runs.metrics import read_health
from sensorium.runs.process_table import alive, read_processes
from sensorium.runs.run_directory import NAME as LOCK
from sensorium.runs.run_directory import RunDirectory, last_holder
from sensorium.viewer.index import DAMAGED, EpisodeIndex, term_values
from sensorium.vocabulary.errors import RecordError, SensoriumError
from sensorium.vocabulary.plain import differences
from sensorium.vocabulary.secrets import without_keys

Json = dict[str, Any]
DEPTH = 3  # folders below one that was given in which runs are looked for
MOST_RUNS = 500
LARGEST = 1e300  # numbers that are drawn: differences of two are finite
COLOURS = (0, 2, 3, 4, 5, 1)  # of the charts' six
CURVES = ("reward/mean", "accuracy", "eval/accuracy", "eval/reward")  # shown first
NEXT = ("policy/entropy", "policy/grad_norm", "mismatch/kl", "episodes/length_mean", "groups/zero_variance", "time/step_s")
UNINTERESTING = ("name", "run_dir")  # keys of recipes in which runs always differ
RESCORING, RESCORED = "rescoring.json", "episodes.jsonl"
MOST_RESCORINGS = 20  # of a run, the newest
INDEX_SHARE, INDEX_S = 0.003, 0.1  # while a run goes on here, indexing takes this share of its time, and so much at first
EPSILON = 1e-9  # advantages below it are 0, as in a rescoring's own count
RescoredSort = Literal["change", "gain", "loss", "step"]


class Curves:
    """The columns of a run's metrics.jsonl; ``update`` reads what was written since, or a rewritten file from its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: dict[str, tuple[array[float], array[float]]] = {}
        self.last: Json = {}
        self.problem = ""
        self._inode, self._read = 0, 0
        self._lock = threading.Lock()

    def update(self) -> "Curves":
        """Read new rows. A damaged row is left out and named in ``problem``."""
        if not self.path.is_file():
            return self
        with self._lock, suppress(FileNotFoundError), self.path.open("rb") as file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode or state.st_size < self._read:
                self.columns, self.last, self.problem, self._inode, self._read = {}, {}, "", state.st_ino, 0
            file.seek(self._read)
            while (line := file.readline()).endswith(b"\n"):
                try:
                    self._add(json.loads(line))
                except (*DAMAGED, RecursionError):
                    self.problem = f"{self.path.name}: the row at byte {self._read:,} cannot be read and is left out"
                self._read += len(line)
        return self

    def _add(self, row: Mapping[str, Any]) -> None:
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        if not abs(step := numbers.pop("step")) < LARGEST:
            raise ValueError("the step is not finite")
        for name, value in numbers.items():
            if abs(value) < LARGEST:
                steps, values = self.columns.setdefault(name, (array("d"), array("d")))
                steps.append(step)
                values.append(value)
        self.last |= {name: row[name] for name in ("step", *CURVES, "time/step_s") if name in row}

    def series(self, name: str, metric: str, colour: int) -> Series:
        with self._lock:
            points = tuple(zip(*self.columns.get(metric, ((), ())), strict=True))
        return Series(name, points, colour, marks=metric.startswith("eval/") and len(points) < 40)


class Rescoring:
    """A rescoring in a folder of its own: its summary, and of each episode where its row lies and how it changes.

    Memory holds 25 bytes of each row. A rescoring that was repeated into the same folder is read again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self._lock = threading.Lock()
        self._summary: tuple[float, Json] = (-1.0, {})
        self._read: tuple[float, int] = (-1.0, 0)
        self._starts_N = np.zeros(0, np.int64)
        self._changes_N = np.zeros(0)
        self._turned_N = np.zeros(0, bool)
        self._names_N = np.zeros(0, np.uint64)

    @property
    def written(self) -> float:
        return _changed(self.folder / RESCORING)

    def summary(self) -> Json:
        """What the rescoring found, as it wrote it; raises RecordError where that cannot be read."""
        with self._lock:
            if self._summary[0] != self.written:
                written = self.written
                self._summary = written, read_json(self.folder / RESCORING, "Run 'sensorium rescore' again.")
            return self._summary[1]

    def of(self, run: Path) -> bool:
        """Whether it is of this run, beside which its folder lies."""
        with suppress(RecordError):
            named = Path(str(self.summary().get("run", ""))).name
            return named == run.name if named else self.name.startswith(f"{run.name}_rescored_")
        return self.name.startswith(f"{run.name}_rescored_")

    def overview(self) -> Json:
        """Its table of terms with notes, and by which rewards."""
        found: Json = {"name": self.name, "written": self.written}
        try:
            summary = self.summary()
            grid = rescoring_grids(summary)[0]
            file = self.folder / "rewards.yaml"
            rewards, _ = read_yaml(file.read_text(), str(file)) if file.is_file() else ({}, None)
        except (SensoriumError, OSError, *DAMAGED) as error:
            return found | {"problem": f"'{self.folder}' cannot be read ({error}): run 'sensorium rescore' again."}
        plain = without_keys(rewards) if isinstance(rewards, dict) else {}
        return found | {
            "title": grid.title.removeprefix(f"{summary['run']}: "),
            "columns": grid.columns,
            "rows": grid.rows,
            "notes": grid.notes,
            "signs": summary["signs"],
            "correlation": summary["correlation"],
            "rewards": write_yaml({key: value for key, value in plain.items() if key != "run"}),
        }

    def rows(self, sort: RescoredSort, *, turned: bool, offset: int, limit: int) -> tuple[int, list[Json]]:
        """How many episodes change (``turned``: in the sign of an advantage), and a page of them."""
        with self._lock:
            self._scan()
            changes_N = self._changes_N
            kept = np.flatnonzero(self._turned_N if turned else changes_N != 0)  # NaN: a reward came or went
            keys = {"change": -np.abs(changes_N[kept]), "gain": -changes_N[kept], "loss": changes_N[kept]}  # NaN is last
            order = kept if sort == "step" else kept[np.argsort(keys[sort], kind="stable")]
            rows = []
            for place in order[offset : offset + limit]:
                with suppress(*DAMAGED):  # a row that is not as it is written is left out
                    rows.append(self._row(int(self._starts_N[place])))
            return len(kept), rows

    def row(self, episode: str, step: int) -> Json | None:
        """How an episode was scored; None if it was not."""
        with self._lock, suppress(RecordError, OSError, *DAMAGED):
            self._scan()
            wanted = np.uint64(_digest(episode))
            for place in np.flatnonzero(self._names_N == wanted):
                found = self._row(int(self._starts_N[place]))
                if (found["name"], found["step"]) == (episode, step):
                    return found
        return None

    def _scan(self) -> None:
        """Read all rows once; they lie in a file that is written whole."""
        path = self.folder / RESCORED
        if not path.is_file():
            raise RecordError(f"'{path}' is gone: run 'sensorium rescore' again.")
        state = _changed(path), path.stat().st_size
        if state == self._read:
            return
        starts, changes, turned, names = array("q"), array("d"), array("b"), array("Q")
        with path.open("rb") as file:
            start = 0
            for line in file:
                with suppress(*DAMAGED):
                    row = from_json(line)
                    old, new = row["reward"]
                    same = old is None and new is None
                    change = 0.0 if same else np.nan if old is None or new is None else float(new) - float(old)
                    name, opposite = _digest(row["episode"]), _turned(row["advantages"])
                    starts.append(start)
                    changes.append(change)
                    turned.append(opposite)
                    names.append(name)
                start += len(line)
        self._starts_N, self._changes_N = np.array(starts), np.array(changes)
        self._turned_N, self._names_N = np.array(turned, dtype=bool), np.array(names)
        self._read = state

    def _row(self, start: int) -> Json:
        with (self.folder / RESCORED).open("rb") as file:
            file.seek(start)
            return _shown(from_json(file.readline()))


def _shown(row: Json) -> Json:
    """A row of a rescoring as pages have it; raises one of DAMAGED for one that is not as it is written."""
    old, new = (term_values(scores) for scores in row["scores"])
    advantages = row["advantages"]
    return {
        "name": row["episode"],
        "step": row["step"],
        "task": row["task"],
        "group": row["group"],
        "reward": row["reward"],
        "correct": row["correct"],
        "advantage": [None if not side else sum(side) / len(side) for side in advantages],
        "turned": _turned(advantages),
        "terms": {name: [old.get(name), new.get(name)] for name in sorted({**old, **new})},
        "reasons": {s["name"]: s["reason"] for s in row["scores"][1] if s.get("value") is None and s.get("reason")},
    }


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def _turned(advantages: Sequence[Sequence[float] | None]) -> bool:
    """Whether the advantage of a turn has the other sign now."""
    old, new = advantages
    return any(min(abs(x), abs(y)) > EPSILON and x * y < 0 for x, y in zip(old or (), new or (), strict=False))


class ViewedRun:
    """One run: its id in addresses, its name in lists, and what is read of it."""

    def __init__(self, path: Path, name: str) -> None:
        self.directory, self.name = RunDirectory(path), name
        self.id = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]
        self.index = EpisodeIndex(self.directory)
        self.curves = Curves(self.directory.metrics)
        self._recipe: tuple[float, Json, str] = (-1.0, {}, "")
        self._rescorings: dict[str, Rescoring] = {}
        self.index_s = 0.0  # of CPU time that indexing took since the run was started
        self._started = 0.0

    @property
    def index_s_left(self) -> float:
        """Seconds of CPU time that indexing may take now: without a limit, unless the run goes on on this machine."""
        holder, started = last_holder(self.directory.path), _changed(self.directory.path / LOCK)
        if started != self._started:
            self._started, self.index_s = started, 0.0
        if holder is None or holder[1] != socket.gethostname() or not alive(holder[0]):
            return math.inf
        return INDEX_S + INDEX_SHARE * (time.time() - started) - self.index_s

    def rescorings(self) -> list[Rescoring]:
        """The rescorings in folders beside the run, the newest first."""
        own = Path(os.path.realpath(self.directory.path))
        found = {}
        with suppress(OSError):
            for folder in own.parent.iterdir():
                if folder != own and (folder / RESCORING).is_file() and (folder / RESCORED).is_file():
                    one = self._rescorings.get(folder.name) or Rescoring(folder)
                    if one.of(own):
                        found[folder.name] = one
        self._rescorings = found
        return sorted(found.values(), key=lambda one: -one.written)[:MOST_RESCORINGS]

    def recipe(self) -> Json:
        """The recipe, without keys of services; empty where it cannot be read."""
        return self._read_recipe()[1]

    def _read_recipe(self) -> tuple[float, Json, str]:
        """When the recipe was written, and it as data and as YAML: read again only where it has changed."""
        changed = _changed(self.directory.recipe)
        if changed != self._recipe[0]:
            data: Json = {}
            with suppress(OSError, SensoriumError, ValueError):
                found, _ = read_yaml(self.directory.recipe.read_text(), str(self.directory.recipe))
                data = dict(without_keys(found)) if isinstance(found, dict) else {}
            self._recipe = (changed, data, write_yaml(data))
        return self._recipe

    def summary(self) -> Json:
        """A line of the list of runs."""
        recipe, curves = self.recipe(), self.curves.update()
        planned = _whole(recipe.get("steps")) + _whole(_section(recipe, "warm_start").get("steps"))
        step = _whole(curves.last.get("step"))
        state, words = run_state(self.directory.path, step, planned)
        try:
            lasting = [notice for notice in read_health(self.directory.health).last() if notice.state != "ended"]
            findings = [{"rule": n.rule, "grave": n.grave, "text": n.text, "step": n.step} for n in lasting]
        except (SensoriumError, *DAMAGED) as error:
            text = (
                str(error)
                if isinstance(error, SensoriumError)
                else f"a row cannot be read ({type(error).__name__}: {error})"
            )
            findings = [{"rule": "health.jsonl", "grave": False, "text": text, "step": 0}]
        return {
            "id": self.id,
            "name": self.name,
            "state": state,
            "words": words,
            "step": step,
            "steps": planned,
            "health": "grave" if any(one["grave"] for one in findings) else "caution" if findings else "well",
            "findings": findings,
            "last": curves.last,
            "model": str(_section(recipe, "model").get("path", "")),
            "problem": curves.problem,
            "written": _changed(self.directory.metrics) or _changed(self.directory.recipe),
        }

    def details(self) -> Json:
        """All but the episodes: summary, recipe, evaluations, names of metrics."""
        try:
            evaluations = [
                {key: one.get(key) for key in ("step", "name", "accuracy", "reward", "interval", "tasks")}
                for one in self.directory.summaries()
            ]
        except RecordError as error:
            evaluations = [{"problem": str(error)}]
        names = sorted(self.curves.columns)
        summary = self.summary()
        shown = [name for name in CURVES if name in self.curves.columns]
        shown += [name for name in names if name.startswith("reward/") and name not in shown]
        shown += [name for name in NEXT if name in self.curves.columns]
        return summary | {
            "recipe": self._read_recipe()[2],
            "evaluations": evaluations,
            "rescorings": len(self.rescorings()),
            "rescore": f"sensorium rescore {shlex.quote(str(self.directory.path))} --rewards FILE",
            "metrics": [*shown, *(name for name in names if name not in shown)],
        }

    def series(self, name: str, metric: str, colour: int) -> Series:
        """A curve; those of evaluations begin with the one before the first step, which metrics.jsonl has no row for."""
        found = self.curves.update().series(name, metric, colour)
        evaluation, _, what = metric.partition("/")
        if found.points and found.points[0][0] > 0 and what in ("accuracy", "reward"):
            with suppress(RecordError):
                value = read_json(self.directory.eval / f"step_000000_{evaluation}.json", "").get(what)
                if isinstance(value, int | float) and abs(value) < LARGEST:
                    return replace(found, points=((0.0, float(value)), *found.points))
        return found

    def glance(self) -> Json:
        """What tells a page to ask again: it changes when the run has written something, or has ended."""
        stamps = [_changed(path) for path in (self.directory.metrics, self.directory.health, self.directory.eval)]
        holder = last_holder(self.directory.path)
        return {"stamps": stamps, "alive": holder is not None and _may_live(holder)}


def run_state(path: Path, step: int, planned: int) -> tuple[str, str]:
    """Whether a run goes on, as one word of a few, and in words."""
    holder = last_holder(path)
    with suppress(RecordError):
        processes = read_processes(path)
        if processes is not None and processes.end is not None and holder is None:
            cause = f": {processes.end.cause}" if processes.end.cause else ""
            return processes.end.how, f"{processes.end.how}{cause}"
    if holder is not None:
        if holder[1] != socket.gethostname():
            return "running", f"held by process {holder[0]} on {holder[1]}, which is not seen from here"
        if alive(holder[0]):
            return "running", f"process {holder[0]}"
        return "killed", f"its process, {holder[0]}, is gone and did not record how the run ended"
    if planned and step >= planned:
        return "finished", "made its last step"
    return "stopped", "stopped before its last step" if planned else "over"


def find_runs(places: Sequence[Path]) -> list[ViewedRun]:
    """The runs in these folders, and in the folders below them; refused if a place is no folder."""
    found: dict[str, ViewedRun] = {}
    for place in places:
        if not place.is_dir():
            raise RecordError(f"'{place}' is no folder: give a run (runs/NAME), or a folder of runs.")
        for path in _runs_below(place, DEPTH):
            name = path.name if path == place else str(path.relative_to(place))
            run = ViewedRun(path, name)
            found.setdefault(run.id, run)
            if len(found) == MOST_RUNS:
                return list(found.values())
    return list(found.values())


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "recipe.yaml").is_file():
        yield folder
    elif depth:
        with suppress(OSError):
            for path in sorted(folder.iterdir()):
                if path.is_dir() and not path.name.startswith("."):
                    yield from _runs_below(path, depth - 1)


def charts(runs: Sequence[ViewedRun], metrics: Sequence[str]) -> list[str]:
    """Charts of these metrics as SVG, the runs' curves in one."""
    drawn = []
    for metric in metrics:
        named = [(run.name if len(runs) > 1 else metric, run) for run in runs[: len(COLOURS)]]
        series = [run.series(name, metric, COLOURS[i]) for i, (name, run) in enumerate(named)]
        drawn.append(line_chart(metric, series))
    return [chart for chart in drawn if chart]


def recipe_differences(runs: Sequence[ViewedRun]) -> list[Json]:
    """The keys of the recipes in which these runs differ, with the value of each run."""
    recipes = [run.recipe() for run in runs]
    keys: dict[str, None] = {}
    for other in recipes[1:]:
        keys |= dict.fromkeys(key for key, _, _ in differences(recipes[0], other))
    shown = [key for key in keys if key not in UNINTERESTING]
    return [{"key": key, "values": [_at(recipe, key) for recipe in recipes]} for key in shown]


def _at(recipe: Any, key: str) -> str:
    for part in re.split(r"\.", key):
        recipe = recipe.get(part) if isinstance(recipe, Mapping) else None
    return "" if recipe is None else value_text(recipe)


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime_ns / 1e9
    return 0.0


def _may_live(holder: tuple[int, str]) -> bool:
    return holder[1] != socket.gethostname() or alive(holder[0])


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and abs(value) < LARGEST else 0


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a recipe, which may be written as anything."""
    found = recipe.get(name)
    return found if isinstance(found, Mapping) else {}
