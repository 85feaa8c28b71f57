"""Accuracy by type of question: each kind of answer has its own comparison, some with partial scores."""

import re
from collections.abc import Callable, Sequence

from sensorium.rewards.reward_term import expected_answers, given_answer
from sensorium.rewards.terms import alphanumeric, choice_letter, number
from sensorium.vocabulary.episode import Episode, Score
from sensorium.vocabulary.errors import RecipeError, TaskError, nearest
from sensorium.vocabulary.task import Task

Verdict = tuple[float, bool | None]  # a value in [0, 1], and right or wrong where that has a meaning
YES_OR_NO = {"yes": True, "true": True, "y": True, "no": False, "false": False, "n": False}


class Unfit(ValueError):
    """The known answer is not what its type says."""


class AccuracyByType:
    """Compares by the task's metadata ``type``, or by ``default`` without one.

    "multiple choice": the same letter (or words). "numerical": equal at two decimals. "ocr": 1 − word error rate.
    "regression": 1 − relative error. "multi-label" (also "emer_ov_mc"): F1 of the two sets. "judge": the same yes or no.
    All within [0, 1]. Free-form answers need a judge. ``fallback`` uses the whole response where the tag is missing.
    """

    instant = True
    needs_answer = True

    def __init__(self, default: str = "", fallback: bool = False, name: str = "accuracy_by_type") -> None:
        self.name = name
        self.fallback = fallback
        self.default = default
        if default and plain(default) not in COMPARE:
            raise RecipeError(f"reward '{name}': there is no type '{default}'{nearest(default, list(COMPARE))}")

    def check_task(self, task: Task) -> None:
        """Refuse an answer that is no text or number."""
        expected_answers(task)

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """One score; a missing answer scores 0."""
        kind = str(task.metadata.get("type", self.default))
        compare = COMPARE.get(plain(kind))
        if compare is None:
            raise TaskError(f"task {task.id}: answers of type '{kind}' cannot be compared{nearest(kind, list(COMPARE))}")
        given = given_answer(episode, fallback=self.fallback)
        try:
            value, correct = compare(expected_answers(task), given if given is not None else "")
        except Unfit as error:
            raise TaskError(
                f"task {task.id}: the answer {task.answer!r:.80} is {error}, as type '{kind}' requires."
            ) from error
        return (Score(self.name, value, correct=correct),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        compare = COMPARE.get(plain(str(task.metadata.get("type", self.default))))
        given = given_answer(episode, fallback=self.fallback)
        return None if compare is None or given is None else READ[compare](given) or None


def plain(kind: str) -> str:
    """A type's name without case and punctuation."""
    return " ".join(re.findall(r"[a-z0-9/]+", kind.lower()))


def multiple_choice(known: Sequence[str], given: str) -> Verdict:
    """The same letter; the same words where the known answer is no letter."""
    letters = {choice_letter(answer) for answer in known} - {None}
    words = {alphanumeric(answer) for answer in known} - {""}
    if not words:
        raise Unfit("no letter and no words")
    right = choice_letter(given) in letters if letters else alphanumeric(given) in words
    return float(right), right


def numerical(known: Sequence[str], given: str) -> Verdict:
    """Equal when both are rounded to two decimals."""
    value, answers = number(given), _numbers(known)
    right = value is not None and any(round(value, 2) == round(answer, 2) for answer in answers)
    return float(right), right


def regression(known: Sequence[str], given: str) -> Verdict:
    """1 − |given − known| / |known|, at least 0; a known zero must be met."""
    value, answers = number(given), _numbers(known)
    if value is None:
        return 0.0, None
    errors = [abs(value - answer) / abs(answer) if answer else float(value != answer) for answer in answers]
    return max(0.0, 1.0 - min(errors)), None


def ocr(known: Sequence[str], given: str) -> Verdict:
    """1 − word error rate, at least 0. Words are compared as they are written."""
    if not all(answer.split() for answer in known):
        raise Unfit("no words")
    value = max(max(0.0, 1.0 - word_error_rate(answer.split(), given.split())) for answer in known)
    return value, value == 1.0


def multi_label(known: Sequence[str], given: str) -> Verdict:
    """F1 of the set of labels given against the set known."""
    labels = {label for answer in known for label in _labels(answer)}
    if not labels:
        raise Unfit("no list of labels")
    found = set(_labels(given))
    shared = len(labels & found)
    return 2 * shared / (len(labels) + len(found)), labels == found


def yes_or_no(known: Sequence[str], given: str) -> Verdict:
    """The same yes or no."""
    wanted = {YES_OR_NO.get(alphanumeric(answer)) for answer in known}
    if None in wanted:
        raise Unfit("neither yes nor no")
    right = YES_OR_NO.get(alphanumeric(given)) in wanted
    return float(right), right


def word_error_rate(reference: Sequence[str], heard: Sequence[str]) -> float:
    """Words to insert, drop or replace, per word of the reference (which must have one)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(reference, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1] / len(reference)


COMPARE: dict[str, Callable[[Sequence[str], str], Verdict]] = {
    "multiple choice": multiple_choice,
    "numerical": numerical,
    "ocr": ocr,
    "regression": regression,
    "multi label": multi_label,
    "emer ov mc": multi_label,
    "judge": yes_or_no,
    "yes/no": yes_or_no,
}
# An answer in the form in which a comparison sees it.
READ: dict[Callable[[Sequence[str], str], Verdict], Callable[[str], str | None]] = {
    multiple_choice: lambda given: choice_letter(given) or alphanumeric(given),
    numerical: lambda given: _shown(number(given), 2),
    regression: lambda given: _shown(number(given), None),
    ocr: lambda given: " ".join(given.split()),
    multi_label: lambda given: ",".join(sorted(set(_labels(given)))),
    yes_or_no: lambda given: {True: "yes", False: "no", None: None}[YES_OR_NO.get(alphanumeric(given))],
}


def _shown(value: float | None, decimals: int | None) -> str | None:
    return None if value is None else repr(value if decimals is None else round(value, decimals))


def _numbers(known: Sequence[str]) -> list[float]:
    found = [number(answer) for answer in known]
    if None in found:
        raise Unfit("no number")
    return [value for value in found if value is not None]


def _labels(text: str) -> list[str]:
    """The labels of a list such as ``A, C`` or ``joy; relief``; ``AC`` is A and C, since labels of options are letters."""
    parts = [part.strip() for part in re.split(r"[,;/\n、]|\band\b", text)]
    found: list[str] = []
    for part in parts:
        letters = re.fullmatch(r"[A-Z ]{2,}", part)
        found += part.replace(" ", "") if letters else [choice_letter(part) or part]
    return [alphanumeric(label) for label in found if alphanumeric(label)]
