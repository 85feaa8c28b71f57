"""The advantages of a response's tokens as HTML: a tint behind the text where they differ, and a line of numbers."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby

from sensorium.vocabulary.episode import Segment

STRONGEST = 2.0
"""An advantage of this size, or larger, has the full tint."""


def tinted(response: Segment, advantages: Sequence[float], marked: Callable[[str], str], limit: int) -> str:
    """The text of a response with its tokens tinted, green where they were made likelier and red where less.

    Tokens in a row with the same advantage are one run. Past ``limit`` characters the text is cut.
    """
    data, start, left, parts = response.text.encode(), 0, limit, []
    decoder = getincrementaldecoder("utf-8")(errors="replace")  # a character of several tokens is shown with its last
    for value, run in groupby(zip(response.byte_ends, advantages, strict=False), key=lambda token: token[1]):
        end = [stop for stop, _ in run][-1]
        text = decoder.decode(data[start:end])
        start = end
        if text and left > 0:
            parts.append(f'<span class="{_class(value)}" style="--s:{_strength(value):.2f}">{marked(text[:left])}</span>')
        left -= len(text)
    return "".join(parts) + (f"… ({-left:,} more characters)" if left < 0 else "")


def advantage_line(advantages: Sequence[float]) -> str:
    """How large the advantages of a response are; nothing where there are none."""
    if not advantages:
        return ""
    low, high = min(advantages), max(advantages)
    words = f"{low:+.2f}" if f"{low:+.2f}" == f"{high:+.2f}" else f"{low:+.2f} to {high:+.2f}"
    mean = sum(advantages) / len(advantages)
    return f'<div class="advantage"><i class="{_class(mean)}" style="--s:{_strength(mean):.2f}"></i>advantage {words}</div>'


def untrained(fate: str) -> str:
    """Why an attempt was not trained on."""
    return f'<div class="advantage">not trained on: {escape(fate.partition(": ")[2] or fate)}</div>'


def _class(value: float) -> str:
    return "up" if value > 0 else "down" if value < 0 else "flat"


def _strength(value: float) -> float:
    return min(1.0, abs(value) / STRONGEST)
