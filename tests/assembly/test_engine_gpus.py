"""Each of several engines on this machine has GPUs of its own, told by the environment of its process."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.assembly.ranks import rank_settings
from sensorium.assembly.workers import gpus_of_engines, open_engine, visible_gpus
from sensorium.cluster.python_process import ProcessHost, ThisMachine
from sensorium.recipe.schema import Recipe
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import RecipeError
from tests.trainer.small import small

Settings = Callable[..., Recipe]


@pytest.fixture
def recipe_of(tmp_path: Path) -> Settings:
    def made(*overrides: str) -> Recipe:
        return small(tmp_path / "run", "rollout.engine.name=process", "rollout.schedule=eager", *overrides)

    return made


@pytest.mark.parametrize(
    ("overrides", "gpus", "policy_gpu", "engines"),
    [
        (["cluster.engines=3"], 4, 0, ["1", "2", "3"]),
        (["cluster.engines=2"], 3, 1, ["0", "2"]),
        (["cluster.engines=2", "cluster.learners=2"], 4, 0, ["2", "3"]),
        (["cluster.engines=2", "cluster.share_gpus=true"], 1, 0, ["0", "0"]),
        (["cluster.engines=4", "cluster.share_gpus=true"], 3, 0, ["1", "2", "0", "1"]),
        (["cluster.engines=2", "rollout.engine={name: vllm, options: {tensor_parallel: 2}}"], 5, 0, ["1,2", "3,4"]),
    ],
)
def test_engines_have_the_gpus_beside_the_learner(
    overrides: list[str], gpus: int, policy_gpu: int, engines: list[str], recipe_of: Settings
) -> None:
    assert gpus_of_engines(recipe_of(*overrides), visible_gpus(gpus, {}), policy_gpu) == engines


def test_gpus_keep_the_names_that_the_driver_was_given() -> None:
    assert visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "GPU-7a, 5"}) == ["GPU-7a", "5"]
    assert visible_gpus(2, {"CUDA_VISIBLE_DEVICES": ""}) == ["0", "1"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.engines=2"], r"cluster.engines=2 asks for 2 GPUs .* has 2 \(1 for the learner\).*share_gpus: true"),
        (["cluster.engines=2", "cluster.learners=2"], r"has 2 \(2 for the learner\)"),
        (
            ["cluster.engines=2", "cluster.share_gpus=true", "rollout.engine={name: vllm, options: {tensor_parallel: 4}}"],
            r"with tensor_parallel=4 asks for 8 GPUs .* Ask for fewer engines, or place",
        ),
    ],
)
def test_too_few_gpus_are_refused(overrides: list[str], said: str, recipe_of: Settings) -> None:
    with pytest.raises(RecipeError, match=said):
        gpus_of_engines(recipe_of(*overrides), ["0", "1"], 0)


def test_the_process_of_an_engine_sees_its_own_gpu_alone(tmp_path: Path) -> None:
    host = ThisMachine("3")
    assert host.own_device
    assert not ThisMachine().own_device
    log = tmp_path / "log.txt"
    process, channels = host.start("tests.assembly.shown_gpus", 0, log, {"MORE": "kept"})
    process.end(60.0)
    assert not channels
    assert process.log_text().split() == ["3", "kept"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_each_engine_of_a_run_is_started_by_the_host_of_its_place(
    recipe_of: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[ProcessHost] = []

    class NotStarted(Exception):
        pass

    def build(kind: str, name: str, options: Any, where: str, **given: Any) -> Any:
        hosts.append(given["host"])
        if len(hosts) == 2:
            raise NotStarted
        return type("Built", (), {"capabilities": None, "version": 0})()

    class OnGpu:
        device = torch.device("cuda:0")

    monkeypatch.setattr("sensorium.assembly.workers.build", build)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(NotStarted):
        open_engine(recipe_of("cluster.engines=2"), OnGpu())  # type: ignore[arg-type]
    assert [host._gpus for host in hosts] == ["1", "2"]  # type: ignore[attr-defined]


def test_ranks_need_a_gpu_each_and_nccl(recipe_of: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    run, two = RunDirectory(tmp_path), ("cluster.learners=2", "model.device=auto")
    ranks = rank_settings(recipe_of(*two), run, None, "")
    assert [(rank.device, rank.backend) for rank in ranks] == [("cuda:0", "nccl"), ("cuda:1", "nccl")]
    with pytest.raises(RecipeError, match=r"cluster.learners=3 asks for a GPU each, and this machine has 2"):
        rank_settings(recipe_of("cluster.learners=3", "model.device=auto"), run, None, "")
    with pytest.raises(RecipeError, match=r"cluster.backend is gloo.*segmentation fault.*Leave it out"):
        rank_settings(recipe_of(*two, "cluster.backend=gloo"), run, None, "")
