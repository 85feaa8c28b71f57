"""Questions with options, as the audio-visual data sets ask them: the options one a line, then how to answer.

The request to think and answer is the one that NeMo-RL's recipe publishes its numbers for, at its place: behind the last
option, on the same line.
"""

import ast
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sensorium.tasks.message_parsing import Place

LETTERED = re.compile(r"\s*\(?[A-Za-z]\s*[.):、]")

THINK = (
    "First reason briefly between <think> </think> tags, then output {what} between <answer> </answer> tags. "
    "Format example: <think>your reasoning</think><answer>{example}</answer>"
)
LETTER = THINK.format(what="only the single option letter (e.g., A, B, C, D, ...)", example="A")
LETTERS = THINK.format(what="only the letters of all options that fit (e.g., A or A,E)", example="A,E")
NUMBER = THINK.format(what="only the number (e.g., 42 or 3.14)", example="42")
YES_OR_NO = THINK.format(what="only Yes or No", example="Yes")
WORDS = THINK.format(what="your answer in a few words", example="your answer")
MOST_CHARACTERS = 100_000
"""Of a list of options that is written as text."""


def question(problem: str, options: Sequence[str], asked: str, instruction: str | None = None) -> str:
    """The text of a question: problem, options one a line (lettered if they are not), and what is ``asked`` of the answer.

    A recipe's own ``instruction`` takes the place of ``asked``, on a line of its own.
    """
    shown = "\n".join((problem.strip(), *lettered(options)))
    if instruction is None:
        return f"{shown} {asked}"
    return f"{shown}\n{instruction}" if instruction else shown


def lettered(options: Sequence[str]) -> list[str]:
    """Options that begin with their letters."""
    if all(LETTERED.match(option) for option in options):
        return [option.strip() for option in options]
    return [f"{chr(ord('A') + i)}. {option.strip()}" for i, option in enumerate(options)]


def options_of(raw: Any, place: Place, field: str) -> list[str]:
    """The options of a row: a list of texts, or the text of such a list, or none."""
    if raw is None or raw == "":
        return []
    if isinstance(raw, str) and len(raw) <= MOST_CHARACTERS:
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            raw = ast.literal_eval(raw.strip())
    if not isinstance(raw, list) or not all(isinstance(option, str) and option.strip() for option in raw) or len(raw) > 26:
        raise place.error(f"'{field}' must be a list of at most 26 texts, not {raw!r:.80}.")
    return raw
