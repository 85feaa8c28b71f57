"""A damaged evaluation folder is one paragraph that names the file and the way out."""

import json
from pathlib import Path

import pytest

from sensorium.cli.main import main
from sensorium.evaluation.folder import EvaluationFolder
from sensorium.vocabulary.errors import RecordError
from tests.evaluation.made import evaluated, samples


def test_a_damaged_claim_or_sample_is_named(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    folder.claim.write_text("{")
    with pytest.raises(RecordError, match=r"evaluation\.json' is damaged.*--fresh"):
        folder.take({"model": "m"})
    folder.claim.write_text(json.dumps({"model": "m"}))
    folder.summary.write_text('{"episodes": 1, "categories": {}}')
    folder.samples.write_text('{"task": 3}\n')
    with pytest.raises(RecordError, match=r"samples\.jsonl' is damaged: a line is no sample.*--fresh"):
        folder.read()


def test_an_evaluation_of_a_run_that_is_not_there_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert main(["eval", "shapes", "--model", "runs/nothing", "--limit", "1"]) == 2
    said = capsys.readouterr().err
    assert "'runs/nothing': there is no such folder" in said
    assert "hub" not in said


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("evaluation.json", "{}", "evaluation.json' is damaged: it lacks 'model'"),
        ("summary.json", "{}", "summary.json' is damaged: it lacks 'categories'"),
        ("samples.jsonl", "", "has 0 samples and 'summary.json'"),
    ],
)
def test_a_comparison_with_a_damaged_folder_is_refused(
    file: str, content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (evaluated(tmp_path / name, samples([True, False, True])) for name in "ab")
    assert main(["compare", str(a), str(b)]) == 0
    (b / file).write_text(content)
    capsys.readouterr()
    assert main(["compare", str(a), str(b)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
