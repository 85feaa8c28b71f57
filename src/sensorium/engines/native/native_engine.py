"""The native engine: the learner's own parameters, one prefill per distinct context, continuous batching.

``scheduler`` says when a tick may happen; ``writer`` does what happens in one.
"""

from collections.abc import Callable, Sequence
from typing import Unpack

from sensorium.engines.native.pipeline import PagedWriter
from sensorium.engines.native.stock_writer import StockWriter
from sensorium.engines.native.writer import Writer, WriterCounters
from sensorium.engines.options import WriterOptions, check_writer_options, completed
from sensorium.engines.protocol import Capabilities, LiveEpisodes, Request, Response, WeightSource
from sensorium.engines.scheduler import Job, TickScheduler
from sensorium.models.policy import Policy
from sensorium.vocabulary.errors import EngineError

STOCK_OPTIONS = frozenset(["max_rows", "max_context"])


class NativeEngine:
    """Samples from a policy in this process.

    ``patience_s`` bounds how long a lockstep tick waits for an episode that neither asks nor leaves; ``WriterOptions`` has
    the other options.
    """

    check_options = staticmethod(check_writer_options)

    def __init__(
        self, policy: Policy, *, lockstep: bool = True, patience_s: float = 600.0, **options: Unpack[WriterOptions]
    ) -> None:
        self.capabilities = Capabilities(
            policy.chat.modalities,
            deterministic=lockstep,
            lockstep=lockstep,
            matched=policy.matched is not None,
            in_flight=True,
        )
        given, paged = completed(options, policy.device.type, matched=policy.matched is not None)
        self._policy = policy
        self._writer: Writer | StockWriter
        if policy.general is not None:
            if useless := sorted(options.keys() - STOCK_OPTIONS):
                raise EngineError(
                    f"the general path samples on the model's own cache, which has no option '{useless[0]}'; leave it out."
                )
            self._writer = StockWriter(policy, **{name: given[name] for name in STOCK_OPTIONS})
        else:
            self._writer = (PagedWriter if paged else Writer)(policy, **given)
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

    def written_so_far(self, thread: str) -> tuple[Sequence[int], Sequence[float]]:
        """Between ticks: the tokens of a response that is being written, and their log-probs."""
        return self._writer.written_so_far(thread)

    def release(self, thread: str) -> None:
        """The thread will not be continued: forget its keys and values."""
        self._writer.release(thread)

    def update_weights(self, source: WeightSource, version: int) -> None:
        """New weights are in place, for they are the policy's: drop keys, values and features of the old ones."""
        if source is not self._policy:
            raise EngineError("the native engine samples with the policy it was made of; it takes no other weights.")
        self._scheduler.refuse_open()
        self._writer.forget(version)

    def push_weights(self, source: WeightSource, version: int) -> None:
        """As ``update_weights``, between ticks, with responses open: their contexts are computed anew and they go on."""
        if source is not self._policy:
            raise EngineError("the native engine samples with the policy it was made of; it takes no other weights.")
        self._scheduler.admit_again(self._writer.carry_over(version))

    def reset_cache(self) -> None:
        """Drop all keys, values and features."""
        self._scheduler.refuse_open()
        self._writer.forget(self._writer.version)

    def close(self) -> None:
        """Drop what is kept."""
        self._writer.forget(self._writer.version)

    async def _tick(self, waiting: Sequence[Job]) -> int:
        return self._writer.tick(waiting)
