"""The media store keeps each medium once, whole, and within its memory."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from sensorium.data.media_store import FilesRead, MediaStore
from sensorium.data.pictures import encode_png
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import MediaError
from tests.data.clips import middle


def test_same_bytes_are_kept_once(tmp_path: Path) -> None:
    store = MediaStore(tmp_path)
    first, second = store.put(b"abc", "picture", "here"), store.put(b"abc", "picture", "there")
    assert first == second
    assert [p.name for p in tmp_path.iterdir()] == [first.hash]
    assert store.bytes_of(second) == b"abc"


def test_files_that_media_are_read_from_are_recorded_as_they_were_first_read(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    store.files_read = FilesRead([str(tmp_path / "known.wav")])
    picture, clip, known = tmp_path / "a.png", tmp_path / "b.wav", tmp_path / "known.wav"
    picture.write_bytes(encode_png(np.zeros((4, 4, 3), np.uint8)))
    for sound in (clip, known):
        sound.write_bytes(b"RIFF of one")
    first = [store.put_picture_file(picture, "row 1"), store.put_file(clip, "sound")]
    store.put_file(known, "sound")
    files = store.files_read.take()
    assert [(path, size, digest) for path, size, _, digest in files] == [
        (str(path), path.stat().st_size, media.hash) for path, media in zip((picture, clip), first, strict=True)
    ]
    (tmp_path / "new").write_bytes(b"RIFF of another")
    (tmp_path / "new").rename(clip)
    assert store.put_file(clip, "sound").hash != first[1].hash
    assert store.files_read.take() == [], "the record is of what the run began with"
    with pytest.raises(MediaError, match="row 2"):
        store.put_picture_file(tmp_path / "missing.png", "row 2")


def test_memory_does_not_grow_with_what_was_put(tmp_path: Path) -> None:
    store = MediaStore(tmp_path, memory_mib=1)
    media = [store.put(bytes([i]) * 300_000, "picture") for i in range(20)]
    assert sum(len(data) for _, data in store._bytes.items()) <= 1024 * 1024
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
        with pytest.raises(MediaError, match=r"row 3"):
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
    with pytest.raises(MediaError, match=r"row 4"):
        store.put_picture(b"\x89PNG broken", "row 4")
    assert list(tmp_path.iterdir()) == []
    data = encode_png(np.zeros((4, 4, 3), np.uint8))
    assert store.put_picture(data, "row 5") == store.put(data, "picture")


def test_a_clip_given_as_a_file_is_linked_and_never_loaded(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"frames" * 1000)
    store = MediaStore(tmp_path / "media")
    media = store.put_file(clip, "video", "row 1", middle(frames=8))
    assert media == store.put(clip.read_bytes(), "video", parameters=middle(frames=8))
    kept = tmp_path / "media" / media.hash
    assert kept.stat().st_ino == clip.stat().st_ino
    assert store.source_of(media) == kept
    assert MediaStore(tmp_path / "media").bytes_of(media) == clip.read_bytes()


def test_a_clip_is_hashed_once_while_it_does_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: (read.append(file.name), real(file, name))[1])
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"one")
    store = MediaStore(tmp_path / "media")
    first = [store.put_file(clip, "video") for _ in range(3)]
    assert (len(set(first)), len(read)) == (1, 1)
    clip.unlink()
    clip.write_bytes(b"other")
    assert store.put_file(clip, "video") != first[0]
    assert store.bytes_of(first[0]) == b"one"
    assert len(read) == 2


def test_a_linked_clip_that_was_changed_in_place_is_refused(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"one")
    store = MediaStore(tmp_path / "media")
    media = store.put_file(clip, "video", "row 1")
    os.utime(clip, (1, 1))
    assert store.source_of(media)
    clip.write_bytes(b"two")
    with pytest.raises(MediaError, match=r"row 1.*changed or damaged"):
        store.source_of(media)


def test_a_clip_of_the_same_size_and_time_is_another_one(tmp_path: Path) -> None:
    """Archives set the times of what they unpack, and sounds often have one length."""
    clip = tmp_path / "clip.wav"
    store = MediaStore(tmp_path / "media")
    found = []
    for content in (b"one", b"two"):
        clip.write_bytes(content)
        os.utime(clip, (1, 1))
        found.append(store.put_file(clip, "sound", "row 1"))
    assert [media.hash for media in found] == [hashlib.sha256(content).hexdigest() for content in (b"one", b"two")]
    with pytest.raises(MediaError, match="row 1"):
        store.source_of(found[0])
    copy = tmp_path / "copy.wav"
    copy.write_bytes(b"one")
    assert store.bytes_of(store.put_file(copy, "sound")) == b"one", "put again, it takes the place of what is wrong"


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("by_symlink", [True, False])
def test_a_clip_that_is_replaced_between_its_hash_and_its_link_is_refused(
    linked: bool, by_symlink: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip, other = tmp_path / "clip.mp4", tmp_path / "other.mp4"
    clip.write_bytes(b"one")
    other.write_bytes(b"two")
    usual = os.link

    def replaced(source: Path, target: Path) -> None:
        clip.unlink()
        if by_symlink:
            clip.symlink_to(other)
        else:
            other.rename(clip)
        if not linked:
            raise OSError(18, "Invalid cross-device link")
        usual(source, target)

    monkeypatch.setattr(os, "link", replaced)
    store = MediaStore(tmp_path / "media")
    with pytest.raises(MediaError, match=r"row 1.*being written to"):
        store.put_file(clip, "video", "row 1")
    assert list((tmp_path / "media").iterdir()) == []
    monkeypatch.setattr(os, "link", usual)
    assert store.bytes_of(store.put_file(clip, "video", "row 1")) == b"two"


def test_a_picture_that_is_written_to_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, writes = tmp_path / "a.png", [b"new, new", b"half"]
    path.write_bytes(b"old")

    class Written(FileIO):
        """A file that is written to before it has been read."""

        def read(self, count: int | None = -1) -> bytes:
            if writes:
                path.write_bytes(writes.pop())
                os.utime(path, (len(writes), 1))
            return super().read(-1 if count is None else count)

    monkeypatch.setattr("sensorium.data.media_files.open_regular", lambda path: Written(path))
    store = MediaStore()
    assert store.bytes_of(store.put_file(path, "picture")) == b"new, new"
    writes[:] = [b"x" * n for n in range(9)]
    with pytest.raises(MediaError, match=r"a\.png.*being written to"):
        store.put_file(path, "picture")


def test_a_clip_is_copied_where_it_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "clip.mp4").write_bytes(b"abc")
    store = MediaStore(tmp_path / "media")
    media = store.put_file(tmp_path / "clip.mp4", "video")
    (tmp_path / "clip.mp4").unlink()
    assert store.bytes_of(media) == b"abc"
    assert [p.name for p in (tmp_path / "media").iterdir()] == [media.hash]


def test_a_clip_reached_through_a_symbolic_link_is_kept_itself(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"abc")
    (tmp_path / "clip.mp4").symlink_to(tmp_path / "blob")
    store = MediaStore(tmp_path / "media")
    media = store.put_file(tmp_path / "clip.mp4", "video")
    assert not (tmp_path / "media" / media.hash).is_symlink()
    assert store.bytes_of(media) == b"abc"


def test_a_store_without_folder_refers_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"abc")
    store = MediaStore()
    media = store.put_file(tmp_path / "clip.mp4", "sound", "row 1")
    assert store.source_of(media) == tmp_path / "clip.mp4"
    assert store.bytes_of(media) == b"abc"
    (tmp_path / "clip.mp4").write_bytes(b"abd")
    with pytest.raises(MediaError, match=r"row 1.*changed or damaged"):
        store.source_of(media)


def test_a_missing_clip_is_named(tmp_path: Path) -> None:
    for place in ("gone.mp4", "\0"):
        with pytest.raises(MediaError, match=r"row 1: cannot read the video"):
            MediaStore(tmp_path / "media").put_file(tmp_path / place, "video", "row 1")


def test_a_medium_is_taken_from_another_store_without_loading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"frames" * 1000)
    first = MediaStore(tmp_path / "first")
    clip = first.put_file(tmp_path / "clip.mp4", "video", "row 1", middle(frames=8))
    monkeypatch.setattr(MediaStore, "bytes_of", lambda *_: pytest.fail("it was loaded"))
    second, without_folder = MediaStore(tmp_path / "second"), MediaStore()
    for store in (second, without_folder):
        store.take(clip, first)
        assert store.size_of(clip) == 6000
    assert (tmp_path / "second" / clip.hash).samefile(tmp_path / "clip.mp4")
    monkeypatch.undo()
    small = MediaStore().put(b"abc", "sound")
    with pytest.raises(MediaError, match="not in the store"):
        second.size_of(small)
    memory = MediaStore()
    memory.put(b"abc", "sound")
    second.take(small, memory)
    assert (memory.size_of(small), second.size_of(small), second.bytes_of(small)) == (3, 3, b"abc")


def test_a_store_knows_how_much_its_folder_holds(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    store.put(b"x" * 100, "picture")
    store.put(b"x" * 100, "picture")
    store.put(b"y" * 50, "picture")
    assert store.stored_bytes == 150
    assert MediaStore(tmp_path / "media").stored_bytes == 150
