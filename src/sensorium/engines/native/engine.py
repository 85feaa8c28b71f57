"""The native engine: the learner's own parameters, one prefill per distinct context, continuous batching.

``scheduler`` says when a tick may happen; ``writer`` does what happens in one.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from sensorium.engines.native.pipeline import PagedWriter
from sensorium.engines.native.writer import Writer, WriterCounters
from sensorium.engines.protocol import Capabilities, LiveEpisodes, Request, Response, WeightSource
from sensorium.engines.scheduler import Job, TickScheduler
from sensorium.models.policy import Policy
from sensorium.vocabulary.errors import EngineError


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
        self.capabilities = Capabilities(policy.chat.modalities, deterministic=lockstep, lockstep=lockstep)
        paged = kv == "pages" or (kv == "auto" and policy.device.type == "cuda")
        make = PagedWriter if paged else Writer
        self._policy = policy
        self._writer = make(policy, max_rows=max_rows, max_context=max_context, keep_bytes=keep_bytes, record=record)
        self._scheduler = TickScheduler(self._tick, lockstep=lockstep, patience_s=patience_s)

    @property
    def version(self) -> int:
        """How many updates the weights have had that it samples with."""
        return self._writer.version

    @property
    def counters(self) -> WriterCounters:
        """What the engine did so far."""
        return self._writer.counters

    def tell_by(self, noted: Callable[[str], None]) -> None:
        """Report slow fallbacks of decoding by this callback instead of as warnings."""
        self._writer.tell_by(noted)

    @property
    def notes(self) -> tuple[str, ...]:
        """What decoding does the slow way, and why."""
        return self._writer.notes

    def start(self) -> None:
        """Nothing to do: the weights are the policy's own."""

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        """Write one response. Cancelling the wait withdraws the request."""
        return await self._scheduler.generate(request, episodes)

    def release(self, thread: str) -> None:
        """The thread will not be continued: forget its keys and values."""
        self._writer.release(thread)

    def update_weights(self, source: WeightSource, version: int) -> None:
        """New weights are in place, for they are the policy's: drop keys, values and features of the old ones."""
        if source is not self._policy:
            raise EngineError("the native engine samples with the policy it was made of; it takes no other weights.")
        self._scheduler.refuse_open()
        self._writer.forget(version)

    def reset_cache(self) -> None:
        """Drop all keys, values and features."""
        self._scheduler.refuse_open()
        self._writer.forget(self._writer.version)

    def close(self) -> None:
        """Drop what is kept."""
        self._writer.forget(self._writer.version)

    async def _tick(self, waiting: Sequence[Job]) -> int:
        return self._writer.tick(waiting)
