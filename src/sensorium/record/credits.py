"""What training made of an episode, as its log row keeps it: its fate, and the advantage of every token as trained.

Example: of two turns, the first with the same advantage at all its tokens, a row has ``"fate": "trained"`` and
``"advantages": [0.5, [0.25, 0.25, -1.0]]``. Rows of older versions and of evaluations have neither.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sensorium.vocabulary.episode import Episode, Group

TRAINED = "trained"


@dataclass(frozen=True)
class EpisodeCredit:
    """An episode's fate, and where it was trained on, the advantages of its tokens by turn."""

    fate: str = TRAINED
    advantages: tuple[tuple[float, ...], ...] = ()


def credits_of(
    groups: Iterable[Group], fates: Mapping[str, str], advantages: Mapping[str, Sequence[Sequence[float]]]
) -> dict[str, EpisodeCredit]:
    """The credit of every episode by id; ``fates`` are of those not trained on, ``advantages`` of those that were."""
    return {
        e.id: EpisodeCredit(fates.get(e.id, TRAINED), tuple(tuple(turn) for turn in advantages.get(e.id, ())))
        for group in groups
        for e in group.episodes
    }


def credit_to_json(credit: EpisodeCredit) -> dict[str, Any]:
    """The fields of a log row. Nine digits are enough to read a float32 back as it was."""
    fields: dict[str, Any] = {"fate": credit.fate}
    if credit.advantages:
        fields["advantages"] = [_short(turn) for turn in credit.advantages]
    return fields


def _short(turn: Sequence[float]) -> float | list[float]:
    """A turn's advantages; one number where they are all alike."""
    if len(set(turn)) == 1:
        return float(f"{turn[0]:.9g}")
    written = [float(f"{value:.9g}") for value in turn]
    return written[0] if len(set(written)) == 1 else written


def credit_from_json(row: Mapping[str, Any], episode: Episode) -> EpisodeCredit | None:
    """The credit in a log row; None where it has none."""
    if "fate" not in row:
        return None
    turns = zip(row.get("advantages", ()), episode.turns, strict=False)
    advantages = tuple(
        tuple(given) if isinstance(given, list) else (float(given),) * len(turn.response.tokens) for given, turn in turns
    )
    return EpisodeCredit(row["fate"], advantages)


def missing_scores(episode: Episode) -> dict[str, str]:
    """Why scores are missing, by name; a term that misses several turns is told once for each."""
    return {
        score.name if score.turn is None else f"{score.name}, turn {score.turn}": score.reason
        for score in episode.scores
        if score.missing
    }
