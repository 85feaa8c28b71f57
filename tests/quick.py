"""``make quick``: test files that start no process or server, encode no clip and load no model, by what they import.

A plugin (``pytest -p tests.quick``). It reads imports, also those of the test modules and conftest.py files that a file
uses, and imports nothing itself: of what is left out, not even the imports take time.
"""

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
SLOW = re.compile(
    r"^\s*(?:from|import) (?:av|http|subprocess|multiprocessing|torch\.multiprocessing|concurrent|ray|uvicorn|studies|bench"
    r"|examples|sensorium\.rewards\.equivalence"
    r"|sensorium\.(?:api|assembly|cli|cluster|engines|learner|models|rollout|services|trainer))\b"
    r"|\bimport sensorium as sn\b|\bfork_server\b|\bforked_python\b",
    re.MULTILINE,
)
"""Modules and fixtures that start processes or servers, encode clips, or load models and train them."""
LOCAL = re.compile(r"^\s*from (tests[\w.]*|\.+[\w.]*) import ([\w, ]+|\([^)]*\))", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out slow test files."""
    return True if collection_path.name.startswith("test_") and is_slow(collection_path) else None


@cache
def is_slow(file: Path) -> bool:
    """Whether a test file, or a module of the tests that it uses, names something slow."""
    text = file.read_text(encoding="utf-8")
    conftests = {folder / "conftest.py" for folder in file.parents if TESTS in folder.parents} - {file}
    return bool(SLOW.search(text)) or any(is_slow(used) for used in modules_used(file, text) | conftests if used.exists())


def modules_used(file: Path, text: str) -> set[Path]:
    """The files of tests/ that a module may import, itself apart."""
    found = set()
    for module, names in LOCAL.findall(text):
        dots = len(module) - len(module.lstrip("."))
        base = file.parents[dots - 1] if dots else TESTS.parent
        place = base.joinpath(*(part for part in module.lstrip(".").split(".") if part))
        found |= {place.with_suffix(".py"), *(place / f"{name}.py" for name in re.findall(r"\w+", names))}
    return found - {file}
