"""Whatever stands in a recipe, it is a recipe or one paragraph that says what is wrong: never a traceback."""

import copy
import random
from contextlib import suppress
from typing import Any

import yaml

from sensorium.recipe.load import parse_recipe, shipped_recipes
from sensorium.recipe.plan import make_plan
from sensorium.vocabulary.errors import SensoriumError

TRIES = 120
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 10**30, -(10**30), 0.5, -0.5, 1e308, float("inf"), float("nan"), "", " ", "x", "1",
    "nan", "../..", "a/b", "a:b", "os:system", ":", "tiny:", "tiny:qwen2", "package:", "package:../..", "eval/", "@",
    "\x00", "\ud800", "ü\u2028", [], [[]], [None], [1], ["x"], {}, {"x": 1}, {"name": "exact"}, {"": None}, [{}],
    [{"source": 3}],
]  # fmt: skip

BROKEN_YAML = ["[", "{", "'", "- a", "&a", "*a", "!!python/object:os.system", "<<: 3"]


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def change(data: Any, place: tuple[Any, ...], draw: random.Random) -> None:
    """Put a wrong value somewhere, take a key away, rename it, or move another part of the recipe there."""
    for key in place[:-1]:
        data = data[key]
    last = place[-1]
    match draw.randrange(4):
        case 0 | 1:
            data[last] = copy.deepcopy(draw.choice(VALUES))
        case 2:
            data.pop(last)
        case 3 if isinstance(data, dict):
            data[draw.choice(["x", "namee", f"{last}s", "", "run_dir"])] = data.pop(last)


def test_random_changes_of_shipped_recipes_give_a_recipe_or_one_paragraph() -> None:
    shipped = [parse_recipe(path.read_text(), name) for name, path in shipped_recipes().items()]
    recipes = [recipe.model_dump(mode="json") for recipe in shipped]
    draw, fine = random.Random(0), 0
    for _ in range(TRIES):
        data = copy.deepcopy(draw.choice(recipes))
        for _ in range(draw.choice([1, 1, 2, 5])):
            place = draw.choice(places(data)[1:])
            change(data, place, draw)
        text = yaml.safe_dump(data, allow_unicode=True)
        with suppress(SensoriumError):
            make_plan(parse_recipe(text, "fuzzed"))
            fine += 1
    assert 0 < fine < TRIES


def test_random_overrides_give_a_recipe_or_one_paragraph() -> None:
    text = shipped_recipes()["shapes"].read_text()
    keys = [".".join(map(str, place)) for place in places(yaml.safe_load(text))[1:]]
    draw = random.Random(1)
    for _ in range(TRIES):
        key = draw.choice(keys) + draw.choice(["", "", ".0", ".x", ".", "..", "=", ".name"])
        value = draw.choice([*map(repr, VALUES), *BROKEN_YAML])
        with suppress(SensoriumError):
            parse_recipe(text, "shapes", [f"{key}={value}"])
