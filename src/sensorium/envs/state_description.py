"""Descriptions of a state, judged against the true one: how much of what the model says of where things are is right.

A state is a set of places for each kind of thing, (row, column) counted from 0 at the top left. A description names kinds
and places in any words around them:

    true state   {"player": {(0, 1)}, "goal": {(3, 3)}}
    description  "I am the player at (0, 1); the goal lies at (2, 3)."      half of it is right: 0.5

A kind is right if the places named after it are all of its places and no others, so that naming every place earns nothing.
"""

import re
from collections.abc import Iterable, Mapping

from sensorium.envs.actions import ActionTurn
from sensorium.envs.responses import ResponseFormat
from sensorium.vocabulary.errors import RecipeError

State = Mapping[str, frozenset[tuple[int, int]]]

MOST_CHARACTERS = 10_000
"""What stands after these in a description is not read."""

PLACE = r"\(\s*(\d{1,3})\s*,\s*(\d{1,3})\s*\)"


def share_right(description: str, state: State) -> float:
    """The share of the kinds of things that a description places rightly."""
    kinds = "|".join(sorted(map(re.escape, state), key=len, reverse=True))
    found: dict[str, set[tuple[int, int]]] = {kind.casefold(): set() for kind in state}
    kind = ""
    for mark in re.finditer(rf"\b({kinds})(?:s|es)?\b|{PLACE}", description[:MOST_CHARACTERS], re.IGNORECASE):
        if mark[1]:
            kind = mark[1].casefold()
        elif kind in found:
            found[kind].add((int(mark[2]), int(mark[3])))
    return sum(found[kind.casefold()] == set(places) for kind, places in state.items()) / len(state) if state else 0.0


def judged(asked: ActionTurn, before: State, after: State, parts: Iterable[str]) -> dict[str, float]:
    """How right a response's observation (of the state before) and prediction (of that after it) are; 0 if not as asked."""
    good = asked.well_formed and asked.valid
    states = {"observation": before, "prediction": after}
    return {
        part: share_right(asked.sections.get(part, ""), states[part]) if good else 0.0 for part in states if part in parts
    }


def described_parts(environment: str, form: ResponseFormat, state_reward: float) -> dict[str, float]:
    """The parts of the pay that descriptions earn: those that a form has a place for. A reward without one is refused."""
    parts = {part: state_reward for part in form.sections if part in ("observation", "prediction")}
    if state_reward and not parts:
        raise RecipeError(
            f"{environment}: state_reward is {state_reward:g}, and the response format '{form.name}' has no place for a "
            "description of the state; use grounding, worldmodeling, grounding_worldmodeling or wm."
        )
    return parts


def describe(state: State) -> str:
    """A description that is all right."""
    said = (
        f"{kind} at {', '.join(f'({row}, {column})' for row, column in sorted(state[kind]))}"
        for kind in state
        if state[kind]
    )
    return "; ".join(said)


def instruction(state: State) -> str:
    """How states are to be described, for a prompt."""
    return (
        f"Say where things are ({', '.join(state)}) by row and column, counted from 0 at the top left, "
        f"as in: {next(iter(state), 'player')} at (0, 1)."
    )
