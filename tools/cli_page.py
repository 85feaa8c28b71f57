"""Prints docs/reference/cli.md: every command with its arguments, from the parsers themselves. `make docs` runs it."""

from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterator
from importlib import import_module

from sensorium.cli.main import COMMANDS, EXIT_CODES, PARTS, parser_of, place_of

HEAD = """# Every command

Made from the argument parsers by `make docs`; a test holds it up to date. `sensorium COMMAND --help` prints the same for
one command, and `sensorium --version` the version.

## Exit codes

| code | meaning |
|---|---|
"""


def page() -> str:
    """The page."""
    codes = "\n".join(f"| {code.value} | {meaning} |" for code, meaning in EXIT_CODES.items())
    return "\n".join([f"{HEAD}{codes}\n", *(line for name in COMMANDS for line in _command(name))])


def _command(name: str) -> Iterator[str]:
    """A command's section, or one for each of its parts."""
    for whole in [f"{name} {part}" for part in PARTS.get(name, ())] or [name]:
        yield from _section(whole, parser_of(whole, import_module(place_of(whole))))


def _section(name: str, parser: ArgumentParser) -> Iterator[str]:
    shown = [action for action in parser._actions if action.dest != "help" and action.help != SUPPRESS]
    yield f"## sensorium {name}\n"
    yield " ".join((parser.description or "").split()).replace("``", "`") + "\n"
    if shown:
        yield "| argument | default | |\n|---|---|---|"
    for action in shown:
        yield f"| `{_spelling(action)}` | {_default(action)} | {_meaning(action)} |".replace("  ", " ")
    yield ""


def _spelling(action: Action) -> str:
    """How an argument is written, with the choices or the name of its value."""
    value = "" if action.nargs == 0 else str(action.metavar or _choices(action) or action.dest.upper())
    several = " …" if action.nargs in ("*", "+") or type(action).__name__ == "_AppendAction" else ""
    return f"{', '.join(action.option_strings)} {value}{several}".strip().replace("|", "\\|")


def _choices(action: Action) -> str:
    return "|".join(map(str, action.choices or ()))


def _default(action: Action) -> str:
    given = action.default
    return "" if given is None or given is False or given in ("", [], SUPPRESS) else f"`{given}`"


def _meaning(action: Action) -> str:
    needed = "required; " if action.required and action.option_strings else ""
    return needed + " ".join((action.help or "").replace("%%", "%").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
