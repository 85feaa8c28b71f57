"""What is compared of rows at the start of a run, without reading their media."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.rows import JsonlRows, ParquetRows, PassedRows
from sensorium.data.task_content import BadRow, ComparedRow, RemainingRows, compared_rows, row_notes
from sensorium.vocabulary import Task, user
from sensorium.vocabulary.errors import TaskError

COLUMNS = {"prompt": "q", "pictures": "image", "answer": "a", "id": "id"}
ROW = {"q": "What is it?", "image": None, "a": "one"}
Write = Callable[..., JsonlRows]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows (objects, or raw lines) as flat JSONL and opens them."""

    def written(name: str, *rows: Any, folder: str = "", **options: Any) -> JsonlRows:
        path = tmp_path / folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        columns = {part: column for part, column in COLUMNS.items() if part != "id" or '"id"' in path.read_text()}
        return JsonlRows(str(path), MediaStore(), columns=columns, media_first=True, **options)

    return written


def notes(train: Any, held_out: Any, on_bad_row: Any = "refuse") -> list[str]:
    return list(row_notes([train], [held_out], on_bad_row))


def shown(picture: Any, question: str = "What is it?", **more: Any) -> dict[str, Any]:
    return {**ROW, "q": question, "image": picture, **more}


def test_held_out_rows_that_are_trained_on_are_counted_without_opening_a_file(write: Write) -> None:
    train = write("train", *(shown(f"{i}.png") for i in range(6)))
    held_out = write("test", shown("5.png"), shown("4.png", a="another answer"), shown("6.png"), shown("5.png", "Who?"))
    (note,) = notes(train, held_out)
    assert note.startswith("ATTENTION: 2 of 4")
    assert "test.jsonl:1" in note
    assert "train.jsonl:6" in note


def test_equal_names_of_other_files_are_other_pictures(write: Write) -> None:
    train, held_out = write("rows", shown("0.png"), folder="train"), write("rows", shown("0.png"), folder="test")
    assert notes(train, held_out) == []
    assert len(notes(train, write("again", shown("../train/0.png"), folder="test"))) == 1


def test_bytes_in_rows_are_compared_by_what_they_are(tmp_path: Path) -> None:
    from pyarrow.parquet import write_table

    pictures = [encode_png(np.full((4, 4, 3), level, np.uint8)) for level in range(4)]
    sources = []
    for name, held in (("train", pictures[:3]), ("test", pictures[2:])):
        path = tmp_path / f"{name}.parquet"
        write_table(pyarrow.table({"q": ["?"] * len(held), "image": held}), path)
        columns = {"prompt": "q", "pictures": "image"}
        sources.append(ParquetRows(str(path), MediaStore(), columns=columns, media_first=True))
    (note,) = notes(*sources)
    assert note.startswith("ATTENTION: 1 of 2")


def test_parts_of_one_clip_are_different_but_not_what_is_decoded_of_them(tmp_path: Path) -> None:
    columns = {"prompt": "q", "videos": "clip", "start": "from", "end": "to"}

    def rows(*parts: tuple[float, float], frames: int) -> PassedRows:
        listed = [{"q": "What happens?", "clip": "long.mp4", "from": start, "to": end} for start, end in parts]
        return PassedRows(listed, MediaStore(), columns=columns, media_first=True, video={"frames": frames})

    train = rows((0, 10), (10, 20), frames=4)
    assert notes(train, rows((20, 30), frames=4)) == []
    assert len(notes(train, rows((10, 20), frames=8))) == 1


def test_ids_of_different_rows_are_reported_and_repeated_rows_are_not(write: Write) -> None:
    held_out = write("test", shown("x.png", id="x"))
    train = write("train", *(shown(f"{i}.png", id=i) for i in (0, 1, 1, 2)))
    assert notes(train, held_out) == []
    (note,) = notes(write("train", *(shown(f"{i}.png", id=i % 2) for i in range(4))), held_out)
    assert note.startswith("2 ids")
    assert "row 0 of tasks.train.0 and row 2 of tasks.train.0" in note


def test_rows_whose_column_of_pictures_is_empty_are_reported(write: Write) -> None:
    held_out = write("test", shown("x.png"))
    some = write("train", shown("0.png"), ROW | {"q": "Why?"}, shown("1.png"))
    (note,) = notes(some, held_out)
    assert "1 of 3 rows" in note
    assert "'image'" in note
    assert "row 1." in note
    none = write("train", ROW | {"q": "Why?"}, ROW)
    assert [note[:4] for note in notes(none, held_out)] == ["2 of", "none"]
    text = JsonlRows(str(none.path), MediaStore(), columns={"prompt": "q"})
    assert notes(text, text)[0].startswith("ATTENTION")
    assert len(notes(text, text)) == 1, "no column of media is named, and neither side shows any"


def test_a_row_without_the_picture_that_the_others_show_is_reported(tmp_path: Path) -> None:
    def reported(pictures: int, texts: int) -> list[str]:
        asked = [[{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "What is it?"}] for i in range(pictures)]
        asked += [[{"type": "text", "text": f"What is {i}?"}] for i in range(texts)]
        rows = [{"messages": [{"role": "user", "content": blocks}], "answer": "one"} for blocks in asked]
        path = tmp_path / f"{texts}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        source = JsonlRows(str(path), MediaStore())
        return list(row_notes([source], [], "refuse"))

    (note,) = reported(9, 1)
    assert "1 of 10 rows" in note
    assert "row 9." in note
    assert reported(8, 2) == [], "text and pictures are mixed on purpose"


def test_a_line_that_is_no_json_is_refused_or_passed_over_wherever_it_is(write: Write) -> None:
    good = [shown(f"{i}.png") for i in range(20)]
    bad, held_out = write("train", *good[:11], '{"q": ', *good[11:]), write("test", shown("x.png"))
    with pytest.raises(TaskError, match=r"train\.jsonl:12: malformed JSON"):
        notes(bad, held_out)
    assert notes(bad, held_out, "skip") == []
    assert len(compared_rows(bad, "tasks.train.0", "skip")) == 20


def test_rows_that_are_left_out_are_not_compared(write: Write, tmp_path: Path) -> None:
    train = write("train", *(shown(f"{i}.png") for i in range(4)))
    excluded = [BadRow("tasks.train.0", 1, "train.jsonl:2", "", "")]
    rest = RemainingRows(train, excluded, tmp_path / "list.jsonl")
    assert notes(rest, write("test", shown("1.png"))) == []
    assert [row.row for row in compared_rows(rest, "tasks.train.0", "refuse")] == [0, 2, 3]


def test_large_rows_are_compared_as_far_as_a_bound_of_bytes(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    train = write("train", *(shown(f"{i}.png") for i in range(50)))
    monkeypatch.setattr("sensorium.data.task_content.MOST_BYTES", 10.5 * train.row_bytes)
    assert len(compared_rows(train, "tasks.train.0", "refuse")) == 10
    monkeypatch.setattr("sensorium.data.task_content.MOST_ROWS", 3)
    assert len(compared_rows(train, "tasks.train.0", "refuse")) == 3


def test_tasks_made_in_python_and_sources_of_other_kinds(write: Write) -> None:
    tasks = PassedRows([Task("a", (user("one"),)), Task("b", (user("two"),))], MediaStore())
    found = compared_rows(tasks, "tasks.train.0", "refuse")
    assert [(row.id, row.kinds) for row in found] == [("a", frozenset()), ("b", frozenset())]
    assert isinstance(found[0], ComparedRow)
    assert compared_rows([Task("a")], "tasks.train.0", "refuse") == []
