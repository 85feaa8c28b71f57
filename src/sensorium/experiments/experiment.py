"""A sweep: the grid of its settings, its folder, its runs and the state of each.

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
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from sensorium.recipe.load import check_recipe, dump_recipe, set_value
from sensorium.recipe.registry import own_modules
from sensorium.recipe.schema import Recipe
from sensorium.recipe.yaml import Path as Place
from sensorium.recipe.yaml import read_yaml, value_text, write_yaml
from sensorium.runs.checkpoint_layout import CheckpointFolder
from sensorium.runs.durable import read_json, write_whole
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import RecipeError, RecordError
from sensorium.vocabulary.plain import differences

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
