"""Processes that start in milliseconds: a server has imported everything, and each run is a fork of it.

    with ForkServer() as server:
        ended = server.run("studies.resumed_runs:train_recipe", "recipe.yaml", "runs/a", kill_at_cpu_s=2.5)
        ended.code     # 0, or -9 for a killed run

Processes that name the same ``shared`` path share one server, which the first of them starts. It ends with the last.

Invariant: the server imports and forks, and never computes, so it has no threads and no random state that a run could
inherit. What a fork cannot show is a fresh interpreter (another hash seed, imports in another order). It ends as one
does: threads are waited for, and what was registered for the end is called.
"""

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = ("trainer.run", "cli.train", "models.families.qwen3_vl", "models.families.qwen2_5_omni", "envs.frozen_lake")
OURS += ("engines.native.native_engine",)
THEIRS = ("auto.modeling_auto", "auto.processing_auto", "auto.tokenization_auto", "qwen3_vl.modeling_qwen3_vl")
THEIRS += ("qwen2_5_omni.modeling_qwen2_5_omni", "qwen3_vl.processing_qwen3_vl", "qwen2_5_omni.processing_qwen2_5_omni")
PRELOADED = tuple(f"sensorium.{name}" for name in OURS) + tuple(f"transformers.models.{name}" for name in THEIRS)
PRELOADED += ("av", "gymnasium.envs.toy_text", "peft", "torch._dynamo")
CALL = "import sys; from importlib import import_module; module, name, *given = sys.argv[1:]; "
CALL += "sys.exit(getattr(import_module(module), name)(*given))"
LOOK_EVERY_S = 0.002
TICKS = os.sysconf("SC_CLK_TCK")
MOST_FDS = 32
WELCOME = b"welcome"


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code (minus the signal's number if it was killed), and the CPU time it took."""

    code: int
    cpu_s: float


class Forked:
    """A fork that runs: its process id, and how it ended when it has."""

    def __init__(self, connection: socket.socket) -> None:
        self._answers = connection.makefile()
        self._connection = connection
        self.pid: int = json.loads(self._answers.readline())["pid"]
        self.ended: Ended | None = None

    def wait(self, timeout_s: float | None = None) -> Ended | None:
        """How it ended; None if it has not within this time."""
        if self.ended is None:
            self._connection.settimeout(timeout_s or None)
            try:
                if timeout_s == 0 and not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise RuntimeError("the fork server ended")
                self.ended = Ended(**json.loads(self._answers.readline()))
            except (TimeoutError, BlockingIOError):
                return None
            self._answers.close()
            self._connection.close()
        return self.ended


class ForkServer:
    """A server and its runs; ``cpu_s`` is what those that were waited for by ``run`` have taken together."""

    def __init__(self, *preloaded: str, shared: Path | None = None) -> None:
        self.cpu_s = 0.0
        self._server: subprocess.Popen[bytes] | None = None
        if shared is None:
            self._start("", preloaded)
            return
        with open(f"{shared}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._connect(str(shared))
            except OSError:
                shared.unlink(missing_ok=True)
                self._start(str(shared), preloaded)

    def _start(self, address: str, preloaded: Sequence[str]) -> None:
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(address)  # without a name it gets one that is no file
            listening.listen()
            self._server = subprocess.Popen(
                [sys.executable, "-m", "studies.fork_server", str(listening.fileno()), *PRELOADED, *preloaded],
                pass_fds=[listening.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                cwd=ROOT,
            )
            name = listening.getsockname()
        self._connect(name)  # the server alone listens now: where it has ended, this fails instead of waiting

    def _connect(self, address: str | bytes) -> None:
        """Be one of the server's clients. One that is about to end accepts nobody any more: then this raises."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address)
        if not self._socket.recv(len(WELCOME)):
            raise ConnectionError("the fork server ended")

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(
        self,
        arguments: Sequence[str],
        fds: Mapping[int, int],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        kill_at_cpu_s: float | None = None,
    ) -> Forked:
        """What ``python *arguments`` does (``-c CODE`` or ``-m MODULE``, with its arguments), in a fork.

        ``fds``: its file descriptors, by the number they have there.
        """
        ours, theirs = socket.socketpair()
        order = {
            "arguments": list(arguments),
            "fds": list(fds),
            "cwd": cwd,
            "env": dict(os.environ if env is None else env),
        }
        file = os.memfd_create("order")
        with os.fdopen(file, "w+") as memory, theirs:
            json.dump(order | {"kill_at_cpu_s": kill_at_cpu_s}, memory)
            memory.flush()
            socket.send_fds(self._socket, [b"order"], [file, theirs.fileno(), *fds.values()])
        return Forked(ours)

    def run(self, target: str, *arguments: str, kill_at_cpu_s: float | None = None, log: Path | None = None) -> Ended:
        """Call ``module:function`` with these strings in a fork and wait for its end.

        ``kill_at_cpu_s``: kill it when it has used so many CPU seconds, a moment that a busy machine does not move.
        """
        with open(os.devnull) as nothing, open(log or os.devnull, "a") as output:
            fds = {0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()}
            call = ("-c", CALL, *target.split(":"), *arguments)
            ended = self.start(call, fds, kill_at_cpu_s=kill_at_cpu_s).wait()
        assert ended is not None
        self.cpu_s += ended.cpu_s
        return ended

    def close(self) -> None:
        """Leave the server, which ends with its last client."""
        self._socket.close()
        if self._server is not None:
            self._server.wait()


def serve(listening: socket.socket) -> list[str] | None:
    """Fork a run for every order. In a fork this returns what to run; in the server nothing, when no order can come."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who watch over the runs are not waited for
    clients: list[socket.socket] = []
    while True:
        for ready in select.select([listening, *clients], [], [])[0]:
            if ready is listening:
                clients.append(listening.accept()[0])
                clients[-1].send(WELCOME)
                continue
            message, received, _, _ = socket.recv_fds(ready, 16, MOST_FDS)
            if not message:
                ready.close()
                clients.remove(ready)
            elif not os.fork():
                for inherited in (listening, *clients):
                    inherited.close()
                return _watch_over_a_fork(*received)
            for fd in received:
                os.close(fd)
        if not clients:
            return None


def _watch_over_a_fork(file: int, connection: int, *given: int) -> list[str]:
    """Fork once more: the fork goes on with what to run, and this process waits for it, tells how it ended, and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with os.fdopen(file) as memory:
        memory.seek(0)
        order = json.load(memory)
    pid = os.fork()
    if not pid:
        os.close(connection)
        _take_over(order, given)
        return order["arguments"]
    answers = os.fdopen(connection, "w")
    print(json.dumps({"pid": pid}), file=answers, flush=True)
    code, cpu_s = _wait(pid, order["kill_at_cpu_s"])
    with suppress(BrokenPipeError):  # who ordered it was killed
        print(json.dumps({"code": code, "cpu_s": cpu_s}), file=answers, flush=True)
    os._exit(0)


def _take_over(order: dict[str, Any], given: Sequence[int]) -> None:
    """Become the process that was ordered: its files, folder, variables and modules' places."""
    apart = [os.dup(fd) for fd in given]  # above all numbers that are asked for: those are low, and still taken
    for fd, number in zip(apart, order["fds"], strict=True):
        os.dup2(fd, number)
    for fd in {*apart, *given} - set(order["fds"]):
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["env"])
    if order["cwd"]:
        os.chdir(order["cwd"])
    sys.path[:0] = order["env"].get("PYTHONPATH", "").split(os.pathsep)


def _live(arguments: list[str]) -> None:
    """Run, and end as an interpreter ends, but for taking itself to pieces: that copies all that was imported."""
    code: Any = 0
    try:
        _run(arguments)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run(arguments: list[str]) -> None:
    """What python does with these arguments."""
    how, what, *rest = arguments
    sys.argv[:] = [how, *rest]
    sys.path.insert(0, "")
    if how == "-m":
        sys.modules.pop(what, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert how == "-c", arguments
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})


def _wait(pid: int, kill_at_cpu_s: float | None) -> tuple[int, float]:
    """The exit code and CPU time of a fork, killed when it has used up its time."""
    while True:
        ended, status, usage = os.wait4(pid, 0 if kill_at_cpu_s is None else os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        assert kill_at_cpu_s is not None
        if _cpu_s(pid) >= kill_at_cpu_s:
            os.kill(pid, signal.SIGKILL)
            kill_at_cpu_s = None
        else:
            time.sleep(LOOK_EVERY_S)


def _cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        for module in sys.argv[2:]:
            import_module(module)
        from PIL import Image

        Image.init()
        gc.collect()
        gc.freeze()  # or each fork would walk, and so copy, all that was imported
        ordered = serve(listening)
    if ordered is not None:
        _live(ordered)
