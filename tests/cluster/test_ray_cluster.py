"""A Ray cluster that cannot be used is reported in one paragraph within a bounded time; none of this needs Ray."""

import os
import socket
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from sensorium.cluster import ray_host
from sensorium.cluster.ray_host import refuse_other_versions
from sensorium.vocabulary.errors import EngineLost, RecipeError


class SilentRay:
    """Ray as it is with an address that takes connections and says nothing: it waits for minutes."""

    def init(self, **given: Any) -> None:
        threading.Event().wait(60)


def test_an_address_at_which_nobody_listens_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RecipeError, match=rf"cluster.address '127.0.0.1:{port}' does not answer: .*ray status"):
        ray_host._open(SilentRay(), f"127.0.0.1:{port}", 2)


def test_an_address_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_host, "CONNECT_S", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(RecipeError, match=r"127.0.0.1.* did not answer within 0.05 s"),
    ):
        ray_host._open(SilentRay(), f"ray://127.0.0.1:{silent.getsockname()[1]}", 2)


@pytest.mark.parametrize("address", ["..:6379", "ä" * 70 + ":6379", "127.0.0.1:-1", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_told_at_once(address: str) -> None:
    with pytest.raises(RecipeError, match=r"does not answer: .*ray status"):
        ray_host._open(SilentRay(), address, 2)


def test_a_cluster_of_the_runs_own_is_not_the_one_that_ray_address_names() -> None:
    class Started:
        def init(self, **given: Any) -> None:
            self.given = given

    ray_host._open(ray := Started(), "", 2)
    assert ray.given["address"] == "local"


def test_what_ray_raises_is_told_by_its_first_line() -> None:
    class Other:
        def init(self, **given: Any) -> None:
            raise RuntimeError("Version mismatch: The cluster was started with:\n  Ray: 2.9\n  Python: 3.10")

    with pytest.raises(RecipeError, match=r"'auto' cannot be used: Version mismatch.*its Python and Ray are the driver's"):
        ray_host._open(Other(), "auto", 2)


def test_that_no_cluster_is_found_is_known_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    services = ModuleType("ray._private.services")

    def nothing(address: str) -> str:
        raise ConnectionError("Could not find any running Ray instance.\nPlease …")

    services.canonicalize_bootstrap_address = nothing  # type: ignore[attr-defined]
    for module in (ModuleType("ray"), ModuleType("ray._private"), services):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert ray_host.unfound() == "Could not find any running Ray instance"
    services.canonicalize_bootstrap_address = lambda address: "127.0.0.1:1"  # type: ignore[attr-defined]
    assert "refused" in ray_host.unfound()
    services.canonicalize_bootstrap_address = lambda address: None  # type: ignore[attr-defined]  # RAY_ADDRESS=local
    assert ray_host.unfound() == "RAY_ADDRESS names no cluster that runs"
    assert ray_host.found_cluster() == ""

    def unreadable(address: str) -> str:
        raise PermissionError(13, "Permission denied", "/tmp/ray/ray_current_cluster")

    services.canonicalize_bootstrap_address = unreadable  # type: ignore[attr-defined]
    assert "Permission denied" in ray_host.unfound()
    assert ray_host.found_cluster() == ""


@pytest.mark.parametrize("own", [True, False], ids=["by a program that lives", "by ray start"])
def test_the_cluster_that_is_found_is_named_with_who_started_it(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a process of Ray: it has its arguments, and this process as parent."""
    services = ModuleType("ray._private.services")
    services.canonicalize_bootstrap_address = lambda address: "10.1.2.3:6379"  # type: ignore[attr-defined]
    for module in (ModuleType("ray"), ModuleType("ray._private"), services):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("RAY_ENABLE_AUTO_CONNECT", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")  # and so put back
    session = f"session_2026-01-02_03-04-05_678_{os.getpid() if own else 999_999_999}"
    arguments = ["--gcs-address=10.1.2.3:6379", f"--session-name={session}"]
    command = [sys.executable, "-c", "input('ready\\n')", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as raylet:
        assert raylet.stdout is not None
        assert raylet.stdout.readline() == b"ready\n"
        told = ray_host.found_cluster()
        raylet.communicate(b"\n")
    assert told.startswith("cluster.address 'auto' is the Ray cluster at 10.1.2.3:6379, which ")
    assert (f"process {os.getpid()} started for itself (" in told) == own
    assert ("'ray start'" in told and f"(session {session})" in told) != own


class Crowded:
    """Ray on a cluster where an actor waits for room until somebody looks again."""

    def wait(self, references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return [], references

    def get(self, reference: str, timeout: float) -> str:
        assert 0 < timeout <= 600
        return f"answer of {reference}"

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 0.5}


def test_a_wait_for_room_is_reported_while_it_lasts() -> None:
    with pytest.warns(UserWarning, match=r"a rank in 20 s.*600 s.*needs 1 CPU; free now,.*: 0.5 CPUs, 0 GPUs"):
        answer = ray_host.first_answer(Crowded(), "a", 600.0, "a rank", "1 CPU")
    assert answer == "answer of a"


def test_a_worker_with_other_versions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ray_host.versions()
    refuse_other_versions(own, "an engine", EngineLost)
    for name in ("sensorium", "torch", "python"):
        with pytest.raises(EngineLost, match=rf"an engine runs {name} 0\.0, and the driver .*install the same versions"):
            refuse_other_versions(own | {name: "0.0"}, "an engine", EngineLost)


class Ray:
    """Ray as far as connecting goes, with two CPUs."""

    def __init__(self, connected: bool) -> None:
        self.connected = connected

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, **given: Any) -> None:
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}


@pytest.mark.parametrize("before", [True, False], ids=["the caller's", "ours"])
def test_a_cluster_that_was_connected_before_us_stays_connected(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(before)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(RecipeError, match="has 2 CPUs"):
        ray_host.connect("", {"CPU": {"cluster.engines": 3.0}})
    assert ray.connected is before
    for _ in range(2):
        ray_host.connect("", {"CPU": {"cluster.engines": 1.0}})
    ray_host.disconnect()
    assert ray.connected
    ray_host.disconnect()
    assert ray.connected is before
