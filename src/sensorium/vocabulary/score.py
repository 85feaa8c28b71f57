"""Score: one named judgement of an episode, a turn or a span. Missing is not zero."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Scope = Literal["episode", "turn", "span"]

LARGEST = 1e30  # no score may be larger: its square must fit in a float64 and its advantage in a float32


@dataclass(frozen=True)
class Score:
    """A named value, or missing (``value is None``) with a reason; ``correct`` if right and wrong have a meaning.

    ``weight`` is the recipe's; a score of weight 0 is measured only.
    """

    name: str
    value: float | None
    weight: float = 1.0
    scope: Scope = "episode"
    turn: int | None = None
    span: tuple[int, int] | None = None
    correct: bool | None = None
    reason: str = ""

    @property
    def missing(self) -> bool:
        """True when nothing was judged."""
        return self.value is None


def reward(value: float | None = None, *, correct: bool) -> Score:
    """What a reward function may return: right or wrong, and a value (default 1 or 0); named after its term."""
    return Score("", float(correct) if value is None else value, correct=correct)


def unusable(value: float) -> bool:
    """True for a number that cannot be trained on: NaN, infinite, or beyond ``LARGEST``."""
    return not abs(value) <= LARGEST


def by_name(scores: Iterable[Score]) -> dict[str, float | None]:
    """Each name's value for an episode, or the sum over turns and spans; None if any is missing."""
    sums: dict[str, float | None] = {}
    for score in scores:
        before = sums.get(score.name, 0.0)
        sums[score.name] = None if before is None or score.value is None else before + score.value
    return sums


def total(scores: Iterable[Score]) -> float | None:
    """The weighted sum, or None if any score that carries weight is missing (or there are none)."""
    kept = [score for score in scores if score.weight != 0.0]
    if not kept or any(score.value is None for score in kept):
        return None
    return sum(score.weight * score.value for score in kept if score.value is not None)


def correctness(scores: Iterable[Score]) -> bool | None:
    """Right if all scores that know say so; None if none knows."""
    verdicts = [score.correct for score in scores if score.correct is not None]
    return all(verdicts) if verdicts else None
