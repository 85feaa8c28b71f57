"""Processes that Ray places: an actor on the machine of its choice starts one and passes messages on.

The actor holds the place (a CPU, a GPU); what works is the same process that ``ThisMachine`` would start. If the actor
dies the process reads that its driver hung up, and ends; if the process dies the actor tells how.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sensorium.cluster.channel import Frames
from sensorium.cluster.python_process import CLOSE_S, HostedProcess
from sensorium.cluster.ray_cluster import connect, disconnect, first_answers, free, refuse_other_versions, short, versions
from sensorium.vocabulary.errors import SensoriumError

CALLS_AT_ONCE = 8
ANSWER_S = 60.0


class ProcessActor:
    """Starts one process on its machine. Calls of different kinds overlap: one may wait while another sends."""

    def __init__(self) -> None:
        self._process: Any = None
        self._frames: list[Frames] = []

    def start(self, module: str, channels: int, environment: dict[str, str], own_group: bool) -> int:
        """Start it; its process id."""
        import tempfile

        from sensorium.cluster.python_process import ThisMachine

        self._folder = tempfile.TemporaryDirectory(prefix="sensorium-actor-")
        log = Path(self._folder.name) / "log.txt"
        self._process, self._frames = ThisMachine().start(module, channels, log, environment, own_group=own_group)
        pid: int = self._process.pid
        return pid

    def versions(self) -> dict[str, str]:
        """What runs here."""
        return versions()

    def send(self, number: int, body: bytes, limit_s: float | None) -> str:
        """Pass a message on; "" or what kept it."""
        try:
            self._frames[number].send(body, limit_s)
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return str(error) or type(error).__name__
        return ""

    def receive(self, number: int) -> bytes | None:
        """The next message of the process; None when it has hung up."""
        try:
            return self._frames[number].receive()
        except (EOFError, OSError):
            return None

    def hang_up(self, number: int) -> None:
        """Close a connection."""
        self._frames[number].close()

    def alive(self) -> bool:
        """Whether it runs."""
        return bool(self._process.alive)

    def end(self, after_s: float) -> None:
        """End it."""
        self._process.end(after_s)

    def ending(self) -> str:
        """How it ended."""
        return str(self._process.ending())

    def log_text(self) -> str:
        """What it printed."""
        return str(self._process.log_text())

    def remove(self) -> None:
        """Remove the log: nobody asks for anything more."""
        self._folder.cleanup()


class RayHost:
    """Starts processes by actors with these resources each. ``folder`` is seen by all machines of the cluster.

    ``needs`` is what the whole run wants of the cluster (``refuse_small``). ``lost`` is the error of a process that cannot
    be placed, ``what`` its name in that.
    """

    def __init__(
        self,
        address: str,
        needs: Mapping[str, Mapping[str, float]],
        folder: Path | None,
        what: str,
        lost: type[SensoriumError],
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        start_s: float = 600.0,
    ) -> None:
        self.folder, self.own_device, self.shared = folder, gpus > 0, False
        self._what, self._lost, self._start_s = what, lost, start_s
        self._each = f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
        self._ray = connect(address, needs)
        self.address: str = self._ray.util.get_node_ip_address()
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "max_concurrency": CALLS_AT_ONCE}
        if not address:  # on this machine a checkout that is only on the path is found too
            options["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        self._actor = self._ray.remote(ProcessActor).options(**options)

    def start(
        self,
        module: str,
        channels: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        own_group: bool = False,
    ) -> tuple[HostedProcess, list[Frames]]:
        """Have an actor placed, refuse one with other versions, and let it start the process."""
        ray, actor = self._ray, self._actor.remote()
        try:
            told = first_answers(ray, [actor.versions.remote()], self._start_s, self._what, self._each)[0]
            refuse_other_versions(told, self._what, self._lost)
            pid = ray.get(actor.start.remote(module, channels, dict(environment or {}), own_group), timeout=ANSWER_S)
        except BaseException as error:
            with suppress(Exception):
                ray.kill(actor)
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise self._lost(
                    f"Ray did not place {self._what} within {self._start_s:g} s (cluster.start_s): others use the cluster, "
                    f"or it is too small. Free now: {free(ray)}; 'ray status' has more."
                ) from error
            if isinstance(error, ray.exceptions.RayError):
                raise self._lost(f"{self._what} could not be started by Ray: {short(error)}") from error
            raise
        process = RayProcess(ray, actor, pid)
        return process, [RayFrames(ray, actor, number) for number in range(channels)]

    def close(self) -> None:
        """Leave the cluster."""
        disconnect()


class RayProcess:
    """A process that an actor has started."""

    def __init__(self, ray: Any, actor: Any, pid: int) -> None:
        self._ray, self._actor, self.pid = ray, actor, pid
        self._told = ""

    @property
    def alive(self) -> bool:
        """True until it, or its actor, has ended."""
        return bool(self._ask(lambda: self._actor.alive.remote(), False))

    def end(self, after_s: float = 0.0) -> None:
        """End it, and its actor."""
        if not self._told:
            silent = object()
            if self._ask(lambda: self._actor.end.remote(after_s), silent, after_s + ANSWER_S) is silent:
                self._told, self._log = "is gone with its actor of Ray, or that does not answer", ""
            else:
                self._told = self._ask(lambda: self._actor.ending.remote(), "is gone with its actor of Ray")
                self._log = str(self._ask(lambda: self._actor.log_text.remote(), ""))
                self._ask(lambda: self._actor.remove.remote(), None)
        with suppress(Exception):
            self._ray.kill(self._actor)

    def ending(self) -> str:
        """How it ended; one that is still ending is waited for."""
        self.end(CLOSE_S)
        return self._told

    def log_text(self) -> str:
        """What it printed, as far as its actor could tell."""
        return self._log if self._told else str(self._ask(lambda: self._actor.log_text.remote(), ""))

    def _ask(self, call: Callable[[], Any], otherwise: Any, limit_s: float = ANSWER_S) -> Any:
        try:
            return self._ray.get(call(), timeout=limit_s)
        except Exception:  # the actor is gone, or its machine; Ray raises errors of many kinds
            return otherwise


class RayFrames:
    """Messages that an actor passes on."""

    def __init__(self, ray: Any, actor: Any, number: int) -> None:
        self._ray, self._actor, self._number = ray, actor, number
        self._pending: Any = None
        self._sending = threading.Lock()

    def send(self, body: bytes, limit_s: float | None = None) -> None:
        """Send by the actor."""
        with self._sending:
            try:
                told = self._get(lambda: self._actor.send.remote(self._number, body, limit_s), limit_s)
            except EOFError as error:
                raise BrokenPipeError(str(error)) from error
        if told == "timeout":
            raise TimeoutError("the process does not take the message")
        if told:
            raise BrokenPipeError(told)

    def receive(self, limit_s: float | None = None) -> bytes:
        """The next message; one that did not come in time is still waited for by the next call."""

        def asked() -> Any:
            self._pending = self._pending or self._actor.receive.remote(self._number)
            return self._pending

        body = self._get(asked, limit_s)
        self._pending = None
        if body is None:
            raise EOFError("the other end has hung up")
        return bytes(body)

    def close(self) -> None:
        """Let the actor hang up."""
        with suppress(Exception):
            self._actor.hang_up.remote(self._number)

    def _get(self, call: Callable[[], Any], limit_s: float | None) -> Any:
        try:
            return self._ray.get(call(), timeout=limit_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise TimeoutError("no answer in time") from error
        except self._ray.exceptions.RayError as error:
            self._pending = None
            raise EOFError(short(error)) from error
