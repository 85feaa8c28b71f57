"""Worker processes with a model each: ``sensorium serve model`` on loopback, started again when one dies or hangs.

A worker has its own port for its whole life, and a key that only this process knows. It is called by the client of judges,
which skips a worker that is down and tries it again later.
"""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import takewhile

import httpx

from sensorium.services.application import ENVIRONMENT_VARIABLE, Json
from sensorium.vocabulary.errors import EngineLost, SensoriumError

KEY_VARIABLE = "SENSORIUM_WORKER_KEY"
LOOK_S = 0.2
ASK_EVERY_S = 5.0
LONGEST_REST_S = 30.0


@dataclass
class ModelWorker:
    """One process. ``command`` holds ``{port}``, and is run with the key in its environment."""

    command: Sequence[str]
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    started: float = 0.0
    heard: float | None = None  # when it answered last since it was started; loading a model takes a while, and may fail
    ready: bool = False  # whether it answered the last health check

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it, in a session of its own: Ctrl-C in a terminal must not end it before its answers are written.

        Its standard input is a pipe that ends when this process does, however that happens. EngineLost where another
        program has its port: that one would get our requests, with our key.
        """
        self.ready, self.heard, self.started = False, None, time.monotonic()
        try:
            socket.create_server(("127.0.0.1", self.port)).close()
        except OSError as error:
            raise EngineLost(
                f"a worker's port {self.port} cannot be used: {error.strerror}. Choose others by --worker-port (0: any "
                "free ones), or end the program that listens there."
            ) from error
        command = [part.replace("{port}", str(self.port)) for part in self.command]
        variables = {**os.environ, **self.environment}
        self.process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def answers(self) -> bool:
        """Whether its /health answers now."""
        try:
            # Plain HTTP on loopback: no proxy, and no certificates, which take 0.1 s to load at every call.
            with httpx.stream("GET", f"{self.url}/health", timeout=2, trust_env=False, verify=False) as reply:
                return reply.status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self, patience_s: float = 10.0) -> None:
        """Ask it to end, and end it."""
        if self.process is None:
            return
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


class ModelWorkers:
    """Several workers, kept alive. One that does not answer for ``hang_s`` (while it loads: ``start_s``) is ended."""

    def __init__(self, workers: Sequence[ModelWorker], start_s: float = 600.0, hang_s: float = 120.0) -> None:
        self.workers, self.start_s, self.hang_s = list(workers), start_s, hang_s

    def states(self) -> list[Json]:
        return [
            {"url": worker.url, "alive": worker.alive, "ready": worker.alive and worker.ready, "restarts": worker.restarts}
            for worker in self.workers
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start all, wait until each answers, and start again those that die; at the end stop them."""
        keeping = None
        try:
            for worker in self.workers:
                worker.start()
            until = time.monotonic() + self.start_s
            for worker in self.workers:
                while not await self._answers(worker):
                    code = worker.process.poll() if worker.process is not None else None
                    if code is not None or time.monotonic() > until:
                        why = f"was not ready within {self.start_s:g} s" if code is None else f"ended with code {code}"
                        command = " ".join(worker.command).replace("{port}", str(worker.port))
                        raise EngineLost(f"the worker at {worker.url} {why}: {command}. Its errors are above.")
                    await asyncio.sleep(LOOK_S)
            keeping = asyncio.create_task(self._keep())
            yield
        finally:
            if keeping is not None:
                keeping.cancel()
            await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in self.workers))

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for worker in self.workers:
                rest = min(LONGEST_REST_S, 2.0 ** min(worker.restarts, 10) - 1)
                if worker.alive:
                    await self._end_if_hung(worker)
                elif time.monotonic() - worker.started >= rest:
                    code = worker.process.poll() if worker.process is not None else None
                    worker.restarts += 1
                    notice = f"the worker at {worker.url} died (code {code}) and is started again ({worker.restarts})"
                    print(notice, file=sys.stderr)
                    try:
                        worker.start()
                    except (SensoriumError, OSError) as error:  # it is tried again after a while
                        print(f"the worker at {worker.url} cannot be started: {error}", file=sys.stderr)

    async def _end_if_hung(self, worker: ModelWorker) -> None:
        """Check a worker now and then; end one that is silent for too long, so that it is started again."""
        since = worker.started if worker.heard is None else worker.heard
        if worker.ready and time.monotonic() - since < min(ASK_EVERY_S, self.hang_s):
            return
        limit = self.start_s if worker.heard is None else self.hang_s
        if not await self._answers(worker) and time.monotonic() - since > limit and worker.process is not None:
            print(f"the worker at {worker.url} has not answered for {limit:g} s and is ended", file=sys.stderr)
            worker.process.kill()

    async def _answers(self, worker: ModelWorker) -> bool:
        """Whether a worker answers; one that does is ready."""
        worker.ready = await asyncio.to_thread(worker.answers) and worker.alive
        if worker.ready:
            worker.heard = time.monotonic()
        return worker.ready


def model_workers(
    checkpoint: str, count: int, first_port: int, options: Sequence[str], devices: Sequence[str] = ()
) -> tuple[ModelWorkers, str]:
    """Workers that serve a checkpoint, and the environment variable that holds their key. Port 0: any free ones.

    Each sees one of ``devices``, in turn; without any they see what this process sees.
    """
    key = secrets.token_urlsafe(32)
    os.environ[KEY_VARIABLE] = key
    serve = [sys.executable, "-m", "sensorium.cli.main", "serve", "model", checkpoint]
    command = [*serve, "--name", "reader", "--port", "{port}", "--until-input-ends", *options]
    workers = []
    for place in range(count):
        environment = {ENVIRONMENT_VARIABLE: key}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
        port = first_port + place if first_port else free_port()
        workers.append(ModelWorker(command, port, environment))
    return ModelWorkers(workers), KEY_VARIABLE


def worker_devices(count: int, asked: str, environment: Mapping[str, str], counted: Callable[[], int]) -> list[str]:
    """The GPUs that ``count`` workers are spread over, as CUDA_VISIBLE_DEVICES names them; none: what this process sees.

    Those ``asked`` for, else those that CUDA_VISIBLE_DEVICES lists, else, for several workers, the ``counted`` ones of the
    machine. As in CUDA, a negative number ends a list: "GPU-5ab,1,-1,2" is GPU-5ab and 1.
    """
    listed = asked or environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(number) for number in range(counted())] if count > 1 else []
    names = [name.strip() for name in listed.split(",") if name.strip()]
    return list(takewhile(lambda name: not name.startswith("-"), names))


def placement_notice(count: int, devices: Sequence[str], listed: bool) -> str:
    """What to report where workers and GPUs are not as many. ``listed``: the user named these GPUs, so none should idle."""
    named = ", ".join(devices)
    if devices and count > len(devices):
        return f"{count} workers share the GPUs {named}: some hold the model several times (--workers, --devices)."
    if listed and 0 < count < len(devices):
        idle = ", ".join(devices[count:])
        return f"GPUs without a worker: {idle} (of {named}). --workers {len(devices)} (REWARD_NUM_WORKERS) uses all."
    return ""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])
