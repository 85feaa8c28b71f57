"""The grid of a sweep: the values of recipe keys, the settings that they make, and the names of their runs.

optimizer.lr=1e-4,3e-4 seed=0..2     six settings, from lr=1e-4,seed=0 to lr=3e-4,seed=2
rollout.stop=[a,b],[c]               two values, each a list
steps=20                             one value: a change that all runs share
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from sensorium.recipe.yaml import read_yaml, value_text
from sensorium.vocabulary.errors import RecipeError

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
