"""What is said before anything is spent."""

from dataclasses import replace
from typing import Any

import pytest

from sensorium.recipe.load import check_recipe
from sensorium.trainer.health.start_checks import long_demonstrations, refuse_without_demonstrations, start_notes
from sensorium.vocabulary import EnvironmentSpec, Task
from sensorium.vocabulary.errors import TaskError
from tests.trainer.health.test_runs import RECIPE


def notes(**optimizer: Any) -> list[str]:
    return list(start_notes(check_recipe(RECIPE | {"optimizer": {"lr": 1e-4} | optimizer}, "test", {}), ()))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"lr": 1.0}, "larger than most weights"),
        ({"lr": 1e-20}, "so small that no weight will change"),
        ({"warmup_steps": 10**9}, "never reaches"),
        ({"warmup_steps": 2}, "never reaches"),
    ],
)
def test_rates_that_ruin_or_do_nothing_are_said(optimizer: dict[str, Any], said: str) -> None:
    (note,) = notes(**optimizer)
    assert said in note


def test_usual_rates_are_not_spoken_of() -> None:
    assert notes(lr=1e-6, warmup_steps=1) == []


def test_workers_of_environments_without_a_task_that_has_one_are_told() -> None:
    source = {"tasks": {"train": [{"source": "jsonl", "options": {"path": "rows.jsonl"}}]}}
    recipe = check_recipe(RECIPE | source | {"optimizer": {"lr": 1e-4}, "cluster": {"environments": 2}}, "test", {})
    (note,) = start_notes(recipe, [Task("a"), Task("b")])
    assert "cluster.environments is 2, and the 2 tasks looked at are questions" in note
    assert not list(start_notes(recipe, [Task("a"), Task("b", environment=EnvironmentSpec("frozen_lake"))]))


def test_demonstrations_that_do_not_fit_a_response_are_told() -> None:
    tasks = [Task("a", demonstration=("short",)), Task("b", demonstration=("much longer",))]
    warm = check_recipe(RECIPE | {"warm_start": {"steps": 2}, "rollout": {"max_new_tokens": 8}}, "test", {})
    (told,) = long_demonstrations(warm, tasks, len)
    assert "1 of 2 demonstrations looked at take up to 11 tokens" in told
    assert "rollout.max_new_tokens is 8" in told
    assert not list(long_demonstrations(warm, tasks[:1], len))


def test_a_warm_start_in_environments_that_cannot_demonstrate_is_refused() -> None:
    recipe = check_recipe(RECIPE | {"optimizer": {"lr": 1e-4}, "warm_start": {"steps": 5}}, "test", {})
    foreign = Task("cart", environment=EnvironmentSpec("gymnasium", {"id": "CartPole-v1"}))
    with pytest.raises(TaskError, match=r"none of 1 tasks .*the first is cart.*a method demonstrate .*Gymnasium"):
        refuse_without_demonstrations(recipe, [foreign])
    refuse_without_demonstrations(recipe, [replace(foreign, demonstration=("left",))])  # its row has one
    own = Task("lake", environment=EnvironmentSpec("frozen_lake"))
    refuse_without_demonstrations(recipe, [foreign, own])
    (note,) = start_notes(recipe, [foreign, own])
    assert "1 of 2 tasks looked at have no demonstration" in note
