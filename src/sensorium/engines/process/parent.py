"""The parent's side of the child process: start it, call it, end it. Every wait is bounded, and its death is an error."""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

import torch

from sensorium.cluster.channel import Channel, Message
from sensorium.cluster.python_process import CLOSE_S, ProcessHost, ThisMachine
from sensorium.data.media_store import MediaStore
from sensorium.engines.native.writer import WriterCounters
from sensorium.engines.options import WriterOptions, check_writer_options, completed
from sensorium.engines.pool import process_lost
from sensorium.engines.process.messages import engine_error, plain_request
from sensorium.engines.protocol import Capabilities, LiveEpisodes, Request, Response, WeightSource
from sensorium.engines.scheduler import Job, TickScheduler
from sensorium.engines.weight_group import write_tensors
from sensorium.models.policy import Policy
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import VersionSpan
from sensorium.vocabulary.errors import EngineLost, SensoriumError


class ChildProcess:
    """A process that answers one message at a time."""

    def __init__(self, host: ProcessHost, log: Path) -> None:
        self.python, (frames,) = host.start("sensorium.engines.process.child", 1, log)
        self._channel = Channel(frames)
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.python.pid

    def ask(self, message: Message, limit_s: float) -> Message:
        """Send a message and wait for the answer; an error it answers with is raised here. From any thread."""
        with self._lock:
            try:
                self._channel.send(message, limit_s)
                answer = self._channel.receive(limit_s)
            except TimeoutError as error:
                self.python.end()
                raise EngineLost(
                    f"the engine process (pid {self.pid}) did not answer '{message['do']}' within {limit_s:g} s and was "
                    "ended. Raise rollout.engine.options.reply_s (start_s for its start) if the model is that slow."
                ) from error
            except (EOFError, OSError) as error:
                raise process_lost(self.python) from error
        if "error" in answer:
            raise engine_error(answer)
        return answer

    def close(self) -> None:
        """Tell it to end, and end it if it does not."""
        if self.python.alive and self._lock.acquire(timeout=CLOSE_S):
            with suppress(EOFError, OSError):
                self._channel.send({"do": "close"}, CLOSE_S)
            self._lock.release()
        self._channel.close()
        self.python.end(CLOSE_S)


# When ticks happen is decided here, by the same scheduler as the native engine's; the child does what happens in one.
# So tokens and log-probs are those of the native engine, bit for bit on a CPU. Weights go by a safetensors file, in
# shared memory where there is room; media by their files; all else as JSON over a socket.


class ProcessEngine:
    """Samples in a child process. Options are the native engine's, and bounds on how long the child is waited for.

    ``start_s`` bounds its start (imports and the model without weights), ``reply_s`` every later answer: a tick, or taking
    over weights. ``host`` starts the child, here or on another machine.
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
        self.capabilities = Capabilities(
            policy.chat.modalities,
            deterministic=lockstep,
            lockstep=lockstep,
            matched=policy.matched is not None,
            in_flight=True,
            own_weights=True,
        )
        self.version = policy.version
        self.counters = WriterCounters()
        self.notes: tuple[str, ...] = ()
        self._policy = policy
        self._writer, self._paged = completed(options, policy.device.type, matched=policy.matched is not None)
        self._start_s, self._reply_s = start_s, reply_s
        self._host: ProcessHost = ThisMachine() if host is None else host
        self._scheduler = TickScheduler(self._tick, lockstep=lockstep, patience_s=patience_s)
        self._child: ChildProcess | None = None
        self._folder: Path | None = None
        self._media: MediaStore | None = None
        self._shown: set[Media] = set()
        self._jobs: dict[str, Job] = {}  # what the child knows of, by thread
        self._released: list[str] = []
        self._sent: dict[str, tuple[int, int]] = {}

    @property
    def pid(self) -> int | None:
        """The child's process id, once it is started."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the child, and give it the policy's weights."""
        if self._child is not None:
            return
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="sensorium-engine-", dir=self._host.folder))
            self._child = ChildProcess(self._host, self._folder / "child.log")
            self._child.ask({"do": "start", **self._description(self._folder)}, self._start_s)
            self.update_weights(self._policy, self._policy.version)
        except BaseException:
            self.close()
            raise

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        """Write one response. Cancelling the wait withdraws the request."""
        return await self._scheduler.generate(request, episodes)

    def release(self, thread: str) -> None:
        """The thread will not be continued; the child hears of it with the next tick."""
        self._released.append(thread)

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Send the weights that may have changed since the last time, in a file that is deleted afterwards."""
        self._scheduler.refuse_open()
        self._send(source, version, in_flight=False)
        self._forget()

    def push_weights(self, source: WeightSource, version: int) -> None:
        """As ``update_weights``, between ticks, with responses open: they go on with the new weights. From any thread."""
        self._send(source, version, in_flight=True)

    def _send(self, source: WeightSource, version: int, *, in_flight: bool) -> None:
        tensors = source.tensors()
        learning = [name for name, tensor in tensors.items() if tensor.requires_grad]
        state = {name: (tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()}
        # What learns is always sent: it may be written to in ways that torch does not count.
        moved = {
            name: tensors[name] for name in tensors if tensors[name].requires_grad or self._sent.get(name) != state[name]
        }
        file = write_tensors(moved, folder=None if self._host.folder is None else self._folder)
        try:
            told = {"do": "weights", "file": str(file), "learning": learning, "version": version, "in_flight": in_flight}
            self._ask(told)
        finally:
            file.unlink(missing_ok=True)
        self._sent, self.version = state, version

    def reset_cache(self) -> None:
        """Keep nothing of earlier rollouts."""
        self._scheduler.refuse_open()
        self._ask({"do": "reset"})
        self._forget()

    def close(self) -> None:
        """End the child and remove its folder."""
        if self._child is not None:
            self._child.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._child = self._folder = None

    async def _tick(self, waiting: Sequence[Job]) -> int:
        """One tick of the child. It queues what it has no room for yet, so all that wait are taken."""
        cancelled = [thread for thread, job in self._jobs.items() if job.future.done()]
        for thread in cancelled:
            del self._jobs[thread]
        shown = [job for job in waiting if self._show(job)]
        new = [plain_request(job.request) for job in shown]
        self._jobs |= {job.request.thread: job for job in shown}
        released, self._released = self._released, []
        message = {"do": "tick", "new": new, "cancelled": cancelled, "released": released}
        answer = await asyncio.to_thread(self._ask, message)
        self.counters = WriterCounters(**answer["counters"])
        self.notes = tuple(answer["notes"])
        for plain in answer["done"]:
            if job := self._jobs.pop(plain["thread"], None):
                self._answer(job, plain)
        return len(waiting)

    def _answer(self, job: Job, plain: Mapping[str, Any]) -> None:
        """Answer a request with what the child wrote, stamped with the version of the weights that wrote it."""
        if job.future.done():
            return
        if "error" in plain:
            job.fail(engine_error(plain))
            return
        versions = tuple(VersionSpan(*span) for span in plain["versions"])
        written = self._policy.chat.written(
            plain["tokens"], plain["logprobs"], plain["sampled_logprobs"], job.request.name, plain["version"], versions
        )
        job.future.set_result(Response(written, plain["finish"], versions))

    def _show(self, job: Job) -> bool:
        """Put media that are only in memory where the child can read them; a request whose media are gone fails alone."""
        if self._media is None:
            return True
        media = {span.media for segment in job.request.context for span in segment.media}
        try:
            for item in media - self._shown:
                self._media.take(item, self._policy.chat.store)
        except SensoriumError as error:
            job.fail(error)
            return False
        self._shown |= media
        return True

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            raise EngineLost("the engine process was not started, or is closed; call start() first.")
        return self._child.ask(message, self._reply_s)

    def _forget(self) -> None:
        self._jobs.clear()
        self._released.clear()

    def _description(self, folder: Path) -> dict[str, Any]:
        """Everything that the child needs to build the same model without weights."""
        policy = self._policy
        policy.save_description(folder / "model")
        media = policy.chat.store.folder
        if media is None:
            media = folder / "media"
            self._media = MediaStore(media, limits=policy.chat.store.limits)
        return {
            "temporary": str(folder),
            "folder": str(folder / "model"),
            "family": policy.family,
            "dtype": str(policy.dtype).removeprefix("torch."),
            "device": policy.device.type if self._host.own_device else str(policy.device),
            "precision": policy.precision,
            "lora": None if policy.adapters is None else policy.adapters.section.model_dump(mode="json"),
            "media": str(media.absolute()),
            "limits": asdict(policy.chat.store.limits),
            "threads": torch.get_num_threads(),
            "onednn": torch.backends.mkldnn.enabled,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "paged": self._paged,
            "writer": self._writer,
        }
