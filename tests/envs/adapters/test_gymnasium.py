"""Stock Gymnasium environments that nobody here wrote, played through the adapter."""

import threading
from typing import Any

import gymnasium
import numpy as np
import pytest

from sensorium.data.environment_tasks import EnvironmentTasks
from sensorium.data.media_store import MediaStore
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
    assert result.observation.messages[0].text == f"Not a move.\n{first.messages[0].text}"


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
        ({"id": "Pendulum-v1", "view": "text"}, "name some of them"),
        ({"id": "Pendulum-v1", "view": "text", "actions": {"far": [99.0]}}, "none of Box"),
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
