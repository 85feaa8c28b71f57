"""The form of an answer: how a judge's text is read, strictly, after a repair that cannot change what was meant.

    JsonAnswer({"score": Number(0, 1)}).parse('Sure! ```json\\n{"score": 0.5,}\\n```')   → {"score": 0.5}
    LetterAnswer("ABCD").parse("The answer is **B**.")  → "B"
    RankingAnswer(3).parse("[2, 3, 1]")                 → (2, 0, 1): the place of each candidate, counted from 0

Whatever is not in its form raises ValueError with what is wrong, in words that can be sent back to the judge. An answer is
never guessed: a ranking with an unknown or repeated candidate, or two different letters, is no answer.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sensorium.judges.json_text import THOUGHT, only_json, only_object
from sensorium.vocabulary.plain import number_of, shown, whole_of


class AnswerForm(Protocol):
    """How an answer is read. ``identity`` is part of what a judgement is known by."""

    @property
    def identity(self) -> str: ...

    def parse(self, text: str) -> Any:
        """The answer; ValueError says what is wrong with it."""
        ...

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer, for endpoints that hold a model to one; None for plain text."""
        ...


@dataclass(frozen=True)
class FreeText:
    """Any text that is not empty."""

    @property
    def identity(self) -> str:
        """As it is."""
        return "text"

    def parse(self, text: str) -> str:
        """The text."""
        if not text.strip():
            raise ValueError("the answer is empty")
        return text

    def schema(self) -> None:
        """None: it is plain text."""


@dataclass(frozen=True)
class Number:
    """A number between two bounds; whole ones only with ``whole``."""

    low: float = float("-inf")
    high: float = float("inf")
    whole: bool = False

    def read(self, value: Any) -> float | int:
        """The number."""
        if isinstance(value, bool | str) or value is None:
            raise ValueError(f"{shown(value)} is no number")
        number = whole_of(value) if self.whole else number_of(value)
        if not self.low <= number <= self.high:
            raise ValueError(f"{number:g} is not between {self.low:g} and {self.high:g}")
        return number

    def schema(self) -> dict[str, Any]:
        """As JSON schema has it."""
        bounds = {"minimum": self.low, "maximum": self.high}
        kept = {key: bound for key, bound in bounds.items() if abs(bound) != float("inf")}
        return {"type": "integer" if self.whole else "number", **kept}


@dataclass(frozen=True)
class OneOf:
    """One of several texts or numbers."""

    choices: tuple[Any, ...]

    def read(self, value: Any) -> Any:
        """The choice."""
        for choice in self.choices:
            if type(value) is type(choice) and value == choice:
                return choice
        raise ValueError(f"{shown(value)} is none of {', '.join(map(str, self.choices))}")

    def schema(self) -> dict[str, Any]:
        """As JSON schema has it."""
        return {"enum": list(self.choices)}


@dataclass(frozen=True)
class Words:
    """A text, such as a reason."""

    def read(self, value: Any) -> str:
        """The text."""
        if not isinstance(value, str):
            raise ValueError(f"{shown(value)} is no text")
        return value

    def schema(self) -> dict[str, Any]:
        """As JSON schema has it."""
        return {"type": "string"}


Field = Number | OneOf | Words


@dataclass(frozen=True)
class JsonAnswer:
    """One JSON object with these fields, all of them; further keys only with ``extra``."""

    fields: Mapping[str, Field]
    extra: bool = True

    @property
    def identity(self) -> str:
        """The schema as text."""
        return json.dumps(self.schema(), sort_keys=True)

    def parse(self, text: str) -> dict[str, Any]:
        """The fields by name."""
        found = only_object(text)
        if missing := [name for name in self.fields if name not in found]:
            raise ValueError(f"the object lacks '{missing[0]}'")
        if not self.extra and (more := [name for name in found if name not in self.fields]):
            raise ValueError(f"the object has the key '{more[0]}', which was not asked for")
        answer = {}
        for name, field_ in self.fields.items():
            try:
                answer[name] = field_.read(found[name])
            except ValueError as error:
                raise ValueError(f"'{name}': {error}") from error
        return answer

    def schema(self) -> dict[str, Any]:
        """As JSON schema has it."""
        properties = {name: field_.schema() for name, field_ in self.fields.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(self.fields),
            "additionalProperties": self.extra,
        }


@dataclass(frozen=True)
class LetterAnswer:
    """One letter of ``letters``: alone, in ``<answer>``, after "answer", or the only one that stands by itself.

    ``first``: the first character that is a letter of them counts, as CapRL reads answers.
    """

    letters: str = "ABCD"
    first: bool = False

    @property
    def identity(self) -> str:
        """Which letters."""
        return f"letter {self.letters}{' first' if self.first else ''}"

    def parse(self, text: str) -> str:
        """The letter, in upper case."""
        said = THOUGHT.sub("", text).strip()
        if self.first:
            found = next((c for c in said.upper() if c.isalpha()), "")
            if found and found in self.letters:
                return found
            raise ValueError(f"the answer does not begin with one of the letters {self.letters}")
        one = f"([{re.escape(self.letters)}])"
        for pattern in (rf"<answer>\s*{one}\b.*?</answer>", rf"answer(?:\s+is)?\s*:?\s*[*(\s]*{one}\b", rf"\b{one}\b"):
            letters = {letter.upper() for letter in re.findall(pattern, said, re.IGNORECASE | re.DOTALL)}
            if pattern == rf"\b{one}\b":  # of single letters only capitals: "a cat" names no option
                alone = {said.upper()} if len(said) == 1 and said.upper() in self.letters else set()
                letters = set(re.findall(pattern, said)) or alone
            if len(letters) == 1:
                return letters.pop()
            if letters:
                raise ValueError(f"the answer names several letters: {', '.join(sorted(letters))}")
        raise ValueError(f"the answer is none of the letters {self.letters}")

    def schema(self) -> None:
        """None: it is plain text."""


@dataclass(frozen=True)
class RankingAnswer:
    """A ranking of ``count`` candidates, the best first: a JSON list of their numbers from 1, or ``{"ranking": […]}``.

    Candidates that were left out are None in the answer with ``partial``; else every one must be there.
    """

    count: int
    partial: bool = False
    key: str = field(default="ranking")

    @property
    def identity(self) -> str:
        """How many, and whether all."""
        return f"ranking {self.count}{' partial' if self.partial else ''}"

    def parse(self, text: str) -> tuple[int | None, ...]:
        """The place of each candidate among those that were ranked, counted from 0."""
        found = only_json(text)
        listed = found.get(self.key) if isinstance(found, dict) else found
        if not isinstance(listed, list):
            raise ValueError(f'the answer is no list of candidates; write {{"{self.key}": [best, …, worst]}}')
        ranked = [_candidate(entry) for entry in listed]
        if strange := [number for number in ranked if not 1 <= number <= self.count]:
            raise ValueError(f"there is no candidate {strange[0]}; they are numbered from 1 to {self.count}")
        if len(set(ranked)) != len(ranked):
            raise ValueError("a candidate is ranked twice")
        if not ranked or (len(ranked) < self.count and not self.partial):
            missing = sorted(set(range(1, self.count + 1)) - set(ranked))
            raise ValueError(f"candidate {missing[0]} is not ranked")
        places: list[int | None] = [None] * self.count
        for place, number in enumerate(ranked):
            places[number - 1] = place
        return tuple(places)

    def schema(self) -> dict[str, Any]:
        """As JSON schema has it."""
        numbers = {"type": "integer", "minimum": 1, "maximum": self.count}
        listed = {"type": "array", "items": numbers, "minItems": 1 if self.partial else self.count, "maxItems": self.count}
        return {"type": "object", "properties": {self.key: listed}, "required": [self.key]}


def _candidate(entry: Any) -> int:
    if isinstance(entry, str) and (digits := re.fullmatch(r"\D*?(\d{1,4})\D*", entry.strip())):
        return int(digits.group(1))
    try:
        return whole_of(entry)
    except ValueError:
        raise ValueError(f"{shown(entry)} is no candidate's number") from None
