"""The code blocks of a tutorial, run as a reader would: files saved under the names the page gives, commands in order.

A fenced block after a line that ends in "`NAME`:" is a file. A block of ``sh`` is commands. ``make`` and ``source`` set up
the environment that this already runs in, so they are passed over. A script that the page did not save is the repository's.
"""

import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"ave (?:it )?as `([\w./]+)`:\s*$")
SET_UP = ("make", "source")
ROOT = Path(__file__).parents[1]
Rewrite = Callable[[list[str]], list[str]]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the file it is to be saved as (empty: none is named)."""

    language: str
    text: str
    file: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        named = NAMED.search(text[: match.start()].rstrip())
        found.append(Block(match[1], match[2], named[1] if named else ""))
    return found


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of a page, as words."""
    for block in blocks(page):
        if block.language == "sh":
            yield from (shlex.split(line) for line in block.text.splitlines() if line.strip())


def follow(page: Path, folder: Path, rewrite: Rewrite = list) -> None:
    """Do what a page says, in ``folder`` and in this process; ``rewrite`` may change a command, or leave it out."""
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        for block in blocks(page):
            if block.file:
                Path(block.file).write_text(block.text)
            elif block.language == "sh":
                for line in block.text.splitlines():
                    if line.strip() and (words := rewrite(shlex.split(line))):
                        _run(words)
    finally:
        os.chdir(before)
        sys.path[:] = path


def _run(words: list[str]) -> None:
    from sensorium.cli.main import main

    program, *arguments = words
    if program in SET_UP:
        return
    if program == "python":
        script = arguments[0] if Path(arguments[0]).exists() else str(ROOT / arguments[0])
        given, sys.argv = sys.argv, [script, *arguments[1:]]
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            sys.argv = given
    elif program == "sensorium":
        code = main(arguments)
        if code:
            raise RuntimeError(f"'{shlex.join(words)}' ended with {code}")
    else:
        raise RuntimeError(f"a tutorial asks for '{program}', which this cannot run")
