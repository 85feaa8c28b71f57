"""Environments that are played by named actions, how a response's answer names them, and states on a grid.

An answer that names no action, too many or an unknown one names none at all. With three allowed,
``<answer>Left, Down</answer>`` is two actions, ``<answer>Left, Jump</answer>`` is none, and so are four. Actions may have
parameters, ``<answer>click(320, 200)</answer>`` (``envs/action_calls.py``).

With the grammar ``vagen`` it is as in VAGEN: of four the first three are taken, and of ``Left, Jump`` the first, but the
response is not valid then.
"""

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

import numpy as np

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.envs.action_calls import LISTED, MAX_CHARACTERS, POSITION, Call, Signature, read_calls, signature_of
from sensorium.envs.protocol import Observation, StepResult, one_of, within
from sensorium.envs.responses import ResponseFormat
from sensorium.vocabulary.content import Media, Message, Text, system, user
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.plain import printable


@dataclass(frozen=True)
class ActionTurn:
    """The actions of a response (none where it is invalid), its other sections, and whether it is well formed.

    Actions are numbers, or calls where they have parameters. ``unknown``: an unknown action came after these. ``reason``:
    what is wrong where there are none, and what is allowed.
    """

    actions: tuple[Any, ...]
    sections: Mapping[str, str] = field(default_factory=dict)
    well_formed: bool = False
    unknown: bool = False
    reason: str = field(default="", compare=False)

    @property
    def valid(self) -> bool:
        """Whether it names actions that can be taken."""
        return bool(self.actions) and not self.unknown


@dataclass(frozen=True)
class ActionGrammar:
    """The names of the actions, how many a response may name, and its form. With ``bare`` they need no tag.

    With ``signatures``, one for each name, actions are calls.
    """

    names: tuple[str, ...]
    most_actions: int
    format: ResponseFormat
    bare: bool = False
    separator: str = ","
    signatures: tuple[Signature, ...] = ()

    def __post_init__(self) -> None:
        if self.format.grammar == "vagen" and (self.bare or self.signatures):
            raise RecipeError(
                "grammar: vagen takes no bare action and none with parameters; use grammar: own with bare or with these."
            )
        if self.signatures and len({name.casefold() for name in self.names}) < len(self.names):
            raise RecipeError(
                f"two of the actions {', '.join(self.names)} have one name; capitals do not distinguish them."
            )

    @classmethod
    def declared(
        cls,
        *actions: str | Signature,
        response_format: str = "no_think",
        most_actions: int = 1,
        bare: bool = False,
        coordinates: Literal["pixels", "relative"] = "pixels",
    ) -> "ActionGrammar":
        """A grammar of actions that are declared as in ``click(x: 0..639, y: 0..479)`` or ``wait``."""
        signatures = tuple(signature_of(action) if isinstance(action, str) else action for action in actions)
        untyped = [f"{p.name} of {one}" for one in signatures for p in one.parameters if not p.kind]
        if untyped:
            raise RecipeError(f"{untyped[0]} has no type; declare it as in {untyped[0].split()[0]}: 0..639.")
        signatures = positions(signatures, coordinates)
        format, names = ResponseFormat(response_format), tuple(signature.name for signature in signatures)
        return cls(names, most_actions, format, bare, signatures=signatures)

    def read(self, response: str) -> ActionTurn:
        """The actions that a response names."""
        parsed = self.format.parse(response)
        if self.format.grammar == "vagen":
            # Legacy VAGEN compares its names as they are written where they have capitals; today's VAGEN in lower case.
            exact = self.format.legacy and any(name != name.lower() for name in self.names)
            words = self._words(parsed.answer or "", exact)[: self.most_actions]
            known = list(takewhile(lambda number: number >= 0, words))
            return ActionTurn(tuple(known), parsed.sections, parsed.well_formed, unknown=len(known) < len(words))
        plain = [answer for answer in parsed.answers if self.signatures or "<" not in answer]
        answer = plain[-1] if plain else response if self.bare else ""
        actions: tuple[Any, ...]
        if not plain and not self.bare:
            actions, reason = (), f"there is no answer in the form {self.format.shown('…')}"
        elif self.signatures:
            actions, reason = read_calls(answer, self.signatures, self.most_actions, self.separator)
        else:
            words = self._words(answer, skip_empty=False)
            actions = () if len(words) > self.most_actions or -1 in words else tuple(words)
            reason = "" if actions else self._why_not(answer, words)
        well_formed = parsed.well_formed and bool(plain)
        well_formed = well_formed or (self.bare and not plain and bool(actions))
        return ActionTurn(actions, parsed.sections, well_formed, reason=reason)

    def write(self, actions: Sequence[Any], **sections: str) -> str:
        """A response that names these actions."""
        answer = self.spell(actions)
        return answer if self.bare and not self.format.thinks else self.format.write(answer, **sections)

    def spell(self, actions: Sequence[Any]) -> str:
        return f"{self.separator} ".join(map(self._spelled, actions))

    def instruction(self) -> str:
        """What to write each turn, for a prompt."""
        many = self.most_actions
        apart = "commas" if self.separator == "," else f"'{self.separator}'"
        how = "one action" if many == 1 else f"up to {many} actions, separated by {apart}"
        return f"Answer with {how}, in this form:\n{self.format.shown('your action' if many == 1 else 'your actions')}"

    def listed(self) -> str:
        """The actions, for a prompt."""
        if not self.signatures:
            return f"Actions: {', '.join(self.names)}."
        return "\n".join(["Actions:", *(f"- {signature.described()}" for signature in self.signatures)])

    def example(self) -> tuple[Any, ...]:
        """An action, for a prompt."""
        return (self.signatures[0].call([0.5] * len(self.signatures[0].parameters)) if self.signatures else 0,)

    def any_action(self, chance: random.Random) -> Any:
        number = chance.randrange(len(self.names))
        return self.signatures[number].random(chance) if self.signatures else number

    def _spelled(self, action: Any) -> str:
        if not isinstance(action, Call):
            return self.names[action]
        return action.text or self.signatures[self.names.index(action.name)].write(action)

    def _why_not(self, answer: str, words: Sequence[int]) -> str:
        if len(answer) > MAX_CHARACTERS:
            return f"the answer has {len(answer):,} characters; at most {MAX_CHARACTERS:,} are read"
        if len(words) > self.most_actions:
            return f"there are {len(words)} actions; give at most {self.most_actions}"
        wrong = answer.split(self.separator)[words.index(-1)].strip()[:40]
        return f"'{printable(wrong)}' is no action; there are: {', '.join(self.names[:LISTED])}"

    def _words(self, answer: str, exact: bool = False, skip_empty: bool = True) -> list[int]:
        """The actions that an answer names, by number; -1 for an unknown one."""
        if len(answer) > MAX_CHARACTERS:
            return []
        numbers = {name if exact else name.lower(): number for number, name in enumerate(self.names)}
        words = [word.strip() for word in answer.split(self.separator)]
        return [numbers.get(word if exact else word.lower(), -1) for word in words if word or not skip_empty]


def positions(actions: tuple[Any, ...], coordinates: str) -> tuple[Any, ...]:
    """Actions whose positions are written in pixels, or ``relative``: from 0 to 1000 across the picture."""
    one_of("actions", "coordinates", coordinates, ["pixels", "relative"])
    if coordinates == "pixels":
        return actions
    if not any(POSITION.fullmatch(p.name) for one in actions if isinstance(one, Signature) for p in one.parameters):
        raise RecipeError("coordinates: relative: no action has a position; call its parameters x and y, or x1 and y1.")
    return tuple(signature.relative() for signature in actions)


# A state has a set of places for each kind of thing, (row, column) counted from 0 at the top left. A description names
# kinds and places with any words around them. Example:
#
#     state         {"player": {(0, 1)}, "goal": {(3, 3)}}
#     description   "I am the player at (0, 1); the goal lies at (2, 3)."     scores 0.5
#
# A kind is right if the places named after it are all of its places and no others, so naming every place earns nothing.

State = Mapping[str, frozenset[tuple[int, int]]]
PLACE = r"\(\s*(\d{1,3})\s*,\s*(\d{1,3})\s*\)"


def share_right(description: str, state: State) -> float:
    """The share of the kinds of things that a description places correctly."""
    kinds = "|".join(sorted(map(re.escape, state), key=len, reverse=True))
    found: dict[str, set[tuple[int, int]]] = {kind.casefold(): set() for kind in state}
    kind = ""
    for mark in re.finditer(rf"\b({kinds})(?:s|es)?\b|{PLACE}", description[:MAX_CHARACTERS], re.IGNORECASE):
        if mark[1]:
            kind = mark[1].casefold()
        elif kind in found:
            found[kind].add((int(mark[2]), int(mark[3])))
    return sum(found[kind.casefold()] == set(places) for kind, places in state.items()) / len(state) if state else 0.0


def description_scores(asked: ActionTurn, before: State, after: State, parts: Iterable[str]) -> dict[str, float]:
    """Scores of a response's observation (the state before it) and prediction (the state after it); 0 if it is invalid."""
    good = asked.well_formed and asked.valid
    states = {"observation": before, "prediction": after}
    return {
        part: share_right(asked.sections.get(part, ""), states[part]) if good else 0.0 for part in states if part in parts
    }


def description_weights(environment: str, form: ResponseFormat, state_reward: float) -> dict[str, float]:
    """The reward parts for the descriptions that a form has a section for; a reward for a form without one is refused."""
    parts = {part: state_reward for part in form.sections if part in ("observation", "prediction")}
    if state_reward and not parts:
        raise RecipeError(
            f"{environment}: state_reward is {state_reward:g}, and the response format '{form.name}' has no place for a "
            "description of the state; use grounding, worldmodeling, grounding_worldmodeling or wm."
        )
    return parts


def describe(state: State) -> str:
    """A description of a state that is all right."""
    places = {kind: ", ".join(f"({row}, {column})" for row, column in sorted(state[kind])) for kind in state if state[kind]}
    return "; ".join(f"{kind} at {listed}" for kind, listed in places.items())


def turn_reward(weights: Mapping[str, float], **amounts: float) -> float | dict[str, float]:
    """The reward of a turn: weight times amount for each part that has a weight. A single part needs no name."""
    unknown = set(amounts) - set(weights)
    assert not unknown, f"no part of the reward is called {', '.join(unknown)}"
    parts = {name: float(weight * amounts.get(name, 0.0)) for name, weight in weights.items() if weight}
    return next(iter(parts.values())) if len(parts) == 1 else parts or 0.0


def observation_of(words: str, shown: str | Media) -> Observation:
    """An observation: words, if any, above a picture or a text."""
    if isinstance(shown, str):
        return Observation((user("\n".join(filter(None, (words, shown)))),))
    return Observation((Message("user", (*([Text(words + "\n")] if words else []), shown)),))


# Pictures of grids in flat colours, and paths that a breadth-first search found.

Colour = tuple[int, int, int]
Place = TypeVar("Place")
MAX_PIXELS_ACROSS = 4096


class Mark(NamedTuple):
    """A smaller square on a place, ``inset`` pixels from each of its edges."""

    row: int
    column: int
    inset: int
    colour: Colour


def draw_tiles(colours: Sequence[Sequence[Colour]], marks: Sequence[Mark], cell: int) -> bytes:
    """PNG bytes of a grid: the colour of each place, then the marks in order."""
    pixels = np.array(colours, np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)
    for mark in marks:
        top, left = mark.row * cell, mark.column * cell
        pixels[top + mark.inset : top + cell - mark.inset, left + mark.inset : left + cell - mark.inset] = mark.colour
    return encode_png(pixels)


def path_to(end: Place, came: Mapping[Place, tuple[Place, int] | None]) -> tuple[int, ...]:
    """The actions that led to ``end``. ``came`` has the place before each place and the action; None for the first."""
    actions = []
    step = came[end]
    while step is not None:
        actions.append(step[1])
        step = came[step[0]]
    return tuple(actions[::-1])


class TurnOptions(TypedDict, total=False):
    """Options of all TurnEnvironments. Defaults are those of its constructor, unless the environment states its own.

    ``view`` may be ``blank``, to test whether a model looks. ``prompt`` explains the environment in a few words or in
    full. ``response_format`` is a form of ``envs/responses.py``; by default the full prompt asks for a thought before the
    answer. ``format_reward`` is for each valid and well-formed response, ``state_reward`` for a correct observation of the
    state, and for a correct prediction of the state after the actions.
    """

    max_turns: int
    view: str
    prompt: Literal["short", "full"]
    response_format: str
    format_reward: float
    state_reward: float
    grammar: Literal["own", "vagen"]


class PlayOptions(TurnOptions, total=False):
    """Options of environments whose responses name several actions."""

    max_actions_per_turn: int


@dataclass(frozen=True)
class PlayedTurn:
    """The outcome of a turn's actions: how many were taken, and whether they ended the episode, successfully or not.

    ``earned`` has amounts by reward part, ``info`` what is recorded of the turn; ``cut``: the environment's own limit.
    """

    taken: int
    ended: bool
    success: bool
    earned: Mapping[str, float]
    info: Mapping[str, bool | float | str] = field(default_factory=dict)
    cut: bool = False


class TurnEnvironment:
    """What environments with a response format, reward parts and descriptions of the state have in common."""

    instant = True
    category = ""  # the kind of task that the last reset began

    def __init__(
        self,
        name: str,
        store: MediaStore,
        views: Sequence[str],
        rewards: Mapping[str, float],
        *,
        max_turns: int = 10,
        view: str = "picture",
        prompt: Literal["short", "full"] = "short",
        response_format: str = "",
        format_reward: float = 0.5,
        state_reward: float = 0.0,
        grammar: Literal["own", "vagen"] = "own",
        answer_tag: str = "answer",
    ) -> None:
        one_of(name, "view", view, views)
        one_of(name, "prompt", prompt, ["short", "full"])
        within(name, "max_turns", max_turns, 1, 10**6)
        self.name, self.store, self.max_turns, self.view, self.full = name, store, max_turns, view, prompt == "full"
        self.format = ResponseFormat(response_format or ("free_think" if self.full else "no_think"), answer_tag, grammar)
        self.weights = {**rewards, "format": format_reward, **description_weights(name, self.format, state_reward)}
        self._seed = self._turn = 0
        self._over = True

    def close(self) -> None:
        """Release what the environment holds."""

    def _refuse_over(self) -> None:
        if self._over:
            raise EnvironmentFailure(f"{self.name}: the episode is over (or has not begun); reset it first.")

    @property
    def _rewards_descriptions(self) -> bool:
        return any(self.weights.get(part) for part in ("observation", "prediction"))

    def _turn_result(
        self, asked: ActionTurn, played: PlayedTurn, before: State, after: State, shown: Callable[[], Observation]
    ) -> StepResult:
        """Count the turn and decide whether the episode is over; ``shown`` makes the next observation."""
        self._turn += 1
        truncated = not played.ended and (played.cut or self._turn >= self.max_turns)
        self._over = played.ended or truncated
        described = description_scores(asked, before, after, self.weights)
        reward = turn_reward(self.weights, format=asked.well_formed and asked.valid, **played.earned, **described)
        info = {"valid": asked.valid, "format": asked.well_formed, **played.info, **described, "success": played.success}
        success = played.success if self._over else None
        return StepResult(None if self._over else shown(), reward, self._over, truncated, success, info)


class ActionEnvironment(TurnEnvironment):
    """What environments with named actions have in common. A subclass implements the private methods at the end; without
    ``_way`` it has no demonstrations.
    """

    demonstration_noise = 0.0
    explains = False  # whether an observation says what was wrong with an invalid answer

    def __init__(
        self,
        name: str,
        store: MediaStore,
        actions: Sequence[str] | Sequence[Signature],
        views: Sequence[str],
        rewards: Mapping[str, float],
        *,
        max_actions_per_turn: int = 1,
        bare: bool = False,
        separator: str = ",",
        **options: Any,
    ) -> None:
        super().__init__(name, store, views, rewards, **options)
        within(name, "max_actions_per_turn", max_actions_per_turn, 1, 10**6)
        signatures = tuple(action for action in actions if isinstance(action, Signature))
        names = tuple(action if isinstance(action, str) else action.name for action in actions)
        self.grammar = ActionGrammar(names, max_actions_per_turn, self.format, bare, separator, signatures)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self._seed, self._turn = seed, 0
        self._begin(seed)
        self._over = False
        return (system(self._rules()),), replace(self._shown(self._above()), category=self.category)

    def step(self, response: str) -> StepResult:
        """Take the actions that a response names, until one of them ends the episode."""
        self._refuse_over()
        asked = self._read(response)
        why = asked.reason if self.explains else ""
        before = self._state()
        played = self._play(asked.actions)
        taken = self.grammar.spell(asked.actions[: played.taken])
        played = replace(played, info={"actions": taken, **({"wrong": why} if why else {}), **played.info})
        return self._turn_result(asked, played, before, self._state(), lambda: self._shown(self._above(taken, why)))

    def demonstrate(self) -> str:
        """The next actions of a good way; by ``demonstration_noise`` one at random, keyed by seed and turn."""
        self._refuse_over()
        actions = self._way()[: self.grammar.most_actions]
        chance = random.Random(f"{self.name}/{self._seed}/{self._turn}")
        if chance.random() < self.demonstration_noise:
            actions = (self.grammar.any_action(chance),)
        return self.grammar.write(actions, **self._thought(actions))

    def _above(self, taken: str | None = None, why: str = "") -> str:
        """The words above an observation, by the actions that were taken (None: the first observation).

        In full they repeat what was done and what to write; short ones only report an invalid answer. ``why`` says what
        was wrong with it.
        """
        wrong = f"Nothing was done: {why}." if why else "That was no valid answer; nothing was done."
        if not self.full:
            return (wrong if why else "Not a move.") if taken == "" else ""
        form = f"{self.grammar.instruction()}\nYou see:"
        if taken is None:
            return form
        return f"You took: {taken}.\n{form}" if taken else f"{wrong}\n{form}"

    def _system_prompt(self, short: str, explained: str, example: tuple[Any, ...], **thought: str) -> str:
        if not self.full:
            return short
        written = self.grammar.write(example, **thought)
        return f"{explained}\n{self.grammar.listed()}\n{self.grammar.instruction()}\nFor example: {written}"

    def _state_instruction(self) -> str:
        """How to describe states on a grid, on a line of its own; empty where the form has no section for it."""
        if not {"observation", "prediction"} & set(self.weights):
            return ""
        kinds = list(self._state())
        return (
            f"\nSay where things are ({', '.join(kinds)}) by row and column, counted from 0 at the top left, "
            f"as in: {kinds[0]} at (0, 1)."
        )

    def _read(self, response: str) -> ActionTurn:
        return self.grammar.read(response)

    def _state(self) -> State:
        return {}

    def _begin(self, seed: int) -> None:
        raise NotImplementedError

    def _rules(self) -> str:
        raise NotImplementedError

    def _play(self, actions: tuple[int, ...]) -> PlayedTurn:
        raise NotImplementedError

    def _shown(self, above: str) -> Observation:
        raise NotImplementedError

    def _way(self) -> tuple[int, ...]:
        raise EnvironmentFailure(f"{self.name}: there is no demonstration; warm start from rows that have one.")

    def _thought(self, actions: tuple[int, ...]) -> dict[str, str]:
        raise NotImplementedError
