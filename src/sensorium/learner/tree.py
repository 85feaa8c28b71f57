"""The threads of a group as a tree of segments: what is shared stands once.

Invariants: a node is a segment in one context (its path from the root); a sampled segment is trained in exactly one node,
at the place where it was generated; a value is read in exactly one node; nodes that none of these needs are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sensorium.learner.credited_episode import CreditedEpisode
from sensorium.learner.positions import LayOut, Positions
from sensorium.models.segment_layout import Slot
from sensorium.vocabulary.episode import Segment


@dataclass(eq=False)
class Node:
    """A segment, expanded, after its ancestors. ``positions`` [3, T] or [T] continue from theirs, up to ``end``.

    ``first`` is the place of its first token among the update's sampled tokens, or -1 where it is context. ``value`` is the
    place of the value before its first token among the update's values, ``after`` of the one after its last token, or -1.
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


def grow(samples: Sequence[CreditedEpisode], first: int, lay_out: LayOut) -> list[Node]:
    """The roots of a group's tree; the sampled tokens are numbered from ``first`` on, in order of episodes and turns."""
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
    return list(roots.values())


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
