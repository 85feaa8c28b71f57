"""Each system's folder can be removed: nothing but its own recipes, names and commands goes with it."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "sensorium"
GIVEN = Path(__file__).parent / "migration" / "given"
RECIPES = {
    "taskmem": ("taskmem", "memory_clips"),
    "caprl": ("caprl", "caption_reader"),
    "vagen": ("vagen",),
    "geo3k": ("geo3k",),
    "audio_visual": ("audio_visual", "sight_and_sound"),
}
"""How the names of a system's recipes begin."""
NAMES = {
    "taskmem": ("reward", "episodic_memory"),
    "caprl": ("source", "captioned_shapes"),
    "vagen": ("environment", "vagen"),
    "geo3k": ("environment", "geometry"),
    "audio_visual": ("source", "sight_and_sound"),
}
SCRIPTS = {
    "taskmem": ("taskmem_run.sh", "verl"),
    "caprl": ("caprl_train.sh", "caprl"),
    "vagen": ("vagen_environments.yaml", "verl"),
    "geo3k": ("geo3k.sh", "slime"),
    "audio_visual": ("nemo_intent.yaml", "nemo_rl"),
}
"""A script of each, and whose settings it holds."""
HEAVY = ("torch", "transformers", "triton", "vllm", "ray", "wandb")
"""Packages that the child does without: they take seconds to import, or are extras."""

CHILD = """
import contextlib, importlib, io, json, pkgutil, sys
from pathlib import Path

for name in [one for one in sys.modules if one.split(".")[0] == "sensorium"]:  # the server's: it is imported from the copy
    del sys.modules[name]

from sensorium.cli.main import main

def run(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(arguments)
    return [code, " ".join(out.getvalue().split())]

def attempt(call):
    try:
        return [0, str(call())]
    except SensoriumError as error:
        return [2, str(error)]

asked = json.loads(sys.argv[1])
found = {"dry_run": run("train", "shapes", "--dry-run")}
from sensorium.recipe.load import load_recipe, shipped_recipes
from sensorium.recipe.registry import resolve
from sensorium.services.environment_service import make_app
from sensorium.services.sessions import SessionTable, usual_offers
from sensorium.systems.migration.recognition import migrate
from sensorium.vocabulary.errors import SensoriumError

found["recipes"] = {name: attempt(lambda: load_recipe(name).name) for name in shipped_recipes()}
found["migrated"] = {
    name: attempt(lambda: migrate(Path(file).read_text(), file, whose, Path(file).parent).start)
    for name, (file, whose) in asked["scripts"].items()
}
found["names"] = {name: attempt(lambda: resolve(kind, name).__name__) for kind, name in asked["names"]}
found["routes"] = list(make_app(SessionTable(usual_offers(), Path(asked["folder"])), "").openapi()["paths"])
found["commands"] = {" ".join(words): run(*words) for words in asked["commands"]}

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in asked["heavy"]:
            raise ImportError("without " + name)

for name in [one for one in sys.modules if one.split(".")[0] in asked["heavy"]]:
    del sys.modules[name]
sys.meta_path.insert(0, Without())
import sensorium
found["from"], found["broken"], found["imported"] = sensorium.__file__, {}, 0
for module in pkgutil.walk_packages(sensorium.__path__, "sensorium."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        found["imported"] += 1
    except ImportError as error:
        if not str(error).startswith("without "):
            found["broken"][module.name] = str(error)
print(json.dumps(found))
"""


def without(system: str, folder: Path) -> Path:
    """The package in another folder, less a system and its recipes. Weights are linked, not copied."""
    package = folder / "sensorium"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("assets", "*.pyc.*"))
    shutil.rmtree(package / "systems" / system)
    (package / "assets").mkdir()
    for asset in (PACKAGE / "assets").iterdir():
        if asset.name != "recipes":
            (package / "assets" / asset.name).symlink_to(asset)
    recipes = PACKAGE / "assets" / "recipes"
    for recipe in recipes.rglob("*.yaml"):
        if not recipe.name.startswith(RECIPES[system]):
            place = package / "assets" / "recipes" / recipe.relative_to(recipes)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(recipe, place)
    return package


def systems_imported(path: Path) -> set[str]:
    """The systems of which a file imports a module, also inside functions."""
    text = path.read_text()
    found = set[str]()
    for node in ast.walk(ast.parse(text)) if "sensorium.systems" in text else ():
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name.split(".")[2] for name in found if name.startswith("sensorium.systems.")}


def test_every_system_is_tried() -> None:
    folders = {path.parent.name for path in (PACKAGE / "systems").glob("*/__init__.py")}
    assert folders - {"migration"} == set(RECIPES)


def test_a_system_is_imported_by_its_own_files_alone() -> None:
    folders = {path: path.parent.name for path in PACKAGE.rglob("*.py")}
    coupled = {
        str(path.relative_to(PACKAGE)): others
        for path, folder in folders.items()
        if (others := systems_imported(path) & set(RECIPES) - {folder})
    }
    assert coupled == {}


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("system", sorted(RECIPES))
def test_a_system_can_be_removed(system: str, tmp_path: Path) -> None:
    package = without(system, tmp_path)
    asked = {
        "folder": str(tmp_path),
        "heavy": HEAVY,
        "names": list(NAMES.values()),
        "scripts": {name: (str(GIVEN / file), whose if name == system else "") for name, (file, whose) in SCRIPTS.items()},
        "commands": [["curate", "--help"], ["serve", "reward", "--help"], ["train", "shapes", "--caprl-env"]]
        if system == "caprl"
        else [],
    }
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(asked)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["from"]).parent == package
    assert found["broken"] == {}
    assert found["imported"] > 100
    assert found["dry_run"][0] == 0, found["dry_run"][1]
    assert {name: said for name, said in found["recipes"].items() if said[0]} == {}
    assert "/health" in found["routes"]
    owner = {NAMES[one][1]: one for one in NAMES}
    for name, (code, text) in [*found["names"].items(), *found["migrated"].items()]:
        removed = owner.get(name, name) == system
        assert code == (2 if removed else 0), text
        assert not removed or system in text
    for code, text in found["commands"].values():
        assert code == 2
        assert "sensorium.systems.caprl" in text
