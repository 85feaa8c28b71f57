"""Worlds: tasks by seed, train and test disjoint by content."""

from collections.abc import Mapping
from typing import Any

import pytest

from sensorium.envs.frozen_lake import FrozenLake
from sensorium.media.store import MediaStore
from sensorium.recipe.names import NAMES, build
from sensorium.tasks.worlds import Worlds, side
from sensorium.vocabulary.errors import RecipeError, TaskError

pytest.importorskip("gymnasium")


def contents(worlds: Worlds) -> list[str]:
    specs = [worlds[i].environment for i in range(len(worlds))]
    return [FrozenLake.content_key(spec.seed, spec.options) for spec in specs if spec is not None]


def test_train_and_test_share_no_map_whatever_their_seeds() -> None:
    train = contents(Worlds("frozen_lake", MediaStore(), size=150, seed=0))
    test = [c for seed in (0, 1) for c in contents(Worlds("frozen_lake", MediaStore(), split="test", size=60, seed=seed))]
    assert len(set(train)) == 150
    assert not set(train) & set(test)
    assert {side(c) for c in train} == {"train"}


def test_without_distinct_maps_repeat_but_sides_hold() -> None:
    options = {"size": 2}
    train = contents(Worlds("frozen_lake", MediaStore(), options, size=20, distinct=False))
    assert len(train) == 20 > len(set(train))
    assert {side(c) for c in train} == {"train"}


def test_a_world_too_small_for_its_size_says_so() -> None:
    with pytest.raises(TaskError, match=r"only \d different worlds.*distinct: false"):
        Worlds("frozen_lake", MediaStore(), {"size": 2}, size=50)


def test_the_same_recipe_gives_the_same_tasks_and_each_plays() -> None:
    options = {"view": "text", "max_turns": 3}
    settings = {"environment": "frozen_lake", "options": options, "size": 5, "seed": 4}
    first, second = (build("source", "worlds", settings, "x", store=MediaStore()) for _ in range(2))
    assert [first[i] for i in range(5)] == [second[i] for i in range(5)]
    assert len({first[i].id for i in range(5)}) == 5
    spec = first[0].environment
    world = build("environment", spec.name, spec.options, "x", store=MediaStore())
    head, _ = world.reset(spec.seed)
    assert head[0].role == "system"


def test_wrong_options_are_refused_with_the_right_name() -> None:
    with pytest.raises(RecipeError, match="did you mean 'slippery'"):
        Worlds("frozen_lake", MediaStore(), {"slipery": True})
    with pytest.raises(RecipeError, match="did you mean 'frozen_lake'"):
        Worlds("frozenlake", MediaStore())
    with pytest.raises(RecipeError, match="unknown split 'tests'"):
        Worlds("frozen_lake", MediaStore(), split="tests")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="at least one"):
        Worlds("frozen_lake", MediaStore(), size=0)


class Keyless:
    """A world of the user's own that cannot tell its content."""

    def __init__(self, store: MediaStore) -> None: ...

    def close(self) -> None: ...


class Coin(Keyless):
    """A world with two contents."""

    @staticmethod
    def content_key(seed: int, options: Mapping[str, Any]) -> str:
        return str(seed % 2)


def test_a_world_of_ones_own_needs_a_content_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("keyless", Keyless), ("coin", Coin)):
        monkeypatch.setitem(NAMES["environment"], name, f"{kind.__module__}:{kind.__name__}")
    with pytest.raises(RecipeError, match="content_key"):
        Worlds("keyless", MediaStore())
    sides = {side("0"), side("1")}
    for split in sides:
        assert len(Worlds("coin", MediaStore(), split=split, size=1)) == 1
