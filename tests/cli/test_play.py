"""A person, or a script piped in, acts as the policy: what is shown, what is paid, and the pictures on disk."""

import io
from pathlib import Path

import pytest
from PIL import Image

from sensorium.cli.main import main
from sensorium.cli.play import drawn, usual_way

RECIPE = """\
name: mine
steps: 1
model: {path: "package:frozen_lake"}
tasks:
  train:
    - {source: environments, options: {environment: sokoban, size: 2, options: {max_turns: 3, max_solution: 1}}}
rollout: {max_turns: 3, max_new_tokens: 8}
rewards: {terms: [{name: environment}]}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return "mine.yaml"


def test_a_script_plays_two_turns_and_sees_what_each_is_paid(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("I walk\\\ninto the wall and say so at length\n<answer>Up</answer>\n"))
    assert main(["play", recipe]) == 0
    shown = capsys.readouterr().out
    assert "Push the boxes onto the targets." in shown
    assert "turn 1: step 0  box 0  success 0  format 0" in shown
    assert "the model may write 8: it would be cut" in shown
    assert "turn 2: step -0.1" in shown
    pictures = list((tmp_path / "runs/play/mine").glob("*.png"))
    assert len(pictures) >= 2
    assert Image.open(pictures[0]).size == (168, 168)


def test_a_demonstration_is_watched_to_its_end_with_the_scores_of_all_terms(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["play", recipe, "--demonstrate", "--episodes", "2", "--pictures", "blocks", "--save", "seen"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("the episode finished") == 2
    lines = shown.splitlines()
    responses = [line for line in lines if line.startswith("> ")]
    assert len(responses) == sum(line.startswith("turn ") for line in lines)
    assert all(len(response) > 2 for response in responses)
    assert shown.count("environment/success: +10 × 1") == 2
    assert "reward 11.4, correct" in shown
    assert "▀" in shown
    assert list(Path("seen").glob("*.png"))


def test_a_task_is_chosen_by_the_id_that_validate_prints(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    def played(*arguments: str) -> str:
        assert main(["play", recipe, "--demonstrate", *arguments]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("── task")]
        return line.split()[2]

    second = played("--task", "1")
    assert second != played()
    assert played("--task", second) == second
    held_out = "tasks.evaluate=[{source: environments, options: {environment: countdown, size: 1}}]"
    assert played(held_out, "--task", second) == second
    assert main(["play", recipe, held_out, "--task", second, "--split", "evaluate"]) == 2
    assert second in capsys.readouterr().err


def test_a_task_that_is_not_there_is_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", recipe, "--task", "7"]) == 2
    assert "tasks.train has 2 tasks" in " ".join(capsys.readouterr().err.split())


def test_pictures_are_sent_as_each_terminal_takes_them() -> None:
    picture = Image.new("RGB", (300, 100), (200, 30, 30))
    assert drawn(picture, "kitty").startswith("\x1b_Ga=T,f=100,m=0;")
    assert drawn(picture, "iterm").startswith("\x1b]1337;File=inline=1;size=")
    blocks = drawn(picture, "blocks").splitlines()
    assert len(blocks) == 10
    assert blocks[0].count("▀") == 64
    assert "200;30;30" in blocks[0]
    assert drawn(picture, "none") == ""
    noise = Image.effect_noise((200, 200), 90)
    assert drawn(noise, "kitty").count("\x1b_G") > 1, "kitty takes 4096 characters at a time"


def test_the_terminal_is_recognised() -> None:
    assert usual_way(False, {"TERM": "xterm-kitty"}) == "none"
    assert usual_way(True, {"TERM": "xterm-kitty"}) == "kitty"
    assert usual_way(True, {"TERM_PROGRAM": "iTerm.app"}) == "iterm"
    assert usual_way(True, {"TERM": "xterm"}) == "blocks"
