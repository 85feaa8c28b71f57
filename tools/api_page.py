"""Prints docs/reference/api.md: what ``import sensorium as sn`` gives, from the docstrings. `make docs` runs it."""

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import sensorium as sn
from sensorium.api.run import ShownEpisode
from sensorium.viewer import View

HEAD = """# Everything in Python

Made from the docstrings by `make docs`; a test holds it up to date. `import sensorium as sn` gives these names.
[The Python API](../start/python.md) explains them with examples; begin there.
"""
GROUPS = {
    "Train": ["train", "resume", "fork", "sweep"],
    "Evaluate and score": ["evaluate", "rescore"],
    "Demonstrations": ["record"],
    "Models": ["load"],
    "Look at runs": ["view"],
    "Recipes": ["load_recipe", "register", "Recipe"],
    "Rewards and tasks": ["reward", "Task", "Episode", "Score"],
    "What the functions return": [
        "Run", "Sweep", "Evaluation", "Rescoring", "Demonstrations", "Model", "Reply", "Table", "View",
        "ShownEpisode",
    ],
    "Errors": ["SensoriumError"],
}  # fmt: skip
"""The page's sections and what is in them: the functions first, since users begin there."""
OTHERS = {"View": View, "ShownEpisode": ShownEpisode}
"""Classes on the page that ``sn`` does not give by name."""
MADE_BY_USERS = {"Run", "Sweep", "Demonstrations"}
"""Classes that are no dataclasses and are made by users as well, so that their arguments are shown."""
LONGEST = 100
"""Characters of a signature in one line; a longer one has a line for each argument."""


def page() -> str:
    """The page."""
    return "\n".join([HEAD, *(line for title, names in GROUPS.items() for line in _group(title, names))])


def _group(title: str, names: list[str]) -> Iterator[str]:
    yield f"## {title}\n"
    for name in names:
        if name in OTHERS:
            yield from _class(name, OTHERS[name])
        elif inspect.isclass(thing := getattr(sn, name)):
            yield from _class(f"sn.{name}", thing)
        else:
            yield from _function(f"sn.{name}", thing)


def _function(name: str, function: Any) -> Iterator[str]:
    yield f"### {name}\n"
    yield f"```python\n{_call(name, inspect.signature(function))}\n```\n"
    yield f"{text_of(function)}\n"


def _class(name: str, thing: type) -> Iterator[str]:
    yield f"### {name}\n"
    if is_dataclass(thing) or thing.__name__ in MADE_BY_USERS:
        made = inspect.signature(thing).replace(return_annotation=inspect.Signature.empty)
        yield f"```python\n{_call(name, made)}\n```\n"
    yield f"{text_of(thing)}\n"
    if thing is sn.Recipe:
        yield "Its sections and keys: [every key of a recipe](recipe.md).\n"
    elif rows := [_row(_member(key, member), member) for key, member in members(thing)]:
        yield "\n".join(["| member | |\n|---|---|", *rows, ""])
    if thing is sn.SensoriumError:
        yield "Its subclasses, in `sensorium.vocabulary.errors`:\n"
        rows = [_row(error.__name__, error) for error in _errors(thing)]
        yield "\n".join(["| error | when |\n|---|---|", *rows, ""])


def members(thing: type) -> Iterator[tuple[str, Any]]:
    """The public properties and methods that a class defines itself."""
    for name, member in vars(thing).items():
        if not name.startswith("_") and (isinstance(member, property) or inspect.isfunction(member)):
            yield name, member


def _member(name: str, member: Any) -> str:
    """How a property or method is written."""
    if isinstance(member, property):
        return f"{name}: {_type(inspect.signature(member.fget).return_annotation)}"
    signature = inspect.signature(member)
    own = [one for one in signature.parameters.values() if one.name != "self"]
    return _call(name, signature.replace(parameters=own), longest=1000)


def _row(code: str, thing: Any) -> str:
    cells = [f"`{code}`", " ".join(text_of(thing).split())]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _errors(base: type) -> Iterator[type]:
    for error in base.__subclasses__():
        if error.__module__ == base.__module__:
            yield error
            yield from _errors(error)


def _call(name: str, signature: inspect.Signature, longest: int = LONGEST) -> str:
    """A function's name with its arguments, and what it returns."""
    arguments, keyword_only = [], False
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            arguments.append("*")
        keyword_only = keyword_only or one.kind is one.VAR_POSITIONAL
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "" if one.default is one.empty else f" = {_default(one.default)}"
        arguments.append(f"{stars}{one.name}: {_type(one.annotation)}{default}")
    back = "" if signature.return_annotation is signature.empty else f" -> {_type(signature.return_annotation)}"
    line = f"{name}({', '.join(arguments)}){back}"
    if len(line) <= longest:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){back}"


def _default(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else "…" if repr(value).startswith("<") else repr(value)


def _type(annotation: Any) -> str:
    """A type as our code writes it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " | ".join(map(_type, parts))
    if origin is Literal:
        return f"Literal[{', '.join(map(_default, parts))}]"
    if parts:
        return f"{origin.__name__}[{', '.join(map(_type, parts))}]"
    if annotation in (None, NoneType, ...):
        return "..." if annotation is ... else "None"
    return annotation if isinstance(annotation, str) else annotation.__name__


def text_of(thing: Any) -> str:
    """A docstring as Markdown."""
    return (inspect.getdoc(thing) or "").replace("``", "`")


if __name__ == "__main__":
    print(page(), end="")
