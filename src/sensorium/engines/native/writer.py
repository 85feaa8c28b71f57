"""The writer of the native engine: in a tick waiting requests join the batch in their order, and every row gets a token.

It holds the rows and their cache, and the prefix cache between turns. ``pipeline.PagedWriter`` is a writer over pages that
launches steps ahead, for GPUs; ``admission.py`` decides who joins its batch.

Invariants. The first rows of the cache are the responses being written, densely; new ones join at the end, gaps are
closed from the end. What a row draws depends on its context and key alone. Rows whose response ended stay in place
until the next tick, by when their episode has released the thread or may come back to it. Weights never change under
a row.
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from sensorium.engines.native.key_values import KVCache, RowStates, layer_places
from sensorium.engines.native.prefix_cache import (
    FeatureCache,
    PrefixCache,
    RouteRecorder,
    SharedContext,
    StoredKV,
    check_features,
    context_key,
    prefill,
)
from sensorium.engines.native.response_rows import Batch, Row
from sensorium.engines.native.steps import Steps
from sensorium.engines.protocol import FinishReason
from sensorium.engines.scheduler import Job
from sensorium.models.encoding import spare_bytes
from sensorium.models.policy import Policy
from sensorium.models.segment_layout import Features
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import EngineError

RESERVE_AHEAD = 256  # tokens of a response that the cache makes room for at once


class _PlainProducts:
    """Matrix products without oneDNN: for the few rows of a decode step its call costs more than the product does.

    torch keeps the choice for the whole process. So those who decode at the same time in several threads are counted: the
    first turns oneDNN off, and the last puts back what the first found.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._enabled = True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._enabled = bool(torch.backends.mkldnn.enabled)
                torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.mkldnn.enabled = self._enabled  # type: ignore[assignment]


plain_products = _PlainProducts()


@dataclass
class WriterCounters:
    """What was computed. A prefill is a context from its beginning, an extension one continued after cached tokens."""

    prefills: int = 0
    prefill_tokens: int = 0
    extensions: int = 0
    extension_tokens: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    dropped_tokens: int = 0  # drawn past the end of a response, by steps launched ahead
    captured: int = 0  # CUDA graphs
    features: int = 0


class Writer:
    """The synchronous half of the native engine: rows, their cache, and the prefix cache between turns."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int,
        max_context: int | None,
        keep_bytes: int | None,
        record: bool,
        routes: bool = False,
    ) -> None:
        config = policy.model.config.get_text_config()
        keep_bytes = spare_bytes(policy.device) if keep_bytes is None else keep_bytes
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.counters = WriterCounters()
        self._policy = policy
        self._max_rows = max_rows
        self._max_context = max_context or config.max_position_embeddings
        model = policy.adapter.language_model
        states = RowStates.of(model, policy.dtype, policy.device)
        layers = len(model.layers) - len(states.windows)
        self._cache = KVCache(
            layers, config.num_key_value_heads, head_dim, policy.dtype, policy.device, layer_places(model), states
        )
        self._features = FeatureCache(policy, keep_bytes)
        self._prefix_cache = PrefixCache(keep_bytes)
        self._steps = Steps(policy, record)
        self._recorder = RouteRecorder(policy) if routes else None
        self._on_cpu = policy.device.type == "cpu"
        self.version = policy.version
        self._stop_ids = frozenset(policy.chat.stop_ids)
        self._stop_S = torch.tensor(policy.chat.stop_ids, device=policy.device)
        self._forbidden_F = torch.tensor(policy.chat.forbidden_ids, dtype=torch.int64, device=policy.device)
        self._rows: list[Row] = []
        self._jobs: dict[str, Job] = {}  # of the rows, by thread
        self._batch: Batch | None = None

    def tell_by(self, noted: Callable[[str], None]) -> None:
        """Report slow fallbacks by this callback instead of as warnings."""
        self._steps.noted = noted

    @property
    def notes(self) -> tuple[str, ...]:
        """What is done the slow way, and why."""
        return ()

    @torch.no_grad()
    def tick(self, waiting: Sequence[Job]) -> int:
        """Admit waiting jobs in order while there is room, and advance every row. How many were taken."""
        self._check_version()
        self._settle()
        room = max(0, self._max_rows - len(self._rows))
        joining = waiting[:room]
        with plain_products if self._on_cpu else nullcontext():
            logits = [self._decode()] if self._rows else []
            if not joining:
                if logits:
                    self._draw(logits[0])
                return 0
        joined, first_NV = self._admit(joining)
        if joined:
            self._rows += joined
            self._jobs |= {row.job.request.thread: row.job for row in joined}
            self._batch = None
            logits.append(first_NV)
        if self._rows:
            self._draw(torch.cat(logits) if len(logits) > 1 else logits[0])
        return len(joining)

    def written_so_far(self, thread: str) -> tuple[Sequence[int], Sequence[float]]:
        """The tokens of a response that is being written, and their log-probs; none before it has begun."""
        row = next((row for row in self._rows if row.job.request.thread == thread), None)
        return ((), ()) if row is None else (row.tokens, row.logprobs)

    def release(self, thread: str) -> None:
        """Forget the keys and values of a thread, or do not set them aside when its response ends."""
        self._prefix_cache.pop(thread)
        if thread in self._jobs:
            self._jobs[thread].keep = False

    def forget(self, version: int) -> None:
        """Drop everything made with other weights; no response may be open."""
        self._prefix_cache.clear()
        self._features.clear()
        self._steps.refresh()
        self._rows.clear()
        self._jobs.clear()
        self._batch = None
        self.version = version

    def change_weights(self, version: int) -> None:
        """New weights are in place while responses are open: those, and threads between turns, keep their keys and values.

        So a push computes nothing again, and log-probs are always of what was sampled from. What other episodes may share,
        prompts and features, is dropped.
        """
        for row in self._rows:
            row.end_version(self.version)
        for key in [key for key, stored in self._prefix_cache.items() if stored.hidden_H is not None]:
            self._prefix_cache.pop(key)
        self._features.clear()
        self._steps.refresh()
        self.version = version

    def _check_version(self) -> None:
        if self._policy.version != self.version:
            if any(not row.job.future.done() for row in self._rows):
                raise EngineError("the weights changed in the middle of a response; finish the rollout before an update.")
            self.forget(self._policy.version)

    def _settle(self) -> None:
        """Rows whose response ended leave the batch: set aside what may be continued, close the gaps from the end."""
        gone = [i for i, row in enumerate(self._rows) if row.job.future.done()]
        if not gone:
            return
        for i in gone:
            self._set_aside(i)
        left = len(self._rows) - len(gone)
        gaps = [i for i in gone if i < left]
        movers = [i for i in range(left, len(self._rows)) if not self._rows[i].job.future.done()]
        self._cache.copy(movers, gaps, max((self._rows[i].cached for i in movers), default=0))
        for source, target in zip(movers, gaps, strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[left:]
        self._batch = None

    def _set_aside(self, i: int) -> None:
        row = self._rows[i]
        future = row.job.future
        self._jobs.pop(row.job.request.thread, None)
        if row.job.keep and not future.cancelled() and future.exception() is None:
            prefix = row.prefix_after(future.result().segment.key)
            stored = StoredKV(prefix, row.cached, self._cache.take(i, row.cached), states=self._cache.states.take(i))
            self._prefix_cache.put(row.job.request.thread, stored)

    # Joining.

    def _admit(self, jobs: Sequence[Job]) -> tuple[list[Row], Tensor]:
        """New rows behind the others, leaders of distinct contexts first, and the logits of their first tokens."""
        entries, features = self._with_features(self._entries(jobs))
        if not entries:
            return [], self._forbidden_F
        owners = [(job, entry) for entry in entries for job in entry.jobs[:1]]
        owners += [(job, entry) for entry in entries for job in entry.jobs[1:]]
        rows = [Row(job, entry.prefix, self._max_context, self._stop_ids) for job, entry in owners]
        first = len(self._rows)
        self._reserve([*self._rows, *rows])
        hidden_NH = prefill(self._policy, self._cache, entries, first, features, self.counters, self._recorder)
        self._store_prompts(entries, first, hidden_NH)
        for row, (_, entry) in zip(rows, owners, strict=True):
            row.context_routes = entry.routes
        logits_NV = self._policy.logits(hidden_NH)
        leaders = [i for i, entry in enumerate(entries) for _ in entry.jobs[1:]]
        if leaders:
            followers = range(first + len(entries), first + len(rows))
            self._cache.copy([first + i for i in leaders], followers, max(row.length for row in rows))
            logits_NV = logits_NV[torch.tensor([*range(len(entries)), *leaders], device=logits_NV.device)]
        return rows, logits_NV

    def _entries(self, jobs: Sequence[Job]) -> list[SharedContext]:
        """One entry per distinct context; a request that cannot be planned fails alone."""
        entries: dict[object, SharedContext] = {}
        for job in jobs:
            request = job.request
            try:
                key = context_key(request.context)
                if key in entries:
                    entries[key].jobs.append(job)
                    continue
                entry = self._planned(job, key)
                if entry.prefix[-1].length >= self._max_context:
                    raise EngineError(
                        f"the context of '{request.name}' has {entry.prefix[-1].length} tokens and this engine holds "
                        f"{self._max_context}, response included. Shorten it, or raise the engine's max_context."
                    )
                entries[key] = entry
            except Exception as error:
                job.fail(error)
        return list(entries.values())

    def _planned(self, job: Job, key: Hashable) -> SharedContext:
        """What the job's context needs, given what is stored of its thread or of its prompt."""
        own = self._prefix_cache.pop(job.request.thread)
        entry = SharedContext.plan(self._policy, job, key, own or self._prefix_cache.get(key))
        if not self._cache.states or entry.stored is not None:
            return entry
        # Of a thread that goes another way than its state, the prompt may be stored.
        context = job.request.context
        keys = (context_key(context[:count]) for count in range(len(context), 0, -1))
        stored = next((found for one in keys if (found := self._prefix_cache.get(one)) is not None), None)
        return entry if stored is None else SharedContext.plan(self._policy, job, key, stored)

    def _with_features(self, entries: Sequence[SharedContext]) -> tuple[list[SharedContext], Mapping[Media, Features]]:
        """Entries whose media have features that fit, by work; the others fail. One tower pass for what is new."""
        features, errors = self._features.get([media for entry in entries for media in entry.media])
        self.counters.features = self._features.encoded
        good = []
        for entry in entries:
            try:
                check_features(entry.suffix, features, errors)
                good.append(entry)
            except Exception as error:
                for job in entry.jobs:
                    job.fail(error)
        return sorted(good, key=SharedContext.work), features

    def _store_prompts(self, entries: Sequence[SharedContext], first: int, hidden_NH: Tensor) -> None:
        """Store the KV of prompts that later requests may share, with the hidden state of their last token."""
        for i, entry in enumerate(entries):
            if entry.shareable and entry.suffix is not None:
                length = entry.prefix[-1].length
                block, states = self._cache.take(first + i, length), self._cache.states.take(first + i)
                self._prefix_cache.put(entry.key, entry.whole(block, hidden_NH[i].clone(), states))

    # Feeding and drawing.

    def _decode(self) -> Tensor:
        """Feed every row its last token; the logits of the next."""
        self.counters.decode_steps += 1
        batch = self._laid_out()
        logits_BV = self._steps.feed(batch)
        if self._recorder is not None:
            for row, ids_LK in zip(self._rows, batch.routes_BLK.numpy(), strict=True):
                row.own_routes.append(ids_LK.tobytes())
        return logits_BV

    def _draw(self, logits_BV: Tensor) -> None:
        """Draw the next token of every row, and end the responses that end."""
        drawn_3B = self._steps.draw(self._laid_out(), logits_BV)
        for row, token, logprob, sampled in zip(self._rows, *drawn_3B.tolist(), strict=True):
            finish = row.take(int(token), logprob, sampled, self._policy)
            self.counters.decoded_tokens += 1
            if isnan(logprob):
                row.job.fail(EngineError(f"the logits of '{row.job.request.name}' are not finite; are the weights?"))
            elif finish:
                self._finish(row, finish)

    def _finish(self, row: Row, finish: FinishReason) -> None:
        if not row.job.future.done():
            row.job.future.set_result(row.response(self._policy, self.version, finish))

    def _laid_out(self) -> Batch:
        """The rows' tensors, with room in the cache for one more token of each."""
        if self._batch is None or self._batch.reach >= self._cache.capacity:
            self._reserve(self._rows)
            routes = None if self._recorder is None else self._recorder.buffer(len(self._rows))
            given = self._forbidden_F, self._stop_S, self._policy.vocab_size, routes
            self._batch = Batch(self._rows, self._cache, *given)
        return self._batch

    def _reserve(self, rows: Sequence[Row]) -> None:
        """Reserve space for the rows and the next tokens of each. A reallocated block needs a new batch."""
        length = max(row.length + min(row.budget, len(row.tokens) + RESERVE_AHEAD) for row in rows)
        if self._cache.reserve(len(rows), length + 1):
            self._batch = None
