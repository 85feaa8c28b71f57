"""Tool calls in a response: ``<tool_call>{"name": "crop", "arguments": {"box": [0, 0, 9, 9]}}</tool_call>``.

That is how Qwen's chat templates ask for them, and geo3k's. A name may also stand under ``function.name``, arguments under
``function.arguments``, and arguments may be the JSON text of an object. Everything else is a call that says what is wrong
with it. Reading takes time linear in the text.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPENING = re.compile(r"<tool_call>\s*(?=\{)")
CLOSING = re.compile(r"(?<=\})\s*</tool_call>")
MOST_CHARACTERS = 100_000
"""A longer call is not read."""


@dataclass(frozen=True)
class ToolCall:
    """A call as it was written: a name and arguments, or in ``problem`` why it cannot be made."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    is_json: bool = True


def calls_in(response: str) -> list[ToolCall]:
    """Every call of a response, in order."""
    calls, place = [], 0
    while opening := OPENING.search(response, place):
        closing = CLOSING.search(response, opening.end())
        if closing is None:
            break
        calls.append(_read(response[opening.end() : closing.start()]))
        place = closing.end()
    return calls


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a model writes it."""
    said = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


def _read(text: str) -> ToolCall:
    if len(text) > MOST_CHARACTERS:
        return ToolCall(problem=f"the call is longer than {MOST_CHARACTERS} characters", is_json=False)
    try:
        said = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the call is not JSON: {error}", is_json=False)
    function = said.get("function")
    within = function if isinstance(function, Mapping) else {}
    name, arguments = said.get("name", within.get("name")), said.get("arguments", within.get("arguments", {}))
    if not isinstance(name, str) or not name:
        return ToolCall(problem='the call has no "name"')
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, problem=f'the "arguments" are text that is not JSON: {error}')
    if not isinstance(arguments, Mapping):
        return ToolCall(name, problem='the "arguments" must be an object')
    return ToolCall(name, arguments)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
