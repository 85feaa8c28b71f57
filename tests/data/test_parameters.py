"""How a video or sound is decoded is part of which medium it is."""

from typing import Any

import pytest

from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import AudioParameters, VideoParameters, parameters_from, parameters_to_data
from sensorium.vocabulary.episode import MediaSpan, Segment
from tests.data.clips import middle

EIGHT, MANY = middle(frames=8), middle(frames=32)


def test_the_same_file_at_other_parameters_is_another_medium() -> None:
    eight, again, many = (Media("video", "ab", "row", asked) for asked in (EIGHT, middle(frames=8), MANY))
    assert eight == again
    assert eight.key == again.key
    assert eight != many
    assert eight.key != many.key
    assert len({eight, again, many}) == 2
    prompts = [Segment("environment", (1, 2), (MediaSpan(0, media),)) for media in (eight, again, many)]
    assert prompts[0].key == prompts[1].key != prompts[2].key


def test_origin_is_no_part_of_identity() -> None:
    assert Media("video", "ab", "here") == Media("video", "ab", "there")
    assert Media("sound", "ab") != Media("video", "ab")


def test_a_video_or_sound_of_which_nothing_is_said_is_decoded_the_usual_way() -> None:
    assert Media("video", "ab") == Media("video", "ab", parameters=VideoParameters(fps=2.0))
    assert Media("sound", "ab").parameters == AudioParameters(16000)
    assert Media("picture", "ab").key == "ab"


def test_whole_and_fractional_seconds_have_one_key() -> None:
    assert Media("video", "a", parameters=middle(start=1, end=2)).key == (
        Media("video", "a", parameters=middle(start=1.0, end=2.0)).key
    )


@pytest.mark.parametrize(
    ("kind", "given", "what"),
    [
        (VideoParameters, {"frame": 8}, "did you mean 'frames'"),
        (VideoParameters, {"frames": 8, "fps": 2}, "both given"),
        (VideoParameters, {"frames": 0}, "at least 1"),
        (VideoParameters, {"frames": 2.5}, "whole number"),
        (VideoParameters, {"frames": True}, "whole number"),
        (VideoParameters, {"fps": 0}, "above 0"),
        (VideoParameters, {"fps": "2"}, "must be a number"),
        (VideoParameters, {"min_frames": 9, "max_frames": 8}, "above max_frames"),
        (VideoParameters, {"max_pixels_per_frame": 0}, "at least 1"),
        (VideoParameters, {"min_pixels_per_frame": -1}, "at least 0"),
        (VideoParameters, {"start": -1}, "0 or later"),
        (VideoParameters, {"start": 2, "end": 2}, "after start"),
        (AudioParameters, {"end": float("nan")}, "must be a number"),
        (AudioParameters, {"sample_rate": 16000.0}, "whole number"),
    ],
)
def test_unfit_parameters_are_refused(kind: Any, given: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parameters_from(kind, given)


@pytest.mark.parametrize(
    "asked",
    [middle(), EIGHT, middle(fps=1, end=3), AudioParameters(8000)],
)
def test_parameters_survive_as_plain_data(asked: Any) -> None:
    assert parameters_from(type(asked), parameters_to_data(asked)) == asked
