"""Videos and sounds in rows of JSONL, Parquet and hub data sets: blocks, columns, parameters, and errors by row."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.data.decoder import Decoder
from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.row_format import Place, fill_placeholders, unread_notes
from sensorium.data.rows import HubRows, JsonlRows, ParquetRows
from sensorium.data.sound import encode_wav
from sensorium.data.video import DecodedVideo
from sensorium.recipe.registry import build
from sensorium.vocabulary.content import Media, Text, user
from sensorium.vocabulary.decoding import AudioParameters, VideoParameters
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError
from tests.data.clips import numbered, numbers, tone

CLIP = encode_clip(numbered(), 8.0, tone())
WAVE = encode_wav(tone(0.5))
ASK = {"type": "text", "text": "what happens?"}

Rows = JsonlRows | ParquetRows | HubRows


@pytest.fixture(params=["jsonl", "parquet", "hub", "saved"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Rows]:
    """Writes rows in one of the forms and opens them."""

    def write(*rows: dict[str, Any], **options: Any) -> Rows:
        (tmp_path / "clip.mp4").write_bytes(CLIP)
        (tmp_path / "clip.wav").write_bytes(WAVE)
        (tmp_path / "cut.mp4").write_bytes(CLIP[: len(CLIP) // 2])
        store = MediaStore(tmp_path / "media")
        if request.param == "jsonl":
            (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            return JsonlRows(str(tmp_path / "train.jsonl"), store, **options)
        from datasets import Dataset

        table = Dataset.from_list(list(rows))
        if request.param == "saved":
            table.save_to_disk(tmp_path / "saved")
            return HubRows(str(tmp_path / "saved"), store, folder=str(tmp_path), **options)
        (tmp_path / "data").mkdir()
        table.to_parquet(tmp_path / "data" / "train.parquet")
        if request.param == "hub":
            return HubRows(str(tmp_path / "data"), store, folder=str(tmp_path), **options)
        (tmp_path / "data" / "train.parquet").rename(tmp_path / "train.parquet")
        return ParquetRows(str(tmp_path / "train.parquet"), store, **options)

    return write


def test_blocks_of_every_kind_in_any_order(opened: Callable[..., Rows]) -> None:
    content = [
        {"type": "audio", "path": "clip.wav"},
        ASK,
        {"type": "video", "video": "clip.mp4", "frames": 4, "start": 1.0, "end": 2.0},
        {"type": "video", "path": "clip.mp4"},
        {"type": "sound", "data": base64.b64encode(WAVE).decode(), "sample_rate": 8000},
    ]
    rows = opened({"messages": [{"role": "user", "content": content}], "answer": "x"}, video={"frames": 2})
    sound, text, trimmed, whole, coded = rows[0].messages[0].content
    assert text == Text("what happens?")
    assert isinstance(sound, Media)
    assert isinstance(trimmed, Media)
    assert isinstance(whole, Media)
    assert isinstance(coded, Media)
    assert (sound.kind, trimmed.kind, coded.kind) == ("sound", "video", "sound")
    assert trimmed.parameters == VideoParameters(frames=4, start=1, end=2)
    assert whole.parameters == VideoParameters(frames=2)
    assert (sound.parameters, coded.parameters) == (AudioParameters(), AudioParameters(8000))
    assert sound.hash == coded.hash != whole.hash == trimmed.hash
    store = rows.store
    found = Decoder(store).get_many([trimmed, whole, sound, coded])
    assert isinstance(found[0], DecodedVideo)
    assert isinstance(found[1], DecodedVideo)
    assert (numbers(found[0].frames), numbers(found[1].frames)) == ([8, 11, 13, 16], [0, 23])


def test_a_row_that_gives_a_rate_overrides_a_source_that_gives_a_number(opened: Callable[..., Rows]) -> None:
    block = {"type": "video", "path": "clip.mp4", "fps": 1.0}
    options = {"frames": 8, "max_pixels_per_frame": 800}
    rows = opened({"messages": [{"role": "user", "content": [block, ASK]}]}, video=options)
    (media,) = rows[0].messages[0].media
    assert media.parameters == VideoParameters(fps=1.0, max_pixels_per_frame=800)


def test_a_video_is_heard_where_its_row_or_its_source_says_so(opened: Callable[..., Rows]) -> None:
    block = {"type": "video", "path": "clip.mp4", "start": 0.5, "use_audio_in_video": True}
    rows = opened({"messages": [{"role": "user", "content": [block, ASK]}]}, video={"frames": 4})
    (video,) = rows[0].messages[0].media
    assert video.parameters == VideoParameters(frames=4, start=0.5, use_audio_in_video=True)
    assert video.sound == Media("sound", video.hash, parameters=AudioParameters(start=0.5))
    assert video.parts == (video, video.sound)


COLUMNS = {"prompt": "q", "videos": "v", "sounds": "a", "answer": "y", "start": "from", "end": "to", "type": "t"}


def test_flat_rows_with_columns_of_media(opened: Callable[..., Rows]) -> None:
    row = {"q": "<video>then<audio>?", "v": ["clip.mp4"], "a": ["clip.wav"], "y": "B", "from": 0.1, "to": 0.4, "t": "ocr"}
    rows = opened(row, {**row, "q": "<video>?"}, columns=COLUMNS, video={"frames": 3})
    task = rows[0]
    video, then, sound, mark = task.messages[0].content
    assert (then, mark) == (Text("then"), Text("?"))
    assert isinstance(video, Media)
    assert isinstance(sound, Media)
    assert video.parameters == VideoParameters(frames=3, start=0.1, end=0.4)
    assert sound.parameters == AudioParameters(start=0.1, end=0.4)
    assert (task.answer, task.metadata) == ("B", {"type": "ocr"})
    with pytest.raises(TaskError, match="0 <audio> placeholders and the row has 1 sounds"):
        rows[1]


def test_media_first(opened: Callable[..., Rows]) -> None:
    columns = {"prompt": "q", "videos": "v", "sounds": "a"}
    row = {"q": "what?", "v": "clip.mp4", "a": "clip.wav"}
    rows = opened(row, {**row, "q": "<video>"}, columns=columns, media_first=True)
    kinds = [block.kind if isinstance(block, Media) else block.text for block in rows[0].messages[0].content]
    assert kinds == ["video", "sound", "what?"]
    with pytest.raises(TaskError, match="media_first is on"):
        rows[1]


@pytest.mark.parametrize(
    ("block", "what"),
    [
        ({"type": "video", "path": "gone.mp4"}, "cannot read the video"),
        ({"type": "video", "path": "https://example.org/a.mp4"}, "remote"),
        ({"type": "video", "path": "clip.mp4", "frames": 0}, "at least 1"),
        ({"type": "video", "path": "clip.mp4", "use_audio_in_video": "yes"}, "must be true or false"),
        ({"type": "video", "path": "clip.mp4", "multiple": 32}, "no parameter 'multiple'"),
        ({"type": "video", "path": "clip.mp4", "sampling": "offical"}, "did you mean 'official'"),
        ({"type": "video", "path": "clip.mp4", "frame": 8}, "did you mean 'frames'"),
        ({"type": "audio", "path": "clip.wav", "frames": 8}, "no parameter 'frames'"),
        ({"type": "audio"}, "exactly one of"),
        ({"type": "audio", "data": "!!"}, "the sound's base64 data is broken"),
    ],
)
def test_a_bad_block_is_an_error_that_names_its_row(block: dict[str, Any], what: str, opened: Callable[..., Rows]) -> None:
    good = {"messages": [{"role": "user", "content": [ASK]}]}
    rows = opened(good, {"messages": [{"role": "user", "content": [block]}]})
    with pytest.raises((TaskError, MediaError), match=rf"(train\.jsonl:2|row 1).*message 0, block 0.*{what}"):
        rows[1]


def test_a_broken_clip_is_found_when_decoded_and_named_by_its_row(opened: Callable[..., Rows]) -> None:
    content = [{"type": "video", "path": "cut.mp4"}, {"type": "audio", "path": "cut.mp4"}]
    rows = opened({"messages": [{"role": "user", "content": [ASK]}]}, {"messages": [{"role": "user", "content": content}]})
    for found in Decoder(rows.store).get_many(rows[1].messages[0].media):
        assert isinstance(found, MediaError)
        assert "train.jsonl:2, message 0" in str(found) or "row 1, message 0" in str(found)


def test_data_uris_carry_clips(tmp_path: Path) -> None:
    uri = "data:video/mp4;base64," + base64.b64encode(CLIP).decode()
    content = [{"type": "video_url", "video_url": {"url": uri}}, {"type": "audio_url", "audio_url": {"url": uri}}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    media = JsonlRows(str(tmp_path / "a.jsonl"), MediaStore())[0].messages[0].media
    assert [(item.kind, item.hash) for item in media] == [("video", media[0].hash), ("sound", media[0].hash)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"video": {"frame": 8}}, "option 'video': .*did you mean 'frames'"),
        ({"sound": {"sample_rate": 0}}, "option 'sound': sample_rate"),
        ({"video": {"frames": 8, "fps": 1}}, "both given"),
    ],
)
def test_wrong_options_of_decoding_are_refused_before_any_row_is_read(
    options: dict[str, Any], what: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(RecipeError, match=what):
        build("source", "jsonl", {"path": str(tmp_path / "a.jsonl"), **options}, "tasks.train.0", store=MediaStore())


def test_hub_data_sets_that_cannot_be_loaded_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset, DatasetDict

    with pytest.raises(TaskError, match="cannot load the data set"):
        HubRows(str(tmp_path / "nothing"), MediaStore())
    DatasetDict({"train": Dataset.from_list([{"q": "a"}])}).save_to_disk(tmp_path / "saved")
    with pytest.raises(TaskError, match="no split 'trian'; did you mean 'train'"):
        HubRows(str(tmp_path / "saved"), MediaStore(), split="trian")
    with pytest.raises(TaskError, match="no column 'question'"):
        HubRows(str(tmp_path / "saved"), MediaStore(), columns={"prompt": "question"})
    rows = HubRows(str(tmp_path / "saved"), MediaStore(), columns={"prompt": "q"}, limit=1)
    assert (len(rows), rows[0].messages) == (1, (user("a"),))
    with pytest.raises(IndexError):
        rows[1]


def test_media_that_a_hub_data_set_holds_itself(tmp_path: Path) -> None:
    """Columns of the library's own image and video types come as bytes, undecoded."""
    from datasets import Dataset, Features, List, Value, Video

    features = Features({"q": Value("string"), "v": List(Video())})
    row = {"q": "<video>?", "v": [{"bytes": CLIP, "path": None}]}
    Dataset.from_list([row], features=features).save_to_disk(tmp_path / "saved")
    rows = HubRows(str(tmp_path / "saved"), MediaStore(), columns={"prompt": "q", "videos": "v"})
    (media,) = rows[0].messages[0].media
    assert rows.store.bytes_of(media) == CLIP


def test_clips_that_are_not_read_are_found_in_every_form(opened: Callable[..., Rows]) -> None:
    row = {"q": "what?", "v": ["clip.mp4"], "w": {"path": "clip.wav"}, "y": "clip", "t": "clip.mp4"}
    rows = opened({**row, "v": [], "w": None}, row, columns={"prompt": "q", "answer": "y", "type": "t"})
    assert rows.unread_media() == {"v": "video", "w": "sound"}
    assert any("sounds: w" in note for note in unread_notes(rows))


PLAIN = st.text(max_size=8).filter(lambda text: "<" not in text and ">" not in text)
PLACES = st.lists(st.tuples(PLAIN, st.sampled_from(["<image>", "<video>", "<audio>"])), max_size=6)


@given(PLACES, PLAIN)
def test_placeholders_of_several_kinds_keep_all_text_and_order(pieces: list[tuple[str, str]], last: str) -> None:
    store = MediaStore()
    names: dict[str, Any] = {"<image>": "picture", "<video>": "video", "<audio>": "sound"}
    media: dict[Any, list[Media]] = {kind: [] for kind in names.values()}
    expected: list[Any] = []
    for i, (text, mark) in enumerate(pieces):
        item = store.put(str(i).encode(), names[mark])
        media[names[mark]].append(item)
        expected += [Text(text), item] if text else [item]
    expected += [Text(last)] if last else []
    prompt = "".join(text + mark for text, mark in pieces) + last
    (message,) = fill_placeholders([user(prompt)], media, Place("row", Path(), store))
    assert list(message.content) == expected
