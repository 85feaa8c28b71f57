"""Bounding boxes: how well the box that the model gave covers the known one, by IoU or GIoU."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from sensorium.rewards.answer import given_answer
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError, TaskError
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task

Box = tuple[float, float, float, float]
"""Left, top, right, bottom; right of left and below top."""

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
FOUR = re.compile(rf"({NUMBER})\s*[,;\s]\s*({NUMBER})\s*[,;\s]\s*({NUMBER})\s*[,;\s]\s*({NUMBER})")
FARTHEST = 1e7


class _BoxTerm:
    """Compares the last box in the answer with the known one, or the best of several.

    Correct is an IoU of at least ``threshold``. An answer without a box gets the worst value there is, so that giving none
    never pays more than giving a bad one. ``fallback`` looks through the whole response where the tag is missing.
    """

    instant = True
    needs_answer = True

    def __init__(
        self, measure: Callable[[Box, Box], float], worst: float, threshold: float, fallback: bool, name: str
    ) -> None:
        if not 0 < threshold <= 1:
            raise RecipeError(f"reward '{name}': threshold must be above 0 and at most 1, not {threshold:g}.")
        self.name, self.threshold, self.fallback = name, threshold, fallback
        self._measure, self._worst = measure, worst

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """One score."""
        known = known_boxes(task)
        given = self._box(episode)
        if given is None:
            return (Score(self.name, self._worst, correct=False),)
        value = max(self._measure(box, given) for box in known)
        return (Score(self.name, value, correct=max(iou(box, given) for box in known) >= self.threshold),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        """The box; only boxes that are equal count as one answer."""
        box = self._box(episode)
        return None if box is None else repr(list(box))

    def _box(self, episode: Episode) -> Box | None:
        text = given_answer(episode, fallback=self.fallback)
        return last_box(text) if text is not None else None


class BoxIoU(_BoxTerm):
    """Intersection over union with the known box, in [0, 1]; no box: 0. Correct from ``threshold`` on."""

    def __init__(self, threshold: float = 0.5, fallback: bool = False, name: str = "bbox_iou") -> None:
        super().__init__(iou, 0.0, threshold, fallback, name)


class BoxGIoU(_BoxTerm):
    """Generalised IoU with the known box, in [-1, 1]: apart, nearer is better; no box: -1. Correct by the IoU."""

    def __init__(self, threshold: float = 0.5, fallback: bool = False, name: str = "bbox_giou") -> None:
        super().__init__(giou, -1.0, threshold, fallback, name)


def iou(one: Box, other: Box) -> float:
    """Intersection over union."""
    shared = _intersection(one, other)
    return shared / (_area(one) + _area(other) - shared)


def giou(one: Box, other: Box) -> float:
    """IoU less the share of the hull that neither covers."""
    shared = _intersection(one, other)
    union = _area(one) + _area(other) - shared
    hull = _area((min(one[0], other[0]), min(one[1], other[1]), max(one[2], other[2]), max(one[3], other[3])))
    return shared / union - (hull - union) / hull


def last_box(text: str) -> Box | None:
    """The last four numbers in a row that make a box, as in ``[10, 20, 110, 80]`` or ``{"bbox_2d": [...]}``."""
    boxes = (_box([float(part) for part in found.groups()]) for found in FOUR.finditer(text))
    return next((box for box in reversed(list(boxes)) if box is not None), None)


def known_boxes(task: Task) -> list[Box]:
    """The boxes that count as right: four numbers, a list of such, or either as text."""
    raw: Any = task.answer
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            box = last_box(raw)
            raw = list(box) if box else None
    rows = raw if isinstance(raw, list | tuple) and raw and isinstance(raw[0], list | tuple) else [raw]
    boxes = [_box(row) for row in rows]
    if not boxes or None in boxes:
        raise TaskError(
            f"task {task.id}: the answer {task.answer!r:.80} is no box; give [left, top, right, bottom], or several."
        )
    return [box for box in boxes if box is not None]


def _box(row: Any) -> Box | None:
    if not isinstance(row, Sequence) or len(row) != 4:
        return None
    if any(isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= FARTHEST for value in row):
        return None
    left, top, right, bottom = map(float, row)
    return (left, top, right, bottom) if right > left and bottom > top else None


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _intersection(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0
