"""Boxes are compared by IoU and GIoU; an answer without one is worth the least."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.recipe.registry import build
from sensorium.rewards.terms import Box, BoxGIoU, BoxIoU, giou, iou, last_box
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError, TaskError
from sensorium.vocabulary.task import Task

MakeEpisode = Callable[..., Episode]
SIDES = st.tuples(st.integers(-50, 50), st.integers(-50, 50), st.integers(1, 60), st.integers(1, 60))
BOXES: st.SearchStrategy[Box] = SIDES.map(lambda s: (float(s[0]), float(s[1]), float(s[0] + s[2]), float(s[1] + s[3])))


@given(BOXES, BOXES)
def test_bounds_symmetry_and_identity(one: Box, other: Box) -> None:
    assert 0.0 <= iou(one, other) <= 1.0
    assert -1.0 <= giou(one, other) <= iou(one, other)
    assert iou(one, other) == iou(other, one)
    assert giou(one, other) == pytest.approx(giou(other, one))
    assert iou(one, one) == giou(one, one) == 1.0


@given(BOXES, BOXES)
def test_iou_counts_cells(one: Box, other: Box) -> None:
    def cells(box: Box) -> set[tuple[int, int]]:
        return {(x, y) for x in range(int(box[0]), int(box[2])) for y in range(int(box[1]), int(box[3]))}

    assert iou(one, other) == pytest.approx(len(cells(one) & cells(other)) / len(cells(one) | cells(other)))


@given(BOXES, st.integers(1, 50), st.integers(1, 50))
def test_apart_giou_falls_with_the_distance(box: Box, gap: int, more: int) -> None:
    width = box[2] - box[0]
    near, far = ((box[2] + d, box[1], box[2] + d + width, box[3]) for d in (gap, gap + more))
    assert iou(box, near) == iou(box, far) == 0.0
    assert giou(box, far) < giou(box, near) < 0.0


@given(BOXES, BOXES, st.sampled_from([0.5, 2.0, 100.0]))
def test_scale_does_not_matter(one: Box, other: Box, scale: float) -> None:
    larger = [tuple(value * scale for value in box) for box in (one, other)]
    assert giou(*larger) == pytest.approx(giou(one, other))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("[1, 2, 3, 4]", (1, 2, 3, 4)),
        ("(1,2,3.5,4)", (1, 2, 3.5, 4)),
        ('{"bbox_2d": [10, 20, 110, 80], "label": "cat 2"}', (10, 20, 110, 80)),
        ("first [1,2,3,4], rather [5, 6, 7, 8]", (5, 6, 7, 8)),
        ("[5, 6, 7, 8] not [4, 4, 2, 2]", (5, 6, 7, 8)),
        ("-1.5 -2 3e1 .5", (-1.5, -2, 30, 0.5)),
        ("[1, 2, 3]", None),
        ("[3, 2, 1, 4]", None),
        ("[0, 0, 1e300, 1e300]", None),
        ("nothing", None),
    ],
)
def test_the_last_box_of_a_text(text: str, box: Box | None) -> None:
    assert last_box(text) == box


def test_terms_pay_the_overlap_and_say_when_it_is_enough(episode_of: MakeEpisode) -> None:
    task = Task("t", answer=[0, 0, 10, 10])
    near = episode_of("<answer>[0, 0, 10, 8]</answer>")
    (score,) = build("reward", "bbox_iou", {}, "x").score(task, near)
    assert (score.name, score.value, score.correct) == ("bbox_iou", pytest.approx(0.8), True)
    assert BoxIoU(threshold=0.9).score(task, near)[0].correct is False
    apart = episode_of("<answer>[20, 0, 30, 10]</answer>")
    (score,) = build("reward", "bbox_giou", {}, "x").score(task, apart)
    assert (score.name, score.value, score.correct) == ("bbox_giou", pytest.approx(-1 / 3), False)


def test_no_box_is_worth_no_more_than_a_bad_one(episode_of: MakeEpisode) -> None:
    task = Task("t", answer=[0, 0, 10, 10])
    for text in ("[0, 0, 10, 10]", "<answer>there</answer>", "<answer>[9, 9, 1, 1]</answer>"):
        assert BoxIoU().score(task, episode_of(text))[0].value == 0.0
        assert BoxGIoU().score(task, episode_of(text))[0].value == -1.0
    assert BoxGIoU(fallback=True).score(task, episode_of("[0, 0, 10, 10]"))[0].value == 1.0


@pytest.mark.parametrize(
    "known", ["[0, 0, 10, 10]", "box: 0 0 10 10", [[0, 0, 10, 10]], [[50, 50, 60, 60], [0, 0, 10, 10]], (0, 0, 10, 10)]
)
def test_a_known_box_may_be_written_in_several_ways(known: Any, episode_of: MakeEpisode) -> None:
    assert BoxIoU().score(Task("t", answer=known), episode_of("<answer>[0, 0, 10, 10]</answer>"))[0].value == 1.0


@pytest.mark.parametrize("known", [None, "a cat", [1, 2, 3], [5, 5, 1, 1], [[0, 0, 1, 1], [1]], 7, [], [True, 0, 2, 2]])
def test_a_task_without_a_box_gives_no_score(known: Any, episode_of: MakeEpisode) -> None:
    with pytest.raises(TaskError, match=r"task t: .* is no box"):
        BoxIoU().score(Task("t", answer=known), episode_of("<answer>[0, 0, 10, 10]</answer>"))


def test_a_threshold_outside_of_its_range_is_refused() -> None:
    with pytest.raises(RecipeError, match="threshold"):
        BoxIoU(threshold=0.0)
