"""Packages import each other only as docs/internals/architecture.md says, without cycles."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "sensorium"
BASE = {"vocabulary", "recipe", "cluster", "runs", "data"}
"""What the page calls ``base``."""


def documented() -> dict[str, tuple[set[str], bool]]:
    """The table of docs/internals/architecture.md: what each package may import, and whether it may import torch."""
    page = (PACKAGE.parents[1] / "docs/internals/architecture.md").read_text()
    rows = page.partition("| package | holds |")[2].partition("\n\n")[0].splitlines()[2:]
    table: dict[str, tuple[set[str], bool]] = {}
    for row in rows:
        package, _, imports, torch = (cell.strip() for cell in row.strip("|").split("|"))
        kept, _, without = imports.partition(" but ")
        names = {"nothing": set(), "all above": set(table)}.get(kept, set(kept.split(", ")))
        table[package] = ((names | BASE) - {"base"} if "base" in names else names) - {without}, torch == "yes"
    return table


TABLE = documented()


def imports_of(path: Path) -> set[str]:
    """Every module a file imports, lazily or at the top."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def files_of(package: str) -> list[Path]:
    return sorted((PACKAGE / package).rglob("*.py"))


def test_every_package_is_in_the_table() -> None:
    assert {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()} == set(TABLE)


@pytest.mark.parametrize("package", sorted(TABLE))
def test_package_imports_only_what_it_may(package: str) -> None:
    allowed, torch = TABLE[package]
    for path in files_of(package):
        for module in imports_of(path):
            root, *rest = module.split(".")
            if root == "sensorium" and rest:
                assert rest[0] in {package, *allowed}, f"{path.relative_to(PACKAGE)} imports {module}"
            assert torch or root not in ("torch", "transformers"), f"{path.relative_to(PACKAGE)} imports {module}"


def test_rollout_needs_no_weights() -> None:
    """It renders, lays out and reads with the chat processor alone, so it can live in a process without the model."""
    for path in files_of("rollout"):
        of_models = {module for module in imports_of(path) if module.startswith("sensorium.models")}
        assert of_models <= {"sensorium.models.chat_processor"}, f"{path.name} imports {of_models}"


def test_a_package_only_imports_those_above_it() -> None:
    above: set[str] = set()
    for package, (allowed, _) in TABLE.items():
        assert allowed <= above, f"{package} may import {allowed - above}, which the table has below it"
        above.add(package)
