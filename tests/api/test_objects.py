"""Functions, rows, data sets and classes as parts of a recipe: they train, and resume finds them or says what it lacks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import sensorium as sn
from sensorium.envs.protocol import Observation, StepResult
from sensorium.recipe.registry import _passed
from sensorium.vocabulary import Message, system, user
from tests.api.small import PARITY, small_recipe


def brevity(task: sn.Task, episode: sn.Episode, scale: float = 1.0) -> float:
    """Pays short responses; a function that any process can import."""
    return scale / max(1, episode.sampled_tokens)


class Echo:
    """Pays for saying its number."""

    instant = True

    def __init__(self, store: Any) -> None: ...

    @classmethod
    def content_key(cls, seed: int, options: dict[str, Any]) -> str:
        return str(seed)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self.seed = seed
        return (system("Echo."),), Observation((user(f"{seed % 10}"),))

    def step(self, response: str) -> StepResult:
        return StepResult(None, reward=float(str(self.seed % 10) in response), done=True)

    def demonstrate(self) -> str:
        return str(self.seed % 10)

    def close(self) -> None: ...


def rows(count: int = 6) -> list[dict[str, Any]]:
    blocks = [{"type": "image", "image": Image.new("RGB", (64, 64), "red")}, "Which colour?"]
    return [{"id": str(i), "messages": [{"role": "user", "content": blocks}], "answer": "red"} for i in range(count)]


def test_functions_are_rewards_and_the_importable_ones_are_written_by_their_module(tmp_path: Path) -> None:
    def shout(task: sn.Task, episode: sn.Episode) -> float:
        return float(episode.response.isupper())

    run = sn.train(
        small_recipe(tmp_path / "run", steps=1),
        show=False,
        rewards=[{"name": brevity, "weight": 0.5, "options": {"scale": 2.0}}, shout, lambda task, episode: 1.0, PARITY],
    )
    terms = [term.name for term in run.recipe.rewards.terms]
    assert terms == ["tests.api.test_objects:brevity", "python:shout", "python:lambda", PARITY]
    row = run.metrics[0]
    assert 0 < row["reward/brevity"] <= 2
    assert row["reward/shout"] == 0
    assert row["reward/reward"] == 1.0


@pytest.mark.usefixtures("forked_python")
def test_resume_needs_a_passed_function_again_and_says_so(tmp_path: Path) -> None:
    def pays(task: sn.Task, episode: sn.Episode) -> float:
        return len(episode.response) / 100

    recipe = small_recipe(tmp_path / "run", rewards=[pays, PARITY])
    run = sn.train(recipe, show=False)
    assert run.recipe.rewards.terms[0].name == "python:pays"
    told = subprocess.run(
        [sys.executable, "-m", "sensorium.cli.main", "train", str(run.directory), "--resume"],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 2
    assert "python:pays" in told.stderr
    assert "sensorium.resume(run_dir, rewards=[…])" in " ".join(told.stderr.split())
    del _passed["reward"]["python:pays"]  # as in a new process
    with pytest.raises(sn.SensoriumError, match="Pass it again"):
        sn.resume(run)
    assert len(sn.resume(run, show=False, rewards=[pays, PARITY]).metrics) == 2


def test_a_function_of_the_script_that_began_a_run_may_be_imported_from_it_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brevity, "__module__", "__main__")
    run = sn.train(small_recipe(tmp_path / "run", steps=1, rewards=[brevity, PARITY]), show=False)
    assert run.recipe.rewards.terms[0].name == "python:brevity"
    monkeypatch.undo()
    del _passed["reward"]["python:brevity"]  # as in a new process
    resumed = sn.resume(run, show=False, rewards=[brevity, PARITY], steps=2)
    assert resumed.recipe.rewards.terms[0].name == "python:brevity"
    assert len(resumed.metrics) == 2


def test_what_is_no_reward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sn.SensoriumError, match="parameters"):
        sn.train(small_recipe(tmp_path / "run"), rewards=[lambda: 1.0])
    with pytest.raises(sn.SensoriumError, match="a reward is"):
        sn.train(small_recipe(tmp_path / "run"), rewards=[7])


def test_rows_are_tasks_and_others_are_refused_on_resume(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path / "run", steps=1, tasks={"train": rows(), "evaluate": rows(2)})
    run = sn.train(recipe, show=False)
    assert [run.recipe.tasks.train[0].source, run.recipe.tasks.evaluate[0].source] == ["python:train", "python:evaluate"]
    assert sn.evaluate(run)["tasks"] == 2
    with pytest.raises(sn.SensoriumError, match=r"another recipe|not those the run began with"):
        sn.resume(run, show=False, tasks={"train": rows(5), "evaluate": rows(2)})
    assert len(sn.resume(run, show=False, tasks={"train": rows(), "evaluate": rows(2)}).metrics) == 1


def test_flat_rows_take_the_options_of_the_jsonl_source(tmp_path: Path) -> None:
    flat = [{"q": f"What is {i}?", "a": str(i)} for i in range(4)]
    source = {"source": flat, "options": {"columns": {"prompt": "q", "answer": "a"}, "instruction": " Be brief."}}
    run = sn.train(small_recipe(tmp_path / "run", steps=1, tasks=source), show=False)
    assert len(run.metrics) == 1
    with pytest.raises(sn.SensoriumError, match="did you mean 'columns'"):
        sn.train(small_recipe(tmp_path / "run"), tasks={"train": {"source": flat, "options": {"column": {}}}})


def test_task_objects_data_sets_and_sources_are_tasks(tmp_path: Path) -> None:
    from datasets import Dataset

    class Sums:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> sn.Task:
            return sn.Task(f"sum/{index}", (user(f"{index} + 1?"),), str(index + 1))

    data = Dataset.from_list([{"prompt": f"{i}?", "answer": str(i)} for i in range(4)])
    columns = {"columns": {"prompt": "prompt", "answer": "answer"}}
    mixed = [Sums(), {"source": data, "options": columns}, {"source": [Sums()[i] for i in range(4)]}]
    run = sn.train(
        small_recipe(tmp_path / "run", steps=1, tasks={"train": mixed}), show=False, batch={"prompts_per_step": 3}
    )
    assert [section.source for section in run.recipe.tasks.train] == ["python:Sums", "python:train", "python:train_2"]


def test_an_environment_may_be_a_class(tmp_path: Path) -> None:
    worlds = {"source": "environments", "options": {"environment": Echo, "size": 4}}
    run = sn.train(small_recipe(tmp_path / "run", steps=1, tasks=[worlds], rewards=["environment", PARITY]), show=False)
    assert run.recipe.tasks.train[0].options["environment"] == "tests.api.test_objects:Echo"
    assert "reward/environment" in run.metrics.columns
