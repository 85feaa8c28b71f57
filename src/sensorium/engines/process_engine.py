"""The engine ``process``: samples in a child process. Every wait is bounded, and the child's death is an error.

When ticks happen is decided here, by the same scheduler as the native engine's; the child does what happens in one. So
tokens and log-probs are those of the native engine, bit for bit on a CPU. Weights go by a safetensors file, in shared
memory where there is room; media by their files; all else over a socket.
"""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Unpack

import torch

from sensorium.cluster.python_process import CLOSE_S, Channel, HostedProcess, Message, ProcessHost, ThisMachine, error_of
from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import stock_options
from sensorium.engines.native.writer import WriterCounters
from sensorium.engines.options import WriterOptions, check_writer_options, completed
from sensorium.engines.pool import process_lost
from sensorium.engines.protocol import Capabilities, LiveEpisodes, Request, Response, WeightSource
from sensorium.engines.scheduler import Job, TickScheduler
from sensorium.engines.weight_group import write_tensors
from sensorium.models.policy import Policy
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import EngineError, EngineLost, SensoriumError


class ProcessEngine:
    """Samples in a child process. Options are the native engine's, and bounds on how long the child is waited for.

    ``start_s`` bounds its start (imports and the model without weights), ``reply_s`` every later answer: a tick, or loading
    weights. ``host`` starts the child, here or on another machine.
    """

    check_options = staticmethod(check_writer_options)

    def __init__(
        self,
        policy: Policy,
        *,
        lockstep: bool = True,
        patience_s: float = 600.0,
        start_s: float = 600.0,
        reply_s: float = 600.0,
        host: ProcessHost | None = None,
        **options: Unpack[WriterOptions],
    ) -> None:
        matched = policy.matched is not None
        self._host: ProcessHost = ThisMachine() if host is None else host
        self.capabilities = Capabilities(
            policy.chat.modalities,
            deterministic=lockstep,
            lockstep=lockstep,
            matched=matched,
            in_flight=True,
            own_weights=policy.device.type != "cuda" or self._host.own_device,  # on one GPU each slows the other down
        )
        self.version = policy.version
        self.counters = WriterCounters()
        self.notes: tuple[str, ...] = ()
        self._policy = policy
        self._writer, self._paged = completed(options, policy.device.type, matched=matched)
        if policy.general is not None:
            self._writer = stock_options(self._writer, options)
        self._start_s, self._reply_s = start_s, reply_s
        self.scheduler = TickScheduler(self._tick, lockstep=lockstep, patience_s=patience_s)
        self._process: HostedProcess | None = None
        self._channel: Channel | None = None
        self._asking = threading.Lock()
        self._folder: Path | None = None
        self._media: MediaStore | None = None
        self._stored: set[Media] = set()
        self._jobs: dict[str, Job] = {}  # those that the child knows, by thread
        self._released: list[str] = []
        self._sent: dict[str, tuple[int, int]] = {}

    @property
    def pid(self) -> int | None:
        """The child's process id, once it is started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the child, and give it the policy's weights."""
        if self._process is not None:
            return
        try:
            self._folder = folder = Path(tempfile.mkdtemp(prefix="sensorium-engine-", dir=self._host.folder))
            self._process, (frames,) = self._host.start("sensorium.engines.process_child", 1, folder / "child.log")
            self._channel = Channel(frames)
            self._ask({"do": "start", **self._description(folder)}, self._start_s)
            self.update_weights(self._policy, self._policy.version)
        except BaseException:
            self.close()
            raise

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        """Write one response. Cancelling the wait withdraws the request."""
        return await self.scheduler.generate(request, episodes)

    def release(self, thread: str) -> None:
        """The thread will not be continued; the next tick passes it on to the child."""
        self._released.append(thread)

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Send the weights that may have changed since the last time, in a file that is deleted afterwards."""
        self.scheduler.refuse_open()
        self._send(source, version, in_flight=False)
        self._forget()

    def push_weights(self, source: WeightSource, version: int) -> None:
        """As ``update_weights``, between ticks, with responses open: they go on with the new weights. From any thread."""
        self._send(source, version, in_flight=True)

    def paused(self) -> AbstractContextManager[None]:
        """No tick begins inside."""
        return self.scheduler.paused()

    async def take_turn(self, seconds: float) -> None:
        """Inside ``paused``: sample until no request is open, for so long at most."""
        await self.scheduler.take_turn(seconds)

    def reset_cache(self) -> None:
        """Keep nothing of earlier rollouts."""
        self.scheduler.refuse_open()
        self._ask({"do": "reset"})
        self._forget()

    def close(self) -> None:
        """Ask the child to end, end it if it does not, and remove its folder."""
        if self._process is not None and self._channel is not None:
            if self._process.alive and self._asking.acquire(timeout=CLOSE_S):
                with suppress(EOFError, OSError):
                    self._channel.send({"do": "close"}, CLOSE_S)
                self._asking.release()
            self._channel.close()
            self._process.end(CLOSE_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._process = self._channel = self._folder = None

    def _send(self, source: WeightSource, version: int, *, in_flight: bool) -> None:
        tensors = source.tensors()
        learning = {name for name, tensor in tensors.items() if tensor.requires_grad}
        state = {name: (tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()}
        # What learns is always sent: it may be written to in ways that torch does not count.
        moved = {name: tensors[name] for name in tensors if name in learning or self._sent.get(name) != state[name]}
        file = write_tensors(moved, folder=None if self._host.folder is None else self._folder)
        message = {"do": "weights", "file": str(file), "learning": learning, "version": version, "in_flight": in_flight}
        try:
            self._ask(message)
        finally:
            file.unlink(missing_ok=True)
        self._sent, self.version = state, version

    async def _tick(self, waiting: Sequence[Job]) -> int:
        """One tick of the child. It queues requests that do not fit yet, so all that wait are sent."""
        cancelled = [thread for thread, job in self._jobs.items() if job.future.done()]
        for thread in cancelled:
            del self._jobs[thread]
        sent = [job for job in waiting if self._store_media(job)]
        self._jobs |= {job.request.thread: job for job in sent}
        released, self._released = self._released, []
        new = [job.request for job in sent]
        message = {"do": "tick", "new": new, "cancelled": cancelled, "released": released}
        answer = await asyncio.to_thread(self._ask, message)
        self.counters, self.notes = answer["counters"], tuple(answer["notes"])
        for thread, response in answer["done"].items():
            job = self._jobs.pop(thread, None)
            if job is None or job.future.done():
                continue
            if isinstance(response, Response):
                job.future.set_result(response)
            else:
                job.fail(error_of(response, EngineError, "the engine"))
        return len(waiting)

    def _store_media(self, job: Job) -> bool:
        """Write media that are only in memory where the child can read them; a request whose media are gone fails alone."""
        if self._media is None:
            return True
        media = {span.media for segment in job.request.context for span in segment.media}
        try:
            for item in media - self._stored:
                self._media.take(item, self._policy.chat.store)
        except SensoriumError as error:
            job.fail(error)
            return False
        self._stored |= media
        return True

    def _ask(self, message: Message, limit_s: float | None = None) -> Message:
        """Send a message and wait for the answer; an error in the answer is raised. From any thread."""
        process, channel, limit_s = self._process, self._channel, self._reply_s if limit_s is None else limit_s
        if process is None or channel is None:
            raise EngineLost("the engine process was not started, or is closed; call start() first.")
        with self._asking:
            try:
                channel.send(message, limit_s)
                answer: Message = channel.receive(limit_s)
            except TimeoutError as error:
                process.end()
                raise EngineLost(
                    f"the engine process (pid {process.pid}) did not answer '{message['do']}' within {limit_s:g} s and was "
                    "ended. Raise rollout.engine.options.reply_s (start_s for its start) if the model is that slow."
                ) from error
            except (EOFError, OSError) as error:
                raise process_lost(process) from error
        if "error" in answer:
            raise error_of(answer, EngineError, "the engine")
        return answer

    def _forget(self) -> None:
        self._jobs.clear()
        self._released.clear()

    def _description(self, folder: Path) -> dict[str, Any]:
        """Everything that the child needs to build the same model without weights."""
        policy, store = self._policy, self._policy.chat.store
        policy.save_description(folder / "model")
        media = store.folder
        if media is None:
            media = folder / "media"
            self._media = MediaStore(media, limits=store.limits)
        return {
            "temporary": str(folder),
            "folder": str(folder / "model"),
            "policy": {
                "family": policy.family,
                "dtype": str(policy.dtype).removeprefix("torch."),
                "device": policy.device.type if self._host.own_device else str(policy.device),
                "precision": policy.precision,
                "lora": None if policy.adapters is None else policy.adapters.section,
            },
            "media": str(media.absolute()),
            "limits": store.limits,
            "threads": torch.get_num_threads(),
            "onednn": torch.backends.mkldnn.enabled,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "paged": self._paged,
            "checked": None if policy.general is None else policy.general.checked(policy.chat),
            "writer": self._writer,
        }
