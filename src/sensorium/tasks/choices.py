"""Questions with options, as the audio-visual data sets ask them: the options one a line, then how to answer."""

import re
from collections.abc import Sequence
from typing import Any

from sensorium.tasks.message_parsing import Place

LETTERED = re.compile(r"\s*\(?[A-Za-z]\s*[.):、]")

THINK = (
    "First think it over between <think> and </think>: what you see, what you hear, and what follows from both. "
    "Then give {what} between <answer> and </answer>, and nothing else there. "
    "Write it like this: <think>your thoughts</think><answer>{example}</answer>"
)
LETTER = THINK.format(what="only the letter of the option you choose", example="B")
LETTERS = THINK.format(what="only the letters of all options that fit, with commas between them", example="A,C")
NUMBER = THINK.format(what="only the number", example="2.5")
YES_OR_NO = THINK.format(what="only yes or no", example="yes")
WORDS = THINK.format(what="your answer in a few words", example="a friendly joke")


def question(problem: str, options: Sequence[str], instruction: str) -> str:
    """The text of a question: problem, options one a line (lettered if they are not), instruction."""
    return "\n".join(part for part in (problem.strip(), *lettered(options), instruction) if part)


def lettered(options: Sequence[str]) -> list[str]:
    """Options that begin with their letters."""
    if all(LETTERED.match(option) for option in options):
        return [option.strip() for option in options]
    return [f"{chr(ord('A') + i)}. {option.strip()}" for i, option in enumerate(options)]


def options_of(raw: Any, place: Place, field: str) -> list[str]:
    """The options of a row: a list of texts, or none."""
    if raw is None:
        return []
    if not isinstance(raw, list) or not all(isinstance(option, str) and option.strip() for option in raw) or len(raw) > 26:
        raise place.error(f"'{field}' must be a list of at most 26 texts, not {raw!r:.80}.")
    return raw
