"""Packages import each other only as docs/architecture.md says, without cycles."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "sensorium"
DATA = {"vocabulary", "caches", "recipe", "media"}
BELOW_TRAINER = {
    *DATA, "compiled", "workers", "tasks", "envs", "rewards", "algorithms", "models", "engines", "rollout", "learner",
    "assembly", "evaluation", "record", "report", "judges", "cluster",
}  # fmt: skip
MAY_IMPORT = {
    "vocabulary": set(),
    "caches": set(),
    "compiled": set(),
    "workers": {"vocabulary"},
    "recipe": {"vocabulary"},
    "forecast": {"vocabulary", "recipe"},
    "migration": {"vocabulary", "recipe"},
    "media": {"vocabulary", "caches", "record"},
    "tasks": {*DATA, "workers", "record"},
    "envs": {*DATA, "workers", "rewards"},
    "judges": {*DATA, "record"},
    "rewards": {*DATA, "workers", "judges"},
    "algorithms": set(),
    "models": {*DATA, "compiled"},
    "engines": {*DATA, "workers", "models", "compiled"},
    "rollout": {*DATA, "workers", "engines", "envs", "models"},
    "learner": {*DATA, "models", "algorithms", "compiled"},
    "assembly": {
        *DATA,
        "workers",
        "compiled",
        "tasks",
        "envs",
        "rewards",
        "judges",
        "models",
        "engines",
        "rollout",
        "learner",
        "record",
    },
    "cluster": {*DATA, "workers", "models", "learner", "engines", "assembly", "record"},
    "evaluation": {
        *DATA,
        "workers",
        "assembly",
        "rollout",
        "engines",
        "models",
        "rewards",
        "judges",
        "tasks",
        "record",
        "report",
    },
    "services": {*DATA, "workers", "tasks", "envs", "judges", "rewards", "models", "engines", "rollout"},
    "record": {"vocabulary"},
    "report": {*DATA, "record"},
    "trainer": BELOW_TRAINER - {"models"},  # it knows weights by the learner's protocol and the session only
    "cli": {*BELOW_TRAINER, "forecast", "migration", "trainer", "services"},
    "api": {*BELOW_TRAINER, "forecast", "migration", "trainer", "services", "cli"},
}
TORCH_FREE = {
    "vocabulary",
    "forecast",
    "migration",
    "caches",
    "workers",
    "recipe",
    "media",
    "tasks",
    "envs",
    "rewards",
    "judges",
    "record",
    "report",
}


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


def documented() -> dict[str, tuple[set[str], bool]]:
    """The table of docs/architecture.md: what each package may import, and whether it may import torch."""
    page = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text()
    rows = page.partition("| package | holds |")[2].partition("\n\n")[0].splitlines()[2:]
    table: dict[str, tuple[set[str], bool]] = {}
    for row in rows:
        package, _, imports, torch = (cell.strip() for cell in row.strip("|").split("|"))
        kept, _, without = imports.partition(" but ")
        names = {"nothing": set(), "all above": set(table)}.get(kept, set(kept.split(", ")))
        table[package] = ((names | DATA) - {"data"} if "data" in names else names) - {without}, torch == "yes"
    return table


def test_the_page_shows_this_table() -> None:
    assert {package: imports for package, (imports, _) in documented().items()} == MAY_IMPORT
    assert {package for package, (_, torch) in documented().items() if not torch} == TORCH_FREE


def test_every_package_is_in_the_table() -> None:
    packages = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert packages == set(MAY_IMPORT)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_package_imports_only_what_it_may(package: str) -> None:
    for path in files_of(package):
        for module in imports_of(path):
            if module.startswith("sensorium."):
                other = module.split(".")[1]
                assert other == package or other in MAY_IMPORT[package], f"{path.relative_to(PACKAGE)} imports {module}"


def test_rollout_needs_no_weights() -> None:
    """It renders, lays out and reads with the chat processor alone, so it can live in a process without the model."""
    for path in files_of("rollout"):
        of_models = {module for module in imports_of(path) if module.startswith("sensorium.models")}
        assert of_models <= {"sensorium.models.chat_processor"}, f"{path.name} imports {of_models}"


@pytest.mark.parametrize("package", sorted(TORCH_FREE))
def test_package_without_torch_stays_so(package: str) -> None:
    for path in files_of(package):
        heavy = {m for m in imports_of(path) if m.split(".")[0] in ("torch", "transformers")}
        assert not heavy, f"{path.relative_to(PACKAGE)} imports {heavy}"


def test_the_table_has_no_cycles() -> None:
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {package for package, needs in MAY_IMPORT.items() if package not in done and needs <= done}
        assert ready, f"cycle among {set(MAY_IMPORT) - done}"
        done |= ready
