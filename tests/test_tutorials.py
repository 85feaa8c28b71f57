"""The tutorials' code blocks run as they stand, in a short form: few steps, few held-out tasks."""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

import sensorium as sn
from sensorium.runs.episodes import read_episodes
from studies.pages import blocks, commands, follow

START = Path(__file__).parents[1] / "docs/start"
DIGITS, ENVIRONMENT, BROWSER = START / "digits.md", START / "own_environment.md", START / "browser.md"
SUMS = START / "sums.md"
PAID = "rewards.terms=[{{name: {}}}, {{name: 'tests.trainer.small:ByParity'}}]"  # something to learn from in one step
SHORT = {
    "digits": ["steps=1", "warm_start.steps=1", "batch.prompts_per_step=2", "batch.group_size=2", "evaluation.limit=2",
               "checkpoint.every=1", "threads=1", PAID.format("exact")],
    "walk": ["steps=1", "warm_start.steps=1", "batch.prompts_per_step=2", "batch.group_size=2", "evaluation.limit=2",
             "rollout.max_turns=2", "threads=1", PAID.format("environment")],
    "browser": ["steps=1", "warm_start.steps=1", "batch.prompts_per_step=2", "batch.group_size=2", "evaluation.limit=2",
                "batch.updates_per_epoch=1", "evaluation.every=2", "checkpoint.every=1", "threads=1",
                PAID.format("environment")],
    "sums": ["steps=1", "batch.prompts_per_step=2", "batch.group_size=2", "evaluation.limit=2", "checkpoint.every=1",
             "threads=1", PAID.format("sum_rewards:result")],
}  # fmt: skip


def shortened(words: list[str]) -> list[str]:
    """The same command with less to do. SFT ends at step 1 then, and RL at step 2."""
    words = [re.sub("step_000(025|120)", "step_000001", re.sub("step_000(175|136)", "step_000002", word)) for word in words]
    if words[:2] == ["python", "bench/smollm2.py"]:
        return ["sensorium", "export", "tiny:llama", words[2]]
    browser = "browser" in " ".join(words)  # which takes seconds to start
    one = ["environments.pool=1"] if browser else []
    if words[:2] == ["sensorium", "train"]:
        return [*words, *SHORT[Path(words[2]).stem], *one]
    if words[:2] == ["sensorium", "record"]:
        return [*words[:-1], "4", *one]
    if words[:2] == ["sensorium", "eval"]:
        return [] if browser and "--blank" not in words else [*words, "--limit", "4", *one]
    if browser and words[:2] in (["sensorium", "compare"], ["sensorium", "show"]):
        return []
    return words


def test_the_digits_tutorial_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="the tutorial's data ship with scikit-learn: pip install -e '.[tutorial]'")
    follow(DIGITS, tmp_path, shortened)
    run = sn.Run(tmp_path / "runs/digits")
    assert run.metrics["step"] == [1, 2]
    assert (tmp_path / "runs/digits_rl/summary.json").exists()
    assert ".png" in capsys.readouterr().out, "the last script reads pictures with the trained model"


def test_the_tutorial_of_a_real_model_runs_on_a_tiny_one(tmp_path: Path) -> None:
    follow(SUMS, tmp_path, shortened)
    assert sn.Run(tmp_path / "runs/sums").metrics["step"] == [1]
    splits = {name: (tmp_path / f"sums/{name}.jsonl").read_text().splitlines() for name in ("test", "validation", "train")}
    assert len(set().union(*splits.values())) == sum(map(len, splits.values()))
    assert (len(splits["test"]), len(splits["validation"])) == (500, 100)
    for when in ("before", "before_sampled", "after", "after_sampled"):
        summary = json.loads((tmp_path / f"runs/sums_{when}/summary.json").read_text())
        assert summary["tasks"] == 4
        assert summary["accuracy"] is not None


def test_the_environment_tutorial_runs(tmp_path: Path) -> None:
    follow(ENVIRONMENT, tmp_path, shortened)
    run = sn.Run(tmp_path / "runs/walk")
    assert run.metrics["step"] == [1, 2]
    assert sn.Run(tmp_path / "runs/walk_on").metrics["step"] == [1, 2]
    played = read_episodes(tmp_path / "runs/walk/episodes/step_000002.jsonl")
    turns = [turn for _, _, episode in played for turn in episode.turns]
    invalid = [turn.response.text.strip() not in ("up", "down", "left", "right") for turn in turns]
    assert [not turn.info["valid"] for turn in turns] == invalid
    assert run.metrics["environment/invalid_share"][-1] == pytest.approx(sum(invalid) / len(invalid))


def test_the_browser_tutorial_records_and_trains_and_leaves_no_browser(tmp_path: Path) -> None:
    for module in ("miniwob", "playwright"):
        pytest.importorskip(module, reason="the tutorial's browser: pip install -e '.[browser]'")
    if shutil.which("chromium") is None:
        pytest.skip("there is no Chromium: apt install chromium")
    follow(BROWSER, tmp_path, shortened)
    rows = [json.loads(line) for line in (tmp_path / "demonstrations/browser/rows.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0] * 4
    assert sn.Run(tmp_path / "runs/browser").metrics["step"] == [1, 2]
    assert json.loads((tmp_path / "runs/browser_blank/summary.json").read_text())["tasks"] == 4
    assert not started_by("test_the_browser_tutorial")


def started_by(test: str) -> list[int]:
    """Processes that a test started, by the variable that pytest sets while it runs."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if re.search(rb"PYTEST_CURRENT_TEST=[^\0]*" + test.encode(), file.read_bytes()):
                found.append(int(file.parent.name))
    return found


@pytest.mark.parametrize("page", [DIGITS, ENVIRONMENT, BROWSER, SUMS], ids=lambda page: page.stem)
def test_every_block_is_a_file_or_commands(page: Path) -> None:
    assert all(block.file or block.language == "sh" for block in blocks(page))
    assert any(words[:2] == ["sensorium", "train"] for words in commands(page))
