"""Where the user's own modules lie is remembered, told if it changed, and read without harm."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from sensorium.recipe.registry import FILE, look_where_found, own_modules, refuse_loaded_elsewhere
from sensorium.vocabulary.errors import RecipeError

RECIPE = {"rewards": {"terms": [{"name": "paid_lately:brevity"}]}}


@pytest.fixture(autouse=True)
def path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def folder_with(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("def brevity(task, episode): return 1.0\n")
    return folder


def run_with(folder: Path, modules: Any) -> Path:
    folder.mkdir()
    (folder / FILE).write_text(modules if isinstance(modules, str) else json.dumps(modules))
    return folder


def test_only_modules_that_the_recipe_names_are_looked_for(tmp_path: Path) -> None:
    mine, other = folder_with(tmp_path / "mine", "paid_lately.py"), folder_with(tmp_path / "other", "torchaudio.py")
    look_where_found(run_with(tmp_path / "run", {"paid_lately": str(mine), "torchaudio": str(other)}), RECIPE)
    assert str(mine) in sys.path
    assert str(other) not in sys.path


def test_another_module_of_the_name_is_told_and_a_loaded_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, shadow = (folder_with(tmp_path / name, "paid_lately.py") for name in ("mine", "shadow"))
    run = run_with(tmp_path / "run", {"paid_lately": str(mine)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look_where_found(run, RECIPE)
    sys.path.insert(0, str(shadow))
    with pytest.warns(UserWarning, match=f"'paid_lately' is loaded from '{shadow}'.*found it in '{mine}'"):
        look_where_found(run, RECIPE)
    refuse_loaded_elsewhere(run, RECIPE)  # it is not loaded
    __import__("paid_lately")
    with pytest.raises(RecipeError, match=f"loaded in this process from '{shadow}'.*a process of its own"):
        refuse_loaded_elsewhere(run, RECIPE)
    monkeypatch.delitem(sys.modules, "paid_lately")
    (mine / "paid_lately.py").unlink()  # it has moved: nothing to say
    refuse_loaded_elsewhere(run, RECIPE)


def test_of_a_package_in_two_folders_the_one_with_the_module_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "data" / "paid_parts").mkdir(parents=True)
    code = folder_with(tmp_path / "code", "paid_parts/mine.py")
    sys.path += [str(tmp_path / "data"), str(code)]
    assert own_modules({"name": "paid_parts.mine:brevity"}) == {"paid_parts": str(code)}


@pytest.mark.parametrize("content", ["[" * 200_000, "{", "[]", '{"paid_lately": 7}', '{"paid_lately": "/tmp/\\ud800x"}'])
def test_a_damaged_file_is_told(tmp_path: Path, content: str) -> None:
    before = [*sys.path]
    run = run_with(tmp_path / "run", content)
    if content == "[]":
        look_where_found(run, RECIPE)  # it names none
    else:
        with pytest.raises(RecipeError, match="cannot be read"):
            look_where_found(run, RECIPE)
    assert sys.path == before


def test_folders_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    for number, folder in enumerate(("relative", "/tmp/a\0b")):
        before = [*sys.path]
        look_where_found(run_with(tmp_path / f"run{number}", {"paid_lately": folder}), RECIPE)
        assert sys.path == before
