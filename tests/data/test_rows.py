"""Rows from JSONL and Parquet: content blocks and flat columns, and errors that name file and line."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import TaskStream, a_few
from sensorium.data.pictures import encode_png
from sensorium.data.row_format import Place, fill_placeholders, literal_placeholders, messages_of, unread_notes
from sensorium.data.rows import JsonlRows, ParquetRows, PassedRows
from sensorium.recipe.registry import build
from sensorium.vocabulary.content import Media, Message, Text, assistant, system, user
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError
from sensorium.vocabulary.task import EnvironmentSpec

pyarrow = pytest.importorskip("pyarrow")
RED = encode_png(np.full((4, 4, 3), (255, 0, 0), np.uint8))
BLUE = encode_png(np.full((4, 4, 3), (0, 0, 255), np.uint8))
ASK = [{"role": "user", "content": "a?"}]


@pytest.fixture
def store() -> MediaStore:
    return MediaStore()


@pytest.fixture
def jsonl(tmp_path: Path, store: MediaStore) -> Callable[..., JsonlRows]:
    """Writes rows (objects, or raw lines) and opens them."""

    def write(*rows: Any, **options: Any) -> JsonlRows:
        (tmp_path / "red.png").write_bytes(RED)
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
        return JsonlRows(str(tmp_path / "train.jsonl"), store, **options)

    return write


@pytest.fixture
def parquet(tmp_path: Path, store: MediaStore) -> Callable[..., ParquetRows]:
    """Writes rows to Parquet, two to a row group, and opens them."""
    from pyarrow.parquet import write_table

    def write(*rows: dict[str, Any], **options: Any) -> ParquetRows:
        (tmp_path / "red.png").write_bytes(RED)
        write_table(pyarrow.Table.from_pylist(list(rows)), tmp_path / "train.parquet", row_group_size=2)
        return ParquetRows(str(tmp_path / "train.parquet"), store, **options)

    return write


def test_a_full_row(jsonl: Callable[..., JsonlRows], store: MediaStore) -> None:
    rows = jsonl(
        {
            "id": "q1",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "image", "path": "red.png"}, {"type": "text", "text": "which?"}]},
            ],
            "answer": ["red", 3],
            "demonstration": "<answer>red</answer>",
            "metadata": {"category": "colour"},
        }
    )
    task = rows[0]
    assert (task.id, task.answer, task.metadata) == ("q1", ["red", 3], {"category": "colour"})
    assert task.messages[0] == system("be brief")
    picture, text = task.messages[1].content
    assert isinstance(picture, Media)
    assert text == Text("which?")
    assert store.bytes_of(picture) == RED
    assert "train.jsonl:1" in picture.origin
    assert task.demonstration == ("<answer>red</answer>",)


def test_every_way_to_give_a_picture(jsonl: Callable[..., JsonlRows], tmp_path: Path) -> None:
    coded = base64.b64encode(RED).decode()
    ways: list[dict[str, Any]] = [
        {"type": "image", "path": "red.png"},
        {"type": "picture", "path": str(tmp_path / "red.png")},
        {"type": "image", "data": coded},
        {"type": "image", "data": f"data:image/png;base64,{coded}"},
        {"type": "image", "url": f"data:image/png;base64,{coded}"},
        {"type": "image", "image": "red.png"},
        {"type": "image", "image": {"bytes": coded}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded}"}},
    ]
    task = jsonl({"messages": [{"role": "user", "content": ways}]})[0]
    assert len(task.messages[0].media) == len(ways)
    assert len(set(task.messages[0].media)) == 1


def test_rows_without_id_are_named_by_their_line_past_blank_ones(jsonl: Callable[..., JsonlRows]) -> None:
    rows = jsonl({"messages": ASK}, "", "   ", {"messages": ASK, "id": 7})
    assert [rows[i].id for i in range(len(rows))] == ["train.jsonl:1", "7"]


def test_a_row_played_in_an_environment(jsonl: Callable[..., JsonlRows]) -> None:
    rows = jsonl({"environment": {"name": "frozen_lake", "options": {"size": 5}, "seed": 9}})
    assert rows[0].environment == EnvironmentSpec("frozen_lake", {"size": 5}, 9)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"messages": [', "malformed JSON: .* at column"),
        ('{"messages": [{"role": "user", "content": "?"}], "answer": "a", "answer": "b"}', "'answer'"),
        ('{"messages": [{"role": "user", "role": "user", "content": "?"}], "answer": "a"}', "'role'"),
        ('{"messages": [{"role": "user", "content": "?"}], "answer": NaN}', "Out of range float"),
        ('{"messages": [{"role": "user", "content": "?"}], "answer": 1e999}', "Out of range float"),
        ("[1]", "one JSON object"),
        ("{}", "needs 'messages'"),
        ({"messages": ASK, "anwser": 1}, "did you mean 'answer'"),
        ({"messages": []}, "list of messages"),
        ({"messages": "hello"}, "not JSON"),
        ({"messages": ["hello"]}, "message 0 must be an object"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "did you mean 'user'"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "unknown key 'name'"),
        ({"messages": [{"role": "user", "content": 3}]}, "text or a list of blocks"),
        ({"messages": [{"role": "user", "content": [3]}]}, "message 0, block 0"),
        ({"messages": [{"role": "user", "content": [{"type": "vidoe", "path": "x"}]}]}, "did you mean 'video'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a text block is"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "exactly one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "path": "a", "data": "b"}]}]}, "exactly one of"),
        ({"messages": [*ASK, {"role": "assistant", "content": "b"}]}, "nothing is asked"),
        ({"messages": ASK, "demonstration": 3}, "demonstration"),
        ({"messages": ASK, "metadata": 3}, "'metadata' must be an object"),
        ({"environment": {"name": "frozenlake"}}, "did you mean 'frozen_lake'"),
        ({"environment": {"name": "frozen_lake", "sede": 1}}, "did you mean 'seed'"),
        ({"environment": {"seed": 1}}, "name: text"),
    ],
)
def test_a_bad_row_is_an_error_that_names_file_and_line(row: Any, what: str, jsonl: Callable[..., JsonlRows]) -> None:
    rows = jsonl({"messages": ASK}, "", row, {"messages": ASK})
    assert rows[0].messages == rows[2].messages == (user("a?"),)
    with pytest.raises(TaskError, match=rf"train\.jsonl:3: .*{what}"):
        rows[1]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "path": "gone.png"},
        {"type": "image", "path": "broken.png"},
        {"type": "image", "path": "empty.png"},
        {"type": "image", "path": "."},
        {"type": "image", "data": "!!"},
        {"type": "image", "data": base64.b64encode(RED[:50]).decode()},
        {"type": "image", "url": "https://example.org/x.png"},
        {"type": "image_url", "image_url": {}},
    ],
)
def test_a_bad_picture_is_an_error_that_names_file_and_line(
    block: dict[str, Any], jsonl: Callable[..., JsonlRows], tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(RED[:40])
    (tmp_path / "empty.png").write_bytes(b"")
    rows = jsonl({"messages": ASK}, {"messages": [{"role": "user", "content": [block]}]})
    with pytest.raises(MediaError, match=r"train\.jsonl:2, message 0, block 0"):
        rows[1]


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path, store: MediaStore) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "x"}]}\r\n{"id": "\xff"}\n')
    rows = JsonlRows(str(tmp_path / "a.jsonl"), store)
    assert rows[0].messages == (user("x"),)
    with pytest.raises(TaskError, match=r"a\.jsonl:2"):
        rows[1]


@pytest.mark.parametrize("kind", [JsonlRows, ParquetRows])
def test_a_missing_file_is_named(kind: Any, tmp_path: Path, store: MediaStore) -> None:
    with pytest.raises(TaskError, match=r"gone\.x"):
        kind(str(tmp_path / "gone.x"), store)


def test_limit(jsonl: Callable[..., JsonlRows], parquet: Callable[..., ParquetRows]) -> None:
    assert len(jsonl(*[{"messages": ASK}] * 5, limit=3)) == 3
    assert len(parquet(*[{"messages": ASK}] * 5, limit=3)) == 3


FLAT = {"prompt": "problem", "pictures": "images", "answer": "answer"}


def test_flat_rows_pair_placeholders_with_pictures(jsonl: Callable[..., JsonlRows], store: MediaStore) -> None:
    coded = "data:image/png;base64," + base64.b64encode(BLUE).decode()
    rows = jsonl(
        {"problem": "<image>\nand <image>: same?", "images": ["red.png", coded], "answer": "no", "other": 1},
        columns=FLAT,
        instruction=" Answer.",
        system="look",
    )
    head, asked = rows[0].messages
    assert head == system("look")
    kinds = [block.text if isinstance(block, Text) else store.bytes_of(block) for block in asked.content]
    assert kinds == [RED, "\nand ", BLUE, ": same?", " Answer."]
    assert rows[0].answer == "no"


@pytest.mark.parametrize(
    ("problem", "images", "what"),
    [
        ("<image> <image>", ["red.png"], "2 <image> placeholders and the row has 1 pictures"),
        ("no place", "red.png", "0 <image> placeholders and the row has 1 pictures"),
        ("<image>", None, "1 <image> placeholders and the row has 0 pictures"),
        (3, [], "list of messages"),
    ],
)
def test_placeholders_and_pictures_must_agree(
    problem: Any, images: Any, what: str, jsonl: Callable[..., JsonlRows]
) -> None:
    rows = jsonl({"problem": problem, "images": images, "answer": 1}, columns=FLAT)
    with pytest.raises(TaskError, match=rf"train\.jsonl:1: .*{what}"):
        rows[0]


def test_media_first_serves_texts_without_places(jsonl: Callable[..., JsonlRows]) -> None:
    rows = jsonl(
        {"q": "which?", "i": "red.png"},
        {"q": "<image>", "i": "red.png"},
        columns={"prompt": "q", "pictures": "i"},
        media_first=True,
    )
    assert [type(block) for block in rows[0].messages[0].content] == [Media, Text]
    with pytest.raises(TaskError, match="media_first is on"):
        rows[1]


def test_columns_reach_into_objects_and_prompts_may_be_messages(jsonl: Callable[..., JsonlRows]) -> None:
    columns = {
        "prompt": "prompt",
        "pictures": "images",
        "answer": "reward_model.ground_truth",
        "id": "n",
        "category": "kind",
        "demonstration": "cot",
    }
    row = {
        "prompt": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "ho"},
            {"role": "user", "content": "<image>?"},
        ],
        "images": ["red.png"],
        "reward_model": {"ground_truth": "42"},
        "n": 5,
        "kind": "geo",
        "cot": "so 42",
    }
    task = jsonl(row, {**row, "reward_model": {}}, columns=columns)[0]
    assert (task.id, task.answer, task.metadata, task.demonstration) == ("5", "42", {"category": "geo"}, ("so 42",))
    assert task.messages[:2] == (user("hi"), assistant("ho"))
    assert len(task.messages[2].media) == 1
    with pytest.raises(TaskError, match=r"train\.jsonl:2: there is no 'reward_model.ground_truth'"):
        jsonl(row, {**row, "reward_model": {}}, columns=columns)[1]


def test_a_column_that_is_in_no_row_is_refused_with_those_there_are(jsonl: Callable[..., JsonlRows]) -> None:
    row = {"q": "What?", "a": "x", "demonstration": "x"}
    rows = jsonl(row, row, columns={"prompt": "question"})
    with pytest.raises(TaskError, match=r"train\.jsonl:1: .* 'question' .*\. Known: a, demonstration, q\.$"):
        rows[0]
    assert a_few([rows]) == []
    with pytest.raises(TaskError, match=r"none of 2 rows .* options"):
        a_few([rows], on_bad_row="refuse")
    some = jsonl({"question": "What?"}, row, columns={"prompt": "question"})
    with pytest.raises(TaskError, match=r"train\.jsonl:2: .*tasks\.on_bad_row: skip"):
        a_few([some], on_bad_row="refuse")


def test_wrong_options_are_refused(jsonl: Callable[..., JsonlRows], tmp_path: Path, store: MediaStore) -> None:
    with pytest.raises(RecipeError, match="did you mean 'pictures'"):
        jsonl({}, columns={"prompt": "q", "picture": "i"})
    with pytest.raises(RecipeError, match=r"columns: .*prompt"):
        jsonl({}, columns={"answer": "a"})
    with pytest.raises(RecipeError, match="for flat rows"):
        jsonl({}, instruction="x")
    with pytest.raises(RecipeError, match="did you mean 'columns'"):
        build("source", "jsonl", {"path": str(tmp_path / "train.jsonl"), "colums": {}}, "tasks.train.0", store=store)


def test_parquet_rows_with_content_blocks(parquet: Callable[..., ParquetRows], store: MediaStore) -> None:
    rows = parquet(
        *[
            {
                "id": f"q{i}",
                "messages": [
                    {"role": "user", "content": [{"type": "image", "bytes": RED}, {"type": "text", "text": f"{i}?"}]}
                ],
                "answer": str(i),
                "metadata": json.dumps({"category": "n"}),
            }
            for i in range(5)
        ],
        cache_mib=0,
    )
    for i in (4, 0, 3, 1, 2):
        task = rows[i]
        assert (task.id, task.answer, task.messages[0].text, task.metadata) == (f"q{i}", str(i), f"{i}?", {"category": "n"})
        assert store.bytes_of(task.messages[0].media[0]) == RED
    with pytest.raises(IndexError):
        rows[5]


def test_parquet_flat_rows_with_embedded_pictures(parquet: Callable[..., ParquetRows]) -> None:
    good = {"images": [{"bytes": RED, "path": "x.png"}], "problem": "<image>?", "answer": 1.5, "extra": 0}
    rows = parquet(good, {**good, "images": [{"bytes": RED[:30], "path": "x.png"}]}, {**good, "images": []}, columns=FLAT)
    assert rows[0].answer == 1.5
    with pytest.raises(MediaError, match=r"train\.parquet, row 1, picture 0"):
        rows[1]
    with pytest.raises(TaskError, match=r"train\.parquet, row 2: .*0 pictures"):
        rows[2]


def test_parquet_columns_are_checked_before_any_row_is_read(parquet: Callable[..., ParquetRows]) -> None:
    with pytest.raises(TaskError, match="no column 'problem'; did you mean 'problems'"):
        parquet({"problems": "x", "images": [], "answer": "a"}, columns=FLAT)
    with pytest.raises(TaskError, match="unknown field 'anwser'; did you mean 'answer'"):
        parquet({"messages": ASK, "anwser": "a"})
    with pytest.raises(TaskError, match=r"unknown field 'question'\. Known: .* as in columns: \{prompt: question"):
        parquet({"question": "x", "label": "a"})


BLIND = {"prompt": "which?", "answer": "red"}
HELD = {
    "image": "red.png",  # a path
    "stored": {"bytes": RED, "path": None},
    "pages": [{"bytes": RED, "path": "red.png"}],
    "raw": RED,
    "extra": {"photo": "elsewhere/1.jpg", "text": "red.txt"},
}
WORDS = {
    "source": "red",
    "caption": "a picture.",
    "image_id": "12",
    "code": "x" * 2000,
    "image_width": 4,
    "url": "a/b.jpg",
}


def media_of_text(value: Any) -> Any:
    """As JSON can hold it."""
    if isinstance(value, dict):
        return {key: media_of_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [media_of_text(item) for item in value]
    return "data:image/png;base64," + base64.b64encode(value).decode() if isinstance(value, bytes) else value


def test_columns_that_hold_media_and_are_not_read_are_found(
    jsonl: Callable[..., JsonlRows], parquet: Callable[..., ParquetRows], store: MediaStore
) -> None:
    columns = {"prompt": "prompt", "answer": "answer"}
    row = {**BLIND, **HELD, **WORDS, "heard": None}
    expected = dict.fromkeys(["image", "stored", "pages", "raw", "extra.photo"], "picture")
    assert parquet({**BLIND, **HELD, **WORDS}, row, row, columns=columns).unread_media() == expected  # in two row groups
    assert jsonl({**BLIND, "image": None}, media_of_text(row), columns=columns).unread_media() == expected
    passed = PassedRows([{**BLIND, "shown": Image.new("RGB", (4, 4))}], store, columns=columns)
    assert passed.unread_media() == {"shown": "picture"}
    assert [note for note in unread_notes(passed) if "pictures: shown" in note]


def test_columns_that_are_read_or_hold_no_media_are_not_reported(
    jsonl: Callable[..., JsonlRows], parquet: Callable[..., ParquetRows]
) -> None:
    columns = {"prompt": "prompt", "answer": "answer", "pictures": "extra.photo"}
    words = {**BLIND, **WORDS, "prompt": "<image> red.png", "extra": {"photo": "red.png", "of": "red"}}
    for rows in (parquet({**words, "digest": b"x" * 20}, columns=columns), jsonl(words, columns=columns)):
        assert rows.unread_media() == {}
        assert rows[0].messages[0].media
    task = jsonl({"messages": ASK, "metadata": {"image": "red.png"}})
    assert list(unread_notes(task)) == []


def test_columns_that_arrow_reads_otherwise_do_not_hide_media(tmp_path: Path, store: MediaStore) -> None:
    from pyarrow.parquet import ParquetFile, write_table

    pages = pyarrow.array([None, [("front", RED)]], pyarrow.map_(pyarrow.string(), pyarrow.binary()))
    far = pyarrow.array([2**61, 2**61], pyarrow.timestamp("us"))  # a time that Python has none for
    held = pyarrow.StructArray.from_arrays([far, pyarrow.array([RED, RED])], ["when", "photo"])
    path = tmp_path / "train.parquet"
    columns = {"prompt": ["which?"] * 2, "torn": ["abc", "def"], "pages": pages, "held": held, "last": [RED] * 2}
    write_table(pyarrow.table(columns), path, compression="none", use_dictionary=False)
    rows = ParquetRows(str(path), store, columns={"prompt": "prompt"})
    expected = dict.fromkeys(["pages", "held.photo", "last"], "picture")
    assert (rows.unread_media(), rows.unsearched) == (expected, {})
    torn = ParquetFile(path).metadata.row_group(0).column(1)
    data = bytearray(path.read_bytes())
    data[torn.data_page_offset : torn.data_page_offset + torn.total_compressed_size] = b"\xff" * torn.total_compressed_size
    path.write_bytes(data)
    rows = ParquetRows(str(path), store, columns={"prompt": "prompt"})
    assert rows.unread_media() == expected
    assert list(rows.unsearched) == ["torn"]
    assert any("'torn'" in note for note in unread_notes(rows))


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path, store: MediaStore) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is not it")
    with pytest.raises(TaskError, match=r"a\.parquet"):
        ParquetRows(str(tmp_path / "a.parquet"), store)


def test_bad_rows_and_pictures_can_be_skipped_and_are_counted(jsonl: Callable[..., JsonlRows]) -> None:
    gone = {"messages": [{"role": "user", "content": [{"type": "image", "path": "gone.png"}]}]}
    rows = jsonl({"messages": ASK, "id": 0}, "{", gone, {"messages": ASK, "id": 3})
    drawn = TaskStream([rows], [1], seed=0, shuffle=False, on_bad_row="skip").draw(0, 2)
    assert [task.id for task in drawn.tasks] == ["0", "3"]
    assert [(s.row, "train.jsonl" in s.reason) for s in drawn.skipped] == [(1, True), (2, True)]


PLAIN = st.text(max_size=12).filter(lambda text: "<" not in text and ">" not in text)


PICTURE = Media("picture", "a" * 64)


@pytest.mark.parametrize(
    ("text", "alone", "with_a_picture"),
    [
        ("<image>What is it?", ("<image>",), ()),
        ("<video>\nWhat is it?", ("<video>",), ("<video>",)),
        ("What is it? <audio>", ("<audio>",), ("<audio>",)),
        ("What is in <video> here?", ("<video>",), ()),
        ("<video src='a'></video> <audio>x</audio>", (), ()),
        ("<img> and <images>", (), ()),
    ],
)
def test_placeholders_without_their_medium_are_found(
    text: str, alone: tuple[str, ...], with_a_picture: tuple[str, ...]
) -> None:
    assert literal_placeholders([user(text)]) == alone
    assert literal_placeholders([Message("user", (PICTURE, Text(text)))]) == with_a_picture


@given(st.lists(PLAIN, min_size=1, max_size=6))
def test_placeholders_keep_all_text_and_order(pieces: list[str]) -> None:
    store = MediaStore()
    place = Place("row", Path(), store)
    pictures = [store.put(str(i).encode(), "picture") for i in range(len(pieces) - 1)]
    (message,) = fill_placeholders([user("<image>".join(pieces))], {"picture": pictures}, place)
    assert message.text == "".join(pieces)
    assert list(message.media) == pictures


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "path"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
def test_no_data_whatever_raise_anything_but_errors_that_name_the_row(raw: Any) -> None:
    try:
        assert messages_of(raw, Place("row 8", Path("/nowhere"), MediaStore()))
    except (TaskError, MediaError) as error:
        if "row 8" not in str(error):
            raise AssertionError(str(error)) from error
