"""Memories of clips as a policy writes them: ``thoughts</think>{"description": "…"}``, with faces as ``<face_3>``.

The description of a semantic memory is a list of facts.
"""

import json
import re
from typing import Any

START_OF_THOUGHT = "<think>"
END_OF_THOUGHT = "</think>"
FACE = re.compile(r"(?<![A-Za-z])face[\s_-]*(\d+)", re.IGNORECASE | re.ASCII)
"""A face in any spelling; "surface 3" names none."""


FENCE = "`jsonJSON"
"""What a fence is made of: three backticks and "json", or what is left of them."""


def parse_memory(text: str) -> str | None:
    """The memory of a response: exactly one ``</think>``, then JSON with the one key ``description``, not empty.

    The JSON may stand in a fence of three backticks, as models like to write it, or in a part of one, as TaskMem reads it.
    """
    description = _description(text)
    return description if _is_usable(description) else None


def parse_facts(text: str) -> tuple[str, ...] | None:
    """A semantic memory, read likewise: its ``description`` is a list of facts, or one of them as a text."""
    description = _description(text)
    facts = description if isinstance(description, list) else [description]
    return tuple(facts) if facts and all(map(_is_usable, facts)) else None


def _description(text: str) -> Any:
    _, end, rest = text.partition(END_OF_THOUGHT)
    if not end or END_OF_THOUGHT in rest:
        return None
    try:
        found = json.loads(rest.strip().strip(FENCE))
    except (ValueError, RecursionError):
        return None
    return found["description"] if isinstance(found, dict) and list(found) == ["description"] else None


def _is_usable(description: Any) -> bool:
    if not isinstance(description, str) or not description.strip():
        return False
    try:
        description.encode()
    except UnicodeEncodeError:  # half a character (an escape such as \ud800): no later prompt could hold it
        return False
    return True


def faces_are_spelled(text: str) -> bool:
    """False where a tag is ``<face>``, or a ``face N`` is not spelled ``<face_N>``."""
    if re.search(r"<\s*face\s*>", text, re.IGNORECASE):
        return False
    return all(
        text[found.start() - 1 : found.end() + 1] == f"<face_{found.group(1)}>" and found.start() > 0
        for found in FACE.finditer(text)
    )
