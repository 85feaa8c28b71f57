"""Print the size of the project beside the limits it has set itself: ``.venv/bin/python tools/figures.py [--json]``.

    lines of Python and kernels in src      73,975  limit  52,000  over
    README lines                               128  limit     130  ok

The exit code is 1 where a figure is over its limit. Below the table: the names used too often, and the
files that know the family which most files know.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = (".py", ".cu", ".c", ".h")
FAMILY_TABLES = 2
"""Files outside src that a family needs: the table of families in the tests and a row of the docs."""


@dataclass(frozen=True)
class Figure:
    """A count with its limit, and what was counted where that is short enough to list."""

    name: str
    value: int
    limit: int
    details: tuple[str, ...] = ()


def figures(root: Path) -> list[Figure]:
    """All figures of a checkout."""
    code = code_files(root)
    repeated = repeated_names(code)
    family, touched = max(files_by_family(root, code).items(), key=lambda item: len(item[1]), default=("", []))
    found = [
        Figure("lines of Python and kernels in src", sum(map(lines, code)), 52_000),
        Figure("files of Python and kernels in src", len(code), 330),
        Figure("file names in src used more than twice", len(repeated), 0, tuple(repeated)),
        Figure(f"files that a family touches, tests and docs included ({family})", len(touched) + FAMILY_TABLES, 5,
               tuple(str(path.relative_to(root)) for path in touched)),
    ]  # fmt: skip
    for name, limit in (("README.md", 130), ("architecture.md", 200), ("performance.md", 150)):
        (page,) = [*root.glob(name), *(root / "docs").rglob(name)]
        found.append(Figure(f"{page.relative_to(root)} lines", lines(page), limit))
    return found


def code_files(root: Path) -> list[Path]:
    """The Python and kernel sources of src."""
    return sorted(path for path in (root / "src").rglob("*") if path.suffix in CODE)


def lines(path: Path) -> int:
    """How many lines a file has."""
    return len(path.read_text(encoding="utf-8").splitlines())


def repeated_names(files: list[Path]) -> list[str]:
    """Names that more than two files have, with how many do."""
    names = Counter(path.name for path in files if path.name != "__init__.py")
    return [f"{name} ({count} files)" for name, count in names.most_common() if count > 2]


def files_by_family(root: Path, files: list[Path]) -> dict[str, list[Path]]:
    """By module of models/families: its own file, then the others whose code names one of its model types."""
    (names,) = [path for path in files if path.match("recipe/registry.py")]
    types = defaultdict(set)
    for known, module in re.findall(r'"(\w+)": "sensorium\.models\.families\.(\w+):', names.read_text(encoding="utf-8")):
        types[module] |= {known, f"families.{module}"}
    # A family that builds on another one is not touched by changes of the other.
    words = {path: set(words_of(path)) for path in files if path.suffix == ".py" and path.parent.name != "families"}
    found = {}
    for module, known in types.items():
        own = root / f"src/sensorium/models/families/{module}.py"
        found[module] = [own, *(path for path in words if path != own and words[path] & known)]
    return found


def words_of(path: Path) -> Iterator[str]:
    """Words in a module's strings (prose, which has spaces, apart), and the families it imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.search(r"\s", node.value):
            yield from re.findall(r"\w+", node.value)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from re.findall(r"families\.\w+", ast.unparse(node).replace(" import ", "."))


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Print the figures; 1 where one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    found = figures(root)
    if parser.parse_args(arguments).json:
        print(json.dumps([asdict(figure) for figure in found], indent=1))
    else:
        width = max(len(figure.name) for figure in found)
        for figure in found:
            state = "over" if figure.value > figure.limit else "ok"
            print(f"{figure.name:{width}}  {figure.value:7,}  limit {figure.limit:7,}  {state}")
        for figure in found:
            if figure.details:
                print(f"\n{figure.name}:", *figure.details, sep="\n  ")
    return int(any(figure.value > figure.limit for figure in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
