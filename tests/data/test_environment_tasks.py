"""Tasks of an environment: by seed, train and test disjoint by content."""

import re
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from sensorium.data import environment_tasks
from sensorium.data.environment_tasks import EnvironmentTasks, side
from sensorium.data.media_store import MediaStore
from sensorium.data.task_content import content_of
from sensorium.envs.frozen_lake import FrozenLake
from sensorium.recipe.registry import NAMES, build
from sensorium.systems.vagen.adapter import VagenEnvironment
from sensorium.vocabulary.errors import RecipeError, TaskError

pytest.importorskip("gymnasium")


def contents(source: EnvironmentTasks) -> list[str]:
    specs = [source[i].environment for i in range(len(source))]
    return [FrozenLake.content_key(spec.seed, spec.options) for spec in specs if spec is not None]


def test_train_and_test_share_no_map_whatever_their_seeds() -> None:
    train = contents(EnvironmentTasks("frozen_lake", MediaStore(), size=150, seed=0))
    test = [
        c
        for seed in (0, 1)
        for c in contents(EnvironmentTasks("frozen_lake", MediaStore(), split="test", size=60, seed=seed))
    ]
    assert len(set(train)) == 150
    assert not set(train) & set(test)
    assert {side(c) for c in train} == {"train"}


def test_levels_are_starts_of_other_options_one_after_the_other() -> None:
    levels = [{"size": 3}, {"size": 4, "p": 0.7}]
    given: dict[str, Any] = {"options": {"max_turns": 7, "p": 0.9}, "size": 8, "levels": levels}
    train, test = (EnvironmentTasks("frozen_lake", MediaStore(), split=split, **given) for split in ("train", "test"))  # type: ignore[arg-type]
    assert (len(train), train.levels) == (16, (range(8), range(8, 16)))
    assert [task.environment.options for task in (train[0], train[8], train[-1])] == [  # type: ignore[union-attr]
        {"max_turns": 7, "p": 0.9, "size": 3}, {"max_turns": 7, "p": 0.7, "size": 4}, {"max_turns": 7, "p": 0.7, "size": 4}
    ]  # fmt: skip
    assert [train[i].metadata["category"] for i in (0, 8)] == ["size=3", "size=4 p=0.7"]
    assert len({task.id for task in map(train.__getitem__, range(16))}) == 16, "a seed may be drawn at both levels"
    assert not set(contents(train)) & set(contents(test))
    named = EnvironmentTasks("frozen_lake", MediaStore(), category="lakes", **given)
    assert named[0].metadata["category"] == "lakes size=3"
    plain = EnvironmentTasks("frozen_lake", MediaStore(), size=3)
    assert (plain.levels, plain[0].metadata["category"], plain[0].id.count("-")) == ((), "frozen_lake", 2)
    inner = {"environment": "frozen_lake", "options": {"max_turns": 3}}
    isolated = EnvironmentTasks("isolated", MediaStore(), inner, size=2, levels=levels, split_by="seed")
    assert isolated[2].environment.options["options"] == {"max_turns": 3, "size": 4, "p": 0.7}  # type: ignore[union-attr]


@pytest.mark.parametrize("levels", [[{"size": 3}, {"sizes": 4}], [{}], [3], [{"size": 3}, {"size": 999}]])
def test_levels_that_cannot_be_played_are_refused(levels: Any) -> None:
    with pytest.raises(RecipeError):
        EnvironmentTasks("frozen_lake", MediaStore(), size=2, levels=levels)


def test_without_distinct_maps_repeat_but_sides_hold() -> None:
    options = {"size": 2}
    train = contents(EnvironmentTasks("frozen_lake", MediaStore(), options, size=20, distinct=False))
    assert len(train) == 20 > len(set(train))
    assert {side(c) for c in train} == {"train"}


def test_too_few_starts_are_counted_and_each_advice_helps() -> None:
    small: dict[str, Any] = {"environment": "frozen_lake", "store": MediaStore(), "options": {"size": 2}}
    with pytest.raises(TaskError) as raised:
        EnvironmentTasks(**small, size=50)
    counted = re.search(r"6000 seeds .* lead to (\d+) different starts, (\d+) of them on side 'train'", str(raised.value))
    assert counted is not None
    every, own = map(int, counted.groups())
    assert 0 < own <= every < 50
    for advised, settings in (("distinct: false", {"distinct": False}), ("split_by: seed", {"split_by": "seed"})):
        assert advised in str(raised.value)
        assert len(EnvironmentTasks(**small, size=50, **settings)) == 50
    assert f"Lower size to {own}" in str(raised.value)
    assert len(EnvironmentTasks(**small, size=own)) == own


def test_the_same_recipe_gives_the_same_tasks_and_each_plays() -> None:
    options = {"view": "text", "max_turns": 3}
    settings = {"environment": "frozen_lake", "options": options, "size": 5, "seed": 4}
    first, second = (build("source", "environments", settings, "x", store=MediaStore()) for _ in range(2))
    assert [first[i] for i in range(5)] == [second[i] for i in range(5)]
    assert len({first[i].id for i in range(5)}) == 5
    spec = first[0].environment
    environment = build("environment", spec.name, spec.options, "x", store=MediaStore())
    head, _ = environment.reset(spec.seed)
    assert head[0].role == "system"


def test_wrong_options_are_refused_with_the_right_name() -> None:
    with pytest.raises(RecipeError, match="did you mean 'slippery'"):
        EnvironmentTasks("frozen_lake", MediaStore(), {"slipery": True})
    with pytest.raises(RecipeError, match="did you mean 'frozen_lake'"):
        EnvironmentTasks("frozenlake", MediaStore())
    with pytest.raises(RecipeError, match="unknown split 'tests'"):
        EnvironmentTasks("frozen_lake", MediaStore(), split="tests")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="at least one"):
        EnvironmentTasks("frozen_lake", MediaStore(), size=0)


def test_one_environment_is_built_for_the_sources_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    monkeypatch.setattr(environment_tasks, "build", lambda *given, **named: built.append(given) or build(*given, **named))
    store = MediaStore()
    for options in ({"size": 4}, {"size": 4}, {"size": 5}):
        EnvironmentTasks("frozen_lake", store, options, size=2)
    assert len(built) == 2
    EnvironmentTasks("frozen_lake", MediaStore(), {"size": 4}, size=2)
    assert len(built) == 3, "another run begins"


class Keyless:
    """A environment of the user's own that cannot tell its content."""

    def __init__(self, store: MediaStore) -> None: ...

    def close(self) -> None: ...


class Coin(Keyless):
    """A environment with two contents."""

    @staticmethod
    def content_key(seed: int, options: Mapping[str, Any]) -> str:
        return str(seed % 2)


def test_a_world_of_ones_own_needs_a_content_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("keyless", Keyless), ("coin", Coin)):
        monkeypatch.setitem(NAMES["environment"], name, f"{kind.__module__}:{kind.__name__}")
    with pytest.raises(RecipeError, match="content_key"):
        EnvironmentTasks("keyless", MediaStore())
    sides = {side("0"), side("1")}
    for split in sides:
        assert len(EnvironmentTasks("coin", MediaStore(), split=split, size=1)) == 1


class TwoStarts:
    """A VAGEN-style environment with two starts, which lie on one side of the split."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.shown = ""

    async def system_prompt(self) -> dict[str, Any]:
        return {"obs_str": "Choose a gate."}

    async def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        self.shown = f"gate {seed % 2}"
        return {"obs_str": self.shown}, {}

    async def close(self) -> None: ...


def test_no_start_on_a_side_names_the_key_that_helps() -> None:
    options = {"path": f"{__name__}:TwoStarts"}
    kept = {side(VagenEnvironment.content_key(seed, options)) for seed in (0, 1)}
    assert len(kept) == 1, "the test needs two starts on one side"
    (full,) = kept
    empty: Any = "test" if full == "train" else "train"
    settings: dict[str, Any] = {"store": MediaStore(), "options": options, "split": empty, "size": 8}
    for distinct in (True, False):
        with pytest.raises(TaskError) as raised:
            EnvironmentTasks("vagen", **settings, distinct=distinct)
        text = str(raised.value)
        assert all(fact in text for fact in ("1800 seeds", "2 different starts", f"none on side '{empty}'"))
        assert "split_by: seed" in text
        assert not any(useless in text for useless in ("distinct: false", "size"))
    assert len(EnvironmentTasks("vagen", **settings, split_by="seed")) == 8


class HangsAtItsEnd(Keyless):
    """Built at once, never closed."""

    @staticmethod
    def content_key(seed: int, options: Mapping[str, Any]) -> str:
        return str(seed)

    def close(self) -> None:
        threading.Event().wait(120)


class HangsAtItsStart(HangsAtItsEnd):
    """Never built."""

    def __init__(self, store: MediaStore) -> None:
        threading.Event().wait(120)


class Leaves(HangsAtItsEnd):
    """Ends the process."""

    def __init__(self, store: MediaStore) -> None:
        raise SystemExit(0)


def test_environments_that_hang_or_leave_do_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_tasks, "DEADLINE_S", 0.2)
    assert len(EnvironmentTasks(f"{__name__}:HangsAtItsEnd", MediaStore(), size=1)) == 1
    with pytest.raises(RecipeError, match=r"did not answer within 0\.2 s"):
        EnvironmentTasks(f"{__name__}:HangsAtItsStart", MediaStore(), size=1)
    with pytest.raises(RecipeError, match="SystemExit"):
        EnvironmentTasks(f"{__name__}:Leaves", MediaStore(), size=1)


def test_a_content_that_never_changes_is_found_at_once() -> None:
    with pytest.raises(TaskError, match="each of the first 100 seeds"):
        EnvironmentTasks(f"{__name__}:Constant", MediaStore(), size=4096)
    assert Constant.asked == 100


class Constant(Keyless):
    """Forgot its seed."""

    asked = 0

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        cls.asked += 1
        return "map"


class HangingKey:
    instant = True

    def __init__(self, store: MediaStore) -> None: ...

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        threading.Event().wait()
        return str(seed)

    def close(self) -> None: ...


def test_a_content_key_that_hangs_is_told_instead_of_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.data.environment_tasks.DEADLINE_S", 0.2)
    monkeypatch.setattr("sensorium.data.environment_tasks.ASKED_S", 0.0)
    with pytest.raises(
        RecipeError, match=r"the content_key of 'tests\.data\.test_environment_tasks:HangingKey' did not ans"
    ):
        EnvironmentTasks("tests.data.test_environment_tasks:HangingKey", MediaStore(), size=2)


class SlowKey(HangingKey):
    """Answers, and takes its time for each."""

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        time.sleep(0.05)
        return str(seed)


def test_a_slow_content_key_is_given_its_time_for_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = EnvironmentTasks(f"{__name__}:SlowKey", MediaStore(), size=5).seeds
    monkeypatch.setattr(environment_tasks, "ASKED_S", 0.0)
    calls = []
    monkeypatch.setattr(environment_tasks, "_keys", lambda *given: calls.append(1) or asked(*given))
    assert EnvironmentTasks(f"{__name__}:SlowKey", MediaStore(), size=5).seeds == quick
    assert len(calls) >= 5


asked = environment_tasks._keys


def test_what_always_begins_alike_or_tells_no_content_is_split_by_seed() -> None:
    sides = [
        EnvironmentTasks(f"{__name__}:{name}", MediaStore(), split=split, size=40, split_by="seed")
        for name in ("Constant", "Keyless")
        for split in ("train", "test")
    ]
    assert not set(sides[0].seeds) & set(sides[1].seeds)
    assert sides[0].seeds == sides[2].seeds
    assert content_of(sides[0][0]) != content_of(sides[1][0])
    with pytest.raises(RecipeError, match="did you mean 'seed'"):
        EnvironmentTasks(f"{__name__}:Constant", MediaStore(), split_by="seeds")  # type: ignore[arg-type]


def test_a_long_search_for_starts_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    EnvironmentTasks("frozen_lake", MediaStore(), {"size": 4}, size=5)
    assert not capsys.readouterr().err
    monkeypatch.setattr(environment_tasks, "REPORTED_S", 0.0)
    EnvironmentTasks("frozen_lake", MediaStore(), {"size": 4}, size=5)
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("looking for 5 different starts of 'frozen_lake' for split 'train': 0 among the first 0 seeds")
