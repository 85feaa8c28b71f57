"""From stored segments to layouts: each placeholder is expanded by the model family, and every token gets its positions."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sensorium.data.lru import LRU
from sensorium.models.family import HearsInVideo, MediaFormat
from sensorium.models.prepared_media import Extent, PreparedMedia
from sensorium.models.segment_layout import Layout, Slot, mismatch
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import SpanMismatch

# Expanded tokens whose layouts are cached: 128 MiB of ids and positions.
TOKENS_KEPT = 1 << 22
SHAPES_KEPT = 4096


class Layouts:
    """Layouts of segments, on the CPU. Those of environment segments are cached by content: a group shares them."""

    def __init__(self, media_format: MediaFormat, media: PreparedMedia) -> None:
        self._format, self._media = media_format, media
        self._known: LRU[str, Layout] = LRU(TOKENS_KEPT, len)
        self._shapes: LRU[tuple[Any, ...], Tensor] = LRU(SHAPES_KEPT)

    def __call__(self, segment: Segment) -> Layout:
        """The segment as the language model sees it."""
        if segment.author == "model":
            return self._lay_out(segment)
        layout = self._known.get(segment.key)
        if layout is None:
            layout = self._lay_out(segment)
            self._known.put(segment.key, layout)
        return layout

    @torch.inference_mode(False)  # cached tensors must also serve training
    def _lay_out(self, segment: Segment) -> Layout:
        check_spans(segment, self._format)
        if not segment.media:
            length = len(segment.tokens)
            steps_T = torch.arange(length)
            return Layout(torch.tensor(segment.tokens, dtype=torch.long), steps_T.expand(3, -1), length, steps_T, ())
        ids: list[int] = []
        ends: list[int] = []
        slots: list[Slot] = []
        extents: list[Extent] = []
        shown = {span.index: span.media for span in segment.media}
        for i, token in enumerate(segment.tokens):
            if i in shown:
                extents.append(self._media.extent(shown[i]))
                if extents[-1].has_sound:  # laid out with its sound, whose placeholder comes next
                    ends.append(len(ids))
                    continue
                parts, expanded = self._expand(shown, i, extents)
                slots += [slot.moved(len(ids)) for slot in parts]
                ids += expanded
            else:
                ids.append(token)
            ends.append(len(ids) - 1)
        ids_T = torch.tensor(ids, dtype=torch.long)
        positions_3T = self._positions(ids_T, slots, extents)
        # From the last token, which is text, and not from the largest: a video may reach beyond what follows it.
        return Layout(ids_T, positions_3T, int(positions_3T[0, -1]) + 1, torch.tensor(ends), tuple(slots))

    def _expand(self, shown: Mapping[int, Media], i: int, extents: Sequence[Extent]) -> tuple[list[Slot], tuple[int, ...]]:
        """What stands for the medium at a place, or for the sound there with the video before it."""
        if shown[i].kind == "sound" and len(extents) > 1 and extents[-2].has_sound:
            assert isinstance(self._format, HearsInVideo), "rendering refuses what the family cannot hear"
            ids, seen, heard = self._format.interleave(extents[-2], extents[-1])
            return [Slot(shown[i - 1], seen), Slot(shown[i], heard)], ids
        expansion = self._format.expand(extents[-1])
        return [Slot(shown[i], expansion.runs)], expansion.ids

    def _positions(self, ids_T: Tensor, slots: Sequence[Slot], extents: Sequence[Extent]) -> Tensor:
        """Positions depend only on where media stand and how large they are; prompts built alike share them."""
        shape = (len(ids_T), tuple(slot.runs for slot in slots), tuple(extents))
        positions_3T = self._shapes.get(shape)
        if positions_3T is None:
            positions_3T = self._format.positions(ids_T, extents)
            self._shapes.put(shape, positions_3T)
        return positions_3T


def check_spans(segment: Segment, media_format: MediaFormat) -> None:
    """Refuse a span that misses its placeholder, and a placeholder without a medium."""
    placeholders = media_format.placeholders
    spans = {span.index: span.media for span in segment.media}
    for i, item in spans.items():
        if not 0 <= i < len(segment.tokens) or segment.tokens[i] != placeholders.get(item.kind):
            raise mismatch(item, f"its span points at token {i}, which is no placeholder of a {item.kind}")
    stray = [i for i, token in enumerate(segment.tokens) if token in placeholders.values() and i not in spans]
    if stray:
        raise SpanMismatch(f"token {stray[0]} of a segment by the {segment.author} is a placeholder without a medium.")
