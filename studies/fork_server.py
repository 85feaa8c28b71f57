"""Processes that start in milliseconds: a server has imported everything, and each run is a fork of it.

    with ForkServer() as server:
        ended = server.run("studies.resumed_runs:train_recipe", "recipe.yaml", "runs/a", kill_at_cpu_s=2.5)
        ended.code     # 0, or -9 for a killed run

Invariant: the server imports and forks, and never computes, so it has no threads and no random state that a run could
inherit. What a fork cannot show is a fresh interpreter (another hash seed, imports in another order).
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = ("trainer.run", "cli.train", "models.qwen3_vl", "models.qwen2_5_omni", "engines.native.engine", "envs.frozen_lake")
THEIRS = ("auto.modeling_auto", "auto.processing_auto", "auto.tokenization_auto", "qwen3_vl.modeling_qwen3_vl")
THEIRS += ("qwen2_5_omni.modeling_qwen2_5_omni", "qwen3_vl.processing_qwen3_vl", "qwen2_5_omni.processing_qwen2_5_omni")
PRELOADED = tuple(f"sensorium.{name}" for name in OURS) + tuple(f"transformers.models.{name}" for name in THEIRS)
PRELOADED += ("av", "gymnasium.envs.toy_text", "peft")
LOOK_EVERY_S = 0.002
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code (minus the signal's number if it was killed), and the CPU time it took."""

    code: int
    cpu_s: float


class ForkServer:
    """A server and its runs, one at a time; ``cpu_s`` is what the runs have taken together."""

    def __init__(self, *preloaded: str) -> None:
        self.cpu_s = 0.0
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "studies.fork_server", *PRELOADED, *preloaded]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True
        )

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, target: str, *arguments: str, kill_at_cpu_s: float | None = None, log: Path | None = None) -> Ended:
        """Call ``module:function`` with these strings in a fork and wait for its end.

        ``kill_at_cpu_s``: kill it when it has used so many CPU seconds, a moment that a busy machine does not move.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        order = {"target": target, "arguments": arguments, "kill_at_cpu_s": kill_at_cpu_s, "log": str(log or os.devnull)}
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the fork server ended with code {self._server.wait()}")
        ended = Ended(**json.loads(answer))
        self.cpu_s += ended.cpu_s
        return ended

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def serve(preloaded: list[str]) -> None:
    """Import, then fork a run for every line of stdin and answer with how it ended."""
    for module in preloaded:
        import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import or a run prints is no answer
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(order)
        code, cpu_s = _wait(pid, order["kill_at_cpu_s"])
        answers.write(json.dumps({"code": code, "cpu_s": cpu_s}) + "\n")
        answers.flush()


def _become(order: dict[str, Any]) -> None:
    """The fork's whole life."""
    code = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        module, _, name = order["target"].partition(":")
        target: Callable[..., int | None] = getattr(import_module(module), name)
        code = int(target(*order["arguments"]) or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
    serve(sys.argv[1:])
