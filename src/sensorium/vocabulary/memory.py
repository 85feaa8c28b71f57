"""Memories of clips as a policy writes them: ``thoughts</think>{"description": "…"}``, with faces as ``<face_3>``."""

import json
import re

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
    _, end, rest = text.partition(END_OF_THOUGHT)
    if not end or END_OF_THOUGHT in rest:
        return None
    try:
        found = json.loads(rest.strip().strip(FENCE))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or list(found) != ["description"]:
        return None
    description = found["description"]
    if not isinstance(description, str) or not description.strip():
        return None
    try:
        description.encode()
    except UnicodeEncodeError:  # half a character (an escape such as \ud800): no later prompt could tell it
        return None
    return description


def faces_are_spelled(text: str) -> bool:
    """False where a tag is ``<face>``, or a ``face N`` is not spelled ``<face_N>``."""
    if re.search(r"<\s*face\s*>", text, re.IGNORECASE):
        return False
    return all(
        text[found.start() - 1 : found.end() + 1] == f"<face_{found.group(1)}>" and found.start() > 0
        for found in FACE.finditer(text)
    )
