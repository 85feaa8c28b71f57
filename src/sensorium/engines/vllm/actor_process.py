"""The actor's process as the engine sees it: its environment, questions to it, and its end.

Every process that vLLM starts must find our weight backend as a plugin, and a torchvision that can be imported. vLLM starts
an engine core and workers, and inspects models in further processes; they share only environment variables with this one.
So a folder at the head of PYTHONPATH carries both: ``sitecustomize``, which Python imports at its start, and the metadata
of an entry point, which vLLM looks up. An installed sensorium has the entry point as well; a checkout on the path has not.
"""

import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from contextlib import suppress
from pathlib import Path

from sensorium.cluster.python_process import CLOSE_S, Channel, Message, ProcessHost, error_of, last_words
from sensorium.engines.pool import process_lost
from sensorium.models import torchvision_fix
from sensorium.vocabulary.errors import EngineError, EngineLost

SITE = """\
import os
import runpy
import sys

import sensorium_torchvision

for folder in sys.path:  # the one that this file hides
    other = os.path.join(folder, "sitecustomize.py")
    if os.path.isfile(other) and not os.path.samefile(other, __file__):
        runpy.run_path(other)
        break
"""
PLUGIN = "sensorium_weights"
ENTRY_POINTS = f"""\
[vllm.general_plugins]
{PLUGIN} = sensorium.engines.vllm.weight_backend:register
"""
METADATA = "Metadata-Version: 2.1\nName: sensorium-vllm\nVersion: 0\n"


def write_startup(folder: Path) -> Path:
    """Write the folder that goes to the head of PYTHONPATH."""
    info = folder / "sensorium_vllm-0.dist-info"
    info.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "sensorium_torchvision.py").write_bytes(Path(torchvision_fix.__file__).read_bytes())
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def environment(startup: Path, *, on_cpu: bool, cache_gib: int) -> dict[str, str]:
    """The variables of vLLM's processes."""
    given = {
        "PYTHONPATH": str(startup),  # before the process's other paths
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if os.environ.get("VLLM_PLUGINS"):
        given["VLLM_PLUGINS"] = f"{os.environ['VLLM_PLUGINS']},{PLUGIN}"
    if on_cpu:
        # Without TORCH_COMPILE_DISABLE, the first request compiles C++ for 12 s, even where the model runs eagerly.
        given |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": str(cache_gib)}
    return given


FAULT = re.compile(r"\b(\w*(?:Error|Exception): [^\n]+)")
# Errors by which vLLM's processes report that another of them has failed.
CONSEQUENCES = ("EngineDeadError", "RuntimeError: Engine core initialization", "Exception: WorkerProc initialization")

Part = Callable[[Message], object]


def cause_in(log: str) -> str:
    """The last error in a log that is not a consequence of another one; empty if there is none."""
    found = [one for one in FAULT.findall(log) if not one.startswith(CONSEQUENCES)]
    return found[-1].strip() if found else ""


class ActorProcess:
    """The process that holds vLLM's front end, and through it vLLM's other processes.

    There is a connection for each direction, so that a thread reads answers while others send.
    """

    def __init__(self, host: ProcessHost, log: Path, environment: Mapping[str, str]) -> None:
        self._python, frames = host.start("sensorium.engines.vllm.actor", 2, log, environment, own_group=True)
        self._questions, self._answers = map(Channel, frames)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, tuple[Future[Message], Part | None]] = {}
        self.lost: EngineLost | None = None  # why nothing more can be asked, if so
        self._closing = False
        self._reader = threading.Thread(target=self._read, name="vllm answers", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The actor's process id, which is that of its process group too."""
        return self._python.pid

    def submit(self, message: Message, part: Part | None = None) -> tuple[int, "Future[Message]"]:
        """Send a question; its number and its future answer. ``part`` is called with parts that come before the answer."""
        answer: Future[Message] = Future()
        with self._lock:
            if self.lost is not None:
                raise self.lost
            number = next(self._numbers)
            self._open[number] = (answer, part)
            try:
                self._questions.send({"id": number, **message}, CLOSE_S)
            except OSError as error:
                del self._open[number]
                raise process_lost(self._python) from error
        return number, answer

    def ask(self, message: Message, limit_s: float) -> Message:
        """Send a question and wait for its answer. If none comes in time, the actor is ended."""
        return self.ask_all([message], limit_s)[0]

    def ask_all(self, messages: Sequence[Message], limit_s: float) -> list[Message]:
        """The same with several questions at once."""
        answers = [self.submit(message)[1] for message in messages]
        until = time.monotonic() + limit_s
        try:
            return [answer.result(max(0.0, until - time.monotonic())) for answer in answers]
        except WaitedTooLong as error:
            lost = EngineLost(
                f"vLLM (pid {self.pid}) did not answer '{messages[0]['do']}' within {limit_s:g} s and was ended. Raise "
                "rollout.engine.options.reply_s (start_s for its start) if the model is that slow."
                f"{self._cause()}"
            )
            self.fail(lost)
            raise lost from error

    def tell(self, message: Message) -> None:
        """Send a message without an answer; nothing happens if the actor is gone."""
        with self._lock, suppress(OSError):
            if self.lost is None:
                self._questions.send({"id": -1, **message}, CLOSE_S)

    def fail(self, why: EngineLost) -> None:
        """End the actor and all that it started, and fail every open question."""
        with self._lock:
            self.lost = self.lost or why
            waiting, self._open = list(self._open.values()), {}
        self._python.end()
        for answer, _ in waiting:
            if not answer.done():
                answer.set_exception(self.lost)

    def close(self) -> None:
        """Ask it to end, and end it and all that it started if it does not."""
        self._closing = True
        if self.lost is None and self._python.alive:
            self.tell({"do": "close"})
        self._questions.close()
        self._python.end(CLOSE_S)
        self.fail(EngineLost("vLLM was closed before it answered."))  # for those who still wait, for its start for example
        self._reader.join(CLOSE_S)
        self._answers.close()

    def _read(self) -> None:
        while True:
            try:
                message = self._answers.receive()
            except (EOFError, OSError, ValueError):
                if not self._closing:
                    self.fail(process_lost(self._python))
                return
            if "part" in message:
                _, part = self._open.get(message["id"], (None, None))
                if part is not None:
                    part(message["part"])
                continue
            answer, _ = self._open.pop(message["id"], (None, None))
            if message.get("kind") == "EngineLost":  # vLLM's own processes have ended
                self.fail(EngineLost(f"{message['error']}{self._cause()}"))
            if answer is not None and not answer.done():
                if "error" in message:
                    answer.set_exception(self.lost or error_of(message, EngineError, "the engine"))
                else:
                    answer.set_result(message)

    def _cause(self) -> str:
        """The reason in the log of vLLM's processes, or its last lines."""
        log = self._python.log_text()
        return f" The cause by vLLM's log: {found}" if (found := cause_in(log)) else last_words(log)
