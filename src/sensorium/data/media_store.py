"""The content-addressed store of media: each distinct medium is kept once, by the sha256 of its bytes.

Invariants: a file ``folder/<hash>`` is complete or absent (written beside its place, then renamed). With a folder, memory
holds only the most recently used media, within a bound; without one (tests) memory holds all of them. Videos and sounds
given as files are never loaded whole: they are hashed as a stream, once while they do not change, and linked into the
folder, or copied where no link can be made. Threads may share it.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from PIL import Image

from sensorium.data.augmentation import changed_picture
from sensorium.data.lru import LRU
from sensorium.data.media_files import MIB, MediaLimits, busy, file_state, open_regular, read_bytes, unreadable
from sensorium.data.pictures import decode_picture, encode_png
from sensorium.runs.durable import drafted
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.decoding import Parameters
from sensorium.vocabulary.errors import MediaError

HASHES_KEPT = 1 << 16


class FilesRead:
    """The files that media were read from, each as it was first read: path, size, time of change, hash of the content.

    ``known`` are the paths of an earlier record, which are not recorded again.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = {hash(path) for path in known}  # not the paths: there may be millions
        self._new: list[tuple[str, int, int, str]] = []
        self._lock = threading.Lock()

    def add(self, path: Path, seen: os.stat_result, digest: str) -> None:
        """Record a file, unless it was before; ``seen`` is its state before it was read."""
        name = os.path.abspath(path)
        with self._lock:
            if hash(name) not in self._known:
                self._known.add(hash(name))
                self._new.append((name, seen.st_size, seen.st_mtime_ns, digest))

    def take(self) -> list[tuple[str, int, int, str]]:
        """What was recorded since the last time."""
        with self._lock:
            taken, self._new = self._new, []
        return taken


class MediaStore:
    """Bytes by content hash, in memory or below a folder (a run directory's ``media/``).

    ``stored_bytes`` is the size of the folder; linked clips count from the next time it is opened. ``files_read``, if set,
    records the files that pictures and clips of rows are read from.
    """

    def __init__(self, folder: Path | None = None, memory_mib: int = 256, limits: MediaLimits | None = None) -> None:
        self.folder, self.limits = folder, limits or MediaLimits()
        bound = memory_mib * MIB if folder is not None else None
        self.files_read: FilesRead | None = None
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
        """Keep a picture that can be decoded; a corrupt one is refused, by its origin, and leaves nothing behind."""
        digest = hashlib.sha256(data).hexdigest()
        if self._pictures.get(digest) is None:
            self._pictures.add(digest, self._decoded(data, origin))
        return self.put(data, "picture", origin)

    def put_picture_file(self, path: Path, origin: str) -> Media:
        """Keep a picture from a file, if it can be read and decoded."""
        with suppress(OSError):  # reading it reports why
            seen = path.stat()
        media = self.put_picture(read_bytes(path, "picture", origin, self.limits), origin)
        if self.files_read is not None:
            self.files_read.add(path, seen, media.hash)
        return media

    def put_file(self, path: Path, kind: MediaKind, origin: str = "", parameters: Parameters | None = None) -> Media:
        """Keep a file; a missing or unreadable one is an error that names it. Videos and sounds are linked, not loaded."""
        if kind == "picture":
            return self.put(read_bytes(path, kind, origin or str(path), self.limits), kind, origin or str(path))
        try:
            real = path.resolve(strict=True)
            seen = real.stat()
            if problem := self.limits.refuse_file(seen.st_size):
                raise MediaError(f"{origin or path}: cannot read the {kind} '{path}': {problem}")
            digest = self._digest(real)
            if self.folder is None:
                self._files[digest] = real
            else:
                self._link(self.folder, digest, real)
        except (OSError, ValueError) as error:
            raise unreadable(path, kind, origin or str(path), error) from error
        if self.files_read is not None:
            self.files_read.add(path, seen, digest)
        return Media(kind, digest, origin or str(path), parameters)

    @property
    def in_memory(self) -> set[str]:
        """The hashes of the media whose bytes are in memory."""
        return {digest for digest, _ in self._bytes.items()}

    def forget_others(self, kept: Collection[str]) -> None:
        """Drop what memory holds of all media but these; nobody asks for them again."""
        for cache in (self._bytes, self._pictures):
            for digest, _ in cache.items():
                if digest not in kept:
                    cache.pop(digest)

    def take(self, media: Media, other: "MediaStore") -> None:
        """Keep a medium of another store too; where it is a file there, it is linked and not loaded."""
        source = other.source_of(media)
        if isinstance(source, bytes):
            self.put(source, media.kind)
        elif self.folder is None:
            self._files[media.hash] = source
        else:
            with _readable(media, source):
                self._digests.add(file_state(source.stat()), media.hash)  # the other store has just checked it
                self._link(self.folder, media.hash, source)

    def size_of(self, media: Media) -> int:
        """The number of bytes of a medium, without reading them."""
        path = self._path(media)
        if path is None:
            return len(self.bytes_of(media))
        with _readable(media, path):
            return path.stat().st_size

    def head_of(self, media: Media, count: int) -> bytes:
        """The first bytes of a medium, without reading the others."""
        path = self._path(media)
        if path is None:
            return self.bytes_of(media)[:count]
        with _readable(media, path), path.open("rb") as file:
            return file.read(count)

    def source_of(self, media: Media) -> bytes | Path:
        """The file that a decoder reads, or the bytes where there is none. Its content is checked by hash."""
        path = self._path(media)
        if path is None:
            return self.bytes_of(media)
        with _readable(media, path):
            digest = self._digest(path)
        if digest != media.hash:
            raise _changed(media, path)
        return path

    def bytes_of(self, media: Media) -> bytes:
        """The bytes of a medium; an unknown hash, or a file that no longer matches its hash, is an error."""
        data = self._bytes.get(media.hash)
        if data is not None:
            return data
        path = self._path(media)
        if path is None:
            raise MediaError(f"{_named(media)} is not in the store.")
        with _readable(media, path):
            data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != media.hash:
            raise _changed(media, path)
        if self.folder is not None:  # without one its own file can be read again, and memory has no bound
            self._bytes.add(media.hash, data)
        return data

    def picture(self, media: Media) -> Image.Image:
        """The decoded picture (RGB), as it is augmented, decoded once while it is in use. Shared: do not draw on it."""
        image = self._pictures.get(media.key)
        if image is None:
            if media.augmentation is None:
                image = self._decoded(self.bytes_of(media), media.name)
            else:
                image = changed_picture(self.picture(replace(media, augmentation=None)), media.augmentation)
            self._pictures.add(media.key, image)
        return image

    def shown_bytes(self, media: Media) -> bytes:
        """The file that shows a medium to others: its own bytes, or a PNG of what a picture is augmented to."""
        augmented = media.kind == "picture" and media.augmentation is not None
        return encode_png(self.picture(media)) if augmented else self.bytes_of(media)

    def _decoded(self, data: bytes, origin: str) -> Image.Image:
        with self._counting:
            self.pictures_decoded += 1
        return decode_picture(data, origin, self.limits)

    def _path(self, media: Media) -> Path | None:
        return self._files.get(media.hash) if self.folder is None else self.folder / media.hash

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
        """Link a file that was hashed into the folder; one that was replaced since is refused."""
        place = folder / digest
        with suppress(OSError):
            if self._digest(place) == digest:
                return
        hashed = file_state(path.stat())
        with drafted(place, flushed=False, shared=True) as draft:
            try:
                os.link(path, draft)
            except OSError:  # another file system, or another user's file
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


class StoredMedia(MediaStore):
    """The media of a folder that is only read; what is put here stays in memory."""

    def __init__(self, folder: Path, limits: MediaLimits | None = None) -> None:
        super().__init__(limits=limits)
        self._read = folder

    def _path(self, media: Media) -> Path | None:
        known = super()._path(media)
        return known if known is not None or self._bytes.get(media.hash) is not None else self._read / media.hash


def _named(media: Media) -> str:
    return f"{media.kind} {media.hash[:12]} ({media.origin or 'unknown origin'})"


@contextmanager
def _readable(media: Media, path: Path) -> Iterator[None]:
    """Turn errors of reading a file into a MediaError that names the medium."""
    try:
        yield
    except OSError as error:
        raise MediaError(f"{_named(media)} is not in the store '{path.parent}': {error.strerror}.") from error


def _changed(media: Media, path: Path) -> MediaError:
    return MediaError(
        f"{_named(media)}: its file in '{path.parent}' was changed or damaged. A clip there is a link to the data's own "
        "file where possible, so one that is overwritten in place changes there too. Restore the original and run again; "
        "replace files by renaming new ones over them."
    )
