"""Every key of a recipe is read by something that acts on it; a key that nothing reads is a promise that nobody keeps.

The type checker finds the reads: it checks the package against a schema without its leaf keys, and each complaint that a
section has no such attribute is a read of that key. Reads by the package recipe (checks, plan) do not count. The keys
of an estimator or a loss count as read where one has a parameter of that name: they are handed over by name.
"""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import sensorium
from sensorium.recipe import schema
from sensorium.recipe.names import resolve, table

PACKAGE = Path(sensorium.__file__).parent
SCHEMA = PACKAGE / "recipe" / "schema.py"
COMPLAINT = re.compile(r'^(.*?):\d+: error: (?:Item )?"(\w+)".* has no attribute "(\w+)"')
STAND_IN = """
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
    """The schema with sections only."""
    lines = ["from pathlib import Path", "from typing import Any, Literal, Self", STAND_IN]
    for section in _sections(source):
        kept = [f"{key}: {kind}" for name, key, kind in _fields(source) if name == section.name and "Section" in kind]
        methods = [ast.unparse(part) for part in section.body if isinstance(part, ast.FunctionDef)]
        body = "\n".join([*kept, *methods]) or "pass"
        lines.append(f"class {section.name}(Section):\n" + "\n".join(f"    {line}" for line in body.splitlines()))
    return "\n".join(lines) + "\n"


def dead_keys(source: str, folder: Path) -> set[Key]:
    """The keys of a schema that nothing outside the recipe package reads."""
    stripped = folder / "schema.py"
    stripped.write_text(without_leaves(source))
    files = [str(path) for path in sorted(PACKAGE.rglob("*.py"))]
    options = [
        "--config-file=",
        "--follow-imports=skip",
        "--ignore-missing-imports",
        "--check-untyped-defs",
        "--no-error-summary",
    ]
    options += [f"--cache-dir={folder / 'cache'}", "--shadow-file", str(SCHEMA), str(stripped)]
    command = [sys.executable, "-m", "mypy", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=PACKAGE.parent)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr
    reads = set()
    for line in done.stdout.splitlines():
        if (found := COMPLAINT.match(line)) and _acts(Path(found.group(1))):
            reads.add((found.group(2), found.group(3)))
    return leaf_keys(source) - reads - passed_by_name()


def passed_by_name() -> set[Key]:
    """Keys that are handed to an estimator or a loss by the names of its parameters."""
    return {
        (section, parameter)
        for kind, section in (("advantage", "AdvantageSection"), ("loss", "LossSection"))
        for name in table(kind)
        for parameter in inspect.signature(resolve(kind, name)).parameters
    }


def test_every_key_is_read_and_a_planted_one_is_found(tmp_path: Path) -> None:
    planted = SCHEMA.read_text().replace("    group_size: int", "    planted: int = 3\n    group_size: int")
    assert dead_keys(planted, tmp_path) == {("BatchSection", "planted")}


def test_the_leaves_of_the_schema_are_those_of_the_recipe() -> None:
    fields = {(name, key) for name, section in _models().items() for key in section.model_fields}
    assert leaf_keys(SCHEMA.read_text()) < fields
    sections = {key for _, key in fields - leaf_keys(SCHEMA.read_text())}
    assert sections >= {"model", "tasks", "train", "batch", "rollout", "terms", "kl", "optimizer", "logging"}
    assert not sections & {"path", "group_size", "lr", "coef", "options", "seed"}


def _models() -> dict[str, type[schema.Section]]:
    known = {
        name: thing for name, thing in vars(schema).items() if isinstance(thing, type) and issubclass(thing, schema.Section)
    }
    del known["Section"]
    return known


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
    return path.parent.name != "recipe" or path.name == "schema.py"
