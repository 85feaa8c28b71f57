"""What a reward term returned, as scores: numbers are converted, everything else is refused by name and value.

A term may return a number, one Score, a tuple or list of Scores, or ``{name: number}``, one score each. True and False are
the numbers 1 and 0, and also say right or wrong, alone and in ``{name: …}``; a Score without a name gets the term's.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, get_args

from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RewardFailure
from sensorium.vocabulary.plain import attempt, number_of, printable, shown, text_of, truth_of, whole_of, words
from sensorium.vocabulary.score import Scope, Score

SCOPES: tuple[str, ...] = get_args(Scope)
FORMS = "a number, a Score, a tuple of Scores, True or False, or {name: number}"


def scores_of(name: str, returned: Any, episode: Episode, others: Container[str] = ()) -> tuple[Score, ...]:
    """The scores of the term ``name``; ``others`` are the names of the other terms. RewardFailure if they are none.

    A value that is not finite is missing.
    """
    scores, error = attempt(_checked, name, returned, episode, others)
    if error is not None:  # of ours, or of what was returned: a mapping may raise when it is read
        told = printable(str(error)) if type(error) is ValueError else words(error)
        raise RewardFailure(f"reward term '{name}': {told}") from error
    unsaid = f"reward term '{name}' gave no value and said no reason"
    return tuple(replace(s, reason=unsaid) if s.value is None and not s.reason else s for s in scores)


def group_scores_of(
    name: str, returned: Any, episodes: Sequence[Episode], others: Container[str] = ()
) -> list[tuple[Score, ...]]:
    """The scores of each episode of a group. RewardFailure if they are no list with an entry for each.

    An entry that is none of the forms is that episode's missing score.
    """
    listed, _ = attempt(lambda: returned.tolist() if getattr(returned, "shape", ()) else returned)
    if not isinstance(listed, list | tuple) or len(listed) != len(episodes):
        raise RewardFailure(
            f"reward term '{name}': score_group must return a list of {len(episodes)} entries, one for each episode, not "
            f"{shown(returned)}"
        )
    found = []
    for entry, episode in zip(listed, episodes, strict=True):
        try:
            found.append(scores_of(name, entry, episode, others) if entry is not None else (_unsaid(name),))
        except RewardFailure as refused:
            found.append((Score(name, None, reason=str(refused)),))
    return found


def _unsaid(name: str) -> Score:
    return Score(name, None, reason=f"reward term '{name}' gave no score")


def _checked(name: str, returned: Any, episode: Episode, others: Container[str]) -> tuple[Score, ...]:
    scores = _scores(name, returned)
    for score in scores:
        _refuse_misplaced(score, episode)
        if score.name != name and score.name in others:
            raise ValueError(f"a score is named '{score.name}', which is the name of another term")
    return scores


def _scores(name: str, returned: Any) -> tuple[Score, ...]:
    if isinstance(returned, Score):
        return (_plain(returned, name),)
    if isinstance(returned, Mapping):
        return tuple(_named(name, key, value) for key, value in returned.items()) or _refuse(returned)
    if isinstance(returned, list | tuple):
        if not returned or not all(isinstance(score, Score) for score in returned):
            _refuse(returned)
        return tuple(_plain(score, name) for score in returned)
    if returned is None:
        _refuse(returned)
    try:
        return (_finite(Score(name, number_of(returned), correct=_verdict(returned))),)
    except ValueError as error:
        raise ValueError(f"it must return {FORMS}, and {error}") from error


def _verdict(returned: Any) -> bool | None:
    """What a bool of Python, numpy or torch says; None of any other number."""
    is_bool = isinstance(returned, bool) or str(getattr(returned, "dtype", "")) in ("bool", "torch.bool")
    return truth_of(returned) if is_bool else None


def _refuse(returned: Any) -> tuple[Score, ...]:
    raise ValueError(f"it must return {FORMS}, not {shown(returned)}")


def _named(term: str, key: Any, value: Any) -> Score:
    try:
        name = text_of(key)
        return _finite(Score(name if name == term else f"{term}/{name}", number_of(value), correct=_verdict(value)))
    except ValueError as error:
        raise ValueError(f"it returned an object in which {error}; its keys are texts and its values numbers") from error


def _plain(score: Score, term: str) -> Score:
    """A score whose fields are of the types they are declared with; without a name it has the term's."""
    field = ""
    try:
        field = "name"
        name = text_of(score.name) or term
        field = "value"
        value = None if score.value is None else number_of(score.value)
        field = "correct"
        correct = None if score.correct is None else truth_of(score.correct)
        field = "turn"
        turn = None if score.turn is None else whole_of(score.turn)
        field = "span"
        span = None if score.span is None else _span(score.span)
    except ValueError as error:
        raise ValueError(f"the {field} of a score: {error}") from error
    if not isinstance(score.scope, str) or score.scope not in SCOPES:
        raise ValueError(f"the scope of a score is one of {', '.join(SCOPES)}, not {shown(score.scope)}")
    reason = printable(score.reason) if isinstance(score.reason, str) else shown(score.reason)
    paid = 0.0 if isinstance(score.weight, int | float) and score.weight == 0 else 1.0  # 0: measured and not paid
    return _finite(Score(name, value, paid, scope=score.scope, turn=turn, span=span, correct=correct, reason=reason))


def _span(span: Any) -> tuple[int, int]:
    if not isinstance(span, list | tuple) or len(span) != 2:
        raise ValueError(f"{shown(span)} is no pair of byte places")
    return whole_of(span[0]), whole_of(span[1])


def _finite(score: Score) -> Score:
    if score.value is None or isfinite(score.value):
        return score
    return Score(
        score.name, None, score.weight, scope=score.scope, turn=score.turn, span=score.span,
        reason=f"the value {score.value} is not finite",
    )  # fmt: skip


def _refuse_misplaced(score: Score, episode: Episode) -> None:
    """Refuse a score that speaks of a turn or span that is not there."""
    turns = len(episode.turns)
    if score.scope == "episode":
        return
    if score.turn is None and (score.scope == "turn" or turns != 1):
        raise ValueError(f"it judged a {score.scope} without saying of which of the {turns} turns")
    if score.turn is not None and not 0 <= score.turn < turns:
        raise ValueError(f"it judged turn {score.turn} of an episode with {turns} turns")
    if score.scope == "span":
        size = len(episode.turns[score.turn or 0].response.text.encode())
        if score.span is None or not 0 <= score.span[0] <= score.span[1] <= size:
            raise ValueError(f"it judged the bytes {score.span} of a response of {size} bytes")
