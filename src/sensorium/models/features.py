"""Media made ready for a tower: decoded and preprocessed once, by content hash, in a bounded cache."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import MediaError

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Prepared:
    """A medium as a tower takes it: flat patches [P, C], and the grid (time, height, width) they fill."""

    patches_PC: Tensor
    grid: Grid


class Preprocessor(Protocol):
    """Turns the bytes of several media into tower inputs, in order."""

    def __call__(self, items: Sequence[tuple[Media, bytes]]) -> list[Prepared]: ...


class PreparedMedia:
    """The cache of prepared media. Patches are kept up to ``capacity`` bytes, oldest out first; grids always."""

    def __init__(self, store: MediaStore, preprocess: Preprocessor, capacity: int = 1 << 29) -> None:
        self._store = store
        self._preprocess = preprocess
        self._capacity = capacity
        self._held = 0
        self._known: OrderedDict[Media, Prepared] = OrderedDict()
        self._grids: dict[Media, Grid] = {}
        self.preprocessed = 0

    def grid(self, media: Media) -> Grid:
        """The patch grid of a medium."""
        if media not in self._grids:
            self.get([media])
        return self._grids[media]

    def get(self, media: Iterable[Media]) -> list[Prepared]:
        """Tower inputs of media, in order; those not yet known are preprocessed together."""
        wanted = list(media)
        found = {item: self._known[item] for item in wanted if item in self._known}
        missing = [item for item in dict.fromkeys(wanted) if item not in found]
        if missing:
            with torch.inference_mode(False):  # what is remembered must also serve training
                fresh = self._preprocess([(item, self._store.bytes_of(item)) for item in missing])
            self.preprocessed += len(missing)
            for item, prepared in zip(missing, fresh, strict=True):
                found[item] = prepared
                self._keep(item, prepared)
        for item in found:
            if item in self._known:
                self._known.move_to_end(item)
        return [found[item] for item in wanted]

    def _keep(self, media: Media, prepared: Prepared) -> None:
        self._grids[media] = prepared.grid
        self._known[media] = prepared
        self._held += prepared.patches_PC.nbytes
        while self._held > self._capacity:
            _, oldest = self._known.popitem(last=False)
            self._held -= oldest.patches_PC.nbytes


class PicturePreprocessor:
    """The checkpoint's own image processor over pictures decoded from bytes."""

    def __init__(self, image_processor: Any) -> None:
        self._image_processor = image_processor

    def __call__(self, items: Sequence[tuple[Media, bytes]]) -> list[Prepared]:
        from sensorium.media.picture import decode_picture

        pictures = [decode_picture(data, media.origin or media.hash[:12]) for media, data in items]
        try:
            made = self._image_processor(images=pictures, return_tensors="pt")
        except ValueError as error:  # an absurd aspect ratio, for one
            names = ", ".join(media.origin or media.hash[:12] for media, _ in items)
            raise MediaError(f"{names}: the image processor refuses a picture: {error}.") from error
        grids: list[Grid] = [(t, h, w) for t, h, w in made["image_grid_thw"].tolist()]
        patches = torch.split(made["pixel_values"], [t * h * w for t, h, w in grids])
        # A copy of each: a view would keep the whole batch alive in the cache.
        return [Prepared(part.clone(), grid) for part, grid in zip(patches, grids, strict=True)]
