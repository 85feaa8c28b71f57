"""Actions with parameters: how they are declared, described to a model, and read from its answers.

    declared       click(x: 0..639, y: 0..479)     type(text: text 100)     scroll(way: up|down)     steer(turn: -1.0..1.0)
    described      click(x, y), where x is a whole number from 0 to 639, y a whole number from 0 to 479
    an answer      click(320, 200)                 or by name: click(y=200, x=320)
    read           Call("click", {"x": 320, "y": 200})
    click(700, 2)  no call, and the reason: "click(700, 2): x is 700; it must be a whole number from 0 to 639"

Numbers are written plainly, texts in quotes with the escapes of Python, choices with or without quotes. Nothing is
evaluated, and reading takes time linear in the answer.
"""

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isfinite
from random import Random
from typing import Literal

from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.plain import printable

Value = int | float | str
MAX_CHARACTERS = 10_000  # of an answer; what is longer is not read
MOST = 1e9  # of numbers without a range
LONGEST_TEXT = 1000  # characters of a text without a length
GRID = 1000  # steps across the picture that relative positions count
LETTERS_AND_DIGITS = "".join(sorted(string.ascii_letters + string.digits))  # what Gymnasium's texts hold by default
LISTED = 30  # actions that a reason lists

WORD = re.compile(r"[^\W\d]\w{0,39}")
NUMBER = re.compile(r"[-+]?(?:\d{1,15}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,3})?")
QUOTED = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
PLAIN = re.compile(r"""[^\s,()"'=]{1,100}""")
RANGE = re.compile(rf"({NUMBER.pattern})\s*\.\.\s*({NUMBER.pattern})")
POSITION = re.compile(r"[xy](\d{1,3}|_\w+)?")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "'": "'", "\\": "\\"}


class WrongCall(ValueError):
    """An answer is not a sequence of calls; the text is what is wrong, and what is allowed."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of an action. Of texts ``low`` and ``high`` bound the length; without ``characters`` any may occur.

    ``kind`` "" is still to be decided. A ``relative`` number is written from 0 to 1000 and stands for a place between
    ``low`` and ``high``.
    """

    name: str
    kind: Literal["whole", "number", "choice", "text", ""]
    low: float = -MOST
    high: float = MOST
    choices: tuple[str, ...] = ()
    characters: frozenset[str] | None = None
    relative: bool = False

    def described(self) -> str:
        """What it must be, in words."""
        if self.kind == "choice":
            return " or ".join(filter(None, [", ".join(self.choices[:-1]), self.choices[-1]]))
        if self.kind == "text":
            least = f"{self.low:.0f} to " if self.low > 0 else "up to "
            known = "" if self.characters is None else "".join(sorted(self.characters))
            only = (
                " (letters and digits)" if known == LETTERS_AND_DIGITS else f" of '{known}'" if 0 < len(known) <= 64 else ""
            )
            return f"a text in quotes, {least}{self.high:.0f} characters{only}"
        if self.relative:
            return f"a whole number from 0 to {GRID} (0 and {GRID} are the picture's edges)"
        noun = "a whole number" if self.kind == "whole" else "a number"
        free = self.low <= -MOST and self.high >= MOST
        return noun if free else f"{noun} from {_number_text(self.low)} to {_number_text(self.high)}"

    def read(self, token: str, quoted: bool) -> Value:
        """The value of what was written; WrongCall if it is not allowed."""
        if self.kind == "text":
            known = self.characters is None or self.characters.issuperset(token)
            if quoted and self.low <= len(token) <= self.high and known:
                return token
        elif self.kind == "choice":
            for choice in self.choices:
                if choice.casefold() == token.casefold():
                    return choice
        elif not quoted and NUMBER.fullmatch(token) and isfinite(number := float(token)):
            low, high = (0, GRID) if self.relative else (self.low, self.high)
            whole = self.relative or self.kind == "whole"
            if low <= number <= high and (number.is_integer() or not whole):
                return self._placed(number) if self.relative else int(number) if whole else number
        shown = f"'{printable(token)[:40]}'" if quoted or not NUMBER.fullmatch(token) else token[:40]
        raise WrongCall(f"{self.name} is {shown}; it must be {self.described()}")

    def write(self, value: Value) -> str:
        """A value as it is written in a call."""
        if self.kind == "text":
            marks = {mark: f"\\{letter}" for letter, mark in ESCAPES.items() if mark != "'"}
            return f'"{"".join(marks.get(mark, mark) for mark in str(value))}"'
        if isinstance(value, str):
            return value
        if self.relative:
            return str(round((value - self.low) / (self.high - self.low or 1) * GRID))
        return str(int(value)) if self.kind == "whole" else repr(float(value)).removesuffix(".0")

    def value(self, share: float) -> Value:
        """A value that is allowed, by a share between 0 and 1: of a range its least at 0, its largest at 1."""
        if self.kind == "choice":
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        if self.kind == "text":
            known = "hello" if self.characters is None else "".join(sorted(self.characters))
            length = int(min(max(self.low, 5 * share), self.high))
            return (known * length)[:length]
        if self.low <= -MOST or self.high >= MOST:  # without a range: something near 0
            low, high = max(self.low, -1.0), min(self.high, 1.0)
            low, high = (low, high) if low <= high else (self.low, self.low)
        else:
            low, high = self.low, self.high
        number = low + share * (high - low)
        return round(number) if self.kind == "whole" else min(max(float(f"{number:.4g}"), self.low), self.high)

    def _placed(self, number: float) -> Value:
        place = self.low + number / GRID * (self.high - self.low)
        return round(place) if self.kind == "whole" else place


@dataclass(frozen=True)
class Call:
    """An action with its arguments by name; ``text`` is how it was written, if a model wrote it."""

    name: str
    arguments: Mapping[str, Value]
    text: str = ""


@dataclass(frozen=True)
class Signature:
    """The name of an action and its parameters; without any it is called by its name alone."""

    name: str
    parameters: tuple[Parameter, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(p.name for p in self.parameters)})" if self.parameters else self.name

    def described(self) -> str:
        """The form of a call, and what its arguments must be."""
        runs = [(words, [p.name for p in run]) for words, run in groupby(self.parameters, Parameter.described)]
        parts = [f"{', '.join(names)} {'is' if len(names) == 1 else 'are each'} {words}" for words, names in runs]
        return f"{self}, where {'; '.join(parts)}" if parts else self.name

    def write(self, call: Call) -> str:
        written = ", ".join(parameter.write(call.arguments[parameter.name]) for parameter in self.parameters)
        return f"{self.name}({written})" if self.parameters else self.name

    def call(self, shares: Sequence[float]) -> Call:
        """A call with allowed arguments, by a share between 0 and 1 for each parameter."""
        return Call(self.name, {p.name: p.value(share) for p, share in zip(self.parameters, shares, strict=True)})

    def random(self, chance: Random) -> Call:
        """A call with arguments at random."""
        return self.call([chance.random() for _ in self.parameters])

    def relative(self) -> "Signature":
        """The same, where positions (x, y, x1, y_to, …) are written from 0 to 1000."""

        def counted(parameter: Parameter) -> Parameter:
            if parameter.kind not in ("whole", "number") or not POSITION.fullmatch(parameter.name):
                return parameter
            if parameter.low <= -MOST or parameter.high >= MOST:
                raise RecipeError(f"coordinates: relative: {parameter.name} of '{self}' has no range, as in x: 0..639.")
            return replace(parameter, relative=True)

        return Signature(self.name, tuple(map(counted, self.parameters)))


def signature_of(declared: str) -> Signature:
    """The signature of a declaration such as ``click(x: 0..639, y: 0..479)``."""
    name, opened, rest = declared.strip().partition("(")
    name, where = name.strip(), f"the action '{declared}'"
    if not name or re.search(r'[(),"\n]', name) or (opened and not rest.rstrip().endswith(")")):
        raise RecipeError(f"{where} cannot be read; an action is declared as in click(x: 0..639, y: 0..479).")
    inner = rest.rstrip()[:-1].strip() if opened else ""
    parameters = tuple(_parameter(part.strip(), where) for part in inner.split(",")) if inner else ()
    if len({parameter.name for parameter in parameters}) < len(parameters):
        raise RecipeError(f"{where} has two parameters of one name.")
    return Signature(name, parameters)


def _parameter(declared: str, where: str) -> Parameter:
    name, _, kind = (part.strip() for part in declared.partition(":"))
    if not WORD.fullmatch(name):
        raise RecipeError(f"{where}: '{name}' cannot name a parameter.")
    if not kind or kind in ("whole", "number"):
        return Parameter(name, kind)  # type: ignore[arg-type]
    if found := RANGE.fullmatch(kind):
        whole = all(re.fullmatch(r"[-+]?\d+", edge) for edge in found.groups())
        low, high = map(float, found.groups())
        if -MOST <= low <= high <= MOST:
            return Parameter(name, "whole" if whole else "number", low, high)
    elif found := re.fullmatch(r"text(?:\s+(\d{1,5}))?", kind):
        return Parameter(name, "text", 0, int(found[1] or LONGEST_TEXT))
    choices = tuple(choice.strip() for choice in kind.split("|"))
    if 1 < len(choices) == len({choice.casefold() for choice in choices}) and all(map(PLAIN.fullmatch, choices)):
        return Parameter(name, "choice", choices=choices)
    raise RecipeError(
        f"{where}: the parameter {name} is '{kind}'; it is a range (0..639, or -1.0..1.0 for numbers that are not whole), "
        "whole, number, text, text 100 (characters at most), or choices (up|down)."
    )


def read_calls(text: str, signatures: Sequence[Signature], most: int, separator: str = ",") -> tuple[tuple[Call, ...], str]:
    """The calls of an answer, between the separator or on lines of their own; or none, and the reason."""
    try:
        return _Reader(text, signatures).calls(most, separator), ""
    except WrongCall as wrong:
        return (), str(wrong)


class _Reader:
    """Reads calls from a text, from ``at`` on."""

    def __init__(self, text: str, signatures: Sequence[Signature]) -> None:
        if len(text) > MAX_CHARACTERS:
            raise WrongCall(f"the answer has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
        if text.encode("utf-8", "replace") != text.encode("utf-8", "surrogatepass"):
            raise WrongCall("the answer has halves of characters (surrogates)")
        self.text, self.signatures, self.at = text, signatures, 0
        self._order = sorted(range(len(signatures)), key=lambda number: -len(signatures[number].name))
        names = "|".join(f"({re.escape(signatures[number].name)})" for number in self._order)
        self._name = re.compile(rf"(?:{names})(?!\w)", re.IGNORECASE)

    def calls(self, most: int, separator: str) -> tuple[Call, ...]:
        self._skip()
        found = [self._call()]
        while (line := self._skip()) or self.at < len(self.text):
            if self.text.startswith(separator, self.at):
                self.at += len(separator)
                self._skip()
            elif self.at == len(self.text):
                break
            elif not line:
                raise WrongCall(f"after {found[-1].text} comes {self._rest()}; separate actions by '{separator}'")
            if len(found) == most:
                raise WrongCall(f"there are more than {most} actions; give at most {most}")
            found.append(self._call())
        return tuple(found)

    def _call(self) -> Call:
        named = self._name.match(self.text, self.at)
        if named is None:
            known = ", ".join(map(str, self.signatures[:LISTED])) + (", …" if len(self.signatures) > LISTED else "")
            what = f"{self._rest()} is no action" if self.at < len(self.text) else "no action is named"
            raise WrongCall(f"{what}; there are: {known}")
        signature, begin = self.signatures[self._order[(named.lastindex or 1) - 1]], self.at
        self.at = named.end()
        try:
            arguments = self._arguments(signature)
        except WrongCall as wrong:
            written = printable(self.text[begin : max(self.at, begin + 1)].strip())
            raise WrongCall(f"{written[:60]}{'…' if len(written) > 60 else ''}: {wrong}") from wrong
        return Call(signature.name, arguments, self.text[begin : self.at])

    def _arguments(self, signature: Signature) -> dict[str, Value]:
        """The arguments in their parentheses. They are read to the end, so that a reason quotes the whole call."""
        given: list[tuple[str, str, bool]] = []
        back = self.at
        self._skip()
        if self.text.startswith("(", self.at):
            self.at += 1
            self._skip()
            while not self.text.startswith(")", self.at):
                given.append(self._argument())
                self._skip()
                if self.text.startswith(",", self.at):
                    self.at += 1
                    self._skip()
                elif not self.text.startswith(")", self.at):
                    closed = "is in the way" if self.at < len(self.text) else "comes before its parentheses are closed"
                    raise WrongCall(f"{self._rest()} {closed}; write {signature.described()}")
            self.at += 1
        else:
            self.at = back
        arguments: dict[str, Value] = {}
        by_name = {parameter.name: parameter for parameter in signature.parameters}
        for place, (name, token, quoted) in enumerate(given):
            free = place < len(signature.parameters) and not any(name for name, _, _ in given[: place + 1])
            key = name or (signature.parameters[place].name if free else "")
            if key not in by_name or key in arguments or len(given) != len(by_name):
                break
            arguments[key] = by_name[key].read(token, quoted)
        if len(arguments) < max(len(by_name), len(given)):
            raise WrongCall(f"write {signature.described()}")
        return arguments

    def _argument(self) -> tuple[str, str, bool]:
        """The name of an argument, if it has one, and its value, which may be quoted."""
        name = ""
        if (word := WORD.match(self.text, self.at)) and re.match(r"\s*=", self.text[word.end() : word.end() + 20]):
            name, self.at = word[0], self.text.index("=", word.end()) + 1
            self._skip()
        if quoted := QUOTED.match(self.text, self.at):
            self.at = quoted.end()
            return name, re.sub(r"\\(.)", lambda m: ESCAPES.get(m[1], m[0]), quoted[0][1:-1], flags=re.DOTALL), True
        if plain := PLAIN.match(self.text, self.at):
            self.at = plain.end()
            return name, plain[0], False
        raise WrongCall(f"{self._rest()} is no value")

    def _skip(self) -> bool:
        """Pass over white space; whether a line ended in it."""
        begin = self.at
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return "\n" in self.text[begin : self.at]

    def _rest(self) -> str:
        """The beginning of what follows, in quotes."""
        if self.at >= len(self.text):
            return "the end"
        rest = self.text[self.at : self.at + 41].splitlines()[0]
        return f"'{printable(rest[:40])}{'…' if len(rest) > 40 else ''}'"


def _number_text(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:.7g}"
