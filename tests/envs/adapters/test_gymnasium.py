"""Stock Gymnasium environments that nobody here wrote, played through the adapter."""

import json
import random
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from sensorium.data.environment_tasks import EnvironmentTasks
from sensorium.data.media_store import MediaStore
from sensorium.envs.adapters.content import text_form
from sensorium.envs.adapters.gymnasium import GymnasiumEnvironment, refuse_thread_bound
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError

TAXI = ["South", "North", "East", "West", "Pick up", "Drop off"]
CLIFF = ["Up", "Right", "Down", "Left"]


def opened(seed: int = 0, **options: Any) -> tuple[GymnasiumEnvironment, Any]:
    environment = GymnasiumEnvironment(MediaStore(), **{"response_format": "no_think", **options})
    return environment, environment.reset(seed)


def act(environment: GymnasiumEnvironment, *actions: str) -> Any:
    return environment.step(f"<answer>{', '.join(actions)}</answer>")


def test_taxi_as_pictures_goes_as_taxi_does() -> None:
    environment, (head, first) = opened(7, id="Taxi-v4", actions=TAXI, rules="Drive the taxi.")
    stock = gymnasium.make("Taxi-v4", render_mode="rgb_array")
    stock.reset(seed=7)
    assert head[0].text.startswith("Drive the taxi.\nActions: South, North, East, West, Pick up, Drop off.")
    (media,) = first.messages[0].media
    assert np.array_equal(np.asarray(environment.store.picture(media)), np.asarray(stock.render()))
    for word in ("South", "Pick up", "East"):
        result = act(environment, word)
        _, reward, *_ = stock.step(TAXI.index(word))
        assert (result.reward, result.done, result.info["actions"]) == (float(reward), False, word)
        (media,) = result.observation.messages[0].media
        assert np.array_equal(np.asarray(environment.store.picture(media)), np.asarray(stock.render()))
    environment.close()


def test_taxi_as_text_and_a_wrong_word_that_does_nothing() -> None:
    environment, (_, first) = opened(7, id="Taxi-v4", actions=TAXI, view="text", prompt="short")
    assert "+---------+" in first.messages[0].text
    assert first.messages[0].media == ()
    result = act(environment, "Fly")
    assert (result.reward, result.info["valid"]) == (0.0, False)
    assert result.info["wrong"] == "'Fly' is no action; there are: South, North, East, West, Pick up, Drop off"
    assert result.observation.messages[0].text == f"Nothing was done: {result.info['wrong']}.\n{first.messages[0].text}"


def test_cliff_walking_is_walked_to_its_end() -> None:
    environment, _ = opened(id="CliffWalking-v1", actions=CLIFF, max_actions_per_turn=20, format_reward=0.5)
    result = act(environment, "Up", *["Right"] * 11, "Down")
    assert (result.done, result.truncated, result.reward) == (True, False, {"reward": -13.0, "format": 0.5})
    assert result.success is False  # it pays -1 at the goal too, and says nothing of success
    with pytest.raises(EnvironmentFailure, match="reset"):
        act(environment, "Up")


def test_minigrid_shows_its_mission_and_names_its_actions() -> None:
    options = {"id": "MiniGrid-Empty-5x5-v0", "modules": ["minigrid"], "max_actions_per_turn": 6}
    environment, (head, first) = opened(1, **options)
    assert "Actions: left, right, forward, pickup, drop, toggle, done." in head[0].text
    assert "get to the green goal square" in first.messages[0].text
    assert environment.store.picture(first.messages[0].media[0]).size == (160, 160)
    result = act(environment, "forward", "forward", "right", "forward", "forward")
    assert (result.done, result.success) == (True, True)
    assert 0.9 < result.reward < 1


def test_wrappers_make_the_picture_that_minigrids_agent_sees() -> None:
    small = {"minigrid.wrappers:RGBImgPartialObsWrapper": {"tile_size": 8}}
    common: dict[str, Any] = {"id": "MiniGrid-Empty-5x5-v0", "modules": ["minigrid"]}
    environment, (_, first) = opened(3, **common, view="observation", wrappers=["gymnasium.wrappers:OrderEnforcing", small])
    assert environment.store.picture(first.messages[0].media[0]).size == (56, 56)
    assert "get to the green goal square" in first.messages[0].text
    with pytest.raises(EnvironmentFailure, match="holds no picture"):
        opened(id="CliffWalking-v1", view="observation")
    with pytest.raises(RecipeError, match=r"wrapper 'minigrid\.wrappers:Nothing'"):
        opened(**common, wrappers=["minigrid.wrappers:Nothing"])


def test_the_turn_limit_and_the_environments_own_truncate() -> None:
    environment, _ = opened(id="CliffWalking-v1", actions=CLIFF, max_turns=1)
    assert act(environment, "Up").truncated is True
    environment, _ = opened(id="Taxi-v4", actions=TAXI, make={"max_episode_steps": 2}, max_actions_per_turn=3)
    result = act(environment, "North", "North", "North")
    assert (result.done, result.truncated, result.info["actions"]) == (True, True, "North, North")


def test_other_actions_are_given_by_name() -> None:
    actions = {"push left": [-1.0], "push right": [1.0]}
    environment, _ = opened(id="Pendulum-v1", actions=actions, view="text", prompt="short")
    result = act(environment, "push left")
    assert result.info["actions"] == "push left"
    assert result.reward < 0
    assert result.observation.messages[0].text.startswith("[")


def test_a_box_is_filled_by_a_call_whose_ranges_are_checked() -> None:
    environment, (head, _) = opened(3, id="Pendulum-v1", view="text", actions=["push(force)"])
    assert "- push(force), where force is a number from -2 to 2" in head[0].text
    stock = gymnasium.make("Pendulum-v1")
    stock.reset(seed=3)
    result = act(environment, "push(0.7)")
    _, reward, *_ = stock.step(np.array([0.7], np.float32))
    assert (result.reward, result.info["actions"]) == (float(reward), "push(0.7)")
    result = act(environment, "push(2.5)")
    assert (result.reward, result.info["valid"]) == (0.0, False)
    assert (
        "Nothing was done: push(2.5): force is 2.5; it must be a number from -2 to 2."
        in result.observation.messages[0].text
    )
    environment, (head, _) = opened(id="MountainCarContinuous-v0", view="text")
    assert "act(value), where value is a number from -1 to 1" in head[0].text
    assert act(environment, "act(-1)").info["valid"] is True


class Desk(gymnasium.Env[Any, Any]):
    """Takes every kind of space within a Dict, and shows what it was given."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012  as Gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        parts = {
            "kind": spaces.Discrete(4), "at": spaces.Box(0, np.array([159, 209]), dtype=np.int64),
            "text": spaces.Text(20, min_length=0, charset="abc xyz"), "force": spaces.Box(-1, 1, (2, 2), np.float32),
            "keys": spaces.MultiBinary(3), "gear": spaces.MultiDiscrete([3, 2], start=[1, 0]),
            "pair": spaces.Tuple([spaces.Discrete(3, start=-1), spaces.Box(0.5, np.inf, (), np.float32)]),
        }  # fmt: skip
        self.action_space = spaces.Dict(parts)
        self.observation_space = spaces.Text(1000)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"desk {seed}", {"category": f"desk {(seed or 0) % 2}"}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return text_form(action), 1.0, False, False, {}


gymnasium.register("Desk-v0", Desk, disable_env_checker=True)
DESK: dict[str, Any] = {"id": "Desk-v0", "view": "text", "response_format": "no_think"}
DESK_ACTIONS = {
    "click(x, y)": {"kind": 1, "at": ["x", "y"]},
    "drag(x1, y1, force: 0.0..0.5)": {"kind": 2, "at": ["x1", "y1"], "force": [[0.25, 0], [0, "force"]]},
    "type(text)": {"kind": 3, "text": "text"},
    "shift(way: down|up)": {"gear": [3, "way"], "pair": [1, 2.0]},
    "wait": {},
}
LEFT_OUT = {
    "kind": 0,
    "at": [0, 0],
    "text": "",
    "force": [[0, 0], [0, 0]],
    "keys": [0, 0, 0],
    "gear": [1, 0],
    "pair": [0, 0.5],
}


def test_a_dict_is_filled_by_the_recipes_calls() -> None:
    environment, (head, first) = opened(5, **DESK, actions=DESK_ACTIONS, max_actions_per_turn=3)
    assert [line.partition(",")[0] for line in head[0].text.splitlines() if line.startswith("- ")] == [
        "- click(x", "- drag(x1", "- type(text)", "- shift(way)", "- wait"
    ]  # fmt: skip
    assert "text is a text in quotes, up to 20 characters of ' abcxyz'" in head[0].text
    assert first.category == "desk 1"
    cases = {
        "click(159, 0)": {"kind": 1, "at": [159, 0]},
        "drag(3, 4, 0.5)": {"kind": 2, "at": [3, 4], "force": [[0.25, 0], [0, 0.5]]},
        'type("a cab")': {"kind": 3, "text": "a cab"},
        "shift(up)": {"gear": [3, 1], "pair": [1, 2.0]},
        "wait": {},
    }
    for answer, filled in cases.items():
        result = act(environment, answer)
        assert json.loads(result.observation.messages[0].text.splitlines()[-1]) == {**LEFT_OUT, **filled}, answer
    result = act(environment, "wait", "click(1, 2)", "click(160, 2)")
    assert (result.reward, result.info["wrong"][:24]) == (0.0, "click(160, 2): x is 160;")
    assert act(environment, 'type("q")').info["valid"] is False
    environment, _ = opened(5, **DESK, actions=DESK_ACTIONS, coordinates="relative")
    shown = act(environment, "click(1000, 500)").observation.messages[0].text
    assert json.loads(shown.splitlines()[-1])["at"] == [159, 104]


def test_a_space_without_named_actions_is_one_call_with_all_of_it() -> None:
    environment, (head, _) = opened(0, **DESK)
    assert (
        "- act(at1, at2, force1, force2, force3, force4, gear1, gear2, keys1, keys2, keys3, kind, pair_1, pair_2, text)"
        in head[0].text
    )
    example = head[0].text.rpartition("For example: ")[2]
    assert environment.step(example).info["valid"] is True
    shown = (
        act(environment, 'act(1, 2, 0, 0, 0, 1, 3, 0, 1, 0, 1, kind=3, pair_1=-1, text="", pair_2=8.5)')
        .observation.messages[0]
        .text
    )
    filled = {"kind": 3, "at": [1, 2], "force": [[0, 0], [0, 1]], "keys": [1, 0, 1], "gear": [3, 0], "pair": [-1, 8.5]}
    assert json.loads(shown.splitlines()[-1]) == {**LEFT_OUT, **filled}


@given(st.integers(0, 2**32))
def test_random_calls_lie_within_the_space(seed: int) -> None:
    environment, _ = opened(0, **DESK, actions=DESK_ACTIONS, max_turns=10**6)
    chance = random.Random(seed)
    for _ in range(5):
        assert environment.step(environment.grammar.write([environment.grammar.any_action(chance)])).info["valid"] is True


def test_splits_share_no_start() -> None:
    options = {"id": "Taxi-v4", "actions": TAXI, "view": "text"}
    sources = [EnvironmentTasks("gymnasium", MediaStore(), options, split=split, size=12) for split in ("train", "test")]  # type: ignore[arg-type]
    keys = [{GymnasiumEnvironment.content_key(seed, options) for seed in source.seeds} for source in sources]
    assert [len(found) for found in keys] == [12, 12]
    assert not keys[0] & keys[1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"id": "Taxi-v3"}, "cannot be made"),
        ({"id": "Nowhere-v0"}, "cannot be made"),
        ({"id": "Taxi-v4", "modules": ["no_such_module"]}, "no_such_module"),
        ({"id": "Taxi-v4", "actions": ["a", "b"]}, "has 6 actions and 2 are named"),
        ({"id": "Pendulum-v1", "view": "text", "actions": ["left", "right"]}, "name those you want"),
        ({"id": "Pendulum-v1", "view": "text", "actions": {"far": [99.0]}}, "none of Box"),
        ({"id": "Pendulum-v1", "view": "text", "actions": {"push(x: -9.0..9.0)": ["x"]}}, "must be a number from -2 to 2"),
        ({"id": "Pendulum-v1", "view": "text", "actions": {"push(x)": ["y"]}}, "'y' is no parameter"),
        ({"id": "Pendulum-v1", "view": "text", "actions": {"push(x)": [0.0]}}, "no place for x"),
        ({"id": "Pendulum-v1", "view": "text", "coordinates": "relative"}, "no action has a position"),
        ({**DESK, "actions": {"click(x, y)": {"kind": 1, "where": ["x", "y"]}}}, "none of Dict.*where"),
        ({**DESK, "actions": {"click(x, y)": {"kind": 9, "at": ["x", "y"]}}}, "none of Dict"),
        ({**DESK, "actions": {"type(text: text 500)": {"text": "text"}, "go(way: a|b|c|d|e)": {"kind": "way"}}}, "way"),
        ({"id": "Taxi-v4", "view": "pictures"}, "option view"),
    ],
)
def test_what_cannot_be_played_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        GymnasiumEnvironment(MediaStore(), **options)


def test_miniworld_is_not_played_where_its_pictures_are_wrong() -> None:
    refused: list[str] = []

    def make() -> None:
        try:
            GymnasiumEnvironment(MediaStore(), id="MiniWorld-Hallway-v0", modules=["miniworld"])
        except RecipeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert "environment: isolated" in refused[0]
    refuse_thread_bound("miniworld.envs:Hallway")  # the main thread may
