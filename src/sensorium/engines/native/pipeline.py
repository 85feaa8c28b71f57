"""The host half of decoding at full speed: steps are launched ahead, and what they drew is read some steps later.

    tick      0        1        2        3        4            (LAG = 2)
    launch    admit    step 1   step 2   step 3   step 4
    read                        admit    step 1   step 2

So the device always has work queued while the host looks at tokens, and nobody waits for a token. A response that ends at
step 1 is seen to end at tick 3; what its row drew in steps 2 and 3 is dropped and counted as such. Responses that reach
their budget are known to without looking. The lag is a number of steps, not of seconds: which rows are batched together
stays a function of the requests.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sensorium.engines.native.admission import AHEAD_TOKENS, joining, prompts_ahead
from sensorium.engines.native.decode_state import RowLayout
from sensorium.engines.native.graphs import DecodeRunner, MatchedPrefill, bucket_of
from sensorium.engines.native.key_values import PAGE, PagedPrefill, PagePool, StateSlots
from sensorium.engines.native.prefix_cache import PrefixEntry, SharedContext, StoredKV, prefill
from sensorium.engines.native.response_rows import Row
from sensorium.engines.native.sampler import SamplingRows, sample, signed64, uniforms
from sensorium.engines.native.writer import RESERVE_AHEAD, Writer
from sensorium.engines.protocol import FinishReason, Response
from sensorium.engines.scheduler import Job
from sensorium.kernels.matched_ops import MatchedOps
from sensorium.models.delta_net import DeltaState
from sensorium.models.policy import Policy
from sensorium.models.segment_layout import sent_to
from sensorium.vocabulary.errors import EngineError

LAG = 2


class PagedRow(Row):
    """A row whose keys and values are in pages, and its states of delta nets in a slot.

    ``launched`` tokens were asked of the device, the first of them at its prefill; ``tokens`` are those read so far.
    ``group`` is the same object for rows that share the first ``shared_pages`` pages. ``context_states`` are the states
    after its context, if the response may end where the device does not see it.
    """

    def __init__(
        self,
        job: Job,
        prefix: tuple[PrefixEntry, ...],
        limit: int,
        stop_ids: frozenset[int],
        group: object,
        pages: list[int],
    ) -> None:
        super().__init__(job, prefix, limit, stop_ids)
        self.group = group
        self.pages = pages
        self.shared_pages = self.length // PAGE
        self.slot = 0
        self.context_states: tuple[DeltaState, ...] = ()
        self.launched = 1
        self.source = 0

    @property
    def wants_more(self) -> bool:
        """Whether the response may still get tokens."""
        return self.launched < self.budget and not self.job.future.done()

    def pages_needed(self) -> int:
        """Pages that the next steps take."""
        return -(-(self.length + min(self.budget, self.launched + RESERVE_AHEAD)) // PAGE)

    def pages_at_most(self) -> int:
        """Pages that the whole response may take."""
        return -(-(self.length + self.budget) // PAGE)

    @property
    def room(self) -> int:
        """Steps until it has no page to write on."""
        return len(self.pages) * PAGE - (self.length + self.launched - 1)

    def layout(self) -> RowLayout:
        """The row's data for the device."""
        return RowLayout(
            source=self.source,
            position=self.position + self.launched - 1,
            length=self.length + self.launched - 1,
            count=self.launched,
            key=self.job.request.key,
            sampling=self.sampling,
            pages=self.pages,
            shared_pages=self.shared_pages,
            group=self.group,
            slot=self.slot,
            end=self.budget,
        )

    def ended_on_device(self, finish: FinishReason) -> bool:
        """Whether the device saw the response end, and left its states as they were then. It does not see stop strings."""
        return finish == "length" or self.tokens[-1] in self._stop_ids


@dataclass
class _Launch:
    """A step under way: the rows it draws for (None: a place whose draw nobody wants) and where the host will find it."""

    rows: list[PagedRow | None]
    host_3B: Tensor
    done: Any
    routes_BLK: Tensor | None = None  # of the tokens that the step fed

    def read(self) -> list[list[float]]:
        """Tokens, log-probs and sampled log-probs; waits until they are there."""
        if self.done is not None:
            self.done.synchronize()
        return self.host_3B[:, : len(self.rows)].tolist()


class _PrefillRows:
    """The rows of a prefill as ``prefill`` takes them."""

    def __init__(self, pool: PagePool, rows: Sequence["PagedRow"], matched: MatchedOps | None) -> None:
        self._pool, self._matched = pool, matched
        self._pages, self._slots = [row.pages for row in rows], [row.slot for row in rows]
        self.device = pool.block.device

    def put(self, row: int, stored: Tensor, length: int, states: Sequence[DeltaState]) -> None:
        """Copy stored keys, values and states into a row."""
        self._pool.put(self._pages[row], stored, length)
        self._pool.states.put(self._slots[row], states)

    def attention(self, first: int, held: Sequence[int], new: Sequence[int]) -> PagedPrefill:
        """Attention of new tokens of rows from ``first`` on."""
        pages = self._pages[first : first + len(held)]
        if self._matched is not None:
            return MatchedPrefill(self._pool, pages, held, new, self._matched)
        return PagedPrefill(self._pool, pages, held, new, self._slots[first : first + len(held)])


class PagedWriter(Writer):
    """The writer with paged keys and values and steps launched ahead; for CUDA, and on CPU to test the same logic."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int,
        max_context: int | None,
        keep_bytes: int | None,
        record: bool,
        compile: bool,
        routes: bool = False,
        quantization: str = "none",
    ) -> None:
        given: Any = {"max_rows": max_rows, "max_context": max_context, "keep_bytes": keep_bytes, "routes": routes}
        super().__init__(policy, record=False, **given)
        block = self._cache.block
        states = StateSlots(self._cache.states.windows, self._cache.states.states)
        self._pool = PagePool(
            block.shape[0], block.shape[3], block.shape[5], block.dtype, block.device, self._cache.places, states
        )
        self._runner = DecodeRunner(
            policy, self._pool, self._forbidden_F, self._stop_S, max_rows,
            fast=record, max_context=self._max_context, compile=compile, recorder=self._recorder,
            quantization=quantization,
        )  # fmt: skip
        self._rows: list[PagedRow] = []  # type: ignore[assignment]
        self._laid: list[PagedRow] = []  # the batch as the device has it
        self._latest_N = self._runner.latest_B
        self._stale = True
        self._under_way: list[_Launch] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What is done the slow way, and why."""
        return tuple(self._runner.notes)

    def tell_by(self, noted: Callable[[str], None]) -> None:
        """Report slow fallbacks by this callback instead of as warnings."""
        super().tell_by(noted)
        self._runner.noted = noted

    @torch.no_grad()
    def tick(self, waiting: Sequence[Job]) -> int:
        """Launch a step, admit waiting jobs in order while there is room, read what an earlier step drew."""
        self._check_version()
        self._settle()
        room = self._max_rows - len(self._rows)
        busy = self._launch()
        count = joining(waiting, room, self._max_rows, idle=not self._rows)
        if count:
            busy |= self._join(waiting[:count], waiting[count:])
        while len(self._under_way) > (LAG if busy else 0):
            self._read(self._under_way.pop(0))
        return count

    def forget(self, version: int) -> None:
        """Drop everything made with other weights; no response may be open."""
        for row in self._rows:
            self._give_back(row)
        super().forget(version)
        self._under_way.clear()
        self._laid, self._stale = [], True
        self._runner.refresh()

    def change_weights(self, version: int) -> None:
        """As ``forget``, with responses open; what steps that are under way draw is of the earlier weights."""
        while self._under_way:
            self._read(self._under_way.pop(0))
        super().change_weights(version)
        self._stale = True
        self._runner.refresh()

    def _settle(self) -> None:
        """Rows whose response ended leave: what may be continued is set aside, their pages are free."""
        gone = [row for row in self._rows if row.job.future.done()]
        for row in gone:
            future = row.job.future
            self._jobs.pop(row.job.request.thread, None)
            if row.job.keep and not future.cancelled() and future.exception() is None:
                self._prefix_cache.put(row.job.request.thread, self._stored(row, future.result()))
            self._give_back(row)
        if gone:
            # The batch stays as the device has it until it fits a smaller bucket: what rows that left still draw is
            # dropped, and their pages are given to nobody before the batch is laid out anew.
            self._rows = [row for row in self._rows if not row.job.future.done()]

    def _stored(self, row: PagedRow, response: Response) -> StoredKV:
        """The thread after a response. Where steps took its states past the end, only the context can be continued."""
        if self._pool.states and not row.ended_on_device(response.finish):
            return StoredKV(row.prefix, row.length, self._pool.take(row.pages, row.length), states=row.context_states)
        prefix = row.prefix_after(response.segment.key)
        block, states = self._pool.take(row.pages, row.cached), self._pool.states.take(row.slot)
        return StoredKV(prefix, row.cached, block, states=states)

    def _give_back(self, row: PagedRow) -> None:
        """A row that leaves, or only had its prompt computed, gives back its pages and its slot."""
        self._pool.release(row.pages)
        self._pool.states.release(row.slot)

    # Joining.

    def _join(self, jobs: Sequence[Job], waiting: Sequence[Job]) -> bool:
        """Prefill new rows, members of a group side by side, and draw the first token of each. Whether there are any.

        Where that takes a pass, the prompts of those who still wait are part of it; they are set aside.
        """
        new = self._entries(jobs)
        keys = {entry.key for entry in new}
        ahead = self._ahead(waiting, keys) if any(entry.suffix is not None for entry in new) else []
        entries, features = self._with_features([*new, *ahead])
        if not entries:
            return False
        groups = [self._group(entry) for entry in entries]
        self._pool.reserve(*_pages_of(groups, self._rows, waiting, self._max_rows, self._max_context))
        now, all_rows = sum(map(len, groups)), min(self._max_rows, len(self._rows) + len(jobs) + len(waiting))
        self._pool.states.reserve(max(now, all_rows - len(self._rows)))
        for group in groups:
            group[0].pages = self._pool.allocate(group[0].pages_needed())
            group[0].slot = self._pool.states.allocate()
        laid = _PrefillRows(self._pool, [group[0] for group in groups], self._policy.matched)
        hidden_NH = prefill(self._policy, laid, entries, 0, features, self.counters, self._recorder)
        self._store_paged_prompts(entries, groups, hidden_NH)
        for entry, group in zip(entries, groups, strict=True):
            for row in group:
                row.context_routes = entry.routes
        for entry, group in zip(entries, groups, strict=True):
            if entry.key not in keys:
                self._give_back(group[0])
        joined = [i for i, entry in enumerate(entries) if entry.key in keys]
        if not joined:
            return False
        self._follow([groups[i] for i in joined])
        owners = [i for i in joined for _ in groups[i]]
        rows = [row for i in joined for row in groups[i]]
        logits_NV = self._policy.logits(hidden_NH)
        self._first_draw(rows, logits_NV[sent_to(logits_NV.device, torch.tensor(owners))])
        self._rows += rows
        self._jobs |= {row.job.request.thread: row.job for row in rows}
        self._stale = True
        return True

    def _ahead(self, waiting: Sequence[Job], known: Collection[object]) -> list[SharedContext]:
        """Prompts of waiting jobs that are neither known nor stored, as many as may be computed before their time."""
        room, states = AHEAD_TOKENS, 0
        if self._prefix_cache.bound is not None:
            a_token = max(1, self._pool.block[:, :, :1].nbytes // PAGE)
            room = min(room, (self._prefix_cache.bound - self._prefix_cache.held) // a_token)
            states = self._pool.states.row_bytes // a_token  # of a prompt take as much as so many tokens
        found: list[SharedContext] = []
        for key, job in prompts_ahead(waiting).items():
            if key in known or key in self._prefix_cache:
                continue
            for entry in self._entries([job]):
                room -= entry.prefix[-1].length + states
                if room < 0:
                    return found
                found.append(entry)
        return found

    def _group(self, entry: SharedContext) -> list[PagedRow]:
        given = entry.prefix, self._max_context, self._stop_ids, entry
        return [PagedRow(job, *given, []) for job in entry.jobs]

    def _follow(self, groups: Sequence[Sequence[PagedRow]]) -> None:
        """Members after the first share the full pages of the prompt and copy the one it ends in, and its states."""
        sources: list[int] = []
        targets: list[int] = []
        slots: list[tuple[int, int]] = []
        for leader, *others in groups:
            shared = leader.pages[: leader.shared_pages]
            for row in others:
                self._pool.share(shared)
                own = self._pool.allocate(row.pages_needed() - len(shared))
                row.pages = [*shared, *own]
                row.slot = self._pool.states.allocate()
                slots.append((leader.slot, row.slot))
                if row.length % PAGE:
                    sources.append(leader.pages[len(shared)])
                    targets.append(own[0])
            if any(row.sampling.stop for row in (leader, *others)):
                kept = self._pool.states.take(leader.slot)
                for row in (leader, *others):
                    row.context_states = kept
        self._pool.copy(sources, targets)
        self._pool.states.copy([leader for leader, _ in slots], [own for _, own in slots])

    def _store_paged_prompts(
        self, entries: Sequence[SharedContext], groups: Sequence[Sequence[PagedRow]], hidden_NH: Tensor
    ) -> None:
        """Store the KV of prompts that later requests may share, with the hidden state of their last token."""
        for i, (entry, group) in enumerate(zip(entries, groups, strict=True)):
            if entry.shareable and entry.suffix is not None:
                block, states = self._pool.take(group[0].pages, group[0].length), self._pool.states.take(group[0].slot)
                self._prefix_cache.put(entry.key, entry.whole(block, hidden_NH[i].clone(), states))

    def _first_draw(self, rows: Sequence[PagedRow], logits_BV: Tensor) -> None:
        device = logits_BV.device
        sampling = SamplingRows.of([row.sampling for row in rows], self._forbidden_F, self._stop_S, self._policy.vocab_size)
        keys_B = sent_to(device, torch.tensor([signed64(row.job.request.key) for row in rows]))
        counts_B = torch.zeros_like(keys_B)
        drawn = sample(logits_BV, sampling, uniforms(keys_B, counts_B))
        for i, row in enumerate(rows):
            row.source = self._latest_N.shape[0] + i
        self._latest_N = torch.cat((self._latest_N, drawn.tokens_B))
        self._under_way.append(
            _sent(list(rows), torch.stack((drawn.tokens_B.double(), drawn.logprobs_B, drawn.sampled_logprobs_B)))
        )

    # Steps.

    def _launch(self) -> bool:
        """One more step of every row that wants one, if any does."""
        wanting = sum(row.wants_more for row in self._rows)
        if not wanting:
            return False
        shrinks = bucket_of(wanting) < bucket_of(len(self._laid))
        if self._stale or shrinks or any(row.room <= 0 for row in self._laid if row.wants_more):
            self._lay_out()
        packed_3B = self._runner.step()
        self.counters.decode_steps += 1
        self.counters.captured = self._runner.captured
        rows: list[PagedRow | None] = []
        for row in self._laid:
            rows.append(row if row.wants_more else None)
            row.launched += row.wants_more
        self._under_way.append(_sent(rows, packed_3B, self._runner.routes_BLK))
        return True

    def _lay_out(self) -> None:
        """Tell the device who is in the batch, with pages for the next steps."""
        self._laid = [row for row in self._rows if row.wants_more]
        for row in self._laid:
            row.pages += self._pool.allocate(max(0, row.pages_needed() - len(row.pages)))
        self._runner.lay_out([row.layout() for row in self._laid], self._latest_N)
        self._latest_N = self._runner.latest_B
        for i, row in enumerate(self._laid):
            row.source = i
        self._stale = False

    def _read(self, launch: _Launch) -> None:
        """Append what a step drew to its rows; end the responses that end. What was drawn past an end is dropped."""
        for i, (row, token, logprob, sampled) in enumerate(zip(launch.rows, *launch.read(), strict=True)):
            if row is None:
                continue
            if row.job.future.done():
                self.counters.dropped_tokens += 1
                continue
            if launch.routes_BLK is not None:
                row.own_routes.append(launch.routes_BLK[i].numpy().tobytes())
            finish = row.take(int(token), logprob, sampled, self._policy)
            self.counters.decoded_tokens += 1
            if logprob != logprob:
                row.job.fail(EngineError(f"the logits of '{row.job.request.name}' are not finite; are the weights?"))
            elif finish:
                self._finish(row, finish)


def _pages_of(
    groups: Sequence[Sequence[PagedRow]], others: Sequence[PagedRow], waiting: Sequence[Job], max_rows: int, limit: int
) -> tuple[int, int]:
    """Pages that new groups take now, and what all take at most until no response is left, those that wait included.

    Full pages of a prompt, which a group shares, count once. Of jobs that wait only the budget is known: their contexts
    count as the longest of the groups. No thread is longer than ``limit``.
    """
    rows = [row for group in groups for row in group]
    shared = sum((len(group) - 1) * group[0].shared_pages for group in groups)
    longest = max(row.length for row in rows)
    at_most = [row.pages_at_most() for row in (*rows, *others)]
    at_most += [-(-min(limit, longest + job.request.sampling.max_new_tokens) // PAGE) for job in waiting]
    later = sum(sorted(at_most, reverse=True)[:max_rows]) - sum(len(row.pages) for row in (*rows, *others))
    return sum(row.pages_needed() for row in rows) - shared, later - shared


def _sent(rows: list[PagedRow | None] | list[PagedRow], packed_3B: Tensor, routes_BLK: Tensor | None = None) -> _Launch:
    """On its way to the host, without waiting; the buffers may be overwritten by later steps right away."""
    routes = None if routes_BLK is None else routes_BLK[: len(rows)]
    if packed_3B.device.type != "cuda":
        return _Launch(list(rows), packed_3B.clone(), None, None if routes is None else routes.clone())
    host_3B, host_BLK = _on_host(packed_3B), None if routes is None else _on_host(routes)
    done = torch.cuda.Event()
    done.record()
    return _Launch(list(rows), host_3B, done, host_BLK)


def _on_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
