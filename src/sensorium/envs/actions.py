"""Actions by name: a response's answer names up to so many of them, in the form that the environment asks for.

One that names none, too many or an unknown one names no action at all: nothing is done by halves. So with three allowed,
``<answer>Left, Down</answer>`` is two actions, ``<answer>Left, Jump</answer>`` is none, and so are four.

With the grammar ``vagen`` it is as in VAGEN: of four the first three are taken, and of ``Left, Jump`` the first, but the
response is not valid then.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.responses import ParsedResponse, ResponseFormat
from sensorium.vocabulary.content import Media, Message, Text, user
from sensorium.vocabulary.errors import RecipeError

MOST_CHARACTERS = 10_000
"""An answer longer than this is not looked at: no list of actions is."""


@dataclass(frozen=True)
class ActionTurn:
    """What a response asks for: actions by number (none where it is invalid), the sections beside them, its form.

    ``unknown``: an action that there is not came after these.
    """

    actions: tuple[int, ...]
    sections: Mapping[str, str] = field(default_factory=dict)
    well_formed: bool = False
    unknown: bool = False

    @property
    def valid(self) -> bool:
        """Whether it names actions that can be taken."""
        return bool(self.actions) and not self.unknown


@dataclass(frozen=True)
class ActionGrammar:
    """The names of the actions, how many a response may name, and its form. With ``bare`` they need no tag."""

    names: tuple[str, ...]
    most_actions: int
    format: ResponseFormat
    bare: bool = False
    separator: str = ","

    def __post_init__(self) -> None:
        if self.bare and self.format.grammar == "vagen":
            raise RecipeError("bare: VAGEN's grammar takes no action without tags; use one of bare and grammar: vagen.")

    def read(self, response: str) -> ActionTurn:
        """The actions that a response names."""
        parsed = self.format.parse(response)
        if self.format.grammar == "vagen":
            return self._read_as_vagen(parsed)
        plain = [answer for answer in parsed.answers if "<" not in answer]
        actions = self._numbers(plain[-1] if plain else response if self.bare else "")
        well_formed = parsed.well_formed and bool(plain)
        return ActionTurn(actions, parsed.sections, well_formed or (self.bare and not plain and bool(actions)))

    def _read_as_vagen(self, parsed: ParsedResponse) -> ActionTurn:
        named = parsed.answer or ""
        words = (
            [word.strip() for word in named.split(self.separator) if word.strip()] if len(named) <= MOST_CHARACTERS else []
        )
        # Its legacy names are compared as they are written, where they have capitals; today's in lower case.
        exact = self.format.legacy and any(name != name.lower() for name in self.names)
        numbers = {name if exact else name.lower(): number for number, name in enumerate(self.names)}
        asked = [numbers.get(word if exact else word.lower()) for word in words[: self.most_actions]]
        known = list(takewhile(lambda number: number is not None, asked))
        return ActionTurn(
            tuple(number for number in known if number is not None),
            parsed.sections,
            parsed.well_formed,
            unknown=len(known) < len(asked),
        )

    def write(self, actions: Sequence[int], **sections: str) -> str:
        """A response that names these actions."""
        said = self.spell(actions)
        return said if self.bare and not self.format.thinks else self.format.write(said, **sections)

    def spell(self, actions: Sequence[int]) -> str:
        """The names of some actions."""
        return f"{self.separator} ".join(self.names[action] for action in actions)

    def instruction(self) -> str:
        """What to write each turn, for a prompt."""
        many = self.most_actions
        apart = "commas" if self.separator == "," else f"'{self.separator}'"
        how = "one action" if many == 1 else f"up to {many} actions, separated by {apart}"
        return f"Answer with {how}, in this form:\n{self.format.shown('your action' if many == 1 else 'your actions')}"

    def _numbers(self, named: str) -> tuple[int, ...]:
        if len(named) > MOST_CHARACTERS:
            return ()
        numbers = {name.lower(): number for number, name in enumerate(self.names)}
        words = [word.strip().lower() for word in named.split(self.separator)]
        if len(words) > self.most_actions or not all(word in numbers for word in words):
            return ()
        return tuple(numbers[word] for word in words)


@dataclass(frozen=True)
class ActionPrompts:
    """Prompts in full repeat at every turn what was done and what to write; short ones say only what did not work."""

    grammar: ActionGrammar
    full: bool
    refusal: str = "Not a move."

    def opening(self) -> str:
        """The words above the first sight."""
        return f"{self.grammar.instruction()}\nYou see:" if self.full else ""

    def after(self, said: str) -> str:
        """The words above the next sight, by the actions that were taken."""
        if not self.full:
            return "" if said else self.refusal
        taken = f"You took: {said}." if said else "That was no valid answer; nothing was done."
        return f"{taken}\n{self.opening()}"

    def rules(self, short: str, explained: str, example: tuple[int, ...], **thought: str) -> str:
        """The system prompt: a few words, or what it is about, the actions, the form and an example."""
        if not self.full:
            return short
        written = self.grammar.write(example, **thought)
        return (
            f"{explained}\nActions: {', '.join(self.grammar.names)}.\n{self.grammar.instruction()}\nFor example: {written}"
        )


def sight(words: str, shown: str | Media) -> Observation:
    """An observation: words, if any, above a picture or a text."""
    if isinstance(shown, str):
        return Observation((user("\n".join(filter(None, (words, shown)))),))
    return Observation((Message("user", (*([Text(words + "\n")] if words else []), shown)),))


def turn_result(
    asked: ActionTurn,
    taken: str,
    observation: Observation | None,
    reward: float | dict[str, float],
    /,
    *,
    truncated: bool,
    success: bool,
    **noted: bool | float,
) -> StepResult:
    """The outcome of a turn with named actions; it is over where nothing is shown any more."""
    done = observation is None
    info = {"valid": asked.valid, "format": asked.well_formed, "actions": taken, **noted, "success": success}
    return StepResult(observation, reward, done, truncated, success if done else None, info)


@dataclass(frozen=True)
class TurnPay:
    """How much each part of the pay is worth. A part that is worth nothing is not paid, and a lone part needs no name."""

    worth: Mapping[str, float]

    def of(self, **amounts: float) -> float | dict[str, float]:
        """The pay of a turn in which each part was earned so many times (or so well); those not given, not at all."""
        unknown = set(amounts) - set(self.worth)
        assert not unknown, f"no part of the pay is called {', '.join(unknown)}"
        parts = {name: float(worth * amounts.get(name, 0.0)) for name, worth in self.worth.items() if worth}
        if len(parts) == 1:
            return next(iter(parts.values()))
        return parts or 0.0


# A state is a set of places for each kind of thing, (row, column) counted from 0 at the top left. A description names
# kinds and places in any words around them: true state {"player": {(0, 1)}, "goal": {(3, 3)}} description "I am the
# player at (0, 1); the goal lies at (2, 3)." half of it is right: 0.5 A kind is right if the places named after it are
# all of its places and no others, so that naming every place earns nothing.


State = Mapping[str, frozenset[tuple[int, int]]]

MOST_DESCRIBED_CHARACTERS = 10_000
"""What stands after these in a description is not read."""

PLACE = r"\(\s*(\d{1,3})\s*,\s*(\d{1,3})\s*\)"


def share_right(description: str, state: State) -> float:
    """The share of the kinds of things that a description places rightly."""
    kinds = "|".join(sorted(map(re.escape, state), key=len, reverse=True))
    found: dict[str, set[tuple[int, int]]] = {kind.casefold(): set() for kind in state}
    kind = ""
    for mark in re.finditer(rf"\b({kinds})(?:s|es)?\b|{PLACE}", description[:MOST_DESCRIBED_CHARACTERS], re.IGNORECASE):
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
