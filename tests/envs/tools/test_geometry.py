"""Geometry from seeds: figures on squared paper, geo3k's tool, and replies that can be garbled."""

import io

import pytest
from PIL import Image

from sensorium.data.media_store import MediaStore
from sensorium.systems.geo3k.environment import Geometry, draw_png, figure_of
from sensorium.vocabulary.errors import EnvironmentFailure


def call(answer: object) -> str:
    return f'<tool_call>{{"name":"calc_score","arguments":{{"answer":{answer}}}}}</tool_call>'


def test_the_tool_says_whether_a_length_is_right_and_the_last_box_decides() -> None:
    environment = Geometry(MediaStore())
    environment.reset(5)
    right = figure_of(5).answer
    told = environment.step(call(right + 1))
    assert told.observation is not None
    assert told.observation.messages[0].text == f"{right + 1} is wrong."
    assert environment.step(call(right)).observation.messages[0].text == f"{right} is right."  # type: ignore[union-attr]
    end = environment.step(f"\\boxed{{{right}}}")
    assert (end.done, end.success, end.reward) == (True, True, {"success": 1.0})
    with pytest.raises(EnvironmentFailure):
        environment.step("again")


def test_demonstrations_succeed_and_follow_the_tool() -> None:
    environment = Geometry(MediaStore(), max_turns=2)
    for seed in range(20):
        environment.reset(seed)
        assert environment.step(environment.demonstrate()).observation is not None
        assert environment.step(environment.demonstrate()).success is True


def test_garbled_replies_do_not_depend_on_the_answer_being_right() -> None:
    environment = Geometry(MediaStore(), tool="garbled")
    told = []
    for seed in range(60):
        environment.reset(seed)
        told.append(environment.step(call(figure_of(seed).answer)).observation.messages[0].text)  # type: ignore[union-attr]
    assert 15 < sum("right" in text for text in told) < 45


def test_what_is_asked_can_be_counted_in_the_picture() -> None:
    seed = next(seed for seed in range(99) if figure_of(seed).shape == "rectangle" and figure_of(seed).asked == "wide")
    picture = Image.open(io.BytesIO(draw_png(figure_of(seed), 16))).convert("RGB")
    bottom = [picture.getpixel((16 * column + 4, 16 * 6 - 8)) for column in range(6)]
    assert bottom.count(bottom[0]) == figure_of(seed).answer or figure_of(seed).answer == 6
    blank = Geometry(MediaStore(), view="blank")
    shown = {blank.reset(seed)[1].messages[0].media[0].hash for seed in range(5)}
    assert len(shown) == 1
    assert Geometry.content_key(1, {}) != Geometry.content_key(2, {})


@pytest.mark.parametrize("answer", ['"x"', "null", '"6 cm"', "1e999", '"' + "9" * 400 + '"'])
def test_strange_answers_are_wrong_and_do_no_harm(answer: str) -> None:
    environment = Geometry(MediaStore())
    environment.reset(1)
    assert environment.step(call(answer)).reward == {"success": 0.0}
