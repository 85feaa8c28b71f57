"""Prepared media, the input of a tower: decoded and preprocessed once, by content and parameters, in a bounded cache.

Invariants: however many threads ask, each medium is preprocessed once while it is kept; what a medium becomes does not
depend on the company it is preprocessed in; one that cannot be prepared fails alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

from sensorium.data.lru import LRU
from sensorium.models.deferred import DeferredModule
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.errors import MediaError, ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = DeferredModule("torch")

Grid = tuple[int, int, int]
EXTENTS_KEPT = 1 << 16
# Decoded media preprocessed at once: enough to share the processor's cost, and little beside what they become.
BATCH_BYTES = 1 << 26


@dataclass(frozen=True)
class Extent:
    """How large a medium is to its tower, and when its frames were: all that its expansion and positions depend on.

    ``grid`` is (time, height, width) in patches; of a sound, (mel frames, 1, 1). A video's frames begin at
    ``times_s`` by the file's average rate, each standing for ``seconds_per_frame``; ``has_sound``: the sound that follows
    it is interleaved with it.
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
    """Decodes media, each once: each medium in order with what it is decoded to, or with the error that it is."""

    def each(self, media: Iterable[Media]) -> Iterator[tuple[Media, Any | MediaError]]: ...


class Preprocessor(Protocol):
    """Turns several decoded media of one kind into tower inputs, in order."""

    def __call__(self, items: Sequence[tuple[Media, Any]]) -> list[TowerInput]: ...


class PreparedMedia:
    """The cache of prepared media. Patches are cached up to ``capacity`` bytes; the least recently used are dropped first.

    Extents are small and outlive them: a prompt can be laid out without decoding its media again. A hit is a request that
    was answered from here, an eviction a medium that there was no room to keep.
    """

    def __init__(
        self,
        decoder: MediaDecoder,
        preprocessors: Mapping[MediaKind, Preprocessor],
        capacity: int = 1 << 29,
    ) -> None:
        self._decoder = decoder
        self._preprocessors = preprocessors
        self._known: LRU[Media, TowerInput] = LRU(capacity, lambda prepared: prepared.patches_PC.nbytes)
        self._extents: LRU[Media, Extent] = LRU(EXTENTS_KEPT)
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self.preprocessed = self.hits = 0

    @property
    def held(self) -> int:
        """Bytes of the patches that are kept."""
        return self._known.held

    @property
    def evictions(self) -> int:
        """Media that there was no room to keep."""
        return self._known.evictions

    def extent(self, media: Media) -> Extent:
        """How large a medium is to its tower."""
        return self._extents.get(media) or self.get([media])[0].extent

    def unknown(self, media: Iterable[Media]) -> list[Media]:
        """The distinct media whose extent is not known yet; those of a kind that the model does not take are refused."""
        new = [item for item in dict.fromkeys(media) if item not in self._extents]
        self.refuse_strange(new)
        return new

    def missing(self, media: Iterable[Media]) -> list[Media]:
        """The distinct media whose patches are not kept."""
        return [item for item in dict.fromkeys(media) if item not in self._known]

    def prepare(self, media: Iterable[Media]) -> dict[Media, MediaError]:
        """Prepare media ahead of their use, as many at a time as are cheap to hold; returns the errors of bad ones."""
        missing = self.missing(media)
        self.refuse_strange(missing)
        with self._making:
            made = self._make(item for item in missing if item not in self._known)
            return {item: one for item, one in made if isinstance(one, MediaError)}

    def get(self, media: Iterable[Media]) -> list[TowerInput]:
        """Tower inputs of media, in order; those not cached are preprocessed together.

        Where one cannot be prepared, the others are all the same before its error is raised.
        """
        wanted = list(media)
        found = self._recall(wanted)
        missing = [item for item in dict.fromkeys(wanted) if item not in found]
        self.refuse_strange(missing)
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

    def refuse_strange(self, media: Sequence[Media]) -> None:
        """Refuse media of a kind that the model does not take."""
        for item in media:
            if item.kind not in self._preprocessors:
                able = " and ".join(["text", *self._preprocessors])
                raise ModelError(f"this model takes {able}; it cannot take {item.kind} {item.name}. Use a family that can.")

    def _recall(self, media: Sequence[Media]) -> dict[Media, TowerInput]:
        """What is kept of some media, which makes it the latest."""
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
            size += _size(decoded)
            if size >= BATCH_BYTES:
                yield from self._preprocess(batch)
                batch, size = [], 0
        yield from self._preprocess(batch)

    def _preprocess(self, batch: Sequence[tuple[Media, Any]]) -> Iterator[tuple[Media, TowerInput | MediaError]]:
        for kind in self._preprocessors:
            items = [(item, decoded) for item, decoded in batch if item.kind == kind]
            if items:
                yield from self._together(kind, items)

    def _together(
        self, kind: MediaKind, items: Sequence[tuple[Media, Any]]
    ) -> Iterator[tuple[Media, TowerInput | MediaError]]:
        """Media of one kind preprocessed and kept; if they are refused, one by one, to find out which it was."""
        try:
            with torch.inference_mode(False):  # cached tensors must also serve training
                ready = self._preprocessors[kind](items)
        except MediaError as error:
            if len(items) == 1:
                yield items[0][0], error
            else:
                for one in items:
                    yield from self._together(kind, [one])
            return
        for (item, _), prepared in zip(items, ready, strict=True):
            self._keep(item, prepared)
            yield item, prepared

    def _keep(self, media: Media, prepared: TowerInput) -> None:
        with self._lock:
            self.preprocessed += 1
        self._extents.put(media, prepared.extent)
        self._known.put(media, prepared)


def _size(decoded: Any) -> int:
    """What a decoded medium takes in memory."""
    if isinstance(decoded, Image.Image):
        return decoded.width * decoded.height * 3
    return int(getattr(decoded, "nbytes", 0))
