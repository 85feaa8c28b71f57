"""Reward terms that need no model: format, comparison with the known answer, mathematics, length, environment."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from math import isfinite
from typing import Any

from sensorium.rewards.equivalence_pool import EquivalencePool
from sensorium.rewards.reward_term import boxed, expected_answers, given_answer, last_response, tagged
from sensorium.vocabulary.episode import Episode, Turn
from sensorium.vocabulary.errors import RecipeError, RewardFailure, TaskError
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task

THINK_AND_ANSWER = {"think": 0.25, "answer": 0.75}


class Format:
    """Pays each tag that is opened and closed its part; several turns pay their mean. Says nothing of right or wrong.

    ``tags: {answer: 1.0}`` asks for the answer alone.
    """

    instant = True

    def __init__(self, tags: Mapping[str, float] | None = None, name: str = "format") -> None:
        self.name = name
        self.tags = dict(THINK_AND_ANSWER if tags is None else tags)
        if not self.tags:
            raise RecipeError(f"reward '{name}': tags is empty; name at least one, as in {{answer: 1.0}}.")

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """One score for the episode."""
        if not episode.turns:
            raise RewardFailure(f"episode {episode.id} has no response to score")
        paid = [self.paid(turn.response.text) for turn in episode.turns]
        return (Score(self.name, sum(paid) / len(paid)),)

    def paid(self, text: str) -> float:
        """What one response earns."""
        return sum(part for tag, part in self.tags.items() if tagged(text, tag) is not None)


LETTER = re.compile(
    r"\s*(?:(?:option|choice|answer)\s*:?\s*)?[(\[]?\s*([a-z])\s*(?:[)\].:,].*|$)", re.IGNORECASE | re.DOTALL
)
ONE_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d*|\.\d+)?(?:(?<=[\d.])e[-+]?\d+)?"
NUMBER = re.compile(rf"(?<![\w.])(?=[-+]?\.?\d)({ONE_NUMBER})(?:\s*/\s*({ONE_NUMBER}))?", re.IGNORECASE | re.ASCII)


def alphanumeric(text: str) -> str:
    """Letters and digits only, in lower case."""
    return "".join(filter(str.isalnum, text.casefold()))


def choice_letter(text: str) -> str | None:
    """The letter of a choice written as ``B``, ``(b)``, ``B.``, ``B) the cat`` or ``Option B``; None for prose."""
    found = LETTER.fullmatch(text)
    return found.group(1).upper() if found else None


def number(text: str) -> float | None:
    """The one number in a text (``1,234.5``, ``-2e3``, ``1/2``, ``5 cm``, ``50%``); None if there is none or several."""
    found = list(NUMBER.finditer(text.replace("\u2212", "-")))
    if len(found) != 1:
        return None
    try:
        value, divisor = (float(part.replace(",", "")) if part else 1.0 for part in found[0].groups())
        value = value / divisor
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value if isfinite(value) else None


class Exact:
    """1 if the answer equals the known one by letters and digits alone, ignoring case; else 0.

    Signs and points are ignored too: compare numbers with ``numeric``. ``fallback`` takes the whole response as the answer
    when the tag is missing.
    """

    instant = True
    needs_answer = True

    def __init__(self, fallback: bool = False, name: str = "exact") -> None:
        self.name = name
        self.fallback = fallback

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """Right or wrong."""
        expected = {alphanumeric(answer) for answer in expected_answers(task)}
        if "" in expected:
            raise TaskError(f"task {task.id}: the answer {task.answer!r:.80} has no letter or digit to compare.")
        return (_verdict(self.name, self.extract(task, episode) in expected),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        """The answer's letters and digits."""
        given = given_answer(episode, fallback=self.fallback)
        return (alphanumeric(given) or None) if given is not None else None


def exact_alnum(name: str = "exact_alnum") -> Exact:
    """``exact`` under the name by which the audio-visual recipes know it: without the tag there is no answer."""
    return Exact(name=name)


def exact_alnum_with_fallback(name: str = "exact_alnum_with_fallback") -> Exact:
    """``exact_alnum`` that takes the whole response as the answer where the tag is missing."""
    return Exact(fallback=True, name=name)


class Choice:
    """1 if the letter of the chosen option is the known one, else 0."""

    instant = True
    needs_answer = True

    def __init__(self, fallback: bool = False, name: str = "choice") -> None:
        self.name = name
        self.fallback = fallback

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """Right or wrong."""
        expected = {choice_letter(answer) for answer in expected_answers(task)}
        if None in expected:
            raise TaskError(f"task {task.id}: the answer {task.answer!r:.80} is not the letter of a choice.")
        return (_verdict(self.name, self.extract(task, episode) in expected),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        """The letter."""
        given = given_answer(episode, fallback=self.fallback)
        return choice_letter(given) if given is not None else None


class Numeric:
    """1 if the answer is a number within ``absolute``, or within ``relative`` times the known one; else 0."""

    instant = True
    needs_answer = True

    def __init__(
        self, absolute: float = 1e-6, relative: float = 0.0, fallback: bool = False, name: str = "numeric"
    ) -> None:
        self.name = name
        self.absolute, self.relative = absolute, relative
        self.fallback = fallback

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """Right or wrong."""
        expected = [number(answer) for answer in expected_answers(task)]
        value = self._value(episode)
        right = False
        for known in expected:
            if known is None:
                raise TaskError(f"task {task.id}: the answer {task.answer!r:.80} is not a number.")
            right |= value is not None and abs(value - known) <= max(self.absolute, self.relative * abs(known))
        return (_verdict(self.name, right),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        """The number."""
        value = self._value(episode)
        return None if value is None else repr(value)

    def _value(self, episode: Episode) -> float | None:
        given = given_answer(episode, fallback=self.fallback)
        return number(given) if given is not None else None


def _verdict(name: str, right: bool) -> Score:
    return Score(name, float(right), correct=right)


class Mathematics:
    r"""1 if the last ``\boxed{…}`` (within ``<answer>`` where there is one), or else ``<answer>``, equals the known answer.

    A comparison that takes more than ``timeout_s`` CPU seconds gives no score. ``fallback`` takes the whole response as
    the answer when it has neither mark.
    """

    instant = False
    needs_answer = True

    def __init__(self, timeout_s: float = 5.0, processes: int = 2, fallback: bool = False, name: str = "math") -> None:
        if find_spec("math_verify") is None:
            raise RecipeError(
                "reward 'math' needs the package math-verify, which is not installed: pip install math-verify."
            )
        self.name = name
        self.fallback = fallback
        self._pool = EquivalencePool(timeout_s, processes)

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """Right or wrong; only what the model wrote in its last turn counts."""
        known = expected_answers(task)
        given = self.extract(task, episode)
        right = given is not None and any(self._equal(task, answer, given) for answer in known)
        return (Score(self.name, float(right), correct=right),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        """The answer as it is written; only what is written alike counts as one answer."""
        return mathematical_answer(last_response(episode), fallback=self.fallback)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def _equal(self, task: Task, known: str, given: str) -> bool:
        equal = self._pool.equal(known, given)
        if equal is None:
            raise TaskError(f"task {task.id}: the answer {known!r:.80} cannot be read as mathematics.")
        return equal


def mathematical_answer(text: str, *, fallback: bool = False) -> str | None:
    """What a response states as its answer."""
    answer = tagged(text)
    box = boxed(text if answer is None else answer)
    if box is not None:
        return box
    return text.strip() if answer is None and fallback else answer


class EnvironmentReward:
    """The sum of the turns' rewards, or with ``per_turn`` one score for each turn that was paid.

    Named parts of the pay are scores of their own: ``{"goal": 1.0}`` is paid as ``environment/goal``. Correct is the
    environment's success: the episode's, or else what the last turn says of it.
    """

    instant = True

    def __init__(self, per_turn: bool = False, name: str = "environment") -> None:
        self.name = name
        self.per_turn = per_turn

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """A score of each part for the episode, or for each paid turn; the last one carries right or wrong."""
        paid = [(turn.index, name, value) for turn in episode.turns for name, value in self._parts(turn)]
        if not paid:
            raise RewardFailure(f"task {task.id}: its environment paid nothing in {len(episode.turns)} turns")
        success = episode.info.get("success", episode.turns[-1].info.get("success"))
        correct = None if success is None else bool(success)
        if self.per_turn:
            *before, last = (Score(name, value, scope="turn", turn=index) for index, name, value in paid)
        else:
            sums: dict[str, float] = {}
            for _, name, value in paid:
                sums[name] = sums.get(name, 0) + value
            *before, last = (Score(name, value) for name, value in sums.items())
        return (*before, replace(last, correct=correct))

    def _parts(self, turn: Turn) -> Iterator[tuple[str, float]]:
        """What a turn was paid, by the name of the score."""
        if turn.parts:
            yield from ((f"{self.name}/{part}", value) for part, value in turn.parts.items())
        elif turn.reward is not None:
            yield self.name, turn.reward


class Overlong:
    """Costs nothing up to ``max_tokens - buffer_tokens``, then in a straight line ``penalty`` at ``max_tokens`` and beyond.

    Counts the tokens the model wrote in the whole episode. With no buffer the price is due at ``max_tokens`` at once.
    """

    instant = True

    def __init__(self, max_tokens: int, buffer_tokens: int, penalty: float = 1.0, name: str = "overlong") -> None:
        if not 0 <= buffer_tokens <= max_tokens or max_tokens < 1:
            raise RecipeError(
                f"reward '{name}': buffer_tokens is {buffer_tokens} and max_tokens {max_tokens}; the buffer is the last "
                "part of max_tokens, so it must lie between 0 and that."
            )
        if penalty < 0:
            raise RecipeError(
                f"reward '{name}': penalty is {penalty}; give what being overlong costs, as a positive number."
            )
        self.name = name
        self.max_tokens, self.buffer_tokens, self.penalty = max_tokens, buffer_tokens, penalty

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """One score for the episode, never above 0."""
        if not episode.turns:
            raise RewardFailure(f"episode {episode.id} has no response to score")
        return (Score(self.name, -self.penalty * self.share(episode.sampled_tokens)),)

    def share(self, tokens: int) -> float:
        """Which part of the penalty so many tokens cost."""
        left = self.max_tokens - tokens
        if left <= 0:
            return 1.0
        return 0.0 if left >= self.buffer_tokens else 1 - left / self.buffer_tokens


class TokenLength:
    """1 up to ``full_until`` tokens, in a straight line down to 0 at ``none_from``, 0 beyond."""

    instant = True

    def __init__(self, full_until: int = 2048, none_from: int = 3072, name: str = "token_length") -> None:
        if not 0 <= full_until < none_from:
            raise RecipeError(
                f"reward '{name}': full_until is {full_until} and none_from {none_from}; the whole pay must end before "
                "there is none."
            )
        self.name, self.full_until, self.none_from = name, full_until, none_from

    def score(self, task: Task, episode: Episode) -> Score:
        """One score for the episode, of the tokens the model wrote in it."""
        if not episode.turns:
            raise RewardFailure(f"episode {episode.id} has no response to score")
        return Score(self.name, self.paid(episode.sampled_tokens))

    def paid(self, tokens: int) -> float:
        """What so many tokens earn."""
        return min(1.0, max(0.0, (self.none_from - tokens) / (self.none_from - self.full_until)))


STAMP = re.compile(r"\[(\d{1,3}):(\d{2})(?:\s*-\s*(\d{1,3}):(\d{2}))?\]")

MOST_MINUTES = 599


class Timestamps:
    """Pays half for the share of timestamps that are valid, and half if the valid ones begin in order. None: 0."""

    instant = True

    def __init__(self, name: str = "timestamps") -> None:
        self.name = name

    def score(self, task: Task, episode: Episode) -> Score:
        """One score for the last response of the episode."""
        if not episode.turns:
            raise RewardFailure(f"episode {episode.id} has no response to score")
        return Score(self.name, timestamp_format(episode.turns[-1].response.text))


def timestamp_format(text: str) -> float:
    """What a caption earns: 0.5 · valid / all + 0.5 · [the valid ones begin in order], 0 without any.

    Valid are seconds up to 59, minutes up to 599 and an end that is not before the start.
    """
    stamps = list(STAMP.finditer(text))
    starts = [start for start in map(_start, stamps) if start is not None]
    if not starts:
        return 0.0
    in_order = all(before <= after for before, after in pairwise(starts))
    return 0.5 * len(starts) / len(stamps) + 0.5 * in_order


def _start(stamp: re.Match[str]) -> int | None:
    """The second at which a stamp begins; None if it is not valid."""
    minutes, seconds, end_minutes, end_seconds = stamp.groups()
    start = 60 * int(minutes) + int(seconds)
    if int(seconds) > 59 or int(minutes) > MOST_MINUTES or int(end_minutes or 0) > MOST_MINUTES:
        return None
    if end_minutes is None:
        return start
    return start if int(end_seconds) <= 59 and 60 * int(end_minutes) + int(end_seconds) >= start else None


Box = tuple[float, float, float, float]
"""Left, top, right, bottom; right of left and below top."""

BOX_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
FOUR = re.compile(rf"({BOX_NUMBER})\s*[,;\s]\s*({BOX_NUMBER})\s*[,;\s]\s*({BOX_NUMBER})\s*[,;\s]\s*({BOX_NUMBER})")
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
