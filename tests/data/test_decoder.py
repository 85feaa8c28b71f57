"""A decoder decodes each medium once, shares what is under way, and lets a bad one fail alone."""

import asyncio
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sensorium.data import decoder as decoding
from sensorium.data.decoder import Clip, Decoder, DiskCache, open_decoder
from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.sound import encode_wav
from sensorium.data.video import DecodedVideo
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import AudioParameters
from sensorium.vocabulary.errors import MediaError
from tests.data.clips import CLIP, middle, numbered, numbers, tone

TWO, THREE = middle(frames=2), middle(frames=3)


def frames(clip: object) -> list[int]:
    assert isinstance(clip, DecodedVideo)
    return numbers(clip.frames)


def test_each_file_and_parameters_is_decoded_once() -> None:
    store = MediaStore()
    decoder = Decoder(store)
    two, three = (store.put(CLIP, "video", "row", asked) for asked in (TWO, THREE))
    sound = store.put(CLIP, "sound", "row", AudioParameters(8000))
    for _ in range(5):
        found = decoder.get_many([two, three, sound, two])
        assert (frames(found[0]), frames(found[1])) == ([6, 18], [4, 12, 20])
        assert found[0] is found[3]
    counters = decoder.counters
    assert counters.decoded == 3
    assert counters.memory_hits + counters.shared == 17
    assert counters.memory_bytes == sum(clip.nbytes for clip in (found[0], found[1], found[2]))  # type: ignore[union-attr]


def test_the_disk_serves_later_decoders_and_evictions_are_counted(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    media = [store.put(encode_clip(numbered(4 + i)), "video", f"row {i}", TWO) for i in range(4)]
    first = Decoder(store, DiskCache(tmp_path / "decoded", 10**7))
    made = first.get_many(media)
    second = Decoder(store, DiskCache(tmp_path / "decoded", 10**7), memory_mib=0)
    for _ in range(2):
        found = second.get_many(media)
        assert [frames(clip) for clip in found] == [frames(clip) for clip in made]
    assert (first.counters.decoded, first.counters.disk_hits) == (4, 0)
    assert (second.counters.decoded, second.counters.disk_hits) == (0, 8)
    assert (second.counters.memory_evictions, second.counters.disk_evictions) == (8, 0)
    assert second.counters.disk_bytes == first.counters.disk_bytes > 0


def test_media_come_one_by_one_and_few_are_held(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    media = [store.put(encode_clip(numbered(4 + i)), "video", f"row {i}", TWO) for i in range(12)]
    media.insert(5, store.put(encode_wav(tone()), "video", "row x", TWO))
    decoder = Decoder(store, memory_mib=0, threads=2)
    asked = 0

    def asking() -> Iterator[Media]:
        nonlocal asked
        for item in media:
            asked += 1
            yield item

    for number, (item, found) in enumerate(decoder.each(asking())):
        assert item is media[number]
        assert isinstance(found, MediaError) == (number == 5)
        assert asked <= number + 1 + 2 * 2, "no more than a few are decoded ahead"
    assert number == 12


def test_a_decoder_is_opened_with_a_folder_beside_its_store(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "run" / "media")
    media = store.put(CLIP, "video", "row", TWO)
    sizes: dict[str, Any] = {"cache_gib": 0.001, "memory_gib": 0.0, "threads": 1}
    open_decoder(store, None, **sizes).get(media)
    assert len(list((tmp_path / "run" / "decoded").iterdir())) == 1
    shared = open_decoder(MediaStore(), tmp_path / "run" / "decoded", **sizes)
    assert frames(shared.get(media)) == [6, 18]
    assert (shared.counters.decoded, shared.counters.disk_hits) == (0, 1)
    assert open_decoder(MediaStore(), None, **sizes).cache is None
    assert open_decoder(store, None, cache_gib=0, memory_gib=1, threads=1).cache is None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Decoding waits until this is set."""
    gate = threading.Event()
    real = decoding.decode

    def slow(store: MediaStore, media: Media) -> Clip:
        assert gate.wait(300)
        return real(store, media)

    monkeypatch.setattr(decoding, "decode", slow)
    return gate


def test_requests_at_the_same_time_share_one_decoding(gate: threading.Event) -> None:
    store = MediaStore()
    decoder = Decoder(store, memory_mib=0)
    requests = [decoder.request(store.put(CLIP, "video", f"row {i}", TWO)) for i in range(10)]
    gate.set()
    assert {id(request.result()) for request in requests} == {id(requests[0].result())}
    assert (decoder.counters.decoded, decoder.counters.shared) == (1, 9)


def test_a_bad_medium_fails_alone_and_by_the_name_of_who_asked() -> None:
    store = MediaStore()
    decoder = Decoder(store)
    good = store.put(CLIP, "video", "row 0", TWO)
    bad = [store.put(encode_wav(tone()), "video", f"row {i}", TWO) for i in (1, 2)]
    gone = Media("sound", "0" * 64, "row 3")
    found = decoder.get_many([good, *bad, gone])
    assert frames(found[0]) == [6, 18]
    for i, error in enumerate(found[1:], 1):
        assert isinstance(error, MediaError)
        assert f"row {i}" in str(error)
    with pytest.raises(MediaError, match=r"row 2"):
        decoder.get(bad[1])


def test_pictures_come_the_same_way() -> None:
    store = MediaStore()
    decoder = Decoder(store)
    picture = store.put(encode_png(np.zeros((4, 6, 3), np.uint8)), "picture", "row 0")
    broken = store.put(b"\x89PNG broken", "picture", "row 1")
    for _ in range(3):
        found = decoder.get_many([picture, picture, picture, broken])
        assert found[0] is found[1] is found[2]
        assert isinstance(found[0], Image.Image)
        assert found[0].size == (6, 4)
        assert isinstance(found[3], MediaError)
    assert decoder.counters.decoded == 4, "the good one once, the broken one each time it was tried"


def test_waiting_leaves_the_event_loop_free(gate: threading.Event) -> None:

    async def both() -> list[int]:
        store = MediaStore()
        decoder = Decoder(store)
        waiting = asyncio.wrap_future(decoder.request(store.put(CLIP, "video", "row", TWO)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        gate.set()
        return frames(await waiting)

    assert asyncio.run(both()) == [6, 18]


def test_a_damaged_cache_entry_is_decoded_anew(tmp_path: Path) -> None:
    store = MediaStore()
    media = store.put(CLIP, "video", "row", TWO)
    Decoder(store, DiskCache(tmp_path, 10**7)).get(media)
    (entry,) = tmp_path.iterdir()
    body = bytearray(entry.read_bytes())
    body[len(body) // 2] ^= 255
    entry.write_bytes(body)
    again = Decoder(store, DiskCache(tmp_path, 10**7))
    assert frames(again.get(media)) == [6, 18]
    assert (again.counters.decoded, again.counters.disk_hits) == (1, 0)
    assert frames(Decoder(store, DiskCache(tmp_path, 10**7)).get(media)) == [6, 18]


def test_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    """Twenty clips, decoded anew or read from disk over and over: peak memory grows by less than 5 % once warm."""
    store = MediaStore(tmp_path / "media", memory_mib=1)
    media = [
        store.put(encode_clip(numbered(8 + i % 5) + i, 8.0, tone(1.0)), kind, f"row {i}")  # type: ignore[arg-type]
        for i in range(10)
        for kind in ("video", "sound")
    ]
    fresh = Decoder(store, memory_mib=0)
    cached = Decoder(store, DiskCache(tmp_path / "decoded", 120_000), memory_mib=1)

    def step() -> None:
        for decoder in (fresh, cached):
            assert not [clip for clip in decoder.get_many(media) if isinstance(clip, MediaError)]

    for _ in range(5):  # how many decodings meet at once, and so the peak, takes a while to settle
        step()
    warm = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5):
        step()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1.05 * warm
    assert fresh.counters.decoded == 10 * 20
    assert cached.counters.memory_bytes <= 2**20
    assert cached.counters.disk_bytes <= 120_000


def test_many_threads_may_ask(tmp_path: Path) -> None:
    store = MediaStore()
    decoder = Decoder(store, DiskCache(tmp_path, 10**6), memory_mib=1, threads=4)
    media = [store.put(CLIP, "video", "row", middle(frames=1 + i)) for i in range(6)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: len(frames(decoder.get(media[i % 6]))), range(120)))
    assert found == [1 + i % 6 for i in range(120)]
    decoder.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_clip_that_is_changed_while_it_is_decoded_is_refused(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was decoded of it, or what was wrong with it, belongs to no content that has a hash."""
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(CLIP)
    store = MediaStore(tmp_path / "media")
    media = store.put_file(clip, "video", "row 1", middle(frames=2))
    usual = decoding.decode_video

    def changed(*given: Any) -> Any:
        clip.write_bytes(CLIP[: None if whole else 100] + b"more")
        return usual(*given)

    monkeypatch.setattr(decoding, "decode_video", changed)
    cache = DiskCache(tmp_path / "decoded", 2**30)
    decoder = Decoder(store, cache)
    with pytest.raises(MediaError, match=r"row 1.*changed or damaged"):
        decoder.get(media)
    assert cache.get(media.key) is None
    decoder.close()
