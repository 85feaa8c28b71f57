"""What commands say of rows: a line that is no JSON, with file and line, and likely mistakes at the start of a run."""

import json
from pathlib import Path

import pytest

from sensorium.cli.main import main
from tests.recipes import quick

SHORT = [
    "tasks.on_bad_row=skip", "steps=1", "rewards.terms=[{name: 'tests.trainer.small:ByParity'}]", "health.sight_tasks=0",
]  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe of 40 rows on each side, of which row 24 is cut off; the current folder is an empty one."""
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        lines = [json.dumps({"q": f"Which {name} is {i}?", "a": str(i)}) for i in range(40)]
        Path(f"{name}.jsonl").write_text("\n".join([*lines[:23], lines[23][:20], *lines[24:]]) + "\n")
    columns = {"prompt": "q", "answer": "a"}
    sources = [{"source": "jsonl", "options": {"path": f"{name}.jsonl", "columns": columns}} for name in ("train", "test")]
    tasks = {"train": sources[:1], "evaluate": sources[1:]}
    Path("rows.yaml").write_text(json.dumps(quick("rows", tasks=tasks, rollout={"max_new_tokens": 2})))
    return "rows.yaml"


@pytest.mark.parametrize(
    ("command", "code", "named"),
    [
        (["train"], 2, "test.jsonl:24"),
        (["train", "evaluation.limit=1"], 2, "train.jsonl:24"),
        (["train", "tasks.evaluate=[]"], 2, "train.jsonl:24"),
        (["validate", "--episodes", "1"], 1, "train.jsonl:24"),
        (["show", "--task", "23"], 2, "test.jsonl:24"),
        (["show", "--task", "train.jsonl:24", "--split", "train"], 2, "train.jsonl:24"),
        (["eval", "--out", "out"], 2, "test.jsonl:24"),
    ],
    ids=lambda given: "_".join(given) if isinstance(given, list) else "",
)
def test_it_is_named(command: list[str], code: int, named: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command[0], recipe, *command[1:]]) == code
    said = capsys.readouterr()
    assert f"{named}: malformed JSON" in " ".join((said.out + said.err).split())
    assert not Path("runs/rows").exists()


def test_a_run_that_skips_bad_rows_trains_on_the_others(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe, *SHORT]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "test.jsonl:24: malformed JSON" in said
    assert "ATTENTION" not in said


def test_a_run_says_which_held_out_rows_are_trained_on(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    same = ["tasks.evaluate.0.options.path=train.jsonl", "tasks.evaluate.0.options.limit=5"]
    assert main(["train", recipe, *SHORT, *same]) == 0
    assert "ATTENTION: 5 of 5" in " ".join(capsys.readouterr().out.split())
    assert main(["train", "runs/rows", "--resume", "steps=2"]) == 0
    assert "5 of 5" not in capsys.readouterr().out
