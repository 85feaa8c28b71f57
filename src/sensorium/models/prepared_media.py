"""Prepared media, the input of a tower: decoded and preprocessed once, by content and parameters, in a bounded cache.

Invariants: however many threads ask, each medium is preprocessed once while it is cached; the result does not depend on
the batch it is preprocessed in; a medium that cannot be prepared fails alone. What preprocesses it is in
``preprocessors.py``, ``general_media.py`` or its family's file.

``seen_frames`` shows a tower's input as pictures again. Patches of Qwen's layout are put back in their places, tiles are
given one by one, and normalised numbers become colours:

    a picture of 640 x 480 at 28 pixels a token    one picture of 644 x 476
    the same by InternVL                           its tiles of 448 x 448, the whole view last
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image

from sensorium.data.lru import LRU
from sensorium.recipe.family_facts import DeferredModule
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.errors import MediaError, ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sensorium.models.chat_processor import ChatProcessor
else:
    torch = DeferredModule("torch")

Grid = tuple[int, int, int]
EXTENTS_KEPT = 1 << 16
BATCH_BYTES = 1 << 22  # of decoded media preprocessed at once; in larger batches fresh memory costs more than is shared
CHANNELS = 3


@dataclass(frozen=True)
class Extent:
    """The size of a medium to its tower, and the times of its frames: all that its expansion and positions depend on.

    ``grid`` is (time, height, width) in patches; of a sound, (mel frames, 1, 1). A video's frames begin at ``times_s`` by
    the file's average rate, ``seconds_per_frame`` apart; ``has_sound``: it is interleaved with the sound that follows it.
    """

    kind: MediaKind
    grid: Grid
    times_s: tuple[float, ...] = ()
    seconds_per_frame: float = 0.0
    has_sound: bool = False


@dataclass(frozen=True)
class TowerInput:
    """A medium as a tower takes it: flat patches of a picture or video, or mel frames of a sound, as [P, C]."""

    patches_PC: Tensor
    extent: Extent


class MediaDecoder(Protocol):
    """Decodes media, each once: gives each medium in order with its decoded form, or with its error."""

    def each(self, media: Iterable[Media]) -> Iterator[tuple[Media, Any | MediaError]]: ...


class Preprocessor(Protocol):
    """Turns several decoded media of one kind into tower inputs, in order."""

    def __call__(self, items: Sequence[tuple[Media, Any]]) -> list[TowerInput]: ...


class PreparedMedia:
    """The cache of prepared media: patches up to ``capacity`` bytes, the least recently used are dropped first.

    Extents are small and outlive them: a prompt can be laid out without decoding its media again. ``hits`` counts requests
    answered from the cache.
    """

    def __init__(
        self, decoder: MediaDecoder, preprocessors: Mapping[MediaKind, Preprocessor], capacity: int = 1 << 29
    ) -> None:
        self._decoder, self._preprocessors = decoder, preprocessors
        self._known: LRU[Media, TowerInput] = LRU(capacity, lambda prepared: prepared.patches_PC.nbytes)
        self._extents: LRU[Media, Extent] = LRU(EXTENTS_KEPT)
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self.preprocessed = self.hits = 0

    @property
    def held(self) -> int:
        return self._known.held

    @property
    def evictions(self) -> int:
        """Media whose patches were dropped, or did not fit."""
        return self._known.evictions

    def extent(self, media: Media) -> Extent:
        """The size of a medium to its tower."""
        return self._extents.get(media) or self.get([media])[0].extent

    def unknown(self, media: Iterable[Media]) -> list[Media]:
        """The distinct media whose extent is not known yet; those of a kind that the model does not take are refused."""
        new = [item for item in dict.fromkeys(media) if item not in self._extents]
        self.refuse_unsupported(new)
        return new

    def missing(self, media: Iterable[Media]) -> list[Media]:
        return [item for item in dict.fromkeys(media) if item not in self._known]

    def prepare(self, media: Iterable[Media]) -> dict[Media, MediaError]:
        """Prepare media ahead of their use, batch by batch; returns the errors of bad ones."""
        missing = self.missing(media)
        self.refuse_unsupported(missing)
        with self._making:
            made = self._make(item for item in missing if item not in self._known)
            return {item: one for item, one in made if isinstance(one, MediaError)}

    def get(self, media: Iterable[Media]) -> list[TowerInput]:
        """Tower inputs of media, in order; those not cached are preprocessed together.

        The error of one that cannot be prepared is raised after the others are prepared.
        """
        wanted = list(media)
        found = self._recall(wanted)
        missing = [item for item in dict.fromkeys(wanted) if item not in found]
        self.refuse_unsupported(missing)
        if missing:
            with self._making:
                found |= self._recall(missing)  # another thread may have made them meanwhile
                errors = []
                for item, one in self._make([item for item in missing if item not in found]):
                    if isinstance(one, MediaError):
                        errors.append(one)
                    else:
                        found[item] = one
            if errors:
                raise errors[0]
        return [found[item] for item in wanted]

    def refuse_unsupported(self, media: Sequence[Media]) -> None:
        """Refuse media of a kind that the model does not take."""
        for item in media:
            if item.kind not in self._preprocessors:
                able = " and ".join(["text", *self._preprocessors])
                raise ModelError(f"this model takes {able}; it cannot take {item.kind} {item.name}. Use a family that can.")

    def _recall(self, media: Sequence[Media]) -> dict[Media, TowerInput]:
        found = {item: kept for item in dict.fromkeys(media) if (kept := self._known.get(item)) is not None}
        with self._lock:
            self.hits += sum(item in found for item in media)
        return found

    def _make(self, media: Iterable[Media]) -> Iterator[tuple[Media, TowerInput | MediaError]]:
        """Decode and preprocess media, a batch at a time."""
        batch: list[tuple[Media, Any]] = []
        size = 0
        for item, decoded in self._decoder.each(media):
            if isinstance(decoded, MediaError):
                yield item, decoded
                continue
            batch.append((item, decoded))
            picture = isinstance(decoded, Image.Image)
            size += decoded.width * decoded.height * 3 if picture else int(getattr(decoded, "nbytes", 0))
            if size >= BATCH_BYTES:
                yield from self._preprocess(batch)
                batch, size = [], 0
        yield from self._preprocess(batch)

    def _preprocess(self, batch: Sequence[tuple[Media, Any]]) -> Iterator[tuple[Media, TowerInput | MediaError]]:
        """Preprocess and cache decoded media, those of one kind together; if refused, one by one to find the bad ones."""
        for kind, preprocessor in self._preprocessors.items():
            items = [(item, decoded) for item, decoded in batch if item.kind == kind]
            if not items:
                continue
            try:
                with torch.inference_mode(False):  # cached tensors must also serve training
                    ready = preprocessor(items)
            except MediaError as error:
                if len(items) == 1:
                    yield items[0][0], error
                else:
                    for one in items:
                        yield from self._preprocess([one])
                continue
            for (item, _), prepared in zip(items, ready, strict=True):
                with self._lock:
                    self.preprocessed += 1
                self._extents.put(item, prepared.extent)
                self._known.put(item, prepared)
                yield item, prepared


def seen_frames(chat: ChatProcessor, media: Media) -> list[Image.Image]:
    """The frames or tiles that the tower takes of a picture or video; none where their layout is not known."""
    (prepared,) = chat.prepared.get([media])
    part = "image_processor" if media.kind == "picture" else "video_processor"
    processor = getattr(chat.processor, part, None)
    pixels_NCHW = _pixels(prepared, processor) if processor is not None else None
    if pixels_NCHW is None:
        return []
    mean, deviation = (_by_channel(processor, name, usual) for name, usual in (("image_mean", 0.0), ("image_std", 1.0)))
    if not getattr(processor, "do_normalize", True):
        mean, deviation = np.zeros_like(mean), np.ones_like(deviation)
    scale = 255.0 if getattr(processor, "do_rescale", True) else 1.0
    colours_NHWC = ((pixels_NCHW * deviation + mean) * scale).round().clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return [Image.fromarray(frame) for frame in colours_NHWC]


def _pixels(prepared: TowerInput, processor: Any) -> np.ndarray | None:
    """Normalised pixels [N, C, H, W]."""
    patches = getattr(prepared, "patches_PC", None)
    if patches is None or patches.ndim != 2:
        return None
    values_PC = patches.float().numpy()
    side, merge = getattr(processor, "patch_size", None), getattr(processor, "merge_size", None)
    grid = prepared.extent.grid
    if isinstance(side, int) and isinstance(merge, int) and len(values_PC) == prod(grid):
        time, height, width = grid
        frames = values_PC.shape[1] // (CHANNELS * side * side)
        shape = (time, height // merge, width // merge, merge, merge, CHANNELS, frames, side, side)
        if values_PC.size == prod(shape):
            together = values_PC.reshape(shape).transpose(0, 6, 5, 1, 3, 7, 2, 4, 8)
            whole: np.ndarray = together.reshape(time * frames, CHANNELS, height * side, width * side)
            # A picture is repeated to fill a temporal patch.
            return whole[:1] if prepared.extent.kind == "picture" else whole
    size = round((values_PC.shape[1] / CHANNELS) ** 0.5)
    if merge is None and size * size * CHANNELS == values_PC.shape[1]:
        return values_PC.reshape(len(values_PC), CHANNELS, size, size)
    return None


def _by_channel(processor: Any, name: str, usual: float) -> np.ndarray:
    given = getattr(processor, name, None)
    values = np.broadcast_to(np.asarray(usual if given is None else given, np.float32), (CHANNELS,))
    return values.reshape(1, CHANNELS, 1, 1)
