"""The content-addressed store of media bytes: each distinct medium is kept once, by the sha256 of its bytes."""

import hashlib
from pathlib import Path

from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.errors import MediaError


class MediaStore:
    """Bytes by content hash, in memory or below a folder (a run directory's ``media/``)."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._memory: dict[str, bytes] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes, kind: MediaKind, origin: str = "") -> Media:
        """Keep bytes and return the reference to them; the same bytes are kept once."""
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._memory:
            self._memory[digest] = data
        return Media(kind, digest, origin)

    def put_file(self, path: Path, kind: MediaKind, origin: str = "") -> Media:
        """Keep a file's bytes; a missing or unreadable file is an error that names it."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise MediaError(f"{origin or path}: cannot read {kind} '{path}': {error.strerror}.") from error
        return self.put(data, kind, origin or str(path))

    def bytes_of(self, media: Media) -> bytes:
        """The bytes of a medium; an unknown hash is an error that names its origin."""
        data = self._memory.get(media.hash)
        if data is None and self.folder is not None:
            path = self.folder / media.hash
            data = path.read_bytes() if path.exists() else None
        if data is None:
            raise MediaError(f"{media.kind} {media.hash[:12]} ({media.origin or 'unknown origin'}) is not in the store.")
        return data
