"""Media made ready for a tower: decoded and preprocessed once, by content and parameters, in a bounded cache."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.errors import ModelError

Grid = tuple[int, int, int]
EXTENTS_KEPT = 1 << 16


@dataclass(frozen=True)
class Extent:
    """How large a medium is to its tower, and when its frames were: all that its expansion and positions depend on.

    ``grid`` is (time, height, width) in patches; of a sound, (mel frames, 1, 1). A video's frames were sampled at
    ``times_s``, each standing for ``seconds_per_frame``.
    """

    kind: MediaKind
    grid: Grid
    times_s: tuple[float, ...] = ()
    seconds_per_frame: float = 0.0


@dataclass(frozen=True)
class Prepared:
    """A medium as a tower takes it: flat patches of a picture or video, or mel frames of a sound, as [P, C]."""

    patches_PC: Tensor
    extent: Extent


class Preprocessor(Protocol):
    """Turns several decoded media of one kind into tower inputs, in order."""

    def __call__(self, items: Sequence[tuple[Media, Any]]) -> list[Prepared]: ...


class PreparedMedia:
    """The cache of prepared media. Patches are kept up to ``capacity`` bytes, least recently used out first.

    Extents are small and outlive them: a prompt can be laid out without decoding its media again.
    """

    def __init__(
        self,
        decode: Callable[[Media], Any],
        preprocessors: Mapping[MediaKind, Preprocessor],
        capacity: int = 1 << 29,
    ) -> None:
        self._decode = decode
        self._preprocessors = preprocessors
        self._capacity = capacity
        self._held = 0
        self._known: OrderedDict[Media, Prepared] = OrderedDict()
        self._extents: OrderedDict[Media, Extent] = OrderedDict()
        self.preprocessed = 0

    def extent(self, media: Media) -> Extent:
        """How large a medium is to its tower."""
        if media not in self._extents:
            self.get([media])
        return self._extents[media]

    def get(self, media: Iterable[Media]) -> list[Prepared]:
        """Tower inputs of media, in order; those not yet known are preprocessed together."""
        wanted = list(media)
        found = {item: self._known[item] for item in wanted if item in self._known}
        missing = [item for item in dict.fromkeys(wanted) if item not in found]
        for kind in dict.fromkeys(item.kind for item in missing):
            several = [item for item in missing if item.kind == kind]
            for item, prepared in zip(several, self._prepare(kind, several), strict=True):
                found[item] = prepared
                self._keep(item, prepared)
        for item in found:
            if item in self._known:
                self._known.move_to_end(item)
        return [found[item] for item in wanted]

    @torch.inference_mode(False)  # what is remembered must also serve training
    def _prepare(self, kind: MediaKind, media: Sequence[Media]) -> list[Prepared]:
        if kind not in self._preprocessors:
            able = ", ".join(self._preprocessors) or "text alone"
            raise ModelError(f"this model takes {able}; it cannot take {kind} {media[0].origin or media[0].hash[:12]}.")
        prepared = self._preprocessors[kind]([(item, self._decode(item)) for item in media])
        self.preprocessed += len(media)
        return prepared

    def _keep(self, media: Media, prepared: Prepared) -> None:
        self._extents[media] = prepared.extent
        if len(self._extents) > EXTENTS_KEPT:
            self._extents.popitem(last=False)
        self._known[media] = prepared
        self._held += prepared.patches_PC.nbytes
        while self._held > self._capacity:
            _, oldest = self._known.popitem(last=False)
            self._held -= oldest.patches_PC.nbytes
