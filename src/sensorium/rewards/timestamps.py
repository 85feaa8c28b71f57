"""Timestamps: are the moments that a caption names written as [mm:ss] or [mm:ss - mm:ss], possible, and in order?"""

import re
from itertools import pairwise

from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RewardFailure
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task

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
