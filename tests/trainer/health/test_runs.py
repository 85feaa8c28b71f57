"""Runs that go wrong say so: whole runs of a tiny model, as users meet them. None of them ends with exit code 0."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from sensorium.cli.main import ExitCode, main
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.envs.protocol import Observation, StepResult
from sensorium.recipe.load import parse_recipe
from sensorium.runs.metrics import read_health, read_metrics
from sensorium.trainer.run import train
from sensorium.vocabulary import Episode, Message, Score, Task, system, user
from sensorium.vocabulary.errors import EnvironmentFailure, NothingTrained, TaskError
from tests.recipes import HELD_OUT, SHAPES, quick

HERE = "tests.trainer.health.test_runs"
RECIPE = quick(
    "unwell",
    rewards={"terms": [{"name": "exact"}], "retries": 0, "retry_wait_s": 0.0},
)


def write_recipe(folder: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(RECIPE | changes | {"run_dir": str(folder / "run")}))
    return path


def digits(folder: Path, **more: Any) -> dict[str, Any]:
    """A source of pictures with answers, as a user has them."""
    lines = []
    for i in range(8):
        (folder / f"{i}.png").write_bytes(encode_png(np.full((56, 56, 3), 30 * i, np.uint8)))
        blocks = [{"type": "image", "path": f"{i}.png"}, {"type": "text", "text": "Which digit is this?"}]
        lines.append(
            json.dumps({"id": f"d{i}", "messages": [{"role": "user", "content": blocks}], "answer": str(i), **more})
        )
    (folder / "digits.jsonl").write_text("\n".join(lines) + "\n")
    return {"train": [{"source": "jsonl", "options": {"path": str(folder / "digits.jsonl")}}]}


def found(folder: Path) -> dict[str, str]:
    """What was told of the run, by rule."""
    return {notice.rule: notice.text for notice in read_health(folder / "run/health.jsonl").notices}


def run(folder: Path, **changes: Any) -> str:
    """Train a recipe that cannot work; returns the paragraph it ends with."""
    with pytest.raises(NothingTrained) as stopped:
        train(parse_recipe(json.dumps(RECIPE | changes | {"run_dir": str(folder / "run")}), "test", []))
    return str(stopped.value)


def test_pictures_judged_by_exact_without_the_tag_are_explained_in_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"model": {"path": "tiny:qwen2_5_vl"}, "tasks": digits(tmp_path), "steps": 9, "health": {"stop_after": 2}}
    assert main(["train", str(write_recipe(tmp_path, **changes))]) == ExitCode.UNTRAINED
    said = capsys.readouterr()
    shown = " ".join(said.out.split())
    assert "Which digit is this?" in shown
    assert "paid by exact 0" in shown
    assert "step 1: health: 'exact' found no answer in any of 9 responses" in shown
    assert "<answer>…</answer>" in shown
    assert "fallback: true" in shown
    assert "the last 2 steps made no update, so the run was stopped (health.stop_after: 2)" in " ".join(said.err.split())
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["health/no_answer"] for row in rows] == [1.0, 1.0]
    assert (tmp_path / "run/checkpoints/step_000002/COMPLETE").exists(), "what the run has is saved"
    assert "found no answer in any of 9 responses" in (tmp_path / "run/report.html").read_text().replace("&#x27;", "'")


def test_a_warm_start_on_rows_without_demonstrations_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, tasks=digits(tmp_path), warm_start={"steps": 3, "prompts_per_step": 2})
    assert main(["train", str(recipe)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "warm_start.steps is 3, but none of 8 tasks looked at has a demonstration" in said
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_warm_start_in_an_environment_that_cannot_demonstrate_says_so_and_ends_badly(tmp_path: Path) -> None:
    tasks = {"train": [{"source": "environments", "options": {"environment": f"{HERE}:Mute", "size": 8}}]}
    warm = {"steps": 2, "prompts_per_step": 2}
    ended = run(tmp_path, tasks=tasks, warm_start=warm, steps=0, rewards={"terms": [{"name": "environment"}]})
    assert "the warm start made no update" in found(tmp_path)["no_update"]
    assert "nobody can show this" in ended


class Mute:
    """An environment without demonstrations, that may fail."""

    instant = True

    def __init__(self, store: MediaStore, fails: bool = False) -> None:
        self.fails = fails

    @classmethod
    def content_key(cls, seed: int, options: dict[str, Any]) -> str:
        return str(seed)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        return (system("say something"),), Observation((user(f"{seed}?"),))

    def step(self, response: str) -> StepResult:
        if self.fails:
            raise ValueError("the game has crashed")
        return StepResult(None, reward=1.0, done=True)

    def demonstrate(self) -> str:
        raise EnvironmentFailure("nobody can show this")

    def close(self) -> None: ...


def test_episodes_that_all_fail_are_told_with_their_failure(tmp_path: Path) -> None:
    options = {"environment": f"{HERE}:Mute", "options": {"fails": True}, "size": 8}
    tasks = {"train": [{"source": "environments", "options": options}]}
    ended = run(tmp_path, tasks=tasks, rewards={"terms": [{"name": "environment"}]})
    assert "9 of 9 episodes failed" in found(tmp_path)["failed_episodes"]
    assert "the game has crashed" in found(tmp_path)["failed_episodes"]
    assert "none of the 2 steps made an update" in ended


class Broken:
    """Always raises."""

    name = "broken"
    instant = True

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        raise KeyError("colour")


class Stuck:
    """Pays everybody the same, as a plain number."""

    name = "stuck"
    instant = True

    def score(self, task: Task, episode: Episode) -> float:
        return 0.25


def test_a_term_that_always_raises_is_told_with_what_it_raises(tmp_path: Path) -> None:
    ended = run(tmp_path, rewards={"terms": [{"name": f"{HERE}:Broken"}]})
    assert "none of 9 episodes has a reward: 'broken' says: KeyError: 'colour'" in found(tmp_path)["nothing_scored"]
    assert "no_update" in found(tmp_path)
    assert "KeyError: 'colour'" in ended


def test_a_term_that_raises_without_weight_is_told_and_costs_nothing(tmp_path: Path) -> None:
    terms = [{"name": f"{HERE}:ByIndex"}, {"name": f"{HERE}:Broken", "weight": 0.0}]
    train(parse_recipe(json.dumps(RECIPE | {"rewards": {"terms": terms}, "run_dir": str(tmp_path / "run")}), "test", []))
    assert set(found(tmp_path)) == {"missing_term"}
    assert "the term 'broken' gave no score for every one of 9 episodes" in found(tmp_path)["missing_term"]


def test_the_command_says_by_its_exit_code_that_two_steps_trained_nothing(tmp_path: Path) -> None:
    assert (
        main(["train", str(write_recipe(tmp_path, rewards={"terms": [{"name": f"{HERE}:Stuck"}]}))]) == ExitCode.UNTRAINED
    )


class ByIndex:
    """Pays the members of a group differently."""

    name = "index"
    instant = True

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        return (Score("index", float(episode.index)),)


def test_a_term_that_pays_everybody_the_same_number_ends_badly(tmp_path: Path) -> None:
    ended = run(tmp_path, rewards={"terms": [{"name": f"{HERE}:Stuck"}]}, steps=3)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["reward/stuck"] for row in rows] == [0.25] * 3, "a number is a score"
    assert "in every group" in found(tmp_path)["no_variance"]
    assert "none of the 3 steps made an update" in ended


def test_rows_none_of_which_has_an_answer_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"8 of 8 tasks looked at have no answer.*Give the rows an 'answer'"):
        train(
            parse_recipe(
                json.dumps(RECIPE | {"tasks": digits(tmp_path, answer=None), "run_dir": str(tmp_path / "run")}), "test", []
            )
        )


@pytest.mark.parametrize("every", [1, 0], ids=["saved_each_step", "saved_at_the_end"])
def test_a_learning_rate_that_ruins_the_model_stops_the_run_and_saves_nothing(
    every: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = {"terms": [{"name": f"{HERE}:ByIndex"}]}
    rate = {"lr": 1e10, "warmup_steps": 1}
    recipe = write_recipe(tmp_path, rewards=terms, optimizer=rate, steps=6, checkpoint={"every": every, "keep": 2})
    assert main(["train", str(recipe)]) == 2
    said = capsys.readouterr()
    assert "optimizer.lr 1e+10 is larger than most weights are" in " ".join(said.out.split())
    ended = " ".join(said.err.split())
    assert "gives log-probs that are not finite, so it is ruined and was not saved" in ended
    assert "after step 1 the model" in ended, "the next step's samples tell where nothing was saved"
    for saved in (tmp_path / "run/checkpoints").glob("step_*"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(saved / "model.safetensors").values())


@pytest.mark.parametrize(("keep", "left"), [(2, [1, 4, 5]), (1, [1, 5])])
def test_a_checkpoint_from_before_the_damage_is_not_rotated_away(
    keep: int, left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sensorium.trainer.health.monitor import Health

    monkeypatch.setattr(Health, "damaged", property(lambda self: self.history.steps >= 3))
    changes = {"rewards": {"terms": [{"name": f"{HERE}:ByIndex"}]}, "steps": 5, "checkpoint": {"every": 1, "keep": keep}}
    train(parse_recipe(json.dumps(RECIPE | changes | {"run_dir": str(tmp_path / "run")}), "test", []))
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step_*"))
    assert kept == [f"step_{step:06d}" for step in left], "what step 2 sampled was the last that was well"


SIGHTED: dict[str, Any] = {
    "tasks": {"train": [SHAPES], "evaluate": [HELD_OUT]},
    "rewards": {"terms": [{"name": f"{HERE}:ByIndex"}, {"name": f"{HERE}:SeesItsPicture"}]},
    "evaluation": {"at_start": True, "limit": 8},
}


class SeesItsPicture:
    """Right where the episode was shown the task's own picture, wrong where that was blanked."""

    name = "sees"
    instant = True

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        own, shown = (
            [m for message in messages for m in message.media] for messages in (task.messages, episode.turns[0].observation)
        )
        return (Score(self.name, float(shown == own), correct=shown == own),)


def test_the_sight_check_compares_with_blanked_pictures_and_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    for name, tasks in (("with", 8), ("without", 0)):
        changes = SIGHTED | {"health": {"sight_tasks": tasks}, "run_dir": str(tmp_path / name)}
        train(parse_recipe(json.dumps(RECIPE | changes), "test", []))
    checks = read_health(tmp_path / "with/health.jsonl").sight
    assert [step for step, _ in checks] == [0, 2]
    assert all([result.kind for result in results] == ["picture"] for _, results in checks)
    assert all(result.tasks == 8 for _, results in checks for result in results)
    assert checks[0][1][0].same < 8, "without the picture some answers differ"
    assert not read_health(tmp_path / "without/health.jsonl").sight
    last = read_metrics(tmp_path / "with/metrics.jsonl")[-1]
    assert [(result.shown, result.blanked) for _, results in checks for result in results] == [(1.0, 0.0)] * 2
    assert (last["sight/shown"], last["sight/picture_blanked"]) == (1.0, 0.0)
    seeing, plain = (
        load_file(tmp_path / name / "checkpoints/step_000002/model.safetensors") for name in ("with", "without")
    )
    assert all((seeing[name] == plain[name]).all() for name in plain)


class RightAtFirst:
    """Calls the first eight responses right, which are those of the evaluation before training, and no other."""

    name = "right_at_first"
    instant = True

    def __init__(self) -> None:
        self.asked = 0

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        self.asked += 1
        return (Score(self.name, float(episode.index), correct=self.asked <= 8),)


def test_held_out_accuracy_that_fell_since_before_training_is_told_in_health_and_report(tmp_path: Path) -> None:
    changes = SIGHTED | {"rewards": {"terms": [{"name": f"{HERE}:RightAtFirst"}]}, "health": {"sight_tasks": 0}}
    changes |= {"evaluation": {"at_start": True, "every": 2, "limit": 8}}
    train(parse_recipe(json.dumps(RECIPE | changes | {"run_dir": str(tmp_path / "run")}), "test", []))
    assert "fell from 100.0 % [67.6 to 100.0] before training to 0.0 %" in found(tmp_path)["held_out_fall"]
    assert "held-out accuracy fell from 100.0 %" in (tmp_path / "run/report.html").read_text()


def test_demonstrations_that_get_no_reward_are_named_where_nothing_gets_one(tmp_path: Path) -> None:
    """The warm start teaches a tag that the term does not read."""
    tasks = digits(tmp_path, demonstration="<solution>7</solution>")
    stopped = run(tmp_path, tasks=tasks, warm_start={"steps": 1}, steps=3)
    assert "demonstrations" in found(tmp_path)["never_paid"]
    assert "3 of 3" in found(tmp_path)["never_paid"]
    assert "3 of 3" in stopped
