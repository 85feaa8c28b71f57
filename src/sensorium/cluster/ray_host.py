"""Ray: the cluster of a run, which runs already or is started for it, and processes that Ray places."""

import logging
import os
import platform
import re
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sensorium
from sensorium.cluster.channel import Frames
from sensorium.cluster.python_process import CLOSE_S, HostedProcess
from sensorium.vocabulary.errors import RecipeError, SensoriumError


def versions() -> dict[str, str]:
    """What must be the same in all processes of a run."""
    try:
        torch = installed("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"sensorium": sensorium.__version__, "torch": torch, "python": platform.python_version()}


def refuse_other_versions(found: Mapping[str, str], what: str, lost: type[SensoriumError]) -> None:
    """Refuse a process that runs another version of Python, torch or of this package than this one."""
    own_versions = versions()
    for name, version in found.items():
        if version != (own := own_versions[name]):
            raise lost(
                f"{what} runs {name} {version}, and the driver {own}. Their numbers and messages may differ; install "
                "the same versions on all machines of the cluster."
            )


# Every wait is bounded: Ray itself asks an address that does not answer for minutes.


PROBE_S = 10.0
CONNECT_S = 60.0
QUIET_S = 20.0
"""How long it is not told that actors wait to be placed."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CAUSE = re.compile(r"[\w.]*(Error|Exception)\b")
CHECK = (
    "Check that it runs ('ray status'), that its Python and Ray are the driver's, and that the driver has its token "
    "(RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH; RAY_AUTH_MODE=token where it is set otherwise)."
)
SESSION = re.compile(r"session_[\d_-]+_(\d+)")
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN_FILE = Path(".ray/auth_token")
"""Where 'ray start' keeps a token that it made, in the home directory."""

_users = 0
_ours = False  # whether it was connected to here, and not by who called us
_lock = threading.Lock()


Needs = Mapping[str, Mapping[str, float]]
"""What a run wants of a cluster: by resource (CPU, GPU), how many for which key of the recipe."""


def connect(address: str, needs: Needs) -> Any:
    """Ray, connected to the cluster at ``address``, or to one that is started here with as many CPUs as are needed.

    A cluster that is too small is refused. Each call is answered by one of ``disconnect``.
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


def _before_import(address: str) -> None:
    # Or a thread that asks an actor too late, when the cluster was left, starts a new one.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if address:
        send_token()


def send_token() -> None:
    """Have Ray send the token that there is, if any. To an address by name it would send none; a cluster without tokens
    takes it as well. To be called before Ray is imported.
    """
    if any(os.environ.get(name) for name in TOKENS) or (Path.home() / TOKEN_FILE).exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def refuse_without_ray() -> None:
    """Refuse to place anything by Ray where it is not installed; loads nothing."""
    if (sys.modules["ray"] if "ray" in sys.modules else find_spec("ray")) is None:
        raise RecipeError(
            "cluster.placement is 'ray', and the package ray is not installed: pip install 'sensorium[ray]', or use "
            "cluster.placement=processes for processes of this machine."
        )


def unanswered(address: str) -> str:
    """Why nobody can be reached at an address, if so; "auto" is for Ray to look for, which it does at once."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host:
        return ""
    try:
        if not 0 < int(port) < 65536:  # the system would take it modulo 65536
            return f"there is no port {port}"
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, ValueError) as error:  # UnicodeError, of a name that is none, is a ValueError
        return str(error)
    return ""


def unfound() -> str:
    """Why Ray, asked for the cluster that runs on this machine ("auto"), would find none, if so."""
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:  # another version of Ray: what it finds is seen by a run
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
    except (ImportError, OSError, ValueError):  # a run is refused with the reason
        return ""
    return f"cluster.address 'auto' is the Ray cluster at {address}, {starter(address)}" if address else ""


def starter(address: str) -> str:
    """Who started the cluster at an address, as far as the processes of this machine tell.

    Ray's own processes name the address and a session, which ends in the id of the process that began it. They are its
    children where a program started the cluster for itself; 'ray start' has ended.
    """
    if os.environ.get("RAY_ADDRESS"):
        return "which RAY_ADDRESS names."
    sessions = set()
    for place in Path("/proc").glob("[0-9]*"):
        command = _words(place)
        found = SESSION.search(command)
        if found and f"--gcs-address={address}" in command.split():
            sessions.add(found[0])
            if _parent(place) == found[1]:
                started = _words(Path("/proc") / found[1])[:200]
                return f"which process {found[1]} started for itself ({started}) and which ends with it."
    began = f" (session {min(sessions)})" if sessions else ""
    return f"which was started by 'ray start', or by a process that is not seen from here{began}."


def _words(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # it has ended
        return ""


def _parent(process: Path) -> str:
    try:
        return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
    except (OSError, IndexError):
        return ""


def disconnect() -> None:
    """Leave the cluster; with its last user, one that was started here ends. One that was connected before us stays."""
    global _users, _ours
    import ray

    with _lock:
        _users = max(0, _users - 1)
        if _ours and not _users and ray.is_initialized():
            ray.shutdown()
            _ours = False


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


def first_answers(ray: Any, references: Sequence[Any], limit_s: float, what: str, each: str) -> list[Any]:
    """What actors answer first, which they do when Ray has placed and started them; raises what Ray raises.

    A long wait is told while it lasts: ``what`` are the actors, ``each`` is what one of them needs.
    """
    until = time.monotonic() + limit_s
    _, waiting = ray.wait(list(references), num_returns=len(references), timeout=min(QUIET_S, limit_s))
    if waiting and limit_s > QUIET_S:
        missing = f" ({len(waiting)} of {len(references)} are missing)" if len(references) > 1 else ""
        warnings.warn(
            f"Ray has not started {what} in {QUIET_S:g} s{missing}; the wait goes on until {limit_s:g} s are over "
            f"(cluster.start_s). Each needs {each}; free now, without what is set aside for those that are just starting: "
            f"{free(ray)}. 'ray status' says who uses the cluster.",
            stacklevel=2,
        )
    return list(ray.get(list(references), timeout=max(0.0, until - time.monotonic())))


def free(ray: Any) -> str:
    """What nobody uses of a cluster, in words."""
    now = ray.available_resources()
    return ", ".join(f"{now.get(resource, 0):g} {resource}s" for resource in ("CPU", "GPU"))


def short(error: BaseException) -> str:
    """The first line of an error of Ray; where that hides another error, its last line, which has the cause."""
    text = COLOURS.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    cause = lines[-1:] if len(lines) > 1 and CAUSE.match(lines[-1]) else []
    return " ".join(line.rstrip(".") + "." for line in [*lines[:1], *cause])


def _open(ray: Any, address: str, cpus: int) -> None:
    given: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if not address:
        # "local", or Ray would take the cluster that RAY_ADDRESS names.
        given |= {"address": "local", "num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
        _call(lambda: ray.init(**given), "a Ray cluster on this machine")
        return
    where = f"the Ray cluster at cluster.address '{address}'"
    if problem := unanswered(address):
        raise RecipeError(f"{where} does not answer: {problem}. {CHECK}")
    failed: list[BaseException] = []
    done = threading.Event()

    def init() -> None:
        logging.getLogger("ray._private.worker").addFilter(_not_of_threads)
        try:
            ray.init(address=address, **given)
        except BaseException as error:
            failed.append(error)
        done.set()

    threading.Thread(target=init, name="ray", daemon=True).start()  # one that hangs is not waited for
    if not done.wait(CONNECT_S):
        raise RecipeError(f"{where} takes connections, and did not answer within {CONNECT_S:g} s. {CHECK}")
    if failed:
        raise RecipeError(f"{where} cannot be used: {short(failed[0])} {CHECK}") from failed[0]


def _call(init: Any, where: str) -> None:
    try:
        init()
    except Exception as error:  # Ray raises what it likes: RuntimeError, ConnectionError, ValueError
        raise RecipeError(f"{where} cannot be used: {short(error)} {CHECK}") from error


def _not_of_threads(record: logging.LogRecord) -> bool:
    """False for Ray's remark that it cannot handle SIGTERM outside of the main thread: it is not to."""
    return not record.getMessage().startswith("SIGTERM handler is not set")


# The actor holds the place (a CPU, a GPU); what works is the same process that ``ThisMachine`` would start. If the actor
# dies the process reads that its driver hung up, and ends; if the process dies the actor tells how.


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
