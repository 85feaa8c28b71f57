"""Decoding off the caller's thread: each medium once, however many ask for it at once, with memory and disk in front.

Invariants: concurrent requests for one (content hash, parameters) share one decoding; what is kept in memory stays within a
bound, whatever the number of steps; a medium that cannot be decoded fails alone, with an error that names whoever asked.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from sensorium.caches.lru import LRU
from sensorium.media.audio import decode_audio
from sensorium.media.container import BadClip
from sensorium.media.decoded_cache import Clip, DiskCache
from sensorium.media.store import MIB, MediaStore
from sensorium.media.video import decode_video
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import AudioParameters, VideoParameters
from sensorium.vocabulary.errors import MediaError

Decoded = Image.Image | Clip
GIB = 1 << 30


@dataclass(frozen=True)
class DecodeCounters:
    """What a decoder did: decodings, requests answered from memory, from disk and by sharing; and what the caches hold.

    ``disk_damaged`` entries were found broken and decoded anew.
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
        """Start decoding a medium and return at once; ``asyncio.wrap_future`` makes it something to await."""
        with self._lock:
            known = self._memory.get(media.key)
            if known is not None:
                self._memory_hits += 1
                return _done(known)
            work = self._under_way.get(media.key)
            if work is None:
                work = self._under_way[media.key] = self._pool.submit(self._made, media)
            else:
                self._shared += 1
        return _answer(work, media)

    def get(self, media: Media) -> Decoded:
        """A decoded medium; MediaError if it cannot be."""
        return self.request(media).result()

    def get_many(self, media: Iterable[Media]) -> "list[Decoded | MediaError]":
        """Decoded media in order, decoded side by side; in the place of one that cannot be, its error."""
        return [_settled(work) for work in [self.request(item) for item in media]]

    def each(self, media: Iterable[Media]) -> "Iterator[tuple[Media, Decoded | MediaError]]":
        """Media in order, each with what was decoded or its error. A few are decoded ahead; no more are held at once."""
        waiting: deque[tuple[Media, Future[Decoded]]] = deque()
        for item in media:
            waiting.append((item, self.request(item)))
            if len(waiting) > self._ahead:
                first, work = waiting.popleft()
                yield first, _settled(work)
        for item, work in waiting:
            yield item, _settled(work)

    @property
    def counters(self) -> DecodeCounters:
        """The counts so far."""
        disk = self.cache
        return DecodeCounters(
            decoded=self._decoded + self.store.pictures_decoded,
            memory_hits=self._memory_hits,
            disk_hits=disk.counters.hits if disk else 0,
            shared=self._shared,
            memory_evictions=self._memory.evictions,
            disk_evictions=disk.counters.evictions if disk else 0,
            disk_damaged=disk.counters.damaged if disk else 0,
            memory_bytes=self._memory.held,
            disk_bytes=disk.bytes if disk else 0,
        )

    def close(self) -> None:
        """End the threads; what has not begun is not begun."""
        self._pool.shutdown(cancel_futures=True)

    def _made(self, media: Media) -> Decoded:
        try:
            if media.kind == "picture":  # the store keeps decoded pictures itself, since it checks them when they are put
                return self.store.picture(media)
            clip = self.cache.get(media.key) if self.cache is not None else None
            if clip is None:
                clip = decode(self.store, media)
                with self._lock:
                    self._decoded += 1
                if self.cache is not None:
                    self.cache.put(media.key, clip)
            self._memory.add(media.key, clip)
            return clip
        finally:
            with self._lock:
                del self._under_way[media.key]


def open_decoder(store: MediaStore, folder: Path | None, *, cache_gib: float, memory_gib: float, threads: int) -> Decoder:
    """A decoder of a store's media with a bounded folder in front: ``folder``, or ``decoded/`` beside the store's own.

    Without either, or at ``cache_gib`` 0, memory is all there is.
    """
    if folder is None and store.folder is not None:
        folder = store.folder.parent / "decoded"
    cache = DiskCache(folder, round(cache_gib * GIB)) if folder is not None and cache_gib > 0 else None
    return Decoder(store, cache, memory_mib=memory_gib * 1024, threads=threads)


def decode(store: MediaStore, media: Media) -> Clip:
    """Decode a video or sound as its parameters ask. A file that is changed meanwhile is refused, whatever was decoded."""
    source = store.source_of(media)
    try:
        if isinstance(media.parameters, VideoParameters):
            return decode_video(source, media.parameters, media.name, store.limits)
        assert isinstance(media.parameters, AudioParameters), "a picture has no parameters"
        return decode_audio(source, media.parameters, media.name, store.limits)
    finally:
        store.source_of(media)


def _done(clip: Clip) -> "Future[Decoded]":
    answer: Future[Decoded] = Future()
    answer.set_result(clip)
    return answer


def _answer(work: "Future[Decoded]", media: Media) -> "Future[Decoded]":
    """The answer of shared work to one who asked; an error calls the medium by that one's name."""
    answer: Future[Decoded] = Future()

    def pass_on(work: "Future[Decoded]") -> None:
        if work.cancelled():
            answer.cancel()
        if not answer.set_running_or_notify_cancel():
            return
        error = work.exception()
        if error is None:
            answer.set_result(work.result())
        else:
            answer.set_exception(BadClip(media.name, error.what) if isinstance(error, BadClip) else error)

    work.add_done_callback(pass_on)
    return answer


def _settled(work: "Future[Decoded]") -> "Decoded | MediaError":
    try:
        return work.result()
    except MediaError as error:
        return error
