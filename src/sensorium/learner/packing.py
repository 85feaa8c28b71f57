"""The threads of a group as a tree of segments: what is shared stands once.

Invariants: a node is a segment in one context (its path from the root); a sampled segment is trained in exactly one node,
at the place where it was generated; a value is read in exactly one node; nodes that none of these needs are left out.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sensorium.kernels.matched_ops import MatchedOps
from sensorium.learner.credited_episode import CreditedEpisode, Groups, LayOut, Positions
from sensorium.learner.sequence_parallel import SharedAttention, SlotShare, TokenGroup, share_tokens, slot_share
from sensorium.learner.token_runs import TokenRun, arrange, arrange_levels
from sensorium.learner.tree_attention import LevelAttention, MatchedTree, TreeAttention
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.experts import UNKNOWN
from sensorium.models.general_path import StockRow, StockRows
from sensorium.models.policy import Policy
from sensorium.models.segment_layout import Slot
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Episode, Routes, Segment


@dataclass(eq=False)
class Node:
    """A segment, expanded, after its ancestors. ``positions`` [3, T] or [T] continue from theirs, up to ``end``.

    ``first`` is the place of its first token among the update's sampled tokens, or -1 where it is context. ``value`` is the
    place of the value before its first token among the update's values, ``after`` of the one after its last token, or -1.
    ``routes`` [T, layers, experts of a token] are those that the engine recorded, ``UNKNOWN`` where it did not.
    """

    key: str
    ids_T: np.ndarray
    positions: np.ndarray
    end: int
    slots: tuple[Slot, ...]
    parent: "Node | None"
    first: int = -1
    value: int = -1
    after: int = -1
    routes: np.ndarray | None = None
    children: dict[str, "Node"] = field(default_factory=dict)

    @property
    def asked(self) -> bool:
        """True if something is read here: log-probs of its tokens, or values."""
        return self.first >= 0 or self.value >= 0

    @property
    def unread(self) -> int:
        """How many tokens at its end nobody reads, if nothing follows it."""
        return 0 if self.after >= 0 else 1


@dataclass(frozen=True)
class Part:
    """Nodes of a tree that are computed together, depth first, and which of them are trained (or valued) here.

    ``fresh``: those that no earlier part computes. ``tokens``: how many are computed; nobody reads what follows a leaf's
    last token, so that one is not.
    """

    nodes: tuple[Node, ...]
    trained: frozenset[Node]
    fresh: frozenset[Node]
    tokens: int


def grow(samples: Sequence[CreditedEpisode], first: int, lay_out: LayOut, *, replay: bool = False) -> list[Node]:
    """The roots of a group's tree; the sampled tokens are numbered from ``first`` on, in order of episodes and turns.

    ``replay``: nodes get the experts that the engine sent their tokens to, where it recorded them.
    """
    roots: dict[str, Node] = {}
    for sample in samples:
        episode = sample.episode
        homes = sum(sum(thread.home) for thread in episode.threads)
        assert homes == len(episode.turns), f"{episode.id}: {len(episode.turns)} turns with {homes} home segments"
        for turn in episode.turns:
            thread = episode.threads[turn.thread]
            assert thread.home[turn.segment], f"{episode.id}: turn {turn.index} is not at home where it says"
            if not turn.response.tokens:
                continue
            node = _walk(roots, thread.segments[: turn.segment + 1], lay_out)
            assert node.first < 0, f"{episode.id}: turn {turn.index} is trained twice"
            node.first = first
            first += len(turn.response.tokens)
            if replay and turn.response.routes is not None:
                _lay_routes(node, turn.response.routes)
    return list(roots.values())


def _lay_routes(last: Node, routes: Routes) -> None:
    """Give the nodes from the root to ``last`` the routes of a thread's tokens. What a node has already stays."""
    path = [last]
    while (parent := path[-1].parent) is not None:
        path.append(parent)
    kind = np.uint8 if routes.width == 1 else np.int16
    rows = np.frombuffer(routes.context + routes.own, kind).reshape(-1, routes.layers, routes.top_k)
    begin = -routes.start  # where a node's first token is among the rows
    for node in reversed(path):
        length = len(node.ids_T)
        found = rows[max(0, begin) : max(0, begin + length)]
        if len(found) and (node.routes is None or (node.routes[:, 0, 0] == UNKNOWN).any()):
            if node.routes is None:
                node.routes = np.full((length, *rows.shape[1:]), UNKNOWN, dtype=np.int16)
            part = node.routes[max(0, -begin) :][: len(found)]
            np.copyto(part, found, where=part == UNKNOWN)
        begin += length


def ask_values(
    roots: Sequence[Node],
    samples: Sequence[CreditedEpisode],
    positions: Positions,
    sequence: int,
    place: int,
    lay_out: LayOut,
) -> int:
    """Mark where a group's values are read, from episode ``sequence`` and value ``place`` on; returns the next place."""
    known = {node.key: node for node in roots}
    for s, sample in enumerate(samples, start=sequence):
        episode = sample.episode
        last = None
        for stretch in positions.stretches[s]:
            if stretch.length:
                node = _walk(known, episode.threads[stretch.thread].segments[: stretch.segment + 1], lay_out)
                assert node.value < 0, f"{episode.id}: turn {stretch.turn} is valued twice"
                node.value = place
                place += stretch.length
                last = node
        if positions.truncated[s] and last is not None:
            last.after = len(positions) + s
    return place


def _walk(roots: dict[str, Node], segments: Sequence[Segment], lay_out: LayOut) -> Node:
    parent: Node | None = None
    children = roots
    for segment in segments:
        node = children.get(segment.key)
        if node is None:
            node = children[segment.key] = _node(segment, parent, lay_out)
        parent, children = node, node.children
    assert parent is not None, "a thread has segments"
    return parent


def _node(segment: Segment, parent: Node | None, lay_out: LayOut) -> Node:
    start = 0 if parent is None else parent.end
    if segment.author == "model":  # text, one position a token: no need to lay it out
        assert not segment.media, "a model writes no media"
        end = start + len(segment.tokens)
        return Node(segment.key, np.array(segment.tokens, dtype=np.int64), np.arange(start, end), end, (), parent)
    layout = lay_out(segment)
    positions_3T = layout.positions_3T.numpy() + start
    return Node(segment.key, layout.ids_T.numpy(), positions_3T, start + layout.advance, layout.slots, parent)


def split(roots: Sequence[Node], limit: int) -> list[Part]:
    """Cut trees into parts of at most ``limit`` tokens, whole branches at a time; a longer branch is a part of its own.

    A node that several parts need is computed in each, and trained in the first.
    """
    parts: list[Part] = []
    done: set[Node] = set()
    seen: set[Node] = set()
    current: dict[Node, None] = {}
    size = 0
    for path in _branches(roots):
        added = sum(len(node.ids_T) for node in path if node not in current) - path[-1].unread
        if current and size + added > limit:
            parts.append(_close(current, done, seen, size))
            current, size, added = {}, 0, sum(len(node.ids_T) for node in path) - path[-1].unread
        current.update(dict.fromkeys(path))
        size += added
    if current:
        parts.append(_close(current, done, seen, size))
    return parts


def _close(nodes: dict[Node, None], done: set[Node], seen: set[Node], size: int) -> Part:
    trained = frozenset(node for node in nodes if node.asked and node not in done)
    fresh = frozenset(node for node in nodes if node not in seen)
    done |= trained
    seen |= fresh
    return Part(tuple(nodes), trained, fresh, size)


def _branches(roots: Sequence[Node]) -> list[list[Node]]:
    """Paths from root to leaf, depth first."""
    found: list[list[Node]] = []
    stack = [[root] for root in reversed(roots)]
    while stack:
        path = stack.pop()
        children = path[-1].children.values()
        if children:
            stack += [[*path, child] for child in reversed(children)]
        else:
            found.append(path)
    return found


@dataclass(frozen=True)
class MicroBatch:
    """One flat row of T tokens, of which M are predicted: token ``targets_M`` from the state at ``states_M``.

    ``places_M`` are the predicted tokens' places among the update's sampled tokens; ``slots`` take features. ``silent``:
    no token in it has an advantage. ``fresh_T``: tokens that no earlier micro-batch computes. Where a critic is asked, its
    values ``value_places_Q`` are read at ``value_states_Q``. Where a token group shares it, T and M are this rank's;
    ``slots`` are all, those without a token here too. ``routes_TLK``: the experts that tokens are sent to (see ``Node``);
    None: the routers choose.
    """

    ids_T: Tensor
    positions_3T: Tensor
    attention: TreeAttention | LevelAttention | SharedAttention | StockRows
    slots: tuple[Slot, ...] | tuple[SlotShare, ...]
    states_M: Tensor
    targets_M: Tensor
    places_M: Tensor
    silent: bool
    fresh_T: Tensor
    value_states_Q: Tensor
    value_places_Q: Tensor
    routes_TLK: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids_T)


@dataclass(frozen=True)
class Packing:
    """The micro-batches of an update, which trains ``trained`` tokens; of a team's, those that are computed here.

    ``splits``: how often a group was cut because it did not fit one; of a token group, the first rank counts. ``blanks``:
    how many hold nothing but one token that nobody reads.
    """

    microbatches: tuple[MicroBatch, ...]
    trained: int
    splits: int
    blanks: int = 0

    @property
    def tokens(self) -> int:
        """Tokens the language model computes, those of blank micro-batches left out."""
        return sum(len(microbatch) for microbatch in self.microbatches) - self.blanks


def pack(
    groups: Groups,
    lay_out: LayOut,
    limit: int,
    device: torch.device,
    positions: Positions | None = None,
    owned: Sequence[bool] | None = None,
    matched: MatchedOps | None = None,
    tokens: TokenGroup | None = None,
    *,
    replay: bool = False,
) -> Packing:
    """Pack groups in order into micro-batches of at most ``limit`` tokens; every sampled token is trained once.

    Groups without any advantage go into micro-batches of their own, after the others: they may need no backward. With
    ``positions`` of the groups' episodes, values are read there too. Groups that are not ``owned`` are computed elsewhere.
    ``matched``: attention sums as the engine does. ``tokens``: the ranks that share each micro-batch. ``replay``: see
    ``grow``.
    """
    parts: dict[bool, list[Part]] = {False: [], True: []}
    splits = first = sequence = value = own = 0
    for i, group in enumerate(groups):
        sampled = sum(sample.episode.sampled_tokens for sample in group)
        if owned is None or owned[i]:
            roots = grow(group, first, lay_out, replay=replay)
            if positions is not None:
                value = ask_values(roots, group, positions, sequence, value, lay_out)
            of_group = split(roots, limit)
            splits += max(0, len(of_group) - 1)
            parts[_silent(group)] += of_group
            own += sampled
        elif positions is not None:
            of_others = positions.stretches[sequence : sequence + len(group)]
            value += sum(stretch.length for stretches in of_others for stretch in stretches)
        first += sampled
        sequence += len(group)
    microbatches = tuple(
        _lay_out(several, device, silent, matched, tokens)
        for silent, of_kind in parts.items()
        for several in _fill(of_kind, limit)
    )
    assert positions is None or value == len(positions), f"{value} of {len(positions)} values are read"
    places = np.concatenate([np.zeros(0), *(microbatch.places_M.cpu().numpy() for microbatch in microbatches)])
    assert len(places) == len(np.unique(places)) <= own, f"{own} tokens sampled, {len(places)} trained"
    if tokens is not None:
        without = sum(isinstance(one.attention, SharedAttention) and one.attention.empty for one in microbatches)
        return Packing(microbatches, first, splits if tokens.rank == 0 else 0, without)
    packing = Packing(microbatches, first, splits)
    assert len(places) == own, f"{own} tokens sampled, {len(places)} trained"
    assert packing.tokens == sum(part.tokens for of_kind in parts.values() for part in of_kind)
    return packing


def pack_rows(groups: Groups, policy: Policy, limit: int, positions: Positions | None = None) -> Packing:
    """The threads of groups as rows for the general path, each whole, up to its last token that is read.

    Micro-batches hold at most ``limit`` tokens, padding counted; those without any advantage come last. A row is not cut.
    With ``positions`` of the groups' episodes, values are read there too.
    """
    general, chat = policy.general, policy.chat
    assert general is not None, "other families share what threads have in common"
    rows: dict[bool, list[tuple[StockRow, _Read]]] = {False: [], True: []}
    first = value = 0
    samples = [(_silent(group), sample.episode) for group in groups for sample in group]
    for s, (silent, episode) in enumerate(samples):
        reads: dict[int, _Read] = defaultdict(lambda: _Read([], [], [], [], []))
        ends: Counter[int] = Counter()
        last = None
        for turn in episode.turns:
            states = _states_before(chat, episode, turn.thread, turn.segment, len(turn.response.tokens))
            if len(states):
                ends[turn.thread] = max(ends[turn.thread], turn.segment + 1)
                read = reads[turn.thread]
                read.states.append(states)
                read.targets.append(np.array(turn.response.tokens))
                read.places.append(np.arange(first, first + len(states)))
            first += len(states)
        for stretch in positions.stretches[s] if positions is not None else ():
            states = _states_before(chat, episode, stretch.thread, stretch.segment, stretch.length)
            if len(states):
                ends[stretch.thread] = max(ends[stretch.thread], stretch.segment + 1)
                last = reads[stretch.thread]
                last.value_states.append(states)
                last.value_places.append(np.arange(value, value + len(states)))
            value += len(states)
        if positions is not None and positions.truncated[s] and last is not None:
            last.value_states.append(last.value_states[-1][-1:] + 1)
            last.value_places.append(np.array([len(positions) + s]))
        for thread, read in reads.items():
            segments = episode.threads[thread].segments[: ends[thread]]
            rows[silent].append((general.row(chat, segments), read))
    assert positions is None or value == len(positions), f"{value} of {len(positions)} values are read"
    microbatches = []
    for silent, of_kind in rows.items():
        for batch in general.batches(chat, [row for row, _ in of_kind], limit):
            microbatches.append(_row_microbatch([of_kind[i] for i in batch], policy.device, silent))
    return Packing(tuple(microbatches), first, 0)


def _states_before(chat: ChatProcessor, episode: Episode, thread: int, segment: int, length: int) -> np.ndarray:
    """The places in a thread of the states before each token of a segment of so many tokens."""
    start = sum(len(chat.layout(one)) for one in episode.threads[thread].segments[:segment])
    return np.arange(start - 1, start + length - 1)


def _row_microbatch(several: Sequence[tuple[StockRow, "_Read"]], device: torch.device, silent: bool) -> MicroBatch:
    """Rows as a micro-batch: its states are what is read of the rows, each place once."""
    places: list[np.ndarray] = []
    joined: dict[str, list[np.ndarray]] = {"states": [], "value_states": []}
    for _, read in several:
        before = sum(map(len, places))
        places.append(np.unique(_joined([*read.states, *read.value_states])))
        for name, found in joined.items():
            found.append(before + np.searchsorted(places[-1], _joined(getattr(read, name))))
    for name in ("targets", "places", "value_places"):
        joined[name] = [part for _, read in several for part in getattr(read, name)]
    laid = {name: torch.from_numpy(_joined(parts)).to(device) for name, parts in joined.items()}
    ids_T = torch.cat([row.ids_T for row, _ in several]).to(device)
    return MicroBatch(
        ids_T=ids_T,
        positions_3T=ids_T.new_zeros(3, 0),
        attention=StockRows(tuple(row for row, _ in several), tuple(map(torch.from_numpy, places))),
        slots=(),
        states_M=laid["states"],
        targets_M=laid["targets"],
        places_M=laid["places"],
        silent=silent,
        fresh_T=torch.ones_like(ids_T, dtype=torch.bool),
        value_states_Q=laid["value_states"],
        value_places_Q=laid["value_places"],
    )


def blank(device: torch.device, silent: bool) -> MicroBatch:
    """A micro-batch of one token that nobody reads: for a rank that has fewer of them than another."""
    node = Node("", np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), 1, (), None, after=0)
    return _lay_out([Part((node,), frozenset(), frozenset(), 1)], device, silent)


def media_of(microbatches: Sequence[MicroBatch]) -> list[Media]:
    """The distinct media shown, in order of appearance."""
    return list(dict.fromkeys(slot.media for microbatch in microbatches for slot in microbatch.slots))


def _silent(group: Sequence[CreditedEpisode]) -> bool:
    return not any(bool(advantages.any()) for sample in group for advantages in sample.advantages)


def _fill(parts: Sequence[Part], limit: int) -> list[list[Part]]:
    filled: list[list[Part]] = []
    size = 0
    for part in parts:
        if filled and size + part.tokens <= limit:
            filled[-1].append(part)
            size += part.tokens
        else:
            filled.append([part])
            size = part.tokens
    return filled


@dataclass
class _Laid:
    """A node's place: ``offset`` in its run, ``count`` tokens computed, and the node whose last token comes before it."""

    run: TokenRun
    offset: int
    count: int
    before: Node | None


def _lay_out(
    parts: Sequence[Part],
    device: torch.device,
    silent: bool,
    matched: MatchedOps | None = None,
    tokens: TokenGroup | None = None,
) -> MicroBatch:
    laid: dict[tuple[int, Node], _Laid] = {}
    runs: list[TokenRun] = []
    for i, part in enumerate(parts):
        runs += _runs(part, i, laid)
    by_level = device.type == "cuda" or matched is not None
    batches = arrange_levels(runs) if by_level else arrange(runs)
    total = sum(run.length for run in runs)
    ids_T = np.empty(total, dtype=np.int64)
    positions_3T = np.empty((3, total), dtype=np.int64)
    fresh_T = np.zeros(total, dtype=bool)
    shape = next((node.routes.shape[1:] for _, node in laid if node.routes is not None), None)
    routes_TLK = None if shape is None else np.full((total, *shape), UNKNOWN, dtype=np.int16)
    slots: list[Slot] = []
    read = _Read([], [], [], [], [])
    for (i, node), place in laid.items():
        start = place.run.start + place.offset
        ids_T[start : start + place.count] = node.ids_T[: place.count]
        positions_3T[:, start : start + place.count] = node.positions[..., : place.count]
        fresh_T[start : start + place.count] = node in parts[i].fresh
        if routes_TLK is not None and node.routes is not None:
            routes_TLK[start : start + place.count] = node.routes[: place.count]
        slots += [slot.moved(start) for slot in node.slots]
        if node in parts[i].trained:
            assert place.before is not None, "what the model wrote follows something"
            before = laid[i, place.before]
            read.note(node, before.run.start + before.offset + before.count - 1, start)
    parts_read = (read.states, read.targets, read.places, read.value_states, read.value_places)
    row = _Row(ids_T, positions_3T, fresh_T, tuple(slots), *map(_joined, parts_read))
    row = replace(row, routes_TLK=routes_TLK)
    if tokens is None:
        return row.microbatch(_attention(batches, device, matched), device, silent)
    shares = share_tokens(runs, tokens.size)
    row = row.share(shares.places[tokens.rank], device)
    return row.microbatch(SharedAttention(shares, tokens, device), device, silent)


@dataclass(frozen=True)
class _Row:
    """What a micro-batch is made of, before it goes to its device."""

    ids_T: np.ndarray
    positions_3T: np.ndarray
    fresh_T: np.ndarray
    slots: tuple[Slot, ...] | tuple[SlotShare, ...]
    states_M: np.ndarray
    targets_M: np.ndarray
    places_M: np.ndarray
    value_states_Q: np.ndarray
    value_places_Q: np.ndarray
    routes_TLK: np.ndarray | None = None

    def share(self, places: np.ndarray, device: torch.device) -> "_Row":
        """The tokens at ``places`` alone, and what is read from them. Where there are none, one that nobody reads."""
        own_T = np.full(len(self.ids_T), -1)
        own_T[places] = np.arange(len(places))
        states_M, values_Q = own_T[self.states_M], own_T[self.value_states_Q]
        here_M, here_Q = states_M >= 0, values_Q >= 0
        slots = tuple(slot_share(slot, own_T, device) for slot in self.slots if isinstance(slot, Slot))
        kept = places if len(places) else np.zeros(1, dtype=np.int64)
        fresh_T = self.fresh_T[kept] & bool(len(places))
        return _Row(
            self.ids_T[kept], self.positions_3T[:, kept], fresh_T, slots, states_M[here_M], self.targets_M[here_M],
            self.places_M[here_M], values_Q[here_Q], self.value_places_Q[here_Q],
            None if self.routes_TLK is None else self.routes_TLK[kept],
        )  # fmt: skip

    def microbatch(
        self, attention: TreeAttention | LevelAttention | SharedAttention, device: torch.device, silent: bool
    ) -> MicroBatch:
        named = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        tensors = {name: torch.from_numpy(value).to(device) for name, value in named.items()}
        return MicroBatch(attention=attention, slots=self.slots, silent=silent, **tensors)


def _attention(
    batches: list[list[TokenRun]], device: torch.device, matched: MatchedOps | None
) -> TreeAttention | LevelAttention:
    if matched is not None:
        return MatchedTree(batches, device, matched)
    return LevelAttention(batches, device) if device.type == "cuda" else TreeAttention(batches, device)


@dataclass
class _Read:
    """What is read of a micro-batch: predicted tokens and values, and the states they are read from."""

    states: list[np.ndarray]
    targets: list[np.ndarray]
    places: list[np.ndarray]
    value_states: list[np.ndarray]
    value_places: list[np.ndarray]

    def note(self, node: Node, last: int, start: int) -> None:
        """Read a node that starts at ``start``; the token before it stands at ``last``."""
        length = len(node.ids_T)
        states = np.concatenate([[last], np.arange(start, start + length - 1)])
        if node.first >= 0:
            self.states.append(states)
            self.targets.append(node.ids_T)
            self.places.append(np.arange(node.first, node.first + length))
        if node.value >= 0:
            self.value_states.append(states)
            self.value_places.append(np.arange(node.value, node.value + length))
        if node.after >= 0:
            self.value_states.append(np.array([start + length - 1]))
            self.value_places.append(np.array([node.after]))


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _runs(part: Part, index: int, laid: dict[tuple[int, Node], _Laid]) -> list[TokenRun]:
    """Join the nodes of a part into unbranched runs and note where each node stands in its run."""
    heirs: dict[Node, int] = dict.fromkeys(part.nodes, 0)
    for node in part.nodes:
        if node.parent is not None:
            heirs[node.parent] += 1
    runs: list[TokenRun] = []
    for node in part.nodes:
        above = None if node.parent is None else laid[index, node.parent]
        if node.parent is not None and above is not None and heirs[node.parent] == 1:
            run = above.run
        else:
            run = TokenRun(0, None if above is None else above.run)
            runs.append(run)
        count = len(node.ids_T) - (0 if heirs[node] else node.unread)
        before = node.parent if above is None or above.count else above.before
        laid[index, node] = _Laid(run, run.length, count, before)
        run.length += count
    return runs
