"""An evaluation that was killed goes on when its command is run again, and gives the same files, byte for byte."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sensorium.cli.main import main
from tests.evaluation.daily import write_daily
from tests.evaluation.lottery import DIES_AT

ROOT = Path(__file__).parents[2]
FILES = ("evaluation.json", "samples.jsonl", "summary.json", "table.md")
WAYS = {"greedy": ["--greedy"], "sampled": ["--samples", "3", "--temperature", "1.3"]}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_daily(tmp_path_factory.mktemp("daily"), 7)


@pytest.fixture(scope="module")
def whole(recipe: Path) -> dict[str, dict[str, bytes]]:
    """The files of evaluations that were not interrupted."""
    found = {}
    for way, arguments in WAYS.items():
        out = recipe.parent / f"whole_{way}"
        assert main(["eval", str(recipe), *arguments, "--chunk", "3", "--out", str(out)]) == 0
        found[way] = files(out)
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.usefixtures("forked_python")
def test_a_killed_evaluation_finishes_the_rest(recipe: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    way, dies_at, chunks = "sampled", "daily_omni/6 1", 2
    command = ["eval", str(recipe), *WAYS[way], "--chunk", "3", "--out", str(tmp_path / "out")]
    environment = os.environ | {DIES_AT: dies_at, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONHASHSEED": "random"}
    killed = subprocess.run([sys.executable, "-m", "sensorium.cli.main", *command], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out" / "summary.json").exists()
    written = (tmp_path / "out" / "samples.jsonl").read_bytes()
    assert whole[way]["samples.jsonl"].startswith(written)
    assert len(written.splitlines()) == chunks * 3 * 3
    assert main(command) == 0
    assert files(tmp_path / "out") == whole[way]


def test_samples_differ_where_they_should(whole: dict[str, dict[str, bytes]]) -> None:
    rows = whole["sampled"]["samples.jsonl"].splitlines()
    responses = [row[row.index(b'"response"') :] for row in rows]
    assert len(set(responses)) > 7, "samples of a task are drawn anew"
    assert len(whole["greedy"]["samples.jsonl"].splitlines()) == 7


@pytest.mark.parametrize("kept", [0.0, 0.55, 0.99, 1.0])
def test_a_torn_file_is_mended(
    kept: float, recipe: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(recipe.parent / "whole_sampled", tmp_path / "out")
    data = whole["sampled"]["samples.jsonl"]
    (out / "samples.jsonl").write_bytes(data[: round(kept * len(data))])
    assert main(["eval", str(recipe), *WAYS["sampled"], "--chunk", "3", "--out", str(out)]) == 0
    assert files(out) == whole["sampled"]
    done = {0.0: "", 0.55: "3 of 7", 0.99: "6 of 7", 1.0: "7 of 7"}[kept]
    assert (f"{done} tasks were done before" in capsys.readouterr().out) == bool(done)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--temperature", "0.9"], "settings.temperature is 1.3 there and 0.9 here"),
        (["--samples", "2"], "settings.samples is 3 there and 2 here"),
        (["--limit", "4"], "settings.limit is 0 there and 4 here"),
        (["rollout.max_new_tokens=5"], "recipe.rollout.max_new_tokens is 4 there and 5 here"),
        (["seed=1"], "settings.seed is 0 there and 1 here"),
    ],
)
def test_another_setting_is_refused_before_a_model_is_loaded(
    changed: list[str],
    said: str,
    recipe: Path,
    whole: dict[str, dict[str, bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = recipe.parent / "whole_sampled"
    command = ["eval", str(recipe), *WAYS["sampled"], "--model", "no/such/model", "--chunk", "3", "--out", str(out)]
    assert main([*command, *changed]) == 2
    assert said in capsys.readouterr().err
    assert files(out) == whole["sampled"]


def test_other_weights_and_other_tasks_are_refused_and_fresh_forgets(
    recipe: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sensorium.models.tiny import make_tiny

    out = shutil.copytree(recipe.parent / "whole_greedy", tmp_path / "out")
    command = ["eval", str(recipe), "--greedy", "--chunk", "3", "--out", str(out)]
    other = str(make_tiny("qwen2_5_omni", tmp_path / "other", seed=1))
    assert main([*command, "--model", other]) == 2
    assert "weights is" in capsys.readouterr().err
    assert main([*command, "--model", str(make_tiny("qwen2_5_omni", tmp_path / "same"))]) == 0, "the same model elsewhere"
    manifest = Path(str(recipe.parent / "data" / "qa.json"))
    kept = manifest.read_text()
    try:
        manifest.write_text(kept.replace("What is seen", "What is shown"))
        assert main(command) == 2
        assert "tasks.digest is" in capsys.readouterr().err
    finally:
        manifest.write_text(kept)
    assert main([*command, "--model", other, "--fresh"]) == 0
    assert files(out)["samples.jsonl"] != whole["greedy"]["samples.jsonl"]
