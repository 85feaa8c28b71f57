"""Sokoban: rooms can be solved in exactly the moves asked for, and play by the rules."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.data.environment_tasks import EnvironmentTasks
from sensorium.data.media_store import MediaStore
from sensorium.envs.sokoban import (
    ACTIONS,
    BOX,
    BOX_ON_TARGET,
    FLOOR,
    PLAYER,
    TARGET,
    WALL,
    Position,
    Room,
    Sokoban,
    draw_png,
    draw_text,
    positions_at,
    room_of,
    solution,
)
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError


def opened(seed: int = 0, **options: Any) -> Sokoban:
    environment = Sokoban(MediaStore(), **options)
    environment.reset(seed)
    return environment


def room_from(text: str) -> tuple[Room, Position]:
    cells = {(r, c): letter for r, row in enumerate(text.split("/")) for c, letter in enumerate(row)}
    room = Room(
        len(text.split("/")),
        frozenset(place for place, letter in cells.items() if letter != "#"),
        frozenset(place for place, letter in cells.items() if letter in "O√S"),
    )
    player = next(place for place, letter in cells.items() if letter in "PS")
    return room, Position(player, frozenset(place for place, letter in cells.items() if letter in "X√"))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 8), st.integers(0, 4), st.sampled_from([1, 2]))
def test_a_room_is_solved_in_the_moves_asked_for_and_no_fewer(seed: int, shortest: int, more: int, boxes: int) -> None:
    room, start = room_of(6, boxes, shortest, shortest + more, 0.1, seed)
    found = solution(room, start)  # by playing forwards; the room was made by playing backwards
    assert found is not None
    assert shortest <= len(found) <= shortest + more
    position = start
    for action in found:
        assert not room.solved(position)
        position = room.after(position, action)
    assert room.solved(position)


def test_playing_backwards_meets_exactly_the_positions_that_lead_there() -> None:
    room, start = room_from("######/#_PXO#/#____#/#_#__#/#____#/######")
    for length in (1, 2, 3, 6):
        assert all(len(solution(room, position) or ()) == length for position in positions_at(room, length))
    assert start in positions_at(room, 1)


def test_boxes_are_pushed_one_at_a_time_and_never_pulled() -> None:
    def after(row: str, action: str) -> str:
        room, position = room_from("/".join(["######", row, *["######"] * 4]))
        return draw_text(room, room.after(position, ACTIONS.index(action))).splitlines()[1]

    assert after("#PX_O#", "Right") == "#_PXO#"
    assert after("#_PXO#", "Right") == "#__P√#"
    assert after("#__P√#", "Right") == "#__P√#"
    assert after("#PXXO#", "Right") == "#PXXO#"
    assert after("#_XPO#", "Right") == "#_X_S#"
    assert after("#_XPO#", "Up") == "#_XPO#"


def test_the_seed_decides_the_room_and_seeds_differ() -> None:
    assert Sokoban.content_key(3, {"boxes": 2}) == Sokoban.content_key(3, {"boxes": 2})
    first, again = Sokoban(MediaStore(), view="text").reset(3), Sokoban(MediaStore(), view="text").reset(3)
    assert first == again
    assert first[1].messages[0].text.replace("\n", "/") == Sokoban.content_key(3, {})
    assert len({Sokoban.content_key(seed, {}) for seed in range(200)}) > 190


@pytest.mark.parametrize("many", [1, 3])
def test_following_the_demonstration_solves_it_and_is_paid_by_name(many: int) -> None:
    for seed in range(20):
        environment = opened(seed, max_actions_per_turn=many, max_solution=8)
        length = len(solution(*room_of(6, 1, 1, 8, 0.1, seed)) or ())
        total: dict[str, float] = {}
        turns, result = 0, None
        while result is None or not result.done:
            result = environment.step(environment.demonstrate())
            turns += 1
            assert isinstance(result.reward, dict)
            total = {name: total.get(name, 0) + value for name, value in result.reward.items()}
        assert (result.success, result.truncated, turns) == (True, False, -(-length // many))
        expected = {"step": -0.1 * length, "box": 1.0, "success": 10.0, "format": 0.5 * turns}
        assert total == pytest.approx(expected)


def test_a_box_that_leaves_its_target_is_taken_back() -> None:
    environment = opened(0, view="text")
    environment._room, environment._position = room_from("######/#P√_O#/#__X_#/#____#/#____#/######")
    assert environment.step("<answer>Right</answer>").reward == {"step": -0.1, "box": -1.0, "success": 0.0, "format": 0.5}


def test_a_room_that_cannot_be_solved_any_more_cannot_be_demonstrated() -> None:
    environment = opened(0)
    environment._room, environment._position = room_from("######/#X___#/#P__O#/#____#/#____#/######")
    with pytest.raises(EnvironmentFailure, match="nothing solves"):
        environment.demonstrate()


def test_the_turn_limit_truncates_and_ends() -> None:
    environment = opened(max_turns=2, min_solution=5)
    first, second = environment.step("?"), environment.step("?")
    assert (first.done, second.done, second.truncated, second.success) == (False, True, True, False)
    with pytest.raises(EnvironmentFailure, match="reset"):
        environment.step("<answer>Up</answer>")


def test_the_picture_shows_every_place() -> None:
    room, position = room_from("######/#_PXO#/#√___#/#____#/#____#/######")
    store = MediaStore()
    pixels = np.asarray(store.picture(store.put(draw_png(room, position, 28), "picture")))
    assert pixels.shape == (168, 168, 3)

    def at(row: int, column: int, y: int = 14, x: int = 14) -> tuple[int, ...]:
        return tuple(int(value) for value in pixels[row * 28 + y, column * 28 + x])

    assert (at(0, 0), at(1, 1), at(1, 2), at(1, 3), at(1, 4)) == (WALL, FLOOR, PLAYER, BOX, TARGET)
    assert (at(2, 1), at(2, 1, 2, 2), at(2, 1, 0, 0)) == (BOX_ON_TARGET, TARGET, FLOOR)


def test_the_blank_view_tells_nothing() -> None:
    sights = {Sokoban(MediaStore(), view="blank").reset(seed)[1].messages[0].media for seed in range(4)}
    assert len(sights) == 1


def test_descriptions_are_judged_by_the_true_state() -> None:
    environment = opened(1, response_format="grounding_worldmodeling", prompt="full", state_reward=1.0)
    result = environment.step(environment.demonstrate())
    assert isinstance(result.reward, dict)
    assert (result.reward["observation"], result.reward["prediction"]) == (1.0, 1.0)


def test_train_and_test_share_no_room() -> None:
    def contents(split: Any) -> set[str]:
        source = EnvironmentTasks("sokoban", MediaStore(), {"max_solution": 3}, split=split, size=100)
        specs = [source[i].environment for i in range(len(source))]
        return {Sokoban.content_key(spec.seed, spec.options) for spec in specs if spec is not None}

    train, test = contents("train"), contents("test")
    assert (len(train), len(test), train & test) == (100, 100, set())


def test_what_cannot_be_is_refused() -> None:
    for options in ({"view": "pictures"}, {"size": 3}, {"min_solution": 9}, {"boxes": 0}):
        with pytest.raises(RecipeError, match="sokoban: option"):
            Sokoban(MediaStore(), **options)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFailure, match="shorter"):
        opened(0, size=4, min_solution=500, max_solution=500)


def test_random_play_keeps_the_boxes() -> None:
    chance = random.Random(0)
    environment = opened(5, boxes=2, max_turns=200, max_solution=8)
    for _ in range(100):
        if environment.step(f"<answer>{chance.choice(ACTIONS)}</answer>").done:
            break
        assert len(environment._position.boxes) == 2
        assert environment._position.player not in environment._position.boxes


def test_vagens_grammar_walks_as_far_as_it_can_read() -> None:
    """Of too many moves the first are made; an unknown one ends them, and takes the pay for the form."""
    rooms = [Sokoban(MediaStore(), max_actions_per_turn=2, prompt="full", grammar=grammar) for grammar in ("own", "vagen")]  # type: ignore[arg-type]
    for answer, made, paid in (("Up, Up, Up", 2, 0.5), ("Up, Jump", 1, 0.0)):
        for room, moves, form in zip(rooms, (0, made), (0.0, paid), strict=True):
            room.reset(3)
            reward = room.step(f"<think>so</think><answer>{answer}</answer>").reward
            assert isinstance(reward, dict)
            assert (round(reward["step"], 6), reward["format"]) == (round(-0.1 * moves, 6), form)
