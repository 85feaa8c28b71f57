r"""Output to the terminal with control characters in data escaped, so that no data can command it.

A path with ESC ]52;c;aGk= BEL would set the clipboard of many terminals; ``\x1b]52;c;aGk=\x07`` is printed. rich prints
through a ``Terminal``; ``guard_streams`` covers everything else (print, warnings, tracebacks, other packages), and leaves
colours and progress bars alone.
"""

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Control characters of terminals, and those that turn the direction of text, without tabs and line ends.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

# Written by progress bars: colours, a line up, the rest of the screen or line cleared, and the line's start.
HARMLESS = r"\x1b\[[0-9;]*[mAJK]|\r"
STREAM = re.compile(f"({HARMLESS})|{CONTROL.pattern}")


def visible(text: str) -> str:
    """The text with its control characters as escapes: ESC becomes ``\\x1b``."""
    return CONTROL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode()


class Terminal(Console):
    """rich's console, with control characters of texts escaped."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich renders, with visible control characters."""
        for segment in super().render(renderable, options):
            if segment.control is None and CONTROL.search(segment.text):
                segment = Segment(visible(segment.text), segment.style)
            yield segment


def say(text: str, console: Console) -> None:
    """Print a text verbatim, whatever brackets it holds and however narrow the terminal is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class GuardedStream:
    """A standard stream that escapes control characters. rich writes directly to ``rich_proxied_file``."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write the escaped text; returns the length of the original."""
        self.rich_proxied_file.write(STREAM.sub(lambda found: found[1] or _escape(found), text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def guard_streams() -> None:
    """Guard this process's standard output and errors, once."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


def unguarded(stream: TextIO) -> TextIO:
    """The stream itself, for output that controls the terminal, such as pictures."""
    return getattr(stream, "rich_proxied_file", stream)
