"""The native engine: the learner's own parameters, one prefill per distinct context, continuous batching.

``scheduler`` says when a tick may happen; ``writer`` does what happens in one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import isnan
from typing import Any, Unpack

import torch
from torch import Tensor

from sensorium.engines.native.pipeline import PagedWriter
from sensorium.engines.native.prefix_cache import PrefixEntry, context_key
from sensorium.engines.native.response_rows import Row
from sensorium.engines.native.sampler import SamplingRows, sample, signed64, uniforms
from sensorium.engines.native.writer import Writer, WriterCounters
from sensorium.engines.options import WriterOptions, check_writer_options, completed
from sensorium.engines.protocol import Capabilities, LiveEpisodes, Request, Response, WeightSource
from sensorium.engines.scheduler import Job, TickScheduler
from sensorium.models.general_path import StockRow
from sensorium.models.policy import Policy
from sensorium.models.segment_layout import sent_to
from sensorium.vocabulary.errors import EngineError

STOCK_OPTIONS = frozenset(["max_rows", "max_context"])


def stock_options(given: Mapping[str, Any], asked: Iterable[str]) -> dict[str, Any]:
    """The arguments of ``StockWriter``, of all that an engine is ``given``; others that were asked for are refused."""
    if useless := sorted(set(asked) - STOCK_OPTIONS):
        raise EngineError(
            f"the general path samples on the model's own cache, which has no option '{useless[0]}'; leave it out."
        )
    return {name: given[name] for name in STOCK_OPTIONS}


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
            self._writer = StockWriter(policy, **stock_options(given, options))
        else:
            self._writer = (PagedWriter if paged else Writer)(policy, **given)
        self.scheduler = TickScheduler(self._tick, lockstep=lockstep, patience_s=patience_s)

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
        return await self.scheduler.generate(request, episodes)

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
        self.scheduler.refuse_open()
        self._writer.forget(version)

    def push_weights(self, source: WeightSource, version: int) -> None:
        """As ``update_weights``, between ticks, with responses open: they go on after their keys and values of before."""
        if source is not self._policy:
            raise EngineError("the native engine samples with the policy it was made of; it takes no other weights.")
        self._writer.change_weights(version)

    def paused(self) -> AbstractContextManager[None]:
        """No token is sampled inside: the policy is trained. Requests wait."""
        return self.scheduler.paused()

    async def take_turn(self, seconds: float) -> None:
        """Inside ``paused``, while nobody trains the policy: sample until no request is open, for so long at most."""
        if self._policy.version != self.version:  # the first of a step's updates is done
            self.push_weights(self._policy, self._policy.version)
        await self.scheduler.take_turn(seconds)

    def reset_cache(self) -> None:
        """Drop all keys, values and features."""
        self.scheduler.refuse_open()
        self._writer.forget(self._writer.version)

    def close(self) -> None:
        """Drop what is kept."""
        self._writer.forget(self._writer.version)

    async def _tick(self, waiting: Sequence[Job]) -> int:
        return self._writer.tick(waiting)


# The general path's writer. What is admitted in a tick is padded on the left, computed once for each distinct context, and
# forked:
#
#     waiting            prompt a (8 requests), prompt b (8)
#     forward            a and b, left-padded            2 rows
#     fork               a a a a a a a a b b b b b b b b  16 rows, then a token for each row and tick
#
# Rows whose response has ended stay until half of a batch is over. A context is always computed from its beginning: not
# every model's layers can compute with padding inside a cache, and a window or a state cannot go back.


PREFILL_TOKENS = 8192  # padded tokens of one forward over prompts
MOST_BATCHES = 4  # each takes a forward of its own in every tick, so that others wait for room


class StockBatch:
    """Rows that share a cache: the padding and tokens before the next of each, and its position."""

    def __init__(self, rows: list[Row], cache: Any, mask_BT: Tensor) -> None:
        self.rows, self.cache, self.mask_BT = rows, cache, mask_BT

    def keep(self, places: Sequence[int]) -> None:
        """Go on with these rows alone."""
        index = torch.tensor(places, device=self.mask_BT.device)
        self.rows = [self.rows[i] for i in places]
        self.cache.reorder_cache(index)
        self.mask_BT = self.mask_BT[index]

    @property
    def open(self) -> list[int]:
        return [i for i, row in enumerate(self.rows) if not row.job.future.done()]


class StockWriter:
    """What ``Writer`` does, by the model's own forward and cache."""

    def __init__(self, policy: Policy, *, max_rows: int, max_context: int | None) -> None:
        assert policy.general is not None, "other families have a writer of their own"
        self.counters = WriterCounters()
        self.version = policy.version
        self.notes: tuple[str, ...] = ()
        self._policy, self._general = policy, policy.general
        self._max_rows, self._max_context = max_rows, max_context or longest_context(policy)
        self._stop_ids = frozenset(policy.chat.stop_ids)
        self._stop_S = torch.tensor(policy.chat.stop_ids, device=policy.device)
        self._forbidden_F = torch.tensor(policy.chat.forbidden_ids, dtype=torch.int64, device=policy.device)
        self._batches: list[StockBatch] = []

    def tell_by(self, noted: Callable[[str], None]) -> None:
        """Nothing falls back later than at the start."""

    @property
    def _forks(self) -> bool:
        """Whether rows of a cache may be copied and left out: found by the check of the weights."""
        forks: bool = self._policy.chat.media_format.forks  # type: ignore[attr-defined]
        return forks

    @torch.no_grad()
    def tick(self, waiting: Sequence[Job]) -> int:
        """Advance every row, and admit waiting jobs in order while there is room. How many were taken."""
        self._check_version()
        self._drop_finished()
        for batch in self._batches:
            self._decode(batch)
        room = self._max_rows - sum(len(batch.rows) for batch in self._batches)
        joining = waiting[: max(0, room)] if len(self._batches) < MOST_BATCHES else waiting[:0]
        if joining:
            self._admit(joining)
        return len(joining)

    def written_so_far(self, thread: str) -> tuple[Sequence[int], Sequence[float]]:
        """The tokens of a response that is being written, and their log-probs; none before it has begun."""
        rows = (row for batch in self._batches for row in batch.rows)
        row = next((row for row in rows if row.job.request.thread == thread and not row.job.future.done()), None)
        return ((), ()) if row is None else (row.tokens, row.logprobs)

    def release(self, thread: str) -> None:
        """Nothing is kept of a thread between its turns."""

    def forget(self, version: int) -> None:
        """Drop everything made with other weights; no response may be open."""
        self._batches.clear()
        self.version = version

    def change_weights(self, version: int) -> None:
        """New weights are in place while responses are open: those go on with what is cached of them."""
        for batch in self._batches:
            for row in batch.rows:
                row.end_version(self.version)
        self.version = version

    def _check_version(self) -> None:
        if self._policy.version != self.version:
            if any(batch.open for batch in self._batches):
                raise EngineError("the weights changed in the middle of a response; finish the rollout before an update.")
            self.forget(self._policy.version)

    def _drop_finished(self) -> None:
        self._batches = [batch for batch in self._batches if batch.open]
        for batch in self._batches:
            if 2 * len(batch.open) <= len(batch.rows) and self._forks:
                batch.keep(batch.open)

    def _decode(self, batch: StockBatch) -> None:
        """Feed every row its last token, and draw the next of each."""
        self.counters.decode_steps += 1
        batch.mask_BT = torch.nn.functional.pad(batch.mask_BT, (0, 1), value=1)
        tokens = [row.tokens[-1] for row in batch.rows]
        positions = [row.position + len(row.tokens) - 1 for row in batch.rows]
        self._draw(batch, self._general.step(batch.cache, tokens, positions, batch.mask_BT).logits[:, -1])

    def _admit(self, jobs: Sequence[Job]) -> None:
        """Batches of the jobs whose contexts can be computed together; a request that cannot be laid out fails alone."""
        contexts: dict[Any, tuple[StockRow, list[Job]]] = {}
        for job in jobs:
            try:
                key = context_key(job.request.context)
                if key in contexts:
                    contexts[key][1].append(job)
                    continue
                row = self._general.row(self._policy.chat, job.request.context)
                self._general.refuse_unequal(self._policy.chat, row)
                if len(row) >= self._max_context:
                    raise EngineError(
                        f"the context of '{job.request.name}' has {len(row)} tokens and this engine holds "
                        f"{self._max_context}, response included. Shorten it, or raise the engine's max_context."
                    )
                contexts[key] = row, [job]
            except Exception as error:
                job.fail(error)
        entries = list(contexts.values())
        if not self._forks:
            entries = [(row, [job]) for row, several in entries for job in several]
        for places in self._general.batches(self._policy.chat, [row for row, _ in entries], PREFILL_TOKENS):
            self._prefill([entries[i] for i in places])

    def _prefill(self, entries: Sequence[tuple[StockRow, list[Job]]]) -> None:
        rows = [row for row, _ in entries]
        given = self._general.inputs(self._policy.chat, rows, "left")
        made = self._general.call({**given, "use_cache": True}, 1)
        self.counters.prefills += len(rows)
        self.counters.prefill_tokens += sum(map(len, rows))
        responses = [
            Row(job, (PrefixEntry("", 0, len(row), row.next_position),), self._max_context, self._stop_ids)
            for row, several in entries
            for job in several
        ]
        fork_B = torch.tensor([i for i, (_, several) in enumerate(entries) for _ in several])
        fork_B = sent_to(given["input_ids"].device, fork_B)
        if self._forks:
            made.past_key_values.reorder_cache(fork_B)
        batch = StockBatch(responses, made.past_key_values, given["attention_mask"][fork_B])
        self._batches.append(batch)
        self._draw(batch, made.logits[:, -1][fork_B])

    def _draw(self, batch: StockBatch, logits_BV: Tensor) -> None:
        """Draw the next token of every row, and end the responses that end."""
        keys = [[signed64(row.job.request.key), len(row.tokens)] for row in batch.rows]
        keys_B, counts_B = sent_to(logits_BV.device, torch.tensor(keys).T.contiguous())
        vocab_size = self._policy.vocab_size
        sampling = SamplingRows.of([row.sampling for row in batch.rows], self._forbidden_F, self._stop_S, vocab_size)
        drawn = sample(logits_BV, sampling, uniforms(keys_B, counts_B))
        packed_3B = torch.stack((drawn.tokens_B.double(), drawn.logprobs_B, drawn.sampled_logprobs_B))
        for row, token, logprob, sampled in zip(batch.rows, *packed_3B.tolist(), strict=True):
            if row.job.future.done():  # fed the same token at the same position until its batch is halved
                self.counters.dropped_tokens += 1
                continue
            finish = row.take(int(token), logprob, sampled, self._policy)
            self.counters.decoded_tokens += 1
            if isnan(logprob):
                row.job.fail(EngineError(f"the logits of '{row.job.request.name}' are not finite; are the weights?"))
            elif finish:
                row.job.future.set_result(row.response(self._policy, self.version, finish))


def longest_context(policy: Policy) -> int:
    """The longest context of a model. Where longer ones have other rotary frequencies (longrope), only up to there."""
    config = policy.model.config.get_text_config()
    longest: int = getattr(config, "max_position_embeddings", None) or 1 << 20
    rope = getattr(config, "rope_parameters", None) or {}
    if "longrope" in str(rope):
        longest = min(longest, getattr(config, "original_max_position_embeddings", None) or longest)
    return longest
