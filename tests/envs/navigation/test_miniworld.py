"""Navigation as it is seen: MiniWorld draws the scenes, from any thread, and what is paid has its name."""

import threading
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sensorium.data.media_store import MediaStore
from sensorium.envs import navigation
from sensorium.envs.navigation import Pose, Scene, Thing
from sensorium.recipe.registry import build
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError

pytestmark = pytest.mark.skipif(find_spec("miniworld") is None, reason="pip install 'sensorium[navigation]'")


def scene(colour: str, shape: str = "box") -> Scene:
    return Scene(((0.0, 6.0, 0.0, 6.0),), (), (Thing(shape, colour, (4.0, 3.0)),), Pose((1.0, 3.0), 0.0))


@pytest.fixture(scope="module", autouse=True)
def drawing() -> None:
    try:
        navigation.view(scene("red"), Pose((1.0, 3.0), 0.0), 32, 60.0)
    except RecipeError as error:
        pytest.skip(str(error))


def share(pixels: np.ndarray, channel: int) -> float:
    """How much of a picture is mostly of one primary colour."""
    others = np.delete(pixels.astype(int), channel, axis=2).max(axis=2)
    return float((pixels[..., channel].astype(int) - others > 60).mean())


def test_a_thing_is_seen_where_it_stands_and_not_behind_the_walker() -> None:
    for shape in ("box", "ball"):
        ahead = navigation.view(scene("red", shape), Pose((1.0, 3.0), 0.0), 64, 60.0)
        assert ahead.shape == (64, 64, 3)
        assert share(ahead, 0) > 0.005
        assert share(ahead[:, 24:40], 0) > share(ahead[:, :16], 0) == 0
        closer = navigation.view(scene("red", shape), Pose((2.5, 3.0), 0.0, -30), 64, 60.0)
        assert share(closer, 0) > share(ahead, 0)
        assert share(navigation.view(scene("red", shape), Pose((1.0, 3.0), 180.0), 64, 60.0), 0) == 0
    left = navigation.view(scene("red"), Pose((1.0, 4.0), 0.0), 64, 60.0)
    assert share(left[:, :32], 0) > share(left[:, 32:], 0)


def test_pictures_are_right_in_whatever_thread_they_are_asked_for() -> None:
    scenes = [scene(colour, shape) for colour in ("red", "blue") for shape in ("box", "ball")]
    expected = [navigation.view(shown, shown.start, 32 + 16 * (n % 2), 60.0) for n, shown in enumerate(scenes)]
    assert len({picture.tobytes() for picture in expected}) == 4
    found: dict[tuple[int, int], Any] = {}

    def look(n: int) -> None:
        for time in range(5):
            found[n, time] = navigation.view(scenes[n], scenes[n].start, 32 + 16 * (n % 2), 60.0)

    threads = [threading.Thread(target=look, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 20
    assert all((picture == expected[n]).all() for (n, _), picture in found.items())


def test_a_demonstrated_walk_is_paid_by_name_and_the_pictures_change() -> None:
    store = MediaStore()
    options = {
        "side": 32,
        "prompt": "full",
        "response_format": "grounding_worldmodeling",
        "state_reward": 0.25,
        "max_turns": 30,
        "max_actions_per_turn": 1,
    }
    environment = build("environment", "navigation", options, "x", store=store)
    head, observation = environment.reset(11)
    assert "moveahead" in head[0].content[0].text
    seen, result = set(), None
    while observation is not None:
        (shown,) = [block for block in observation.messages[0].content if isinstance(block, Media)]
        assert Image.open(BytesIO(store.bytes_of(shown))).size == (32, 32)
        seen.add(shown.hash)
        result = environment.step(environment.demonstrate())
        observation = result.observation
        parts = {"success": 10.0 * (observation is None), "format": 0.5, "observation": 0.25, "prediction": 0.25}
        assert result.reward == parts
    assert result is not None
    assert (result.done, result.truncated, result.success) == (True, False, True)
    assert len(seen) > 1
    with pytest.raises(EnvironmentFailure, match="reset it first"):
        environment.step("")


def test_bumping_is_told_and_actions_are_counted() -> None:
    environment = build("environment", "navigation", {"side": 16, "max_steps": 7, "max_turns": 9}, "x", store=MediaStore())
    environment.reset(2)
    back = "<answer>moveback, moveback, moveback, moveback, moveback</answer>"
    nothing = environment.step("<answer>fly</answer>")
    assert (nothing.reward, nothing.info["valid"]) == ({"success": 0.0, "format": 0.0}, False)
    first = environment.step("<answer>lookup, lookup, lookup</answer>")
    assert "did not work" in first.observation.messages[0].content[0].text
    last = environment.step(back)
    if not last.success:
        assert (last.truncated, last.done, last.info["actions"].count("moveback")) == (True, True, 4)
