"""The media store keeps each medium once, whole, and within its memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sensorium.media.picture import encode_png
from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import MediaError


def test_same_bytes_are_kept_once(tmp_path: Path) -> None:
    store = MediaStore(tmp_path)
    first, second = store.put(b"abc", "picture", "here"), store.put(b"abc", "picture", "there")
    assert first == second
    assert [p.name for p in tmp_path.iterdir()] == [first.hash]
    assert store.bytes_of(second) == b"abc"


def test_memory_does_not_grow_with_what_was_put(tmp_path: Path) -> None:
    store = MediaStore(tmp_path, memory_mib=1)
    media = [store.put(bytes([i]) * 300_000, "picture") for i in range(20)]
    assert sum(len(store._bytes._kept[h]) for h in store._bytes._kept) <= 1024 * 1024
    assert [store.bytes_of(m)[0] for m in media] == list(range(20))


def test_a_store_without_folder_forgets_nothing() -> None:
    store = MediaStore(memory_mib=0)
    media = store.put(b"abc", "picture")
    assert store.bytes_of(media) == b"abc"


def test_a_new_store_over_the_folder_finds_what_an_old_one_kept(tmp_path: Path) -> None:
    media = MediaStore(tmp_path).put(b"abc", "picture")
    assert MediaStore(tmp_path).bytes_of(media) == b"abc"


def test_a_damaged_file_is_refused_and_mended_by_putting_again(tmp_path: Path) -> None:
    media = MediaStore(tmp_path).put(b"abcdef", "picture", "train.jsonl:2")
    (tmp_path / media.hash).write_bytes(b"abc")
    with pytest.raises(MediaError, match=r"train\.jsonl:2"):
        MediaStore(tmp_path).bytes_of(media)
    store = MediaStore(tmp_path)
    store.put(b"abcdef", "picture")
    assert MediaStore(tmp_path).bytes_of(media) == b"abcdef"


def test_unknown_medium_names_its_origin(tmp_path: Path) -> None:
    for store in (MediaStore(), MediaStore(tmp_path)):
        with pytest.raises(MediaError, match="row 3"):
            store.bytes_of(Media("picture", "0" * 64, "row 3"))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"gone\.png"):
        MediaStore().put_file(tmp_path / "gone.png", "picture")


def test_threads_may_put_and_read_together(tmp_path: Path) -> None:
    store = MediaStore(tmp_path, memory_mib=0)
    bodies = [str(i % 10).encode() * 1000 for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda body: store.bytes_of(store.put(body, "picture")), bodies))
    assert read == bodies
    assert len(list(tmp_path.iterdir())) == 10


def test_a_picture_is_decoded_once() -> None:
    store = MediaStore()
    media = store.put(encode_png(np.zeros((4, 4, 3), np.uint8)), "picture")
    assert store.picture(media) is store.picture(media)
    assert store.picture(media).size == (4, 4)


def test_a_corrupt_picture_is_refused_by_its_origin_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store = MediaStore(tmp_path)
    with pytest.raises(MediaError, match="row 4"):
        store.put_picture(b"\x89PNG broken", "row 4")
    assert list(tmp_path.iterdir()) == []
    data = encode_png(np.zeros((4, 4, 3), np.uint8))
    assert store.put_picture(data, "row 5") == store.put(data, "picture")
