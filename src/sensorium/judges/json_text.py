"""The one JSON value of a judge's text: all of it, in a fence, or among words.

    only_json("Sure! ```json\\n{'score': 0.5,}\\n```")    → {"score": 0.5}

Repaired are fences, trailing commas and single quotes, which cannot change what was meant. Nothing is guessed: two values
that differ, a key that is given twice, NaN and infinity are no answer (ValueError).
"""

import ast
import json
import re
from math import isfinite
from typing import Any

FENCE = re.compile(r"```[a-zA-Z]*\s*\n?(.*?)```", re.DOTALL)
THOUGHT = re.compile(r"^.*</think>", re.DOTALL)
TRAILING_COMMA = re.compile(r",(\s*[}\]])")


class AmbiguousJson(ValueError):
    """JSON that can be read in two ways; repair must not choose one."""


def only_object(text: str) -> dict[str, Any]:
    """The one JSON value of a text, which must be an object."""
    found = only_json(text)
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return found


def only_json(text: str) -> Any:
    """The one JSON value of a text, an object or a list."""
    said = THOUGHT.sub("", text).strip()
    fenced = [block.strip() for block in FENCE.findall(said)]
    for candidate in (said, *(fenced[:1] if len(fenced) == 1 else [])):
        found = _loaded(candidate)
        if found is not None:
            return found
    spans = _balanced(said)
    values = [value for value in map(_loaded, spans) if value is not None]
    if len(values) == 1 or (values and all(value == values[0] for value in values)):
        return values[0]
    raise ValueError(
        "the answer holds several JSON values" if values else "the answer holds no JSON value that can be read"
    )


def _loaded(text: str) -> Any:
    if not text or text[0] not in "{[":
        return None
    for attempt in (text, TRAILING_COMMA.sub(r"\1", text)):
        try:
            return json.loads(attempt, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_keys_once)
        except AmbiguousJson:
            raise
        except (ValueError, RecursionError):
            pass
    if len(text) > 100_000:
        return None
    try:
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                _keys_once([(getattr(key, "value", None), None) for key in node.keys])
        found = ast.literal_eval(tree)  # single quotes, True, None
        json.dumps(found, allow_nan=False)  # of Python's values only those that JSON has too
    except AmbiguousJson:
        raise
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    return found if isinstance(found, dict | list) else None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    if not isfinite(number := float(digits)):
        raise AmbiguousJson(f"{digits[:40]} is too large for a number")
    return number


def _keys_once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise AmbiguousJson(f"the key '{twice}' is given twice")
    return found


def _balanced(text: str) -> list[str]:
    """The outermost {...} and [...] of a text, quotes respected."""
    spans: list[str] = []
    stack: list[str] = []
    start, quoted, escaped = 0, False, False
    for i, char in enumerate(text):
        if quoted:
            escaped, quoted = (char == "\\" and not escaped), not (char == '"' and not escaped)
        elif char == '"' and stack:
            quoted = True
        elif char in "{[":
            if not stack:
                start = i
            stack.append("}" if char == "{" else "]")
        elif stack and char == stack[-1]:
            stack.pop()
            if not stack:
                spans.append(text[start : i + 1])
    return spans
