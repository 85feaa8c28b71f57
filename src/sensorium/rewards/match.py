"""Terms that compare the model's answer with the known one: exact text, choice letter, number."""

import re
from math import isfinite

from sensorium.rewards.answer import expected_answers, given_answer
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task

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
