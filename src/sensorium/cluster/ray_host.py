"""Ray: the cluster of a run, which exists already or is started for it, and processes that Ray places.

Every wait is bounded: Ray itself asks an address that does not answer for minutes.
"""

import logging
import os
import platform
import re
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sensorium
from sensorium.cluster.python_process import CLOSE_S, Frames, HostedProcess, PythonProcess, Variables
from sensorium.vocabulary.errors import RecipeError, SensoriumError

PROBE_S = 10.0
CONNECT_S = 60.0
QUIET_S = 20.0  # how long a wait for actors to be placed is not reported
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CAUSE = re.compile(r"[\w.]*(Error|Exception)\b")
CHECK = (
    "Check that it runs ('ray status'), that its Python and Ray are the driver's, and that the driver has its token "
    "(RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH; RAY_AUTH_MODE=token where it is set otherwise)."
)
SESSION = re.compile(r"session_[\d_-]+_(\d+)")
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN_FILE = Path(".ray/auth_token")  # of 'ray start', in the home directory

_users = 0
_ours = False  # whether the connection was made here, and not by our caller
_lock = threading.Lock()


Needs = Mapping[str, Mapping[str, float]]
"""What a run needs from a cluster: for each resource (CPU, GPU), how many for which key of the recipe."""


def versions() -> dict[str, str]:
    """What must be the same in all processes of a run."""
    try:
        torch = installed("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"sensorium": sensorium.__version__, "torch": torch, "python": platform.python_version()}


def refuse_other_versions(found: Mapping[str, str], what: str, lost: type[SensoriumError]) -> None:
    """Refuse a process that runs another version of Python, torch or this package than the driver."""
    own_versions = versions()
    for name, version in found.items():
        if version != (own := own_versions[name]):
            raise lost(
                f"{what} runs {name} {version}, and the driver {own}. Their numbers and messages may differ; install "
                "the same versions on all machines of the cluster."
            )


def connect(address: str, needs: Needs) -> Any:
    """Ray, connected to the cluster at ``address``, or to one that is started here with as many CPUs as are needed.

    A cluster that is too small is refused. Each call needs a later call of ``disconnect``.
    """
    global _users, _ours
    refuse_without_ray()
    _before_import(address)
    import ray

    with _lock:
        if not ray.is_initialized():
            _users = 0
            _open(ray, address, round(sum(needs["CPU"].values())))
            _ours = True
        elif not _users:
            _ours = False
        try:
            refuse_small(ray.cluster_resources(), needs)
        except BaseException:
            if _ours and not _users:
                ray.shutdown()
            raise
        _users += 1
    return ray


def disconnect() -> None:
    """Leave the cluster; with its last user, one that was started here ends. A caller's own connection stays."""
    global _users, _ours
    import ray

    with _lock:
        _users = max(0, _users - 1)
        if _ours and not _users and ray.is_initialized():
            ray.shutdown()
            _ours = False


def _before_import(address: str) -> None:
    # Without this, a thread that asks an actor after the cluster was left would start a new one.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if address:
        send_token()


def send_token() -> None:
    """Before Ray is imported: make it send an existing token, also to an address by name, for which it would send none.

    A cluster without tokens accepts it as well.
    """
    if any(os.environ.get(name) for name in TOKENS) or (Path.home() / TOKEN_FILE).exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def refuse_without_ray() -> None:
    """Refuse to place anything by Ray where it is not installed; imports nothing."""
    if (sys.modules["ray"] if "ray" in sys.modules else find_spec("ray")) is None:
        raise RecipeError(
            "cluster.placement is 'ray', and the package ray is not installed: pip install 'sensorium[ray]', or use "
            "cluster.placement=processes for processes of this machine."
        )


def refuse_small(resources: Mapping[str, float], needs: Needs) -> None:
    """Refuse a cluster that could never place what is needed."""
    for resource, by_key in needs.items():
        wanted, has = sum(by_key.values()), resources.get(resource, 0)
        if has < wanted:
            keys = ", ".join(f"{key} {count:g}" for key, count in by_key.items() if count)
            raise RecipeError(
                f"the Ray cluster has {has:g} {resource}s, and the recipe's cluster section needs {wanted:g} ({keys}). Ask "
                "for fewer, or add machines to the cluster."
            )


def unanswered(address: str) -> str:
    """Why nobody can be reached at an address; "" if somebody can, or for "auto", which Ray resolves itself."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host:
        return ""
    try:
        if not 0 < int(port) < 65536:  # the system would take it modulo 65536
            return f"there is no port {port}"
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, ValueError) as error:  # UnicodeError, for an impossible name, is a ValueError
        return str(error)
    return ""


def unfound() -> str:
    """Why Ray would find no running cluster on this machine ("auto"); "" if it would."""
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:  # another version of Ray: the run itself will show
        return ""
    try:
        address = canonicalize_bootstrap_address("auto")
        return unanswered(address) if address else "RAY_ADDRESS names no cluster that runs"
    except (OSError, ValueError) as error:  # ConnectionError is an OSError
        return short(error).rstrip(".")


def found_cluster() -> str:
    """Which cluster "auto" means on this machine and who started it, in a sentence; empty if none is found."""
    _before_import("auto")
    try:
        from ray._private.services import canonicalize_bootstrap_address

        address = canonicalize_bootstrap_address("auto")
    except (ImportError, OSError, ValueError):  # the run will be refused with the reason
        return ""
    return f"cluster.address 'auto' is the Ray cluster at {address}, {_starter(address)}" if address else ""


def _starter(address: str) -> str:
    """Who started the cluster at an address, as far as the processes of this machine show.

    The command lines of Ray's own processes have the address and a session, which ends in the id of the process that began
    it. If a program started the cluster for itself, they are its children; 'ray start' has ended.
    """
    if os.environ.get("RAY_ADDRESS"):
        return "which RAY_ADDRESS names."
    sessions = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it has ended
            command = _command(process)
            found = SESSION.search(command)
            if not found or f"--gcs-address={address}" not in command.split():
                continue
            sessions.add(found[0])
            parent = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            if parent == found[1]:
                started = _command(Path("/proc") / parent)[:200]
                return f"which process {parent} started for itself ({started}) and which ends with it."
    began = f" (session {min(sessions)})" if sessions else ""
    return f"which was started by 'ray start', or by a process that is not visible from here{began}."


def _command(process: Path) -> str:
    return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _open(ray: Any, address: str, cpus: int) -> None:
    given: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if not address:
        # "local": otherwise Ray would take the cluster that RAY_ADDRESS names.
        given |= {"address": "local", "num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
        try:
            ray.init(**given)
        except Exception as error:  # RuntimeError, ConnectionError, ValueError and others
            raise RecipeError(f"a Ray cluster on this machine cannot be used: {short(error)} {CHECK}") from error
        return
    where = f"the Ray cluster at cluster.address '{address}'"
    if problem := unanswered(address):
        raise RecipeError(f"{where} does not answer: {problem}. {CHECK}")
    failed: list[BaseException] = []
    done = threading.Event()

    def init() -> None:
        # Ray remarks that it cannot handle SIGTERM outside of the main thread. It should not.
        about_sigterm = "SIGTERM handler is not set"
        logging.getLogger("ray._private.worker").addFilter(lambda one: not one.getMessage().startswith(about_sigterm))
        try:
            ray.init(address=address, **given)
        except BaseException as error:
            failed.append(error)
        done.set()

    threading.Thread(target=init, name="ray", daemon=True).start()  # if it hangs, nobody waits for it
    if not done.wait(CONNECT_S):
        raise RecipeError(f"{where} accepts connections, and did not answer within {CONNECT_S:g} s. {CHECK}")
    if failed:
        raise RecipeError(f"{where} cannot be used: {short(failed[0])} {CHECK}") from failed[0]


def short(error: BaseException) -> str:
    """The first line of an error of Ray, and its last line where that names the cause."""
    text = COLOURS.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    cause = lines[-1:] if len(lines) > 1 and CAUSE.match(lines[-1]) else []
    return " ".join(line.rstrip(".") + "." for line in [*lines[:1], *cause])


def first_answer(ray: Any, reference: Any, limit_s: float, what: str, each: str) -> Any:
    """The first answer of an actor, which comes when Ray has placed and started it; raises what Ray raises.

    A long wait is reported while it lasts: ``what`` is the actor, ``each`` what it needs.
    """
    until = time.monotonic() + limit_s
    _, waiting = ray.wait([reference], timeout=min(QUIET_S, limit_s))
    if waiting and limit_s > QUIET_S:
        warnings.warn(
            f"Ray has not started {what} in {QUIET_S:g} s; the wait goes on until {limit_s:g} s are over "
            f"(cluster.start_s). Each needs {each}; free now, without what is reserved for those that are starting: "
            f"{_free(ray)}. 'ray status' shows who uses the cluster.",
            stacklevel=2,
        )
    return ray.get(reference, timeout=max(0.0, until - time.monotonic()))


def _free(ray: Any) -> str:
    """The unused resources of a cluster, in words."""
    now = ray.available_resources()
    return ", ".join(f"{now.get(resource, 0):g} {resource}s" for resource in ("CPU", "GPU"))


CALLS_AT_ONCE = 8
ANSWER_S = 60.0


class ProcessActor:
    """Reserves resources (a CPU, a GPU) and starts one process on its machine, the same as ``ThisMachine`` would start.

    Calls of different kinds overlap: one may wait while another sends. If the actor dies, the process reads that its
    driver hung up, and ends; if the process dies, the actor reports how.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._frames: list[Frames] = []

    def start(self, module: str, channels: int, variables: dict[str, str], own_group: bool) -> tuple[int, str]:
        """Start it; its process id, and the address of this machine."""
        import ray

        self._folder = tempfile.TemporaryDirectory(prefix="sensorium-actor-")
        log = Path(self._folder.name) / "log.txt"
        self._process = PythonProcess(module, channels, log, variables, own_group=own_group)
        self._frames = self._process.frames
        return self._process.pid, ray.util.get_node_ip_address()

    def versions(self) -> dict[str, str]:
        return versions()

    def send(self, number: int, body: bytes, limit_s: float | None) -> str:
        """Forward a message; "" or what prevented it."""
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
        self._frames[number].close()

    def alive(self) -> bool:
        return bool(self._process.alive)

    def log_text(self) -> str:
        return str(self._process.log_text())

    def end(self, after_s: float) -> tuple[str, str]:
        """End the process: how it ended, and what it printed. The log is removed."""
        self._process.end(after_s)
        found = self._process.ending(), self._process.log_text()
        self._folder.cleanup()
        return found


class RayHost:
    """Starts processes by actors with these resources each. ``folder`` is visible to all machines of the cluster.

    ``needs`` is what the whole run needs from the cluster. ``lost`` is the error for a process that cannot be placed,
    ``what`` its name in that error.
    """

    def __init__(
        self,
        address: str,
        needs: Needs,
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
        self, module: str, channels: int, log: Path, variables: Variables = None, *, own_group: bool = False
    ) -> tuple[HostedProcess, list[Frames]]:
        """Have an actor placed, refuse one with other versions, and let it start the process."""
        ray, actor = self._ray, self._actor.remote()
        try:
            found = first_answer(ray, actor.versions.remote(), self._start_s, self._what, self._each)
            refuse_other_versions(found, self._what, self._lost)
            started = actor.start.remote(module, channels, dict(variables or {}), own_group)
            pid, address = ray.get(started, timeout=ANSWER_S)
        except BaseException as error:
            with suppress(Exception):
                ray.kill(actor)
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise self._lost(
                    f"Ray did not place {self._what} within {self._start_s:g} s (cluster.start_s): others use the cluster, "
                    f"or it is too small. Free now: {_free(ray)}; 'ray status' has more."
                ) from error
            if isinstance(error, ray.exceptions.RayError):
                raise self._lost(f"{self._what} could not be started by Ray: {short(error)}") from error
            raise
        return RayProcess(ray, actor, pid, address), [RayFrames(ray, actor, number) for number in range(channels)]

    def close(self) -> None:
        disconnect()


class RayProcess:
    """A process that an actor has started."""

    def __init__(self, ray: Any, actor: Any, pid: int, address: str) -> None:
        self._ray, self._actor, self.pid, self.address = ray, actor, pid, address
        self._ending = self._log = ""

    @property
    def alive(self) -> bool:
        return not self._ending and bool(self._ask(lambda: self._actor.alive.remote(), False))

    def end(self, after_s: float = 0.0) -> None:
        if not self._ending:
            unanswered = "is gone with its actor of Ray, or that does not answer", ""
            limit_s = after_s + 2 * ANSWER_S  # a group takes a while to end
            self._ending, self._log = self._ask(lambda: self._actor.end.remote(after_s), unanswered, limit_s)
        with suppress(Exception):
            self._ray.kill(self._actor)

    def ending(self) -> str:
        self.end(CLOSE_S)
        return self._ending

    def log_text(self) -> str:
        return self._log if self._ending else str(self._ask(lambda: self._actor.log_text.remote(), ""))

    def _ask(self, call: Callable[[], Any], otherwise: Any, limit_s: float = ANSWER_S) -> Any:
        try:
            return self._ray.get(call(), timeout=limit_s)
        except Exception:  # the actor is gone, or its machine; Ray raises errors of many kinds
            return otherwise


class RayFrames:
    """Messages that an actor forwards."""

    def __init__(self, ray: Any, actor: Any, number: int) -> None:
        self._ray, self._actor, self._number = ray, actor, number
        self._pending: Any = None
        self._sending = threading.Lock()

    def send(self, body: bytes, limit_s: float | None = None) -> None:
        with self._sending:
            try:
                problem = self._get(lambda: self._actor.send.remote(self._number, body, limit_s), limit_s)
            except EOFError as error:
                raise BrokenPipeError(str(error)) from error
        if problem == "timeout":
            raise TimeoutError("the process does not accept the message")
        if problem:
            raise BrokenPipeError(problem)

    def receive(self, limit_s: float | None = None) -> bytes:
        """The next message; after a timeout, the next call goes on waiting for the same one."""

        def asked() -> Any:
            self._pending = self._pending or self._actor.receive.remote(self._number)
            return self._pending

        body = self._get(asked, limit_s)
        self._pending = None
        if body is None:
            raise EOFError("the other end has hung up")
        return bytes(body)

    def close(self) -> None:
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
