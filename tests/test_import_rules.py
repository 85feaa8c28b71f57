"""Packages import each other only as docs/architecture.md says, without cycles."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "sensorium"
DATA = {"vocabulary", "caches", "recipe", "media"}
BELOW_TRAINER = {
    *DATA, "workers", "tasks", "envs", "rewards", "algorithms", "models", "engines", "rollout", "learner", "assembly",
    "evaluation", "record", "report",
}  # fmt: skip
MAY_IMPORT = {
    "vocabulary": set(),
    "caches": set(),
    "workers": {"vocabulary"},
    "recipe": {"vocabulary"},
    "media": {"vocabulary", "caches", "record"},
    "tasks": {*DATA, "workers", "record"},
    "envs": DATA,
    "rewards": {*DATA, "workers"},
    "algorithms": set(),
    "models": DATA,
    "engines": {*DATA, "models"},
    "rollout": {*DATA, "workers", "engines", "envs", "models"},
    "learner": {*DATA, "models", "algorithms"},
    "assembly": {
        *DATA,
        "workers",
        "tasks",
        "envs",
        "rewards",
        "models",
        "engines",
        "rollout",
        "learner",
        "record",
    },
    "evaluation": {*DATA, "workers", "assembly", "rollout", "engines", "models", "rewards", "tasks", "record", "report"},
    "record": {"vocabulary"},
    "report": {*DATA, "record"},
    "trainer": BELOW_TRAINER - {"models"},  # it knows weights by the learner's protocol and the session only
    "cli": {*BELOW_TRAINER, "trainer"},
    "api": {*BELOW_TRAINER, "trainer", "cli"},
}
TORCH_FREE = {"vocabulary", "caches", "workers", "recipe", "media", "tasks", "envs", "rewards", "record", "report"}


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


def test_every_room_is_in_the_table() -> None:
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


def test_the_table_has_no_circles() -> None:
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {package for package, needs in MAY_IMPORT.items() if package not in done and needs <= done}
        assert ready, f"circle among {set(MAY_IMPORT) - done}"
        done |= ready
