"""An environment server that ends in the middle of a run is waited for; its episodes are rolled again, to the same bits."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.runs.metrics import read_metrics
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import WorkersLost
from studies.fork_server import ForkServer
from tests.forked import forked_python
from tests.recipes import parsed, quick
from tests.services.test_environment_service import started


class Servers(Watcher):
    """Starts the server again when the run says that it is lost, unless it is to stay lost."""

    def __init__(self, port: int, kind: str, forks: ForkServer) -> None:
        self.port, self.kind, self.again, self.notes, self.forks = port, kind, True, list[str](), forks
        self.running = list[subprocess.Popen[str]]()

    def start(self) -> None:
        with forked_python(self.forks):
            self._start()

    def _start(self) -> None:
        if self.kind == "remote":
            self.running.append(started(self.port, "dying=tests.services.running:Dying"))
            return
        command = [sys.executable, "-m", "tests.services.openenv_server", str(self.port)]
        surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings))
        assert self.running[-1].stdout is not None
        assert "serving" in self.running[-1].stdout.readline()

    def noted(self, text: str) -> None:
        if str(self.port) in text:
            self.notes.append(text)
            if len(self.notes) == 1 and self.again:
                self.start()

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def unused_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


@pytest.fixture(scope="module", params=["remote", "openenv"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer
) -> Iterator[Servers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIES_AT", str(tmp_path_factory.mktemp("dying") / "dies_at"))
        found = Servers(unused_port(), request.param, fork_server)
        found.start()
        yield found
        found.end()


@pytest.fixture
def servers(running: Servers) -> Servers:
    running.again, running.notes = True, []
    return running


def recipe(folder: Path, port: int, kind: str, wait_s: float = 120.0, workers: bool = False) -> Recipe:
    url = f"http://127.0.0.1:{port}"
    asked = {"servers": [url], "environment": "dying"} if kind == "remote" else {"url": url, "field": "move"}
    source = {"environment": kind, "size": 6, "split_by": "seed", "options": {**asked, "wait_s": wait_s}}
    sections: dict[str, Any] = {
        "steps": 3,
        "model": {"path": "tiny:qwen2", "device": "cpu"},
        "tasks": {"train": [{"source": "environments", "options": source}]},
        "rollout": {"max_turns": 2, "max_new_tokens": 4},
        "rewards": {"terms": [{"name": "environment"}]},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 1},
        "cluster": {"environments": int(workers)},
    }
    return parsed(quick("lost", **sections), folder)


@pytest.mark.usefixtures("forked_python")
def test_its_episodes_are_rolled_again_and_the_run_ends_in_the_same_bits(servers: Servers, tmp_path: Path) -> None:
    port, kind = servers.port, servers.kind
    with_workers = kind == "openenv"  # which play other environments; remote is refused with them
    train(recipe(tmp_path / "whole", port, kind, workers=with_workers))
    assert servers.notes == []
    Path(os.environ["DIES_AT"]).write_text("27")  # within the second step
    train(recipe(tmp_path / "lost", port, kind, workers=with_workers), watchers=[servers])
    lost, back = servers.notes
    assert str(port) in lost
    assert "120 s" in lost
    assert str(port) in back
    whole, again = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "lost"))
    assert [row["episodes/failed"] for row in again] == [0, 0, 0]
    assert not any("policy/skipped" in row for row in again)
    assert again[-1]["worker/rolled_again"] > 0
    assert [row["policy/loss"] for row in again] == [row["policy/loss"] for row in whole]
    first, second = (load_file(tmp_path / name / "checkpoints/step_000003/model.safetensors") for name in ("whole", "lost"))
    assert all((first[name] == second[name]).all() for name in first)


def test_a_server_that_does_not_come_back_ends_the_run_which_then_resumes(servers: Servers, tmp_path: Path) -> None:
    servers.again = False
    Path(os.environ["DIES_AT"]).write_text("27")
    asked = recipe(tmp_path / "run", servers.port, servers.kind, wait_s=1.0)
    with pytest.raises(WorkersLost, match=str(servers.port)):
        train(asked, watchers=[servers])
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl")] == [1]
    servers.start()
    train(asked, resume=True)
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["remote", "openenv"])
def test_a_server_that_is_dead_from_the_start_is_an_error_at_the_start(kind: str, tmp_path: Path) -> None:
    port = unused_port()
    with pytest.raises(WorkersLost, match=str(port)):
        train(recipe(tmp_path / "run", port, kind))
    assert not (tmp_path / "run").exists()


def test_failed_episodes_are_no_throughput(tmp_path: Path) -> None:
    source = {"environment": "tests.services.running:Dying", "size": 6, "split_by": "seed", "options": {"fails": True}}
    data = recipe(tmp_path / "run", 1, "remote").model_dump(mode="json")
    data["tasks"]["train"] = [{"source": "environments", "options": source}]
    train(parsed(data, tmp_path / "run"))
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    failed = [row["episodes/failed"] for row in rows]
    assert sum(failed) == 1
    played = [row["throughput/episodes_per_s"] * row["time/step_s"] for row in rows]
    assert played == pytest.approx([9 - count for count in failed])
