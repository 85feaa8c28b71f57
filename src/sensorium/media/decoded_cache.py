"""A bounded folder of decoded videos and sounds, keyed by content hash and parameters.

Invariants: an entry is complete or absent (written beside its place, then renamed), ends in a checksum, and is decoded anew
when it does not hold; so a kill, a full disk or another process in the same folder costs a decoding, never a wrong frame.
The least recently used entries go first once the folder is over its limit.
"""

import json
import os
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from sensorium.media.audio import DecodedAudio
from sensorium.media.container import library
from sensorium.media.video import DecodedVideo
from sensorium.record.durable import drafted

Clip = DecodedVideo | DecodedAudio
KINDS: dict[str, type[Clip]] = {"video": DecodedVideo, "sound": DecodedAudio}

FORMAT = 3
STALE_DRAFT_S = 3600.0
RECOUNT_EVERY = 64
"""Other processes write too, so the folder is counted again after so many entries of our own."""


@dataclass
class CacheCounters:
    """Since this process opened the folder: entries found, entries evicted, entries found damaged."""

    hits: int = 0
    evictions: int = 0
    damaged: int = 0


class DiskCache:
    """Decoded clips in a folder, within ``limit`` bytes. Several threads and processes may share the folder.

    ``noted`` is told once if nothing can be written there: every clip is then decoded again when it is needed.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.counters = CacheCounters()
        self.noted: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2)
        self._told = False
        self._lock = threading.Lock()
        self._since_count = 0
        self.bytes = 0
        if folder.is_dir():  # else it is made with its first entry: most runs have only pictures, which are not kept here
            self._trim()

    def get(self, key: str) -> Clip | None:
        """The clip of a key, marked as just used; None if it is not there or not whole."""
        path = self._place(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        clip = unpacked(data)
        with self._lock:
            if clip is None:
                self.counters.damaged += 1
                with suppress(OSError):  # of a folder that is only read, it stays and is decoded anew each time
                    path.unlink(missing_ok=True)
            else:
                self.counters.hits += 1
        return clip

    def put(self, key: str, clip: Clip) -> None:
        """Keep a clip, unless it is larger than the whole cache may be or the disk is full."""
        body = packed(clip)
        size = sum(len(part) for part in body)
        if size > self.limit:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with drafted(self._place(key), flushed=False, shared=True) as draft, draft.open("wb") as file:
                file.writelines(body)
        except OSError as error:  # a cache that cannot be written to is no cache, and no reason to stop
            self._tell(error)
            return
        with self._lock:
            self.bytes += size
            self._since_count += 1
            if self.bytes > self.limit or self._since_count >= RECOUNT_EVERY:
                self._trim()

    def _tell(self, error: OSError) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told:
            self.noted(
                f"decoded clips cannot be kept in '{self.folder}' ({error.strerror}), so each is decoded again whenever it "
                "is needed. Make room there, or choose another folder (media.cache)."
            )

    def _place(self, key: str) -> Path:
        return self.folder / f"{key}.{FORMAT}-{_decoder_version()}"

    def _trim(self) -> None:
        """Count the folder, and let the least recently used entries go until it is a tenth below its limit."""
        found: list[tuple[float, int, str]] = []
        now = time.time()
        for entry in os.scandir(self.folder):
            try:
                seen = entry.stat()
                if not entry.name.startswith("."):
                    found.append((seen.st_mtime, seen.st_size, entry.path))
                elif now - seen.st_mtime > STALE_DRAFT_S:  # left by a process that was killed
                    os.unlink(entry.path)
            except OSError:
                continue  # another process was quicker
        self.bytes = sum(size for _, size, _ in found)
        self._since_count = 0
        if self.bytes <= self.limit:
            return
        for _, size, path in sorted(found):
            Path(path).unlink(missing_ok=True)
            self.counters.evictions += 1
            self.bytes -= size
            if self.bytes <= self.limit * 0.9:
                return


def packed(clip: Clip) -> list[bytes]:
    """A clip as bytes: a header in JSON, its arrays, a checksum over both."""
    plain: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for field in fields(clip):
        value = getattr(clip, field.name)
        (arrays if isinstance(value, np.ndarray) else plain)[field.name] = value
    kind = next(name for name, made in KINDS.items() if isinstance(clip, made))
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    head = json.dumps({"kind": kind, "plain": plain, "arrays": shapes}).encode()
    body = [len(head).to_bytes(4, "little"), head, *(array.tobytes() for array in arrays.values())]
    check = 0
    for part in body:
        check = zlib.crc32(part, check)
    return [*body, check.to_bytes(4, "little")]


def unpacked(data: bytes) -> Clip | None:
    """The clip that was packed, or None if the bytes are not whole."""
    view = memoryview(data)
    if len(data) < 8 or zlib.crc32(view[:-4]) != int.from_bytes(view[-4:], "little"):
        return None
    start = 4 + int.from_bytes(view[:4], "little")
    head: Mapping[str, Any] = json.loads(bytes(view[4:start]))
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in head["plain"].items()
    }
    for name, (kind, shape) in head["arrays"].items():
        array = np.frombuffer(data, kind, int(np.prod(shape)), start).reshape(shape)
        values[name], start = array, start + array.nbytes
    return KINDS[head["kind"]](**values)


def _decoder_version() -> str:
    """Another version of the decoders may give other pixels, so it does not use these entries."""
    return str(library().__version__)
