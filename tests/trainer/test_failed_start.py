"""A run that cannot start says why, and nothing else: no plan before it, no folder after it."""

import json
from pathlib import Path

import pytest

from sensorium.cli.main import main
from sensorium.trainer import run as starting
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import RecipeError, TaskError
from tests.trainer.small import small


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("model.path=./no_such_model", "there is no such folder"),
        ("tasks.train.0.options.path=nowhere.jsonl", "nowhere.jsonl"),
    ],
)
def test_a_start_that_fails_prints_no_plan_and_leaves_no_folder(
    change: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = small(tmp_path / "data" / "run").model_dump(mode="json") | {"run_dir": None}
    (tmp_path / "trial.yaml").write_text(json.dumps(recipe))
    assert main(["train", "trial.yaml", change]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said = " ".join(err.split())
    assert says in said
    assert said.endswith("runs/small' was not kept.")
    assert "Nothing was left behind" in said
    assert not (tmp_path / "runs").exists()


def test_bad_rows_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    rows = [json.dumps({"q": "What?", "demonstration": "x"})] * 3
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    source = {"source": "jsonl", "options": {"path": str(tmp_path / "rows.jsonl"), "columns": {"prompt": "question"}}}
    with pytest.raises(TaskError, match=r"none of 3 rows .*'question'.* Known: demonstration, q"):
        train(small(tmp_path / "run", "model.path=./no_such_model", tasks={"train": [source]}))
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps({"question": "What?"}), rows[0]]))
    with pytest.raises(TaskError, match=r"rows\.jsonl:2"):
        train(small(tmp_path / "run", "model.path=./no_such_model", tasks={"train": [source]}))


def test_the_folders_of_others_stay(tmp_path: Path) -> None:
    broken = {"train": [{"source": "jsonl", "options": {"path": "nowhere.jsonl"}}]}
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for folder in (tmp_path / "runs" / "new", tmp_path / "mine"):
        with pytest.raises(TaskError) as error:
            train(small(folder, tasks=broken))
        assert bool(getattr(error.value, "__notes__", [])) == (folder.name == "new")
    assert not (tmp_path / "runs" / "new").exists()
    assert (tmp_path / "runs" / "other").is_dir()
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_a_run_that_another_process_made_meanwhile_is_not_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(small(tmp_path / "run", steps=1))
    monkeypatch.setattr(starting, "_first_missing", lambda path: path)  # it was not there when we looked
    with pytest.raises(RecipeError, match="exists"):
        train(small(run, steps=1))
    assert (run / "checkpoints" / "step_000001" / "COMPLETE").is_file()
