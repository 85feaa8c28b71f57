"""The media of a token group, divided among its ranks: each encodes a part, and the features are gathered.

A tower of Qwen's kind attends within one step of time, so a video is cut between steps; other media stay whole. Example: a
video of 8 steps of 100 patches and a picture of 300, two ranks:

    pieces      video 0–4 (400)   video 4–8 (400)   picture (300)
    rank              0                 1                 0
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from sensorium.learner.balance import divide
from sensorium.learner.sharded.token_group import RankTokenGroup
from sensorium.models.family import Tower
from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.segment_layout import Features
from sensorium.models.tower import VisionTower
from sensorium.vocabulary.content import Media


@dataclass(frozen=True)
class MediaPiece:
    """The steps of time ``first`` to ``end`` of a medium, which ``rank`` encodes; ``count`` features come of them."""

    media: Media
    extent: Extent
    first: int
    end: int
    count: int
    rank: int = 0

    @property
    def patches(self) -> int:
        """How much there is to encode."""
        return (self.end - self.first) * prod(self.extent.grid[1:])

    def cut(self, prepared: TowerInput) -> TowerInput:
        """What the tower is given of the prepared medium."""
        steps, height, width = self.extent.grid
        if self.end - self.first == steps:
            return prepared
        size = height * width
        patches_PC = prepared.patches_PC[self.first * size : self.end * size]
        return TowerInput(patches_PC, replace(self.extent, grid=(self.end - self.first, height, width)))


def divide_media(
    tower: Tower, media: Sequence[Media], extents: Sequence[Extent], counts: Sequence[int], ranks: int
) -> list[MediaPiece]:
    """The pieces of media, in order, each with the rank that encodes it; ``counts`` are their features."""
    pieces: list[MediaPiece] = []
    for item, extent, count in zip(media, extents, counts, strict=True):
        steps = extent.grid[0]
        parts = min(ranks, steps) if isinstance(tower, VisionTower) and extent.kind == "video" else 1
        ends = [steps * i // parts for i in range(parts + 1)]
        pieces += [MediaPiece(item, extent, first, end, count * (end - first) // steps) for first, end in pairwise(ends)]
    owners = divide([piece.patches for piece in pieces], ranks)
    return [replace(piece, rank=rank) for piece, rank in zip(pieces, owners, strict=True)]


def encode_shared(
    tower: Tower,
    pieces: Sequence[MediaPiece],
    prepare: Callable[[Sequence[Media]], list[TowerInput]],
    group: RankTokenGroup,
    spare: MediaPiece,
    *,
    apart: bool = False,
) -> dict[Media, Features]:
    """Features of all media, of which each rank encodes its pieces, or the spare one where it has none.

    ``apart``: each piece in a pass of its own.
    """
    by_rank = [[piece for piece in pieces if piece.rank == rank] or [spare] for rank in range(group.size)]
    own = by_rank[group.rank]
    inputs = [piece.cut(prepared) for piece, prepared in zip(own, prepare([piece.media for piece in own]), strict=True)]
    made = [one for single in inputs for one in tower([single])] if apart else tower(inputs)
    sizes = [part.shape[1] for part in (made[0].embeds_NH, *made[0].deepstack_NH)]
    rows = torch.cat([torch.cat([one.embeds_NH, *one.deepstack_NH], 1) for one in made])
    assert len(rows) == sum(piece.count for piece in own), (
        f"{len(rows)} features, {[piece.count for piece in own]} expected"
    )
    width = max(sum(piece.count for piece in several) for several in by_rank)
    whole = group.gather_with_gradient(rows, width)
    found: dict[MediaPiece, Tensor] = {}
    for rank, several in enumerate(by_rank):
        start = rank * width
        for piece in several:
            found[piece], start = whole[start : start + piece.count], start + piece.count
    features: dict[Media, Features] = {}
    for item in dict.fromkeys(piece.media for piece in pieces):
        joined = torch.cat([found[piece] for piece in pieces if piece.media == item])
        embeds_NH, *levels = joined.split(sizes, 1)
        features[item] = Features(embeds_NH, tuple(levels))
    return features
