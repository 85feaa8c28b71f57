"""How many runs go on at a time: what cores, GPUs and memory have room for."""

import json

import pytest

from sensorium.experiments import experiment
from sensorium.experiments.experiment import room_for
from sensorium.recipe.load import parse_recipe
from sensorium.recipe.schema import Recipe
from tests.recipes import quick

GIB = 1 << 30


def recipes(count: int, **changes: object) -> list[Recipe]:
    return [parse_recipe(json.dumps(quick("r", **changes)), "r") for _ in range(count)]


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores, much memory and no GPU."""
    monkeypatch.setattr(experiment, "_cores", lambda: 8)
    monkeypatch.setattr(experiment, "free_memory", lambda: 100 * GIB)
    monkeypatch.setattr(experiment, "gpus_seen", lambda: False)


def test_cores_and_the_number_of_runs_bound_the_jobs() -> None:
    assert room_for(recipes(20)).jobs == 8, "a thread each"
    assert room_for(recipes(3)).jobs == 3
    assert room_for(recipes(20, threads=4)).jobs == 2
    assert room_for(recipes(20), 5).jobs == 5


def test_memory_bounds_the_jobs_by_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "free_memory", lambda: GIB)
    assert room_for(recipes(20)).jobs == 2, "an interpreter with torch takes 460 MiB"
    asked = room_for(recipes(20), 6)
    assert asked.jobs == 6, "what was asked for is done"
    assert "2 fit" in asked.why


def test_a_gpu_has_one_run_and_a_run_of_several_processes_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "gpus_seen", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    room = room_for(recipes(20))
    assert (room.jobs, room.gpus) == (2, ("2", "5"))
    assert room_for(recipes(20), 7).jobs == 2
    assert room_for(recipes(20, model={"path": "package:shapes", "device": "cpu"})).gpus == ()
    assert room_for(recipes(20, cluster={"learners": 2})).jobs == 1
