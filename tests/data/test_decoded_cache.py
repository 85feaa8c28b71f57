"""Decoded clips on disk: found again whole, let go by use, and never trusted when damaged."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.data.decoder import Clip, DiskCache, packed, unpacked
from sensorium.data.sound import DecodedAudio
from sensorium.data.video import DecodedVideo


def video(fill: int = 1, pixels: int = 100) -> DecodedVideo:
    frames, times_s = np.full((2, 5, pixels // 5, 3), fill, np.uint8), np.array([0.5, 1.5])
    return DecodedVideo(frames, times_s, 8.0, 2.0, (20, 5), 0.0, 2.0, np.array([4, 12]), 1.0)


def same(one: Clip | None, other: Clip) -> bool:
    return type(one) is type(other) and all(
        np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(other)
    )


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50), st.floats(0.001, 1e6))
def test_packing_keeps_every_bit(samples: list[float], length: float) -> None:
    sound = DecodedAudio(np.array(samples, np.float32), 16000, length, 0.0, length)
    assert same(unpacked(b"".join(packed(sound))), sound)
    assert same(unpacked(b"".join(packed(video()))), video())


@settings(deadline=None)
@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject) -> None:
    whole = b"".join(packed(video()))
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    assert unpacked(bytes(changed)) is None
    assert unpacked(whole[:place]) is None


def test_what_was_put_is_found_by_another_process_of_the_same_folder(tmp_path: Path) -> None:
    first = DiskCache(tmp_path, 10**6)
    assert first.get("a") is None
    first.put("a", video(7))
    second = DiskCache(tmp_path, 10**6)
    assert same(second.get("a"), video(7))
    assert second.bytes == first.bytes > 0
    assert (first.hits, second.hits) == (0, 1)


def test_a_damaged_entry_is_dropped_and_counted(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 10**6)
    cache.put("a", video())
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-9])
    assert cache.get("a") is None
    assert cache.damaged == 1
    assert list(tmp_path.iterdir()) == []


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    size = sum(map(len, packed(video())))
    cache = DiskCache(tmp_path, 4 * size)
    for i, key in enumerate("abcd"):
        cache.put(key, video())
        (path,) = tmp_path.glob(f"{key}.*")
        os.utime(path, (1000 + i, 1000 + i))
    assert cache.get("a") is not None
    cache.put("e", video())
    assert cache.evictions == 2
    assert [key for key in "abcde" if cache.get(key)] == ["a", "d", "e"]
    assert cache.bytes == 3 * size <= cache.limit


def test_the_limit_holds_whatever_is_put(tmp_path: Path) -> None:
    size = sum(map(len, packed(video())))
    cache = DiskCache(tmp_path, 5 * size)
    for i in range(40):
        cache.put(str(i), video(i))
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= cache.limit
    cache.put("huge", video(pixels=10_000))
    assert cache.get("huge") is None
    assert cache.evictions == 40 - len(list(tmp_path.iterdir()))


def test_a_lower_limit_is_kept_from_the_start(tmp_path: Path) -> None:
    size = sum(map(len, packed(video())))
    for key in "abcd":
        DiskCache(tmp_path, 10 * size).put(key, video())
    assert DiskCache(tmp_path, 2 * size).bytes <= 2 * size


def test_many_writers_of_one_folder(tmp_path: Path) -> None:
    size = sum(map(len, packed(video())))
    caches = [DiskCache(tmp_path, 6 * size) for _ in range(4)]

    def use(i: int) -> bool:
        cache, key = caches[i % 4], i % 9
        cache.put(str(key), video(key))
        found = cache.get(str(key))
        return found is None or same(found, video(key))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(400)))
    assert sum(cache.damaged for cache in caches) == 0


WRITER = """
import sys, numpy as np
from pathlib import Path
from sensorium.data.sound import DecodedAudio
from sensorium.data.decoder import DiskCache
cache = DiskCache(Path(sys.argv[1]), 10**9)
samples = np.zeros(2_000_000, np.float32)
print("ready", flush=True)
for i in range(10**9):
    cache.put(str(i % 20), DecodedAudio(samples, 16000, 1.0, 0.0, 1.0))
"""


def test_a_killed_writer_leaves_no_half_entry(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        while len([path for path in tmp_path.iterdir() if not path.name.startswith(".")]) < 3:
            assert writer.poll() is None
            time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
    cache = DiskCache(tmp_path, 10**9)
    found = [cache.get(str(i)) for i in range(20)]
    assert any(clip is not None for clip in found)
    assert cache.damaged == 0
    for draft in tmp_path.glob(".*"):
        os.utime(draft, (1, 1))
    DiskCache(tmp_path, 10**9)
    assert list(tmp_path.glob(".*")) == []


def test_a_folder_that_cannot_be_written_to_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = DiskCache(tmp_path / "file" / "decoded", 10**6)
    cache.put("a", video())
    assert cache.get("a") is None


def test_the_folder_comes_with_its_first_entry(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "deep" / "decoded", 10**6)
    assert cache.get("a") is None
    assert list(tmp_path.iterdir()) == []
    cache.put("a", video(3))
    assert same(cache.get("a"), video(3))


def test_a_folder_that_cannot_be_written_is_said_once_and_costs_only_decodings(tmp_path: Path) -> None:
    """A file stands where the folder should be, which stops root as well."""
    (tmp_path / "cache").write_text("")
    cache, told = DiskCache(tmp_path / "cache", 10**6), list[str]()
    cache.noted = told.append
    cache.put("a", video())
    cache.put("b", video())
    assert cache.get("a") is None
    assert len(told) == 1
    assert "media.cache" in told[0]
