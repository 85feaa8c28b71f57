"""The positions of an episode that get credit: sampled tokens and, where asked, the observations between them.

Positions are numbered in canonical order: groups, episodes, time. The value *at* a position is that of the prefix before
it; the values *after* the episodes come behind all positions, one place an episode.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sensorium.models.segment_layout import Layout
from sensorium.vocabulary.episode import Episode, Segment, Status

LayOut = Callable[[Segment], Layout]


@dataclass(frozen=True)
class Stretch:
    """Consecutive positions: all tokens of one segment of a thread. An observation belongs to the turn it opens."""

    turn: int
    thread: int
    segment: int
    length: int
    written: bool


@dataclass(frozen=True)
class Positions:
    """The positions of episodes. ``turns_P`` are counted through all of them."""

    stretches: tuple[tuple[Stretch, ...], ...]
    truncated: tuple[bool, ...]
    sequences_P: Tensor
    turns_P: Tensor
    written_P: Tensor

    def __len__(self) -> int:
        return len(self.sequences_P)


def find_positions(episodes: Sequence[Episode], lay_out: LayOut, *, observations: bool = False) -> Positions:
    """Number the positions of episodes; with ``observations`` each must be one growing thread."""
    stretches = tuple(tuple(_stretches(episode, lay_out, observations)) for episode in episodes)
    flat = [(s, stretch) for s, several in enumerate(stretches) for stretch in several]
    lengths = torch.tensor([stretch.length for _, stretch in flat], dtype=torch.long)
    turns_before = [0]
    for episode in episodes:
        turns_before.append(turns_before[-1] + len(episode.turns))

    def spread(values: list[int], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=dtype), lengths)

    return Positions(
        stretches,
        tuple(episode.status == Status.TRUNCATED for episode in episodes),
        spread([s for s, _ in flat]),
        spread([turns_before[s] + stretch.turn for s, stretch in flat]),
        spread([stretch.written for _, stretch in flat], torch.bool),
    )


def _stretches(episode: Episode, lay_out: LayOut, observations: bool) -> list[Stretch]:
    found: list[Stretch] = []
    for i, turn in enumerate(episode.turns):
        if observations and i > 0:
            before = episode.turns[i - 1]
            assert before.thread == turn.thread, f"{episode.id}: observations are positions of one growing thread only"
            segments = episode.threads[turn.thread].segments
            for place in range(before.segment + 1, turn.segment):
                found.append(Stretch(i, turn.thread, place, len(lay_out(segments[place])), False))
        found.append(Stretch(i, turn.thread, turn.segment, len(turn.response.tokens), True))
    return found
