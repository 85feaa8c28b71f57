"""Every key of a recipe is read by something that acts on it; a key that nothing reads is a promise that nobody keeps.

The type checker finds the reads: it checks the package against a schema without its leaf keys, and each complaint that a
section has no such attribute is a read of that key. Reads by the package recipe (checks, plan) do not count. The keys
of an estimator or a loss count as read where one has a parameter of that name: they are handed over by name.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import sensorium
from sensorium.recipe.registry import resolve, table
from sensorium.recipe.schema import Recipe, Section

PACKAGE = Path(sensorium.__file__).parent
RECIPE = PACKAGE / "recipe"
SECTIONS = ("schema.py",)
NAMED = re.compile(r"Recipe\b|Section|recipe\.")  # files without read nothing of it
COMPLAINT = re.compile(r'^(.*?):\d+: error: (?:Item )?"(\w+)".* has no attribute "(\w+)"')
STAND_IN = """from typing import Any, Self

named: Any = None


class Section:
    def __init__(self, **values: Any) -> None: ...
    def model_dump(self, **options: Any) -> dict[str, Any]: ...
    def model_copy(self, **options: Any) -> "Self": ...
    @classmethod
    def model_validate(cls, *values: Any, **options: Any) -> "Self": ...
    @classmethod
    def model_validate_json(cls, *values: Any, **options: Any) -> "Self": ...
    model_fields: Any = None
    model_fields_set: Any = None
"""

Key = tuple[str, str]


def leaf_keys(source: str) -> set[Key]:
    """Every (section, key) whose value is not itself a section."""
    return {(section, key) for section, key, kind in _fields(source) if "Section" not in kind}


def without_leaves(source: str) -> str:
    """A file of the schema with sections only."""
    parts = ast.parse(source).body
    ours = [part for part in parts if isinstance(part, ast.ImportFrom) and str(part.module).startswith("sensorium.")]
    lines = ["from pathlib import Path", "from typing import Any, Literal, Self", *map(ast.unparse, ours)]
    for section in _sections(source):
        kept = [f"{key}: {kind}" for name, key, kind in _fields(source) if name == section.name and "Section" in kind]
        methods = [ast.unparse(part) for part in section.body if isinstance(part, ast.FunctionDef)]
        body = "\n".join([*kept, *methods]) or "pass"
        lines.append(f"class {section.name}(Section):\n" + "\n".join(f"    {line}" for line in body.splitlines()))
    return "\n".join(lines) + "\n"


def dead_keys(sources: dict[str, str], folder: Path) -> set[Key]:
    """The keys of a schema that nothing outside the recipe package reads."""
    stripped = {name: STAND_IN + without_leaves(source) for name, source in sources.items()}
    shadows = []
    for name, text in stripped.items():
        (folder / name).write_text(text)
        shadows += ["--shadow-file", str(RECIPE / name), str(folder / name)]
    files = [str(path) for path in sorted(PACKAGE.rglob("*.py")) if NAMED.search(path.read_text())]
    options = [
        "--config-file=",
        "--follow-imports=skip",
        "--ignore-missing-imports",
        "--check-untyped-defs",
        "--no-error-summary",
    ]
    options += [f"--cache-dir={os.devnull}", *shadows]
    command = [sys.executable, "-m", "mypy", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=PACKAGE.parent)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr
    reads = set()
    for line in done.stdout.splitlines():
        if (found := COMPLAINT.match(line)) and _acts(Path(found.group(1))):
            reads.add((found.group(2), found.group(3)))
    return set.union(*map(leaf_keys, sources.values())) - reads - passed_by_name()


def passed_by_name() -> set[Key]:
    """Keys that are handed to an estimator or a loss by the names of its parameters."""
    return {
        (section, parameter)
        for kind, section in (("advantage", "AdvantageSection"), ("loss", "LossSection"))
        for name in table(kind)
        for parameter in inspect.signature(resolve(kind, name)).parameters
    }


def test_every_key_is_read_and_a_planted_one_is_found(tmp_path: Path) -> None:
    planted = sources()
    planted["schema.py"] = planted["schema.py"].replace("    group_size: int", "    planted: int = 3\n    group_size: int")
    assert dead_keys(planted, tmp_path) == {("BatchSection", "planted")}


def test_the_leaves_of_the_schema_are_those_of_the_recipe() -> None:
    leaves = set.union(*map(leaf_keys, sources().values()))
    fields = {(name, key) for name, section in _reached(Recipe).items() for key in section.model_fields}
    assert leaves < fields
    sections = {key for _, key in fields - leaves}
    assert sections >= {"model", "tasks", "train", "batch", "rollout", "terms", "kl", "optimizer", "logging"}
    assert not sections & {"path", "group_size", "lr", "coef", "options", "seed"}


def sources() -> dict[str, str]:
    """The files of the schema."""
    return {name: (RECIPE / name).read_text() for name in SECTIONS}


def _reached(section: type[Section]) -> dict[str, type[Section]]:
    """A section and all below it, by name."""
    below = [part for field in section.model_fields.values() for part in _mentioned(field.annotation)]
    return {section.__name__: section} | {name: each for part in below for name, each in _reached(part).items()}


def _mentioned(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [part for inner in get_args(annotation) for part in _mentioned(inner)]


def _sections(source: str) -> list[ast.ClassDef]:
    return [part for part in ast.parse(source).body if isinstance(part, ast.ClassDef) and part.name != "Section"]


def _fields(source: str) -> list[tuple[str, str, str]]:
    """Every key as (section, key, annotation)."""
    return [
        (section.name, ast.unparse(part.target), ast.unparse(part.annotation))
        for section in _sections(source)
        for part in section.body
        if isinstance(part, ast.AnnAssign)
    ]


def _acts(path: Path) -> bool:
    """True for code that acts on a recipe; the schema's own properties count, its checks and plan do not."""
    return path.parent.name != "recipe" or path.name in SECTIONS
