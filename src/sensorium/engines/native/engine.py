"""The native engine: the learner's own parameters, one prefill per distinct context, continuous batching.

This file is the asynchronous half: who waits, and when a tick may happen; ``writer`` does what happens in one. In lockstep
a tick happens only when every live episode waits, so what is batched together is a function of the requests, not of the
clock. A request that fails fails alone; one whose wait is cancelled leaves the batch at the next tick.
"""

import asyncio
from collections.abc import Callable
from typing import Literal

from sensorium.engines.native.pipeline import PagedWriter
from sensorium.engines.native.rows import Job
from sensorium.engines.native.writer import Writer, WriterCounters
from sensorium.engines.protocol import Request, Response
from sensorium.models.policy import Policy
from sensorium.vocabulary.errors import EngineError

QUIET_TURNS = 3  # turns of the event loop without news before a lockstep tick: whoever just woke may still enter or ask


class NativeEngine:
    """Samples from a policy in this process.

    ``max_rows`` responses are written at once, others wait. ``max_context`` is the longest thread, response included
    (default: what the model allows). ``keep_bytes`` bounds the keys and values, and likewise the features, kept between
    turns (default: 1 GiB, or a sixteenth of the GPU); what does not fit is computed again. ``patience_s`` bounds how long
    a lockstep tick waits for an episode that neither asks nor leaves. ``record`` lets decoding run from recordings where
    they pay (see ``steps``); the bits are the same. On a GPU it lets steps run fused and from CUDA graphs (see ``graphs``).
    ``kv`` says how keys and values are held: a block of rows (on the CPU), or pages with steps launched ahead (on a GPU).
    """

    def __init__(
        self,
        policy: Policy,
        *,
        lockstep: bool = True,
        max_rows: int = 512,
        max_context: int | None = None,
        keep_bytes: int | None = None,
        patience_s: float = 600.0,
        record: bool = True,
        kv: Literal["auto", "rows", "pages"] = "auto",
    ) -> None:
        self.modalities = policy.chat.modalities
        self.deterministic = lockstep
        self.between_ticks: Callable[[], bool] | None = None
        paged = kv == "pages" or (kv == "auto" and policy.device.type == "cuda")
        make = PagedWriter if paged else Writer
        self._policy = policy
        self._writer = make(policy, max_rows=max_rows, max_context=max_context, keep_bytes=keep_bytes, record=record)
        self._patience_s = patience_s
        self._live = 0
        self._open: dict[str, Job] = {}
        self._waiting: list[Job] = []
        self._pump: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._events = 0

    @property
    def version(self) -> int:
        """How many updates the weights have had that it samples with."""
        return self._policy.version

    @property
    def counters(self) -> WriterCounters:
        """What the engine did so far."""
        return self._writer.counters

    @property
    def notes(self) -> tuple[str, ...]:
        """What decoding does the slow way, and why."""
        return self._writer.notes

    def enter(self) -> None:
        """One more episode is live."""
        self._live += 1
        self._happened()

    def leave(self) -> None:
        """One episode less."""
        self._live -= 1
        self._happened()
        if not self.deterministic and self.between_ticks is not None:
            self.between_ticks()

    async def generate(self, request: Request) -> Response:
        """Write one response. Cancelling the wait withdraws the request."""
        if request.thread in self._open:
            raise EngineError(f"thread '{request.thread}' is being continued already; a thread has one response at a time.")
        if request.sampling.max_new_tokens < 1:
            raise EngineError(
                f"'{request.name}' asks for {request.sampling.max_new_tokens} new tokens; ask for one at least."
            )
        job = Job(request, asyncio.get_running_loop().create_future())
        self._open[request.thread] = job
        self._waiting.append(job)
        if self._pump is None or self._pump.done():
            self._news = asyncio.Event()
            self._pump = asyncio.get_running_loop().create_task(self._run(), name="native engine")
        self._happened()
        try:
            return await job.future
        finally:
            if self._open.get(request.thread) is job:
                del self._open[request.thread]
                self._happened()

    def release(self, thread: str) -> None:
        """The thread will not be continued: forget its keys and values."""
        self._writer.release(thread)

    def refresh(self, policy_version: int) -> None:
        """New weights are in place: drop keys, values and features of the old ones."""
        if self._open:
            raise EngineError(f"the weights changed while {len(self._open)} responses were open; finish the rollout first.")
        self._writer.forget(policy_version)

    def _happened(self) -> None:
        self._events += 1
        self._news.set()

    async def _run(self) -> None:
        """The pump: one task, alive while any request is open."""
        seen = -1
        try:
            while self._open:
                if self.deterministic and seen != self._events:
                    await self._all_wait()
                    if self._open and self.between_ticks is not None and self.between_ticks():
                        continue  # those that were cancelled leave before the others go on
                    seen = self._events
                if self._open:
                    self._tick()
                await asyncio.sleep(0)
        except Exception as error:
            for job in self._open.values():
                job.fail(error if isinstance(error, EngineError) else EngineError(f"the engine failed: {error!r}"))
        finally:
            for job in self._open.values():
                job.future.cancel()
            self._open.clear()
            self._waiting.clear()

    async def _all_wait(self) -> None:
        """Wait until every live episode waits for the engine, and nothing stirs."""
        quiet, seen = 0, self._events
        while quiet < QUIET_TURNS and self._open:
            if len(self._open) >= self._live:
                await asyncio.sleep(0)
                quiet = quiet + 1 if seen == self._events else 0
                seen = self._events
                continue
            quiet = 0
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), self._patience_s)
            except TimeoutError:
                raise EngineError(
                    f"{len(self._open)} episodes waited {self._patience_s:g} s for {self._live - len(self._open)} that "
                    "neither asked for a response nor ended; give their environments shorter deadlines, or set "
                    "rollout.schedule: eager."
                ) from None

    def _tick(self) -> None:
        """One tick of the writer; answered requests are closed."""
        waiting = sorted((job for job in self._waiting if not job.future.done()), key=lambda job: job.request.order)
        admitted = self._writer.tick(waiting) if waiting else self._writer.tick(())
        self._waiting = waiting[admitted:]
        for thread in [thread for thread, job in self._open.items() if job.future.done()]:
            del self._open[thread]
            self._events += 1
