"""The way that a breadth-first search found: from the place it ended at back to where it began."""

from collections.abc import Mapping
from typing import TypeVar

Place = TypeVar("Place")


def way_back(came: Mapping[Place, tuple[Place, int] | None], end: Place) -> tuple[int, ...]:
    """The actions that led to ``end``. ``came`` has for each place the one before it and the action; None for the first."""
    actions = []
    step = came[end]
    while step is not None:
        actions.append(step[1])
        step = came[step[0]]
    return tuple(actions[::-1])
