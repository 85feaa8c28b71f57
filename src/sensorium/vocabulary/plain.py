"""Plain values (numbers, booleans, texts, JSON) from what a user's code returned, or a ValueError.

A value's ``__str__``, ``__float__`` and the like may raise anything. Only ValueError leaves this module, so that a strange
value costs one episode and never the run.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from math import isfinite, prod
from numbers import Real
from typing import Any

SHOWN = 120
WORDS = 1000
MOST_BITS = 256  # of whole numbers: Python would not even print larger ones
DEEPEST = 32
LONGEST = 100_000  # values in one array, list or object
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # an object's address differs between runs, and what a run writes must repeat


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """What a call of a user's code returns, or what it raised, SystemExit too; Ctrl-C passes through."""
    try:
        return function(*arguments), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, error


def counted(count: float, one: str, many: str = "") -> str:
    """A count with its noun: ``1 row``, ``2 rows``, ``1 skip of a bad row``."""
    return f"{count:,.0f} {one if round(count) == 1 else many or one + 's'}"


def differences(then: Any, now: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two nested mappings differ: dotted key, the value then and the value now."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*then, *now]):
            yield from differences(then.get(key), now.get(key), f"{place}.{key}".lstrip("."))
    elif then != now:
        yield place, then, now


def number_of(value: Any) -> float:
    """A float from a number: bool, int, float, Fraction, Decimal, a scalar or 0-d array of numpy or torch."""
    if type(value) is float:
        return value
    number, error = attempt(_number, value)
    if error is not None:
        what = "is too large for a number" if isinstance(error, OverflowError) else f"cannot be read ({words(error)})"
        raise ValueError(f"{shown(value)} {what}") from error
    if number is None:
        raise ValueError(f"{shown(value)} is no number")
    return float(number)


def truth_of(value: Any) -> bool:
    """True or false from a bool of Python, numpy or torch, or from a 0 or 1."""
    if type(value) is bool:
        return value
    try:
        number = number_of(value)
    except ValueError:
        number = -1.0
    if number not in (0.0, 1.0):
        raise ValueError(f"{shown(value)} is neither true nor false")
    return bool(number)


def whole_of(value: Any) -> int:
    """A whole number of Python, numpy or torch, of at most 63 bits; a bool is none."""
    number = float(value) if type(value) is int and value.bit_length() < 64 else number_of(value)
    if isinstance(value, bool) or not isfinite(number) or number != int(number) or abs(number) >= 2**63:
        raise ValueError(f"{shown(value)} is no whole number, or too large for one")
    return value if type(value) is int else int(number)


def text_of(value: Any) -> str:
    """A text that can be written as UTF-8; half of a surrogate pair cannot."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is no text")
    plain = str.__str__(value)  # a subclass may override it
    try:
        plain.encode()
    except UnicodeEncodeError as error:
        broken = plain[error.start : error.start + 1]
        raise ValueError(f"the text {shown(plain)} has a lone surrogate {broken!a}, which is no character") from error
    return plain


def json_of(value: Any, depth: int = 0) -> Any:
    """A value as JSON: None, bool, int, float, text, lists and objects with text keys; arrays become lists."""
    if value is None or type(value) in (bool, float):
        return value
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep, or holds itself")
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, int):
        whole = value if type(value) is bool else int(value)
        if whole.bit_length() > MOST_BITS:
            raise ValueError(f"a whole number of {whole.bit_length()} bits is too large")
        return whole
    if isinstance(value, Mapping):
        return _object(value, depth)
    if isinstance(value, list | tuple):
        if len(value) > LONGEST:
            raise ValueError(f"a list of {len(value)} items is too long; {LONGEST} are the most")
        return [json_of(item, depth + 1) for item in value]
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return _array(value, depth)
    if isinstance(value, Fraction):
        return float(value)
    try:
        return number_of(value)
    except ValueError as error:
        raise ValueError(f"{shown(value)} is no number, text, list or object of these") from error


def strict_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError also if an object has a key twice. The reader of a field checks for NaN."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key '{printable(repeated)}' occurs twice in one object; keep one of them")
        return found

    return json.loads(text, object_pairs_hook=without_repeats)


def shown(value: Any) -> str:
    """A value for an error message: the head of its repr, and its type."""
    head, error = attempt(repr, value)
    text = "(its repr fails)" if error is not None else head if len(head) <= SHOWN else head[: SHOWN - 1] + "…"
    name = getattr(type(value), "__name__", "?")
    return printable(text if isinstance(value, str | float | bool | type(None)) else f"{text} ({name})")


def words(error: BaseException) -> str:
    """An exception as text: its class and message."""
    text, failed = attempt(str, error)
    text = "(its text fails)" if failed is not None else text
    name = getattr(type(error), "__name__", "?")
    return printable(f"{name}: {text}" if text else name)


def printable(text: str) -> str:
    """The text as UTF-8, of bounded length; characters that cannot be encoded are shown by their code."""
    text = ADDRESS.sub("", text)
    cut = text if len(text) <= WORDS else text[: WORDS - 1] + "…"
    return cut.encode("utf-8", "backslashreplace").decode()


def _number(value: Any) -> float | None:
    if not isinstance(value, Real | Decimal) and hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    return float(value) if isinstance(value, Real | Decimal) else None


def _array(value: Any, depth: int) -> Any:
    size, error = attempt(lambda: prod(map(int, value.shape)))
    if error is None and size > LONGEST:
        raise ValueError(f"an array of {size} values is too long; {LONGEST} are the most")
    plain, failed = attempt(value.tolist)
    if error is not None or failed is not None:
        raise ValueError(f"{shown(value)} cannot be read as numbers ({words(error or failed or ValueError())})")
    return json_of(plain, depth + 1)


def _object(value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    found = {}
    items, error = attempt(lambda: list(value.items()))
    if error is not None:
        raise ValueError(f"an object cannot be read ({words(error)})") from error
    if len(items) > LONGEST:
        raise ValueError(f"an object of {len(items)} keys is too large; {LONGEST} are the most")
    for key, item in items:
        if not isinstance(key, str):
            raise ValueError(f"the key {shown(key)} is no text")
        try:
            found[text_of(key)] = json_of(item, depth + 1)
        except ValueError as problem:
            raise ValueError(f"'{printable(key)}': {problem}") from problem
    return found
