"""Decoding off the caller's thread: each medium once, however many ask, with bounded caches in memory and on disk.

Invariants: concurrent requests for one (content hash, parameters) share one decoding; memory stays within a bound; a medium
that cannot be decoded fails alone, with an error that names it as its asker does. An entry on disk is complete or absent
(written beside its place, then renamed) and ends in a checksum, so a kill, a full disk or another process in the same
folder costs a decoding, never a wrong frame. The least recently used entries go first.
"""

import json
import os
import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sensorium.data.lru import LRU
from sensorium.data.media_files import MIB
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import DecodedAudio, augmented_sound, decode_audio
from sensorium.data.video import BadClip, DecodedVideo, decode_video, library
from sensorium.runs.durable import drafted
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import AudioParameters, VideoParameters
from sensorium.vocabulary.errors import MediaError

Clip = DecodedVideo | DecodedAudio
KINDS: dict[str, type[Clip]] = {"video": DecodedVideo, "sound": DecodedAudio}

FORMAT = 3
STALE_DRAFT_S = 3600.0
RECOUNT_EVERY = 64  # entries of our own after which the folder is counted again, since other processes write too


class DiskCache:
    """Decoded clips in a folder, within ``limit`` bytes. Several threads and processes may share the folder.

    ``noted`` is called once if nothing can be written there: clips are then decoded again whenever they are needed.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.hits = self.evictions = self.damaged = 0  # since this process opened the folder
        self.noted: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2)
        self._noted_problem = False
        self._lock = threading.Lock()
        self._since_count = self.bytes = 0
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
                self.damaged += 1
                with suppress(OSError):  # in a read-only folder it stays, and is decoded again each time
                    path.unlink(missing_ok=True)
            else:
                self.hits += 1
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
        except OSError as error:  # a cache that cannot be written is no reason to stop
            with self._lock:
                known, self._noted_problem = self._noted_problem, True
            if not known:
                self.noted(
                    f"decoded clips cannot be kept in '{self.folder}' ({error.strerror}), so each is decoded again "
                    "whenever it is needed. Make room there, or choose another folder (media.cache)."
                )
            return
        with self._lock:
            self.bytes += size
            self._since_count += 1
            if self.bytes > self.limit or self._since_count >= RECOUNT_EVERY:
                self._trim()

    def _place(self, key: str) -> Path:
        # Another version of the decoders may give other pixels, so it does not use these entries.
        return self.folder / f"{key}.{FORMAT}-{library().__version__}"

    def _trim(self) -> None:
        """Count the folder, and remove the least recently used entries until it is a tenth below its limit."""
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
                continue  # another process removed it
        self.bytes = sum(size for _, size, _ in found)
        self._since_count = 0
        if self.bytes <= self.limit:
            return
        for _, size, path in sorted(found):
            Path(path).unlink(missing_ok=True)
            self.evictions += 1
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


Decoded = Image.Image | Clip
GIB = 1 << 30


@dataclass(frozen=True)
class DecodeCounters:
    """Decodings of a decoder, requests answered from memory, from disk and by sharing; and the sizes of the caches.

    ``disk_damaged`` entries were found broken and decoded again.
    """

    decoded: int
    memory_hits: int
    disk_hits: int
    shared: int
    memory_evictions: int
    disk_evictions: int
    disk_damaged: int
    memory_bytes: int
    disk_bytes: int


class Decoder:
    """Decoded media of a store: pictures (PIL, RGB), videos and sounds. Close it to end its threads."""

    def __init__(
        self, store: MediaStore, cache: DiskCache | None = None, *, memory_mib: float = 256, threads: int = 2
    ) -> None:
        self.store, self.cache = store, cache
        self._memory: LRU[str, Clip] = LRU(round(memory_mib * MIB), lambda clip: clip.nbytes)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._ahead = 2 * threads
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[Decoded]] = {}
        self._decoded = self._memory_hits = self._shared = 0

    def request(self, media: Media) -> "Future[Decoded]":
        """Start decoding a medium and return at once; equal requests share the future."""
        with self._lock:
            known = self._memory.get(media.key)
            if known is not None:
                self._memory_hits += 1
                done: Future[Decoded] = Future()
                done.set_result(known)
                return done
            work = self._under_way.get(media.key)
            if work is None:
                work = self._under_way[media.key] = self._pool.submit(self._made, media)
            else:
                self._shared += 1
        return work

    def get(self, media: Media) -> Decoded:
        """A decoded medium; MediaError if it cannot be decoded."""
        found = _outcome(self.request(media), media)
        if isinstance(found, MediaError):
            raise found
        return found

    def get_many(self, media: Iterable[Media]) -> "list[Decoded | MediaError]":
        """Decoded media in order, decoded side by side; an error in the place of one that cannot be decoded."""
        return [found for _, found in self.each(media)]

    def each(self, media: Iterable[Media]) -> "Iterator[tuple[Media, Decoded | MediaError]]":
        """Media in order, each with its decoding or its error. A few are decoded ahead; no more are held at once."""
        waiting: deque[tuple[Media, Future[Decoded]]] = deque()
        for item in media:
            waiting.append((item, self.request(item)))
            if len(waiting) > self._ahead:
                first, work = waiting.popleft()
                yield first, _outcome(work, first)
        for item, work in waiting:
            yield item, _outcome(work, item)

    @property
    def counters(self) -> DecodeCounters:
        disk = self.cache
        return DecodeCounters(
            decoded=self._decoded + self.store.pictures_decoded,
            memory_hits=self._memory_hits,
            disk_hits=disk.hits if disk else 0,
            shared=self._shared,
            memory_evictions=self._memory.evictions,
            disk_evictions=disk.evictions if disk else 0,
            disk_damaged=disk.damaged if disk else 0,
            memory_bytes=self._memory.held,
            disk_bytes=disk.bytes if disk else 0,
        )

    def close(self) -> None:
        """End the threads; queued requests are cancelled."""
        self._pool.shutdown(cancel_futures=True)

    def _made(self, media: Media) -> Decoded:
        try:
            if media.kind == "picture":  # the store caches decoded pictures itself, since it checks them on arrival
                return self.store.picture(media)
            cache = self.cache if media.augmentation is None else None  # each draw of those is another one
            clip = cache.get(media.key) if cache is not None else None
            if clip is None:
                clip = decode(self.store, media)
                with self._lock:
                    self._decoded += 1
                if cache is not None:
                    cache.put(media.key, clip)
            self._memory.add(media.key, clip)
            return clip
        finally:
            with self._lock:
                del self._under_way[media.key]


def open_decoder(store: MediaStore, folder: Path | None, *, cache_gib: float, memory_gib: float, threads: int) -> Decoder:
    """A decoder of a store's media with a disk cache in ``folder``, or in ``decoded/`` beside the store's own.

    Without either, or at ``cache_gib`` 0, it caches in memory only.
    """
    if folder is None and store.folder is not None:
        folder = store.folder.parent / "decoded"
    cache = DiskCache(folder, round(cache_gib * GIB)) if folder is not None and cache_gib > 0 else None
    return Decoder(store, cache, memory_mib=memory_gib * 1024, threads=threads)


def decode(store: MediaStore, media: Media) -> Clip:
    """Decode a video or sound as its parameters ask. A file that changes meanwhile is refused."""
    source = store.source_of(media)
    try:
        if isinstance(media.parameters, VideoParameters):
            return decode_video(source, media.parameters, media.name, store.limits, media.augmentation)
        assert isinstance(media.parameters, AudioParameters), "a picture has no parameters"
        sound = decode_audio(source, media.parameters, media.name, store.limits)
        return sound if media.augmentation is None else augmented_sound(sound, media.augmentation)
    finally:
        store.source_of(media)


def _outcome(work: "Future[Decoded]", media: Media) -> "Decoded | MediaError":
    """The result of shared work, or an error that names the medium as this asker does."""
    try:
        return work.result()
    except BadClip as error:
        return BadClip(media.name, error.what)
    except MediaError as error:
        return error
