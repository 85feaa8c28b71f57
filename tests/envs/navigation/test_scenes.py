"""Scenes: the same for the same seed, walked as geometry says, and split by content. No picture is drawn here."""

import math
from importlib.util import find_spec
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.data.environment_tasks import EnvironmentTasks
from sensorium.data.media_store import MediaStore
from sensorium.envs.navigation import ACTIONS, BODY, Navigation, Pose, Scene, Thing, scene_of
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError

ROOM = Scene(((0.0, 6.0, 0.0, 6.0),), (), (Thing("box", "red", (5.0, 3.0)),), Pose((1.0, 3.0), 0.0))


def walked(scene: Scene, pose: Pose, *actions: str) -> tuple[Pose, list[bool]]:
    worked = []
    for action in actions:
        pose, good = scene.after(pose, ACTIONS.index(action), 0.5)
        worked.append(good)
    return pose, worked


def test_moves_go_where_the_walker_looks_and_stop_at_walls_and_things() -> None:
    assert walked(ROOM, ROOM.start, "moveahead")[0].at == (1.5, 3.0)
    assert walked(ROOM, ROOM.start, "moveright")[0].at == pytest.approx((1.0, 3.5))
    assert walked(ROOM, ROOM.start, "rotateright", "moveahead")[0].at == pytest.approx((1.0, 3.5))
    assert walked(ROOM, ROOM.start, "rotateleft", "moveahead")[0].at == pytest.approx((1.0, 2.5))
    assert walked(ROOM, ROOM.start, "moveback", "moveback")[1] == [True, False]
    assert walked(ROOM, ROOM.start, *["moveahead"] * 8)[1] == [True] * 6 + [False] * 2
    pose, worked = walked(ROOM, ROOM.start, "lookup", "lookup", "lookup", "lookdown")
    assert (pose.tilt, worked) == (30, [True, True, False, True])
    assert (ROOM.distance(ROOM.start), ROOM.bearing(ROOM.start)) == (4.0, 0.0)
    assert ROOM.bearing(Pose((5.0, 1.0), 0.0)) == pytest.approx(90)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 4]))
def test_every_target_can_be_walked_to_by_the_demonstrated_actions(seed: int, rooms: int) -> None:
    scene = scene_of(rooms, 5.0, 2, 1.5, 0.5, seed)
    pose = scene.start
    for _ in range(200):
        if scene.distance(pose) <= 1.5:
            break
        pose, worked = scene.after(pose, scene.demonstration(pose, 1.5, 0.5)[0], 0.5)
        assert worked
        assert all(math.dist(pose.at, thing.at) > BODY for thing in scene.things)
    assert scene.distance(pose) <= 1.5


def test_nothing_is_walked_through_between_rooms_but_passages() -> None:
    scene = scene_of(4, 5.0, 1, 1.5, 0.5, 3)
    assert scene.free((0.0, 3.5))
    assert not scene.free((0.0, 3.5 + 0.7))
    assert not scene.free((1.0, 1.8))
    at = [(1.5 - 0.5 * n, 3.5) for n in range(7)]
    assert all(scene.free(point) or math.dist(point, scene.target.at) < 1 for point in at)
    assert all(abs(a[0] - b[0]) <= 0.5 for a, b in pairwise(at))


@pytest.mark.skipif(find_spec("miniworld") is None, reason="pip install 'sensorium[navigation]'")
def test_the_sides_share_no_scene_and_a_seed_is_always_the_same() -> None:
    store = MediaStore()
    options = {"rooms": 1, "things": 2}
    train, test = (EnvironmentTasks("navigation", store, options, side, 15) for side in ("train", "test"))  # type: ignore[arg-type]
    keys = [{Navigation.content_key(seed, options) for seed in tasks.seeds} for tasks in (train, test)]
    assert [len(found) for found in keys] == [15, 15]
    assert not keys[0] & keys[1]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(EnvironmentFailure, match="fewer things or larger rooms"):
        scene_of(1, 3.0, 10, 1.5, 0.5, 0)


@pytest.mark.skipif(find_spec("miniworld") is None, reason="pip install 'sensorium[navigation]'")
def test_options_that_make_no_sense_are_refused() -> None:
    for options, told in (
        ({"rooms": 3}, "rooms"),
        ({"step_length": 2.0}, "step_length"),
        ({"room_size": 50.0, "step_length": 0.1}, "steps across"),
        ({"view": "x"}, "view"),
    ):
        with pytest.raises(RecipeError, match=told):
            Navigation(MediaStore(), **options)  # type: ignore[arg-type]
