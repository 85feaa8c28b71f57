"""Actions by name: a response's answer names up to so many of them, in the form that the environment asks for.

One that names none, too many or an unknown one names no action at all: nothing is done by halves. So with three allowed,
``<answer>Left, Down</answer>`` is two actions, ``<answer>Left, Jump</answer>`` is none, and so are four.

With the grammar ``vagen`` it is as in VAGEN: of four the first three are taken, and of ``Left, Jump`` the first, but the
response is not valid then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from sensorium.envs.responses import ParsedResponse, ResponseFormat
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
