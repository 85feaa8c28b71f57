"""FrozenLake: the seed decides the lake, the moves are gymnasium's, the way shown is safe."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.data.media_store import MediaStore
from sensorium.envs.actions import ActionTurn
from sensorium.envs.frozen_lake import ACTIONS, COLOURS, PLAYER, FrozenLake, lake, safe_way
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError

pytest.importorskip("gymnasium")


def opened(seed: int = 0, **options: Any) -> FrozenLake:
    environment = FrozenLake(MediaStore(), **options)
    environment.reset(seed)
    return environment


def answer(*words: str) -> str:
    return f"<answer>{', '.join(words)}</answer>"


@given(st.integers(0, 2**31 - 1))
def test_the_seed_decides_the_map_and_every_map_is_solvable(seed: int) -> None:
    environment = FrozenLake(MediaStore(), view="text")
    first, again = environment.reset(seed), FrozenLake(MediaStore(), view="text").reset(seed)
    assert first == again
    grid = lake(4, 0.8, seed)
    assert FrozenLake.content_key(seed, {}) == "/".join(grid)
    assert safe_way(grid, 0) is not None


def test_other_seeds_give_other_maps() -> None:
    assert len({lake(4, 0.8, seed) for seed in range(50)}) > 30


@pytest.mark.parametrize("many", [1, 3])
def test_following_the_demonstration_reaches_the_goal_by_a_shortest_way(many: int) -> None:
    for seed in range(30):
        environment = opened(seed, max_actions_per_turn=many, max_turns=20)
        length = len(safe_way(lake(4, 0.8, seed), 0) or ())
        turns, result = 0, None
        while result is None or not result.done:
            result = environment.step(environment.demonstrate())
            turns += 1
        assert (result.success, result.reward, result.truncated) == (True, 1.0, False)
        assert turns == -(-length // many)


def test_on_slippery_ice_the_seed_decides_the_slips() -> None:
    def walk(seed: int) -> list[str]:
        environment, shown = opened(seed, slippery=True, view="text", p=0.99, max_turns=8), []
        result = environment.step(answer("Down"))
        while result.observation is not None:
            shown.append(result.observation.messages[0].text)
            result = environment.step(answer("Down"))
        return shown

    assert walk(3) == walk(3)
    assert len({tuple(walk(seed)) for seed in range(20)}) > 5


def test_a_hole_ends_the_walk_without_success() -> None:
    seed = next(s for s in range(100) if lake(4, 0.8, s)[1][0] == "H")
    result = opened(seed).step(answer("Down"))
    assert (result.done, result.truncated, result.success, result.reward, result.observation) == (
        True,
        False,
        False,
        0.0,
        None,
    )


def test_the_turn_limit_truncates() -> None:
    environment = opened(max_turns=2)
    first, second = environment.step("?"), environment.step("?")
    assert (first.done, first.success, first.info["success"]) == (False, None, False)
    assert (second.done, second.truncated, second.success) == (True, True, False)
    with pytest.raises(EnvironmentFailure, match="over"):
        environment.step(answer("Down"))


@pytest.mark.parametrize(
    ("response", "actions", "well_formed"),
    [
        ("<answer>Left</answer>", "Left", True),
        (" <ANSWER> dOWN </ANSWER>\n", "Down", True),
        ("so <answer>Up</answer>", "Up", False),
        ("<answer>Up</answer><answer>Right</answer>", "Right", False),
        ("<answer>Jump</answer>", "", True),
        ("<answer>Left, Jump</answer>", "", True),
        ("<answer>Left, Left, Left, Left</answer>", "", True),
        ("<answer>left,down , Right</answer>", "Left, Down, Right", True),
        ("<answer></answer>", "", True),
        ("Left", "", False),
        ("<answer>Left", "", False),
        ("", "", False),
    ],
)
def test_reading_a_response(response: str, actions: str, well_formed: bool) -> None:
    environment = FrozenLake(MediaStore(), max_actions_per_turn=3)
    found = environment.grammar.read(response)
    assert (", ".join(ACTIONS[a] for a in found.actions), found.well_formed) == (actions, well_formed)


def test_bare_words_are_read_when_allowed() -> None:
    environment = FrozenLake(MediaStore(), bare=True)
    assert environment.grammar.read(" up\n") == ActionTurn((3,), {}, True)
    assert environment.grammar.read("<answer>Up</answer>") == ActionTurn((3,), {}, True)
    assert environment.grammar.read("go up") == ActionTurn((), {}, False)
    environment.reset(0)
    assert environment.demonstrate() in ACTIONS


@given(st.text(max_size=60))
def test_no_response_whatever_breaks_the_world(response: str) -> None:
    result = opened(bare=True, view="text").step(response)
    assert isinstance(result.info["valid"], bool)


def test_an_invalid_answer_moves_nothing_and_says_so() -> None:
    environment = opened(view="text")
    result = environment.step("<answer>Fly</answer>")
    assert (result.info["valid"], result.info["moved"]) == (False, False)
    assert result.observation is not None
    assert result.observation.messages[0].text.startswith("Not a move.\nP")


def test_rewards_of_goal_and_format() -> None:
    environment = opened(max_actions_per_turn=20, goal_reward=10, format_reward=0.5, prompt="full")
    assert environment.step("<answer>Fly</answer>").reward == {"goal": 0.0, "format": 0.0}
    assert environment.step("<think>hm</think><answer>Fly</answer>").reward == {"goal": 0.0, "format": 0.0}
    result = environment.step(environment.demonstrate())
    assert (result.reward, result.info["format"]) == ({"goal": 10.0, "format": 0.5}, True)


def test_a_goal_that_is_all_the_pay_is_a_number() -> None:
    environment = opened(max_actions_per_turn=20, goal_reward=2)
    assert environment.step(environment.demonstrate()).reward == 2.0


def test_the_way_over_the_lake_of_the_docstring() -> None:
    assert safe_way(("SFFF", "FHFH", "FFFH", "HFFG"), 0) == (1, 1, 2, 1, 2, 2)


def test_full_prompt_wants_a_thought() -> None:
    environment = FrozenLake(MediaStore(), prompt="full")
    assert environment.grammar.read("<answer>Up</answer>") == ActionTurn((3,), {}, False)
    thought = "<think>a < b</think>\n<answer>Up</answer>"
    assert environment.grammar.read(thought) == ActionTurn((3,), {"think": "a < b"}, True)
    head, observation = environment.reset(0)
    assert "Left, Down, Right, Up" in head[0].text
    form = "<think>your thoughts</think><answer>your action</answer>"
    assert observation.messages[0].text == f"Answer with one action, in this form:\n{form}\nYou see:\n"
    after = environment.step(environment.demonstrate()).observation
    assert after is not None
    assert after.messages[0].text.startswith("You took: ")
    assert form in after.messages[0].text


def test_the_picture_shows_the_lake_cell_by_cell() -> None:
    store = MediaStore()
    environment = FrozenLake(store, cell=28)
    _, observation = environment.reset(5)
    grid, (media,) = lake(4, 0.8, 5), observation.messages[0].media
    pixels = np.asarray(store.picture(media))
    assert pixels.shape == (112, 112, 3)
    for row in range(4):
        for column in range(4):
            assert tuple(pixels[row * 28, column * 28]) == COLOURS[grid[row][column]]
    assert tuple(pixels[14, 14]) == PLAYER
    environment.step(environment.demonstrate())
    assert len({*COLOURS.values(), PLAYER}) == 5


def test_equal_sights_are_one_medium() -> None:
    store = MediaStore()
    sights = [FrozenLake(store).reset(7)[1].messages[0].media[0] for _ in range(3)]
    assert len(set(sights)) == 1


def test_the_text_view_moves_the_player() -> None:
    environment = opened(1, view="text", p=0.999)
    result = environment.step(answer("Down"))
    assert result.observation is not None
    assert result.observation.messages[0].text == "S___\nP___\n____\n___G"


def test_demonstration_noise_is_a_share_and_is_keyed() -> None:
    def first(seed: int, noise: float) -> str:
        return opened(seed, demonstration_noise=noise, view="text").demonstrate()

    clean = [first(seed, 0.0) for seed in range(400)]
    noisy = [first(seed, 0.4) for seed in range(400)]
    assert noisy == [first(seed, 0.4) for seed in range(400)]
    changed = sum(a != b for a, b in zip(clean, noisy, strict=True)) / 400
    assert 0.22 < changed < 0.38  # 0.4 of the moves are random, three quarters of them differ


def test_options_that_make_no_sense_are_refused() -> None:
    for options in ({"view": "pictures"}, {"prompt": "long"}, {"size": 1}, {"p": 0}, {"demonstration_noise": 2}):
        with pytest.raises(RecipeError, match="frozen_lake: option"):
            FrozenLake(MediaStore(), **options)  # type: ignore[arg-type]


def test_the_blank_view_tells_nothing_of_the_lake() -> None:
    store = MediaStore()
    pictures = set()
    for seed in (1, 2):
        environment = FrozenLake(store, view="blank")
        _, observation = environment.reset(seed)
        pictures.update(media.hash for message in observation.messages for media in message.media)
        after = environment.step("<answer>Down</answer>").observation
        pictures.update(media.hash for message in (after.messages if after else ()) for media in message.media)
    assert len(pictures) == 1


@pytest.mark.parametrize(("size", "p"), [(2, 0.5), (4, 0.8), (5, 0.55), (8, 0.9), (12, 0.7), (6, 1.0)])
def test_the_map_of_a_seed_is_the_one_gymnasium_makes(size: int, p: float) -> None:
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    for seed in range(20):
        assert lake(size, p, seed) == tuple(generate_random_map(size=size, p=p, seed=seed))


def test_options_of_a_row_cannot_keep_the_run_busy_for_ever() -> None:
    with pytest.raises(EnvironmentFailure, match="raise p"):
        lake(8, 0.01, 0)
    with pytest.raises(RecipeError, match="width"):
        FrozenLake(MediaStore(), size=64, cell=512)


@pytest.mark.parametrize("form", ["grounding", "worldmodeling", "grounding_worldmodeling"])
def test_demonstrations_describe_the_lake_rightly_and_are_paid_for_it(form: str) -> None:
    for seed in range(10):
        environment = opened(seed, prompt="full", response_format=form, state_reward=0.25, max_actions_per_turn=2)
        result = environment.step(environment.demonstrate())
        assert isinstance(result.reward, dict)
        parts = {part: value for part, value in result.reward.items() if part != "goal"}
        assert parts == dict.fromkeys([p for p in ("observation", "prediction") if p in parts], 0.25) != {}


def test_a_wrong_description_is_paid_by_what_is_right_of_it() -> None:
    environment = opened(0, prompt="full", response_format="grounding", state_reward=3.0, p=0.999)
    said = "<observation>player at (0, 0), goal at (1, 1)</observation><reasoning></reasoning>"
    result = environment.step(f"<think>{said}</think><answer>Down</answer>")
    assert result.reward == {"goal": 0.0, "observation": 2.0}  # the player, and that there are no holes


def test_the_prompts_example_tells_nothing_of_the_lake() -> None:
    heads = {FrozenLake(MediaStore(), prompt="full", response_format="grounding").reset(s)[0][0].text for s in range(5)}
    assert len(heads) == 1
