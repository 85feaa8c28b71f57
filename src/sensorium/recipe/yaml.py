"""YAML of recipes: 1.2 core types only, no duplicate keys, and the line of every key.

PyYAML reads YAML 1.1, where ``1e-6`` is a string, ``no`` is false and ``1:30`` is ninety.
"""

import json
import re
from contextlib import suppress
from typing import Any

import yaml as pyyaml

from sensorium.vocabulary.errors import RecipeError

try:
    from yaml import CSafeLoader as _Parser
except ImportError:  # PyYAML without libyaml
    from yaml import SafeLoader as _Parser  # type: ignore[assignment]

Path = tuple[str | int, ...]
Lines = dict[Path, int]

_CORE = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
)


class _Loader(pyyaml.SafeLoader):
    """Reads any text, and says what is wrong with it."""


class _FastLoader(_Parser):
    """Reads a text eight times as fast, where PyYAML has libyaml. One that is nested too deep would end the process."""


def _whole_number(_: Any, node: pyyaml.ScalarNode) -> int:
    """Decimal (also with leading zeros) or hexadecimal."""
    text = str(node.value)
    return int(text, 16) if "x" in text else int(text)


_loaders: tuple[Any, ...] = (_Loader, _FastLoader)
for _loader in _loaders:
    _loader.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _CORE:
        _loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))
    _loader.add_constructor("tag:yaml.org,2002:int", _whole_number)

DEEPEST = 2000
"""Each level of nesting takes one of these marks, so a text with no more of them cannot be nested too deep for libyaml."""

MOST = 200_000
"""Keys and items of a text. Without a bound, ten lines of aliases to lists of aliases never end."""


def _composed(text: str) -> tuple[Any, pyyaml.Node | None]:
    """The nodes of a text, and the loader that makes values of them. Errors are those of PyYAML's own parser."""
    if sum(map(text.count, "[{-:?")) < DEEPEST:
        with suppress(pyyaml.YAMLError, UnicodeError):
            fast = _FastLoader(text)
            return fast, fast.get_single_node()
    loader = _Loader(text)
    return loader, loader.get_single_node()


def read_yaml(text: str, where: str) -> tuple[Any, Lines]:
    """The value of a YAML text, and the line of every key and list item in it."""
    try:
        lines = Lines()
        loader, node = _composed(text)
        if node is None:
            return None, lines
        _trace(node, (), lines, where)
        return loader.construct_document(node), lines
    except RecursionError as error:
        raise RecipeError(f"{where}: not valid YAML: it is nested too deep.") from error
    except pyyaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None and "\n" in text else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise RecipeError(f"{where}{line}: not valid YAML: {problem}.") from error


def write_yaml(data: Any) -> str:
    """A value as YAML in its own order."""
    return pyyaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=124)


class _Dumper(pyyaml.SafeDumper):
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def represent_list(self, data: Any) -> pyyaml.SequenceNode:
        """A list: inline if it holds plain values only."""
        plain = all(not isinstance(item, dict | list) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=plain)

    def represent_text(self, data: str) -> pyyaml.ScalarNode:
        """A text: in double quotes if it holds a Unicode line break, which PyYAML would fold."""
        odd = any(mark in data for mark in "\x85\u2028\u2029\ufeff")
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if odd else None)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_list)


def _refuse_more(lines: Lines, where: str) -> None:
    if len(lines) > MOST:
        raise RecipeError(f"{where}: it has more than {MOST:,} keys and items, with those that aliases (*name) repeat.")


def _trace(node: pyyaml.Node, path: Path, lines: Lines, where: str) -> None:
    if isinstance(node, pyyaml.SequenceNode):
        _refuse_more(lines, where)
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _trace(item, (*path, index), lines, where)
    if isinstance(node, pyyaml.MappingNode):
        _refuse_more(lines, where)
        for key, value in node.value:
            place = (*path, str(key.value))
            if key.value == "<<":
                raise RecipeError(
                    f"{where}, line {key.start_mark.line + 1}: '<<' merges mappings in YAML 1.1, and recipes are YAML 1.2, "
                    "which has no such key. Write the keys out, or give what differs as overrides on the command line."
                )
            if place in lines:
                raise RecipeError(
                    f"{where}, line {key.start_mark.line + 1}: '{dotted(place)}' was given before, on line {lines[place]}; "
                    "keep one of them."
                )
            lines[place] = key.start_mark.line + 1
            _trace(value, place, lines, where)


def value_text(value: Any) -> str:
    """A value as one writes it: 1e-4, 0.5, true, [a, b]."""
    if isinstance(value, float):
        plain, mantissa = repr(value), f"{value:e}".partition("e")[0]
        digits = re.sub(r"e([-+])0*(\d)", r"e\1\2", f"{value:.{max(0, len(mantissa.rstrip('0')) - 2)}e}").replace("e+", "e")
        return digits if len(digits) < len(plain) and float(digits) == value else plain
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dotted(path: Path) -> str:
    """A place in a recipe as in overrides: ``tasks.train.0.options``."""
    return ".".join(str(part) for part in path)
