"""Reward terms that need no model: format, comparison with the known answer, mathematics, length, environment.

They are named in ``recipe/registry.py``.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from math import isfinite
from typing import Any

from sensorium.rewards.equivalence import EquivalencePool
from sensorium.rewards.reward_term import boxed, expected_answers, given_answer, last_response, tagged
from sensorium.vocabulary.episode import Episode, Score, Turn
from sensorium.vocabulary.errors import RecipeError, RewardFailure, TaskError
from sensorium.vocabulary.task import Task

THINK_AND_ANSWER = {"think": 0.25, "answer": 0.75}
LETTER = re.compile(
    r"\s*(?:(?:option|choice|answer)\s*:?\s*)?[(\[]?\s*([a-z])\s*(?:[)\].:,].*|$)", re.IGNORECASE | re.DOTALL
)
ONE_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d*|\.\d+)?(?:(?<=[\d.])e[-+]?\d+)?"
NUMBER = re.compile(rf"(?<![\w.])(?=[-+]?\.?\d)({ONE_NUMBER})(?:\s*/\s*({ONE_NUMBER}))?", re.IGNORECASE | re.ASCII)
HASHES = re.compile(r"####[ \t]*([^\sA-Za-z][^\n]*)")  # not a heading such as "#### Step 2"
BESIDE_NUMBER = re.compile(r"\\?[$€£]|\\!|[{](?=,[}])|(?<=[{],)[}]")  # currencies; LaTeX in 1{,}200 and 1,\!200
STAMP = re.compile(r"\[(\d{1,3}):(\d{2})(?:\s*-\s*(\d{1,3}):(\d{2}))?\]")
MOST_MINUTES = 599


class Format:
    """Rewards each tag that is opened and closed with its part; several turns get their mean. Says nothing of correctness.

    ``tags: {answer: 1.0}`` asks for the answer alone.
    """

    instant = True

    def __init__(self, tags: Mapping[str, float] | None = None, name: str = "format") -> None:
        self.name = name
        self.tags = dict(THINK_AND_ANSWER if tags is None else tags)
        if not self.tags:
            raise RecipeError(f"reward '{name}': tags is empty; name at least one, as in {{answer: 1.0}}.")

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        last_response(episode)  # refuses an episode without one
        texts = [turn.response.text for turn in episode.turns]
        values = [sum(part for tag, part in self.tags.items() if tagged(text, tag) is not None) for text in texts]
        return (Score(self.name, sum(values) / len(values)),)


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


class _Comparison:
    """1 if the answer in ``<answer>`` reads as one of the known answers, else 0.

    ``fallback`` takes the whole response as the answer when the tag is missing.
    """

    instant = True
    needs_answer = True
    unreadable = ""  # what is wrong with a known answer that ``read`` returns None for

    def __init__(self, fallback: bool, name: str) -> None:
        self.name, self.fallback = name, fallback

    def read(self, text: str) -> Any:
        """An answer in the form that is compared; None if it has none."""
        raise NotImplementedError

    def equal(self, known: Any, given: Any) -> bool:
        """True if an answer counts as the known one."""
        return bool(known == given)

    def check_task(self, task: Task) -> list[Any]:
        """The known answers as they are compared; TaskError for one that cannot be."""
        known = [self.read(answer) for answer in expected_answers(task)]
        if None in known:
            raise TaskError(f"task {task.id}: the answer {task.answer!r:.80} {self.unreadable}.")
        return known

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        known, given = self.check_task(task), self._given(episode)
        right = given is not None and any(self.equal(answer, given) for answer in known)
        return (Score(self.name, float(right), correct=right),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        given = self._given(episode)
        return given if given is None or isinstance(given, str) else repr(given)

    def _given(self, episode: Episode) -> Any:
        text = given_answer(episode, fallback=self.fallback)
        return None if text is None else self.read(text)


class Exact(_Comparison):
    """1 if the answer equals the known one by letters and digits alone, ignoring case; else 0.

    Signs and points are ignored too: compare numbers with ``numeric``.
    """

    unreadable = "has no letter or digit to compare"

    def __init__(self, fallback: bool = False, name: str = "exact") -> None:
        super().__init__(fallback, name)

    def read(self, text: str) -> str | None:
        return alphanumeric(text) or None


def exact_alnum(name: str = "exact_alnum") -> Exact:
    """``exact`` under the name that audio-visual recipes use."""
    return Exact(name=name)


def exact_alnum_with_fallback(name: str = "exact_alnum_with_fallback") -> Exact:
    """``exact_alnum`` that takes the whole response as the answer where the tag is missing."""
    return Exact(fallback=True, name=name)


class Choice(_Comparison):
    """1 if the letter of the chosen option is the known one, else 0."""

    unreadable = "is not the letter of a choice"

    def __init__(self, fallback: bool = False, name: str = "choice") -> None:
        super().__init__(fallback, name)

    def read(self, text: str) -> str | None:
        return choice_letter(text)


class Numeric(_Comparison):
    """1 if the answer is a number within ``absolute``, or within ``relative`` times the known one; else 0."""

    unreadable = "is not a number"

    def __init__(
        self, absolute: float = 1e-6, relative: float = 0.0, fallback: bool = False, name: str = "numeric"
    ) -> None:
        super().__init__(fallback, name)
        self.absolute, self.relative = absolute, relative

    def read(self, text: str) -> float | None:
        return number(text)

    def equal(self, known: float, given: float) -> bool:
        return abs(given - known) <= max(self.absolute, self.relative * abs(known))


class Gsm8k(_Comparison):
    r"""1 if the number after the last ``####``, or where none is there in the last ``\boxed{…}``, is the known one; else 0.

    The known answer may be a solution of the data set, which ends in ``#### 72``. Currencies and units may be beside it.
    """

    unreadable = "is no number, and has none after '####'"

    def __init__(self, name: str = "gsm8k") -> None:
        super().__init__(fallback=False, name=name)

    def read(self, text: str) -> float | None:
        after = after_hashes(text)
        return _amount(text) if after is None else _amount(after)

    def _given(self, episode: Episode) -> float | None:
        text = last_response(episode)
        stated = (_amount(part) for part in (after_hashes(text), boxed(text)) if part is not None)
        return next((amount for amount in stated if amount is not None), None)


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last ``####``, or None."""
    found = HASHES.findall(text)
    return found[-1].strip() if found else None


def _amount(text: str) -> float | None:
    return number(BESIDE_NUMBER.sub("", text))


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
        self.name, self.fallback = name, fallback
        self._pool = EquivalencePool(timeout_s, processes)

    def check_task(self, task: Task) -> None:
        """Refuse an answer that is no text or number; whether it is mathematics shows when it is compared."""
        expected_answers(task)

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        answers, given, right = expected_answers(task), self.extract(task, episode), False
        for known in answers:
            if given is None or right:
                break
            equal = self._pool.equal(known, given)
            if equal is None:
                raise TaskError(f"task {task.id}: the answer {known!r:.80} cannot be read as mathematics.")
            right = equal
        return (Score(self.name, float(right), correct=right),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        return mathematical_answer(last_response(episode), fallback=self.fallback)

    def close(self) -> None:
        self._pool.close()


def mathematical_answer(text: str, *, fallback: bool = False) -> str | None:
    """The part of a response that states its answer."""
    answer = tagged(text)
    box = boxed(text if answer is None else answer)
    if box is not None:
        return box
    return text.strip() if answer is None and fallback else answer


class EnvironmentReward:
    """The sum of the turns' rewards, or with ``per_turn`` one score for each turn that has a reward.

    Named parts of a reward are scores of their own: ``{"goal": 1.0}`` becomes ``environment/goal``. Correct is the
    environment's success: that of the episode, or else of the last turn.
    """

    instant = True

    def __init__(self, per_turn: bool = False, name: str = "environment") -> None:
        self.name = name
        self.per_turn = per_turn

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """A score of each part for the episode, or for each turn; the last one carries right or wrong."""
        values = [(turn.index, name, value) for turn in episode.turns for name, value in self._parts(turn)]
        if not values:
            raise RewardFailure(f"task {task.id}: its environment gave no reward in {len(episode.turns)} turns")
        success = episode.info.get("success", episode.turns[-1].info.get("success"))
        if self.per_turn:
            *before, last = (Score(name, value, scope="turn", turn=index) for index, name, value in values)
        else:
            sums: dict[str, float] = {}
            for _, name, value in values:
                sums[name] = sums.get(name, 0) + value
            *before, last = (Score(name, value) for name, value in sums.items())
        return (*before, replace(last, correct=None if success is None else bool(success)))

    def _parts(self, turn: Turn) -> Iterator[tuple[str, float]]:
        if turn.parts:
            yield from ((f"{self.name}/{part}", value) for part, value in turn.parts.items())
        elif turn.reward is not None:
            yield self.name, turn.reward


class Overlong:
    """0 up to ``max_tokens - buffer_tokens``, then in a straight line down to ``-penalty`` at ``max_tokens`` and beyond.

    Counts the tokens the model wrote in the whole episode. Without a buffer all of it is due at ``max_tokens``.
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
        last_response(episode)  # refuses an episode without one
        return (Score(self.name, -self.penalty * self.share(episode.sampled_tokens)),)

    def share(self, tokens: int) -> float:
        """The share of the penalty for so many tokens."""
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
                f"reward '{name}': full_until is {full_until} and none_from {none_from}; full_until must be the lower one."
            )
        self.name, self.full_until, self.none_from = name, full_until, none_from

    def score(self, task: Task, episode: Episode) -> Score:
        last_response(episode)  # refuses an episode without one
        return Score(self.name, self.value(episode.sampled_tokens))

    def value(self, tokens: int) -> float:
        """The score of so many tokens."""
        return min(1.0, max(0.0, (self.none_from - tokens) / (self.none_from - self.full_until)))


class Timestamps:
    """Half for the share of timestamps that are valid, and half if the valid ones begin in order; 0 without any."""

    instant = True

    def __init__(self, name: str = "timestamps") -> None:
        self.name = name

    def score(self, task: Task, episode: Episode) -> Score:
        return Score(self.name, timestamp_format(last_response(episode)))


def timestamp_format(text: str) -> float:
    """The score of a caption: 0.5 · valid / all + 0.5 · [the valid ones begin in order], 0 without any.

    Valid are seconds up to 59, minutes up to 599 and an end that is not before the start.
    """
    stamps, starts = list(STAMP.finditer(text)), []
    for stamp in stamps:
        minutes, seconds, end_minutes, end_seconds = (int(part or 0) for part in stamp.groups())
        start, end = 60 * minutes + seconds, 60 * end_minutes + end_seconds
        in_range = max(seconds, end_seconds) <= 59 and max(minutes, end_minutes) <= MOST_MINUTES
        if in_range and (stamp[3] is None or end >= start):
            starts.append(start)
    if not starts:
        return 0.0
    in_order = all(before <= after for before, after in pairwise(starts))
    return 0.5 * len(starts) / len(stamps) + 0.5 * in_order


Box = tuple[float, float, float, float]  # left, top, right, bottom; right of left and below top
BOX_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
FOUR = re.compile(rf"({BOX_NUMBER})\s*[,;\s]\s*({BOX_NUMBER})\s*[,;\s]\s*({BOX_NUMBER})\s*[,;\s]\s*({BOX_NUMBER})")
FARTHEST = 1e7


class BoxIoU:
    """Intersection over union of the last box in the answer with the known one, or the best of several; no box: 0.

    Correct is an IoU of at least ``threshold``. ``fallback`` looks through the whole response where the tag is missing.
    """

    instant = True
    needs_answer = True
    worst = 0.0  # so that giving no box never scores above giving a bad one

    def __init__(self, threshold: float = 0.5, fallback: bool = False, name: str = "bbox_iou") -> None:
        if not 0 < threshold <= 1:
            raise RecipeError(f"reward '{name}': threshold must be above 0 and at most 1, not {threshold:g}.")
        self.name, self.threshold, self.fallback = name, threshold, fallback

    def check_task(self, task: Task) -> None:
        """Refuse an answer that is no box."""
        known_boxes(task)

    def measure(self, one: Box, other: Box) -> float:
        return iou(one, other)

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        known = known_boxes(task)
        given = self._given(episode)
        if given is None:
            return (Score(self.name, self.worst, correct=False),)
        value = max(self.measure(box, given) for box in known)
        return (Score(self.name, value, correct=max(iou(box, given) for box in known) >= self.threshold),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        box = self._given(episode)
        return None if box is None else repr(list(box))

    def _given(self, episode: Episode) -> Box | None:
        text = given_answer(episode, fallback=self.fallback)
        return None if text is None else last_box(text)


class BoxGIoU(BoxIoU):
    """Generalised IoU with the known box, in [-1, 1]: boxes apart score higher when nearer; no box: -1.

    Correct by the IoU.
    """

    worst = -1.0

    def __init__(self, threshold: float = 0.5, fallback: bool = False, name: str = "bbox_giou") -> None:
        super().__init__(threshold, fallback, name)

    def measure(self, one: Box, other: Box) -> float:
        return giou(one, other)


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
            raw = last_box(raw)
    rows = raw if isinstance(raw, list | tuple) and raw and isinstance(raw[0], list | tuple) else [raw]
    boxes = [box for box in map(_box, rows) if box is not None]
    if len(boxes) < len(rows):
        raise TaskError(
            f"task {task.id}: the answer {task.answer!r:.80} is no box; give [left, top, right, bottom], or several."
        )
    return boxes


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
