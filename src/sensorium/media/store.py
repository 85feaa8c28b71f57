"""The content-addressed store of media: each distinct medium is kept once, by the sha256 of its bytes.

Invariants: a file ``folder/<hash>`` is complete or absent (written beside its place, then renamed). With a folder, memory
holds only the most recently used media, within a bound, so it does not grow with steps; without one (tests) memory is all
there is and nothing is forgotten. Safe to call from several threads.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from PIL import Image

from sensorium.media.picture import decode_picture
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.errors import MediaError

MIB = 1024 * 1024
Kept = TypeVar("Kept")


class MediaStore:
    """Bytes by content hash, in memory or below a folder (a run directory's ``media/``)."""

    def __init__(self, folder: Path | None = None, memory_mib: int = 256) -> None:
        self.folder = folder
        bound = memory_mib * MIB if folder is not None else None
        self._bytes: _Recent[bytes] = _Recent(bound, len)
        self._pictures: _Recent[Image.Image] = _Recent(memory_mib * MIB, lambda image: image.width * image.height * 3)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes, kind: MediaKind, origin: str = "") -> Media:
        """Keep bytes and return the reference to them; the same bytes are kept once."""
        digest = hashlib.sha256(data).hexdigest()
        if self._bytes.get(digest) is None:
            if self.folder is not None:
                self._write(self.folder, digest, data)
            self._bytes.add(digest, data)
        return Media(kind, digest, origin)

    def put_picture(self, data: bytes, origin: str) -> Media:
        """Keep a picture once it has been decoded: a corrupt one is refused by its origin and leaves nothing behind."""
        digest = hashlib.sha256(data).hexdigest()
        if self._pictures.get(digest) is None:
            self._pictures.add(digest, decode_picture(data, origin))
        return self.put(data, "picture", origin)

    def put_file(self, path: Path, kind: MediaKind, origin: str = "") -> Media:
        """Keep a file's bytes; a missing or unreadable file is an error that names it."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise MediaError(f"{origin or path}: cannot read {kind} '{path}': {error.strerror}.") from error
        return self.put(data, kind, origin or str(path))

    def bytes_of(self, media: Media) -> bytes:
        """The bytes of a medium; an unknown hash, or a file that no longer matches its hash, is an error."""
        data = self._bytes.get(media.hash)
        if data is None:
            data = self._read(media)
            self._bytes.add(media.hash, data)
        return data

    def picture(self, media: Media) -> Image.Image:
        """The decoded picture (RGB), decoded once while it is in use. Shared: do not draw on it."""
        image = self._pictures.get(media.hash)
        if image is None:
            image = decode_picture(self.bytes_of(media), media.origin or media.hash[:12])
            self._pictures.add(media.hash, image)
        return image

    def _read(self, media: Media) -> bytes:
        who = f"{media.kind} {media.hash[:12]} ({media.origin or 'unknown origin'})"
        try:
            data = (self.folder / media.hash).read_bytes() if self.folder is not None else None
        except OSError as error:
            raise MediaError(f"{who} is not in the store '{self.folder}': {error.strerror}.") from error
        if data is None:
            raise MediaError(f"{who} is not in the store.")
        if hashlib.sha256(data).hexdigest() != media.hash:
            raise MediaError(f"{who}: its file in '{self.folder}' was changed or damaged. Delete it and run again.")
        return data

    @staticmethod
    def _write(folder: Path, digest: str, data: bytes) -> None:
        place = folder / digest
        try:
            if place.stat().st_size == len(data):
                return
        except FileNotFoundError:
            pass
        draft = folder / f".{digest}.{os.getpid()}.{threading.get_ident()}"
        draft.write_bytes(data)
        os.replace(draft, place)


class _Recent(Generic[Kept]):
    """The most recently used things by hash, within a bound on their bytes (None: no bound)."""

    def __init__(self, bound: int | None, size: Callable[[Kept], int]) -> None:
        self._bound, self._size, self._used = bound, size, 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> Kept | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def add(self, digest: str, thing: Kept) -> None:
        with self._lock:
            if digest in self._kept:
                return
            self._kept[digest] = thing
            self._used += self._size(thing)
            while self._bound is not None and self._used > self._bound and self._kept:
                self._used -= self._size(self._kept.popitem(last=False)[1])
