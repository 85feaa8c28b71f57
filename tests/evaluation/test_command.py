"""``sensorium eval``: the published table's columns, a line a sample, and what it cannot do refused at the start."""

import json
from pathlib import Path
from typing import Any

import pytest

from sensorium.cli.main import main
from sensorium.evaluation.folder import default_folder
from sensorium.recipe.load import load_recipe
from sensorium.runs.episodes import task_from_json
from sensorium.vocabulary import Media
from sensorium.vocabulary.decoding import VideoParameters
from tests.evaluation.daily import LOTTERY, write_daily


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    paid = {"name": "format", "weight": 0.2, "options": {"tags": {"answer": 1.0}}}
    changes = {"rewards": {"terms": [LOTTERY, paid]}, "evaluation": {"samples": 2}}
    return write_daily(tmp_path_factory.mktemp("daily"), 12, **changes)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_daily_omni_has_the_published_columns_on_screen_in_markdown_and_in_json(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(recipe), "--greedy", "--save", "all.json"]) == 0
    out = capsys.readouterr().out
    folder = Path("runs/eval_daily_tiny_qwen2_5_omni_greedy")
    assert f"written to {folder}" in out
    head = "all AV alignment comparative context sequence inference reasoning"
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert head in lines
    page = (folder / "table.md").read_text()
    assert f"|  | {' | '.join(('all', 'AV alignment', *head.split()[3:]))} |" in page
    summary = json.loads((folder / "summary.json").read_text())
    assert json.loads(Path("all.json").read_text()) == {"checkpoint": "tiny:qwen2_5_omni", **summary}
    assert [summary["columns"][category] for category in summary["categories"]] == ["AV alignment", *head.split()[3:]]
    shares = [f"{100 * part['accuracy']:.1f} %" for part in (summary, *summary["categories"].values())]
    assert f"accuracy {' '.join(shares)}" in lines
    assert f"| accuracy | {' | '.join(shares)} |" in page
    assert f"n 12 {' '.join('2' * 6)}" in lines
    assert any(line.startswith("reward/lottery") for line in lines)


def test_a_line_a_sample_with_references_to_its_media(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["eval", str(recipe), "--limit", "4", "--out", str(out), "--temperature", "1"]) == 0
    rows = rows_of(out)
    drawn = sorted({row["task"] for row in rows}, key=lambda task: int(task.rpartition("/")[2]))
    assert len(drawn) == 4
    assert [(row["task"], row["sample"]) for row in rows] == [(task, j) for task in drawn for j in range(2)]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["tasks"], summary["samples"], summary["episodes"], summary["skipped"]) == (4, 2, 8, 0)
    for row in rows:
        parts = row["weights"]
        assert row["reward"] == pytest.approx(sum(parts[name] * row[f"reward/{name}"] for name in parts))
        assert row["correct"] == (row["reward/lottery"] == 1.0)
        assert set(row) >= {"category", "answer", "extracted", "length", "status", "seed", "response"}
        video, sound, _ = task_from_json({"id": row["task"], "messages": row["messages"]}).messages[0].content
        assert isinstance(video, Media)
        assert isinstance(sound, Media)
        assert video.parameters == VideoParameters(frames=2, max_pixels_per_frame=3136)
        assert (len(video.hash), sound.kind) == (64, "sound")
        assert "qa.json, row" in video.origin
    total = sum(summary["weights"][name] * value for name, value in summary["terms"].items())
    assert summary["reward"] == pytest.approx(total)
    assert summary["mean@2"]["value"] == summary["accuracy"] == sum(row["correct"] for row in rows) / 8
    best = [any(row["correct"] for row in rows[2 * i : 2 * i + 2]) for i in range(4)]
    assert summary["best@2"]["value"] == sum(best) / 4


def test_a_family_that_lacks_a_modality_is_refused_by_task_and_medium(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["eval", str(recipe), "--model", "tiny:qwen3_vl", "--out", str(out)]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "task daily_omni/0: family qwen3_vl takes picture, text, video and not sound" in err
    assert "row 0, sound 'v0'" in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--greedy", "--temperature", "0.5"], "--greedy and --temperature 0.5 contradict each other"),
        (["--greedy", "--samples", "4"], "at temperature 0 every sample is the same"),
        (["--samples", "0"], "'evaluation.samples' is 0; it must be greater than or equal to 1"),
        (["--temperature", "-1"], "'evaluation.temperature' is -1.0"),
        (["--chunk", "0"], "--chunk is 0"),
        (["--model", "no/such/model"], "model.path 'no/such/model'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    arguments: list[str], said: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(recipe), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_bad_row_is_refused_or_skipped_and_counted(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads((recipe.parent / "data" / "qa.json").read_text())
    rows[1]["Choice"] = []
    data = tmp_path / "data"
    data.mkdir()
    (data / "Videos").symlink_to(recipe.parent / "data" / "Videos")
    (data / "qa.json").write_text(json.dumps(rows[:3]))
    command = ["eval", str(recipe), "--greedy", "--out", str(tmp_path / "out"), f"tasks.evaluate.0.options.path={data}"]
    assert main(command) == 2
    assert "row 1" in capsys.readouterr().err
    assert main([*command, "tasks.on_bad_row=skip"]) == 0
    assert "1 bad row skipped" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["skipped"] == 1


def test_a_prompt_that_is_too_long_is_refused_or_left_out_and_counted(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(recipe), "--greedy", "--limit", "2", "--out", str(tmp_path / "out")]
    assert main([*command, "rollout.max_context_tokens=40"]) == 2
    assert "task daily_omni/0: the prompt takes" in capsys.readouterr().err
    assert main([*command, "rollout.max_context_tokens=40", "tasks.on_long_prompt=skip"]) == 2, "nothing was evaluated"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["failed"], summary["judged"], summary["accuracy"]) == (2, 0, None)
    assert all("the prompt takes" in row["failure"] and row["correct"] is None for row in rows_of(tmp_path / "out"))


def test_an_evaluation_goes_into_the_run_of_its_checkpoint_or_a_folder_of_its_own(recipe: Path, tmp_path: Path) -> None:
    loaded = load_recipe(recipe, ["evaluation.temperature=0.7", "evaluation.samples=4", "evaluation.limit=9"])
    assert default_folder(loaded, "Qwen/Qwen2.5-Omni-7B") == Path("runs/eval_daily_Qwen2.5-Omni-7B_t0.7_x4_first9")
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step_000012"
    checkpoint.mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: run\n")
    greedy = load_recipe(recipe, ["evaluation.temperature=0", "evaluation.samples=1"])
    assert default_folder(greedy, str(checkpoint)) == run / "evaluations" / "step_000012_greedy"


TRAINED = """
name: trained
steps: 1
threads: 1
model: {path: "tiny:qwen3_vl"}
tasks:
  train: [{source: shapes, options: {size: 8, picture_size: 56}}]
  evaluate: [{source: shapes, options: {split: test, size: 6, picture_size: 56}}]
batch: {prompts_per_step: 2, group_size: 4}
rollout: {max_new_tokens: 3}
rewards: {terms: [{name: "tests.evaluation.lottery:Lottery"}]}
evaluation: {every: 1, samples: 2}
"""


def test_a_run_is_evaluated_by_its_checkpoint_and_compared_with_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trained.yaml").write_text(TRAINED)
    assert main(["train", "trained.yaml"]) == 0
    row = json.loads(Path("runs/trained/metrics.jsonl").read_text())
    assert {"eval/accuracy", "eval/mean@2", "eval/best@2", "eval/majority@2"} <= row.keys()
    assert main(["eval", "runs/trained", "--greedy"]) == 0
    assert main(["eval", "trained.yaml", "--greedy", "--model", "runs/trained"]) == 0, "the same, told otherwise"
    after = "runs/trained/evaluations/step_000001_greedy"
    assert [path.name for path in Path("runs/trained/evaluations").iterdir()] == ["step_000001_greedy"]
    assert main(["eval", "trained.yaml", "--greedy"]) == 0
    assert main(["compare", "runs/eval_trained_tiny_qwen3_vl_greedy", after]) == 0
    assert "are the same model" not in capsys.readouterr().out
    assert main(["train", "runs/trained", "--resume"]) == 0, "evaluations are not in the way of a run that goes on"
    assert Path(after, "summary.json").exists()
    capsys.readouterr()
    with Path("runs/trained/metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(row | {"step": 2}) + "\n")
    assert main(["eval", "runs/trained", "--greedy"]) == 0
    tie = f"step 1 is the first with the best eval/accuracy, {row['eval/accuracy']:.4g}; later steps tie with it: 2"
    assert tie in " ".join(capsys.readouterr().out.split())
