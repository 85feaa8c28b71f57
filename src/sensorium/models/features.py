"""Media made ready for a tower: decoded and preprocessed once, by content and parameters, in a bounded cache."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.errors import MediaError, ModelError

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


class Decoder(Protocol):
    """Decodes media, each once: pictures, videos and sounds in order, or in the place of one the error that it is."""

    def get_many(self, media: Iterable[Media]) -> "list[Any | MediaError]": ...


class Preprocessor(Protocol):
    """Turns several decoded media of one kind into tower inputs, in order."""

    def __call__(self, items: Sequence[tuple[Media, Any]]) -> list[Prepared]: ...


class PreparedMedia:
    """The cache of prepared media. Patches are kept up to ``capacity`` bytes, least recently used out first.

    Extents are small and outlive them: a prompt can be laid out without decoding its media again. Threads may share it.
    """

    def __init__(self, decoder: Decoder, preprocessors: Mapping[MediaKind, Preprocessor], capacity: int = 1 << 29) -> None:
        self._decoder = decoder
        self._preprocessors = preprocessors
        self._capacity = capacity
        self._held = 0
        self._known: OrderedDict[Media, Prepared] = OrderedDict()
        self._extents: OrderedDict[Media, Extent] = OrderedDict()
        self._lock = threading.RLock()
        self.preprocessed = 0

    def extent(self, media: Media) -> Extent:
        """How large a medium is to its tower."""
        with self._lock:
            if media not in self._extents:
                self._get([media])
            return self._extents[media]

    def missing(self, media: Iterable[Media]) -> list[Media]:
        """Those whose extent is not known yet: they would have to be decoded."""
        with self._lock:
            return [item for item in media if item not in self._extents]

    def get(self, media: Iterable[Media]) -> list[Prepared]:
        """Tower inputs of media, in order; those not yet known are preprocessed together.

        Where one cannot be decoded, the others are prepared all the same before its error is raised.
        """
        with self._lock:
            return self._get(list(media))

    def _get(self, wanted: list[Media]) -> list[Prepared]:
        found = {item: self._known[item] for item in wanted if item in self._known}
        missing = [item for item in dict.fromkeys(wanted) if item not in found]
        self.refuse_strange(missing)
        decoded = dict(zip(missing, self._decoder.get_many(missing), strict=True)) if missing else {}
        errors = [failure for failure in decoded.values() if isinstance(failure, MediaError)]
        for kind, preprocess in self._preprocessors.items():
            items = [
                (item, made) for item, made in decoded.items() if item.kind == kind and not isinstance(made, MediaError)
            ]
            if items:
                with torch.inference_mode(False):  # what is remembered must also serve training
                    ready = preprocess(items)
                for (item, _), prepared in zip(items, ready, strict=True):
                    found[item] = prepared
                    self._keep(item, prepared)
                self.preprocessed += len(items)
        if errors:
            raise errors[0]
        for item in found:
            if item in self._known:
                self._known.move_to_end(item)
        return [found[item] for item in wanted]

    def refuse_strange(self, media: Sequence[Media]) -> None:
        """Refuse media of a kind that the model does not take."""
        for item in media:
            if item.kind not in self._preprocessors:
                able = " and ".join(["text", *self._preprocessors])
                raise ModelError(f"this model takes {able}; it cannot take {item.kind} {item.name}. Use a family that can.")

    def _keep(self, media: Media, prepared: Prepared) -> None:
        self._extents[media] = prepared.extent
        if len(self._extents) > EXTENTS_KEPT:
            self._extents.popitem(last=False)
        self._known[media] = prepared
        self._held += prepared.patches_PC.nbytes
        while self._held > self._capacity:
            _, oldest = self._known.popitem(last=False)
            self._held -= oldest.patches_PC.nbytes
