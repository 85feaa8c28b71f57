"""The content-addressed store of media: each distinct medium is kept once, by the sha256 of its bytes.

Invariants: a file ``folder/<hash>`` is complete or absent (written beside its place, then renamed). With a folder, memory
holds only the most recently used media, within a bound, so it does not grow with steps; without one (tests) memory is all
there is and nothing is forgotten. Videos and sounds given as files are never loaded whole: they are hashed as a stream,
once while they do not change, and linked into the folder, or copied where no link can be made. Threads may share it.
"""

import hashlib
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from PIL import Image

from sensorium.data.lru import LRU
from sensorium.data.media_files import MediaLimits, busy, file_state, open_regular, read_bytes, unreadable
from sensorium.data.pictures import decode_picture
from sensorium.runs.durable import drafted
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.decoding import Parameters
from sensorium.vocabulary.errors import MediaError

MIB = 1024 * 1024
HASHES_KEPT = 1 << 16


class MediaStore:
    """Bytes by content hash, in memory or below a folder (a run directory's ``media/``).

    ``stored_bytes`` is what the folder holds; linked clips count from the next time it is opened.
    """

    def __init__(self, folder: Path | None = None, memory_mib: int = 256, limits: MediaLimits | None = None) -> None:
        self.folder, self.limits = folder, limits or MediaLimits()
        bound = memory_mib * MIB if folder is not None else None
        self.pictures_decoded = 0
        self._counting = threading.Lock()
        self._bytes: LRU[str, bytes] = LRU(bound, len)
        self._pictures: LRU[str, Image.Image] = LRU(memory_mib * MIB, lambda image: image.width * image.height * 3)
        self._files: dict[str, Path] = {}
        self._digests: LRU[tuple[int, ...], str] = LRU(HASHES_KEPT)
        self.stored_bytes = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.stored_bytes = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())

    def put(self, data: bytes, kind: MediaKind, origin: str = "", parameters: Parameters | None = None) -> Media:
        """Keep bytes and return the reference to them; the same bytes are kept once."""
        digest = hashlib.sha256(data).hexdigest()
        if self._bytes.get(digest) is None:
            if self.folder is not None:
                self._write(self.folder, digest, data)
            self._bytes.add(digest, data)
        return Media(kind, digest, origin, parameters)

    def put_picture(self, data: bytes, origin: str) -> Media:
        """Keep a picture once it has been decoded: a corrupt one is refused by its origin and leaves nothing behind."""
        digest = hashlib.sha256(data).hexdigest()
        if self._pictures.get(digest) is None:
            self._pictures.add(digest, self._decoded(data, origin))
        return self.put(data, "picture", origin)

    def put_file(self, path: Path, kind: MediaKind, origin: str = "", parameters: Parameters | None = None) -> Media:
        """Keep a file; a missing or unreadable one is an error that names it. Videos and sounds are linked, not loaded."""
        if kind == "picture":
            return self.put(read_bytes(path, kind, origin or str(path), self.limits), kind, origin or str(path))
        try:
            real = path.resolve(strict=True)
            if problem := self.limits.refuse_file(real.stat().st_size):
                raise MediaError(f"{origin or path}: cannot read the {kind} '{path}': {problem}")
            digest = self._digest(real)
            if self.folder is None:
                self._files[digest] = real
            else:
                self._link(self.folder, digest, real)
        except (OSError, ValueError) as error:
            raise unreadable(path, kind, origin or str(path), error) from error
        return Media(kind, digest, origin or str(path), parameters)

    def take(self, media: Media, other: "MediaStore") -> None:
        """Keep a medium of another store too; where it is a file there, it is linked and not loaded."""
        source = other.source_of(media)
        if isinstance(source, bytes):
            self.put(source, media.kind)
        elif self.folder is not None:
            try:
                self._digests.add(file_state(source.stat()), media.hash)  # the other store has just checked it
                self._link(self.folder, media.hash, source)
            except OSError as error:
                raise MediaError(f"{_who(media)} is not in the store '{source.parent}': {error.strerror}.") from error
        else:
            self._files[media.hash] = source

    def size_of(self, media: Media) -> int:
        """How many bytes a medium has, without reading them."""
        path = self._path(media)
        if path is None:
            return len(self.bytes_of(media))
        try:
            return path.stat().st_size
        except OSError as error:
            raise MediaError(f"{_who(media)} is not in the store '{path.parent}': {error.strerror}.") from error

    def head_of(self, media: Media, count: int) -> bytes:
        """The first bytes of a medium, without reading the others."""
        path = self._path(media)
        if path is None:
            return self.bytes_of(media)[:count]
        try:
            with path.open("rb") as file:
                return file.read(count)
        except OSError as error:
            raise MediaError(f"{_who(media)} is not in the store '{path.parent}': {error.strerror}.") from error

    def source_of(self, media: Media) -> bytes | Path:
        """Where a decoder reads a medium: its file, or its bytes where there is none. Its content is checked by hash."""
        path = self._path(media)
        if path is None:
            return self.bytes_of(media)
        try:
            digest = self._digest(path)
        except OSError as error:
            raise MediaError(f"{_who(media)} is not in the store '{path.parent}': {error.strerror}.") from error
        return path if digest == media.hash else _refuse_changed(media, path)

    def bytes_of(self, media: Media) -> bytes:
        """The bytes of a medium; an unknown hash, or a file that no longer matches its hash, is an error."""
        data = self._bytes.get(media.hash)
        if data is None:
            data = self._read(media)
            if self.folder is not None:  # without one the file it came from serves, and memory would never let go
                self._bytes.add(media.hash, data)
        return data

    def picture(self, media: Media) -> Image.Image:
        """The decoded picture (RGB), decoded once while it is in use. Shared: do not draw on it."""
        image = self._pictures.get(media.hash)
        if image is None:
            image = self._decoded(self.bytes_of(media), media.name)
            self._pictures.add(media.hash, image)
        return image

    def _decoded(self, data: bytes, origin: str) -> Image.Image:
        with self._counting:
            self.pictures_decoded += 1
        return decode_picture(data, origin, self.limits)

    def _path(self, media: Media) -> Path | None:
        return self._files.get(media.hash) if self.folder is None else self.folder / media.hash

    def _read(self, media: Media) -> bytes:
        path = self._path(media)
        if path is None:
            raise MediaError(f"{_who(media)} is not in the store.")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise MediaError(f"{_who(media)} is not in the store '{path.parent}': {error.strerror}.") from error
        if hashlib.sha256(data).hexdigest() != media.hash:
            _refuse_changed(media, path)
        return data

    def _digest(self, path: Path) -> str:
        """The hash of a file's content, remembered while the file stays as it is."""
        with open_regular(path) as file:
            for _ in range(3):
                state = file_state(os.fstat(file.fileno()))
                known = self._digests.get(state)
                if known is not None:
                    return known
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                if file_state(os.fstat(file.fileno())) == state:  # else it was written to meanwhile
                    self._digests.add(state, digest)
                    return digest
                file.seek(0)
        raise busy()

    def _link(self, folder: Path, digest: str, path: Path) -> None:
        """Have a file that was hashed in the folder; one that was replaced since is refused, whatever came of it."""
        place = folder / digest
        with suppress(OSError):
            if self._digest(place) == digest:
                return
        hashed = file_state(path.stat())
        with drafted(place, flushed=False, shared=True) as draft:
            try:
                os.link(path, draft)
            except OSError:  # another file system, or somebody else's file
                shutil.copyfile(path, draft)
                self._count(draft.stat().st_size)
        found = file_state(place.lstat())
        if found[:-1] == hashed[:-1] and self._digests.get(hashed) == digest:  # a link changes only the last of its state
            self._digests.add(found, digest)
        elif place.is_symlink() or self._digest(place) != digest:
            place.unlink()
            raise busy()

    def _count(self, size: int) -> None:
        with self._counting:
            self.stored_bytes += size

    def _write(self, folder: Path, digest: str, data: bytes) -> None:
        place = folder / digest
        try:
            if place.stat().st_size == len(data):
                return
        except FileNotFoundError:
            pass
        with drafted(place, flushed=False, shared=True) as draft:
            draft.write_bytes(data)
        self._count(len(data))


def _who(media: Media) -> str:
    return f"{media.kind} {media.hash[:12]} ({media.origin or 'unknown origin'})"


def _refuse_changed(media: Media, path: Path) -> Path:
    raise MediaError(
        f"{_who(media)}: its file in '{path.parent}' was changed or damaged. A clip there is a link to the data's own file "
        "where possible, so one that is written over in place changes there too. Put the original back and run again; "
        "replace files by renaming new ones over them."
    )
