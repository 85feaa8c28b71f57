"""From groups to micro-batches: trees of segments laid out flat, several to a row, at most so many tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sensorium.learner.attention import Run, TreeAttention
from sensorium.learner.sample import Groups
from sensorium.learner.tree import Node, Part, grow, split
from sensorium.models.layout import Layout, Slot
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Segment


@dataclass(frozen=True)
class MicroBatch:
    """One flat row of T tokens, of which M are predicted: token ``targets_M`` from the state at ``states_M``.

    ``places_M`` are the predicted tokens' places among the update's sampled tokens; ``slots`` take features.
    """

    ids_T: Tensor
    positions_3T: Tensor
    attention: TreeAttention
    slots: tuple[Slot, ...]
    states_M: Tensor
    targets_M: Tensor
    places_M: Tensor

    def __len__(self) -> int:
        return len(self.ids_T)


@dataclass(frozen=True)
class Packing:
    """The micro-batches of an update. ``splits``: how often a group was cut because it did not fit one."""

    microbatches: tuple[MicroBatch, ...]
    media: tuple[Media, ...]
    trained: int
    splits: int

    @property
    def tokens(self) -> int:
        """Tokens the language model computes."""
        return sum(len(microbatch) for microbatch in self.microbatches)


def pack(groups: Groups, layout: Callable[[Segment], Layout], limit: int, device: torch.device) -> Packing:
    """Pack groups in order into micro-batches of at most ``limit`` tokens; every sampled token is trained once."""
    parts: list[Part] = []
    splits = first = 0
    for group in groups:
        of_group = split(grow(group, first, layout), limit)
        splits += max(0, len(of_group) - 1)
        parts += of_group
        first += sum(sample.episode.sampled_tokens for sample in group)
    microbatches = tuple(_lay_out(several, device) for several in _fill(parts, limit))
    assert sum(map(len, microbatches)) == sum(part.tokens for part in parts), "parts are as large as they said"
    trained = sum(len(microbatch.places_M) for microbatch in microbatches)
    places = torch.cat([microbatch.places_M for microbatch in microbatches]) if microbatches else torch.zeros(0)
    assert trained == first == len(places.unique()), f"{first} tokens were sampled, {trained} would be trained"
    media = dict.fromkeys(slot.media for microbatch in microbatches for slot in microbatch.slots)
    return Packing(microbatches, tuple(media), trained, splits)


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
    """A node's place in the row: its run, the runs above, and the last token of the path."""

    start: int
    end: int
    above: tuple[tuple[int, int], ...]
    last: int


def _lay_out(parts: Sequence[Part], device: torch.device) -> MicroBatch:
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    slots: list[Slot] = []
    states: list[np.ndarray] = []
    targets: list[Tensor] = []
    places: list[np.ndarray] = []
    runs: list[Run] = []
    end = 0
    for part in parts:
        heirs: dict[Node, int] = dict.fromkeys(part.nodes, 0)
        for node in part.nodes:
            if node.parent is not None:
                heirs[node.parent] += 1
        laid: dict[Node, _Laid] = {}
        for node in part.nodes:
            count = len(node.layout) - (0 if heirs[node] else 1)
            start, end = end, end + count
            place = laid[node] = _Laid(start, end, (), end - 1)
            if node.parent is not None:
                parent = laid[node.parent]
                if heirs[node.parent] == 1:
                    place.start, place.above = parent.start, parent.above
                else:
                    place.above = (*parent.above, (parent.start, parent.end - parent.start))
                place.last = end - 1 if count else parent.last
            if heirs[node] != 1:
                runs.append(Run(place.start, end - place.start, place.above))
            ids.append(node.layout.ids_T[:count])
            positions.append(node.layout.positions_3T[:, :count] + node.position)
            slots += [Slot(start + slot.start, slot.count, slot.media) for slot in node.layout.slots]
            if node in part.trained:
                assert node.parent is not None, "what the model wrote follows something"
                length = len(node.layout)
                states.append(np.concatenate([[laid[node.parent].last], np.arange(start, start + length - 1)]))
                targets.append(node.layout.ids_T)
                places.append(np.arange(node.first, node.first + length))
    return MicroBatch(
        ids_T=torch.cat(ids).to(device),
        positions_3T=torch.cat(positions, dim=1).to(device),
        attention=TreeAttention(runs, end, device),
        slots=tuple(slots),
        states_M=torch.from_numpy(np.concatenate(states)).to(device),
        targets_M=torch.cat(targets).to(device),
        places_M=torch.from_numpy(np.concatenate(places)).to(device),
    )
