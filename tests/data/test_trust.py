"""Rows are data: they run no code, open no file outside of their folder, and cannot be changed under a run."""

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sensorium.data import row_format
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import each_once
from sensorium.data.pictures import encode_png
from sensorium.data.rows import HubRows, JsonlRows, ParquetRows, content_digest
from sensorium.recipe.load import parse_recipe
from sensorium.recipe.registry import resolve
from sensorium.systems.audio_visual import sources
from sensorium.systems.audio_visual.sources import unpack_once
from sensorium.vocabulary.errors import DataChanged, MediaError, RecipeError, TaskError
from sensorium.vocabulary.task import EnvironmentSpec

RED = encode_png(np.full((4, 4, 3), (255, 0, 0), np.uint8))
CALLED: list[str] = []


class Trap:
    """Must not be built, nor even imported, because a row says so."""

    def __init__(self, **options: Any) -> None:
        CALLED.append("built")


class Maze:
    """An environment of the user's own."""

    def __init__(self, store: MediaStore, size: int = 3) -> None: ...


def rows_of(folder: Path, *rows: Mapping[str, Any], **options: Any) -> JsonlRows:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlRows(str(folder / "rows.jsonl"), MediaStore(), **options)


def showing(path: Any, kind: str = "image") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, "path": str(path)}, "what?"]}]}


@pytest.mark.parametrize("name", [f"{__name__}:Trap", "torch.hub:load", "os:system", "python:trap", ":", "a:b:c"])
def test_a_row_cannot_name_code(name: str, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, {"environment": {"name": name, "options": {}}})
    with pytest.raises(TaskError, match=r"rows\.jsonl:1: .*names code, and a row may not.*environments"):
        rows[0]
    assert not CALLED


def test_a_parquet_or_hub_row_cannot_name_code_either(tmp_path: Path) -> None:
    from datasets import Dataset

    row = {"environment": json.dumps({"name": f"{__name__}:Trap"})}
    Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    for rows in (ParquetRows(str(tmp_path / "rows.parquet"), MediaStore()), HubRows(str(tmp_path), MediaStore())):
        with pytest.raises(TaskError, match="a row may not"):
            rows[0]
    assert not CALLED


def test_the_recipe_opens_an_environment_to_rows_by_a_name(tmp_path: Path) -> None:
    opened = {"maze": f"{__name__}:Maze"}
    rows = rows_of(
        tmp_path,
        {"environment": {"name": "maze", "options": {"size": 5}, "seed": 2}},
        {"environment": {"name": "maez"}},
        {"environment": {"name": "maze", "options": {"sise": 5}}},
        {"environment": {"name": "maze", "options": {"store": 5}}},
        environments=opened,
    )
    assert rows[0].environment == EnvironmentSpec(f"{__name__}:Maze", {"size": 5}, 2)
    for index, what in ((1, "did you mean 'maze'"), (2, "did you mean 'size'"), (3, "no option 'store'")):
        with pytest.raises(TaskError, match=rf"rows\.jsonl:{index + 1}: .*{what}"):
            rows[index]


def test_an_environment_that_the_recipe_opens_is_checked_with_the_recipe(tmp_path: Path) -> None:
    source = {"source": "jsonl", "options": {"path": "x", "environments": {"maze": "frozenlake"}}}
    recipe = {"name": "r", "steps": 1, "model": {"path": "package:shapes"}, "tasks": {"train": [source]}}
    recipe["rewards"] = {"terms": [{"name": "exact"}]}
    with pytest.raises(RecipeError, match="did you mean 'frozen_lake'"):
        parse_recipe(json.dumps(recipe), "test")


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_a_path_that_leads_out_of_the_data_folder_is_refused_unless_the_recipe_opens_it(kind: str, tmp_path: Path) -> None:
    data, outside = tmp_path / "data", tmp_path / "outside"
    outside.mkdir()
    data.mkdir()
    secret = outside / "secret.png"
    secret.write_bytes(RED)
    (data / "link.png").symlink_to(secret)
    (data / "folder").symlink_to(outside)
    ways = [secret, "../outside/secret.png", "link.png", "folder/secret.png", "./x/../../outside/secret.png"]
    rows = rows_of(data, *(showing(way, kind) for way in ways))
    for index, way in enumerate(ways):
        with pytest.raises(MediaError, match=rf"rows\.jsonl:{index + 1}, .*{Path(way).name}.*outside of .*media_roots"):
            rows[index]
    for roots in ([str(outside)], ["/"]):
        opened = rows_of(data, *(showing(way, kind) for way in ways[:4]), media_roots=roots)
        assert all(opened[i].messages[0].media for i in range(4))


def test_paths_within_the_data_folder_are_read_whatever_form_they_have(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").write_bytes(RED)
    (tmp_path / "link.png").symlink_to("real/a.png")
    data = tmp_path / "data"
    data.symlink_to(tmp_path)
    rows = rows_of(data, showing("real/a.png"), showing("link.png"), showing(tmp_path / "real/a.png"))
    assert len({rows[i].messages[0].media for i in range(3)}) == 1


def test_a_snapshot_of_the_hub_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "datasets--a" / "snapshots" / "1f", tmp_path / "datasets--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "77").write_bytes(RED)
    (snapshot / "a.png").symlink_to("../../blobs/77")
    assert rows_of(snapshot, showing("a.png"))[0].messages[0].media


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to("loop.png")
    names = ["pipe.png", "folder.png", "/dev/zero", "loop.png", "gone.png", "nul\0.png", "x" * 5000]
    rows = rows_of(tmp_path, *(showing(name, kind) for name in names), media_roots=["/dev"])
    for index, what in enumerate(["a pipe", "a folder", "a device", "", "No such file", "", ""]):
        with pytest.raises(MediaError, match=rf"rows\.jsonl:{index + 1}, .*{what}"):
            rows[index]


def test_a_link_that_is_switched_after_the_check_of_its_folder_leads_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, link = tmp_path / "data", tmp_path / "data" / "a.png"
    data.mkdir()
    (data / "own.png").write_bytes(RED)
    (tmp_path / "secret.png").write_bytes(encode_png(np.zeros((4, 4, 3), np.uint8)))
    link.symlink_to("own.png")
    rows = rows_of(data, showing("a.png", "image"))
    usual = row_format.inside

    def switched(path: Path, roots: tuple[Path, ...]) -> bool:
        allowed = usual(path, roots)
        link.unlink()
        link.symlink_to(tmp_path / "secret.png")
        return allowed

    monkeypatch.setattr(row_format, "inside", switched)
    (medium,) = rows[0].messages[0].media
    assert medium.hash == hashlib.sha256(RED).hexdigest()


def test_a_file_that_is_changed_under_a_run_ends_it_and_a_touched_one_does_not(tmp_path: Path) -> None:
    ask = [{"role": "user", "content": "a?"}]
    rows = rows_of(tmp_path, {"id": "1", "messages": ask}, {"id": "2", "messages": ask})
    path = tmp_path / "rows.jsonl"
    os.utime(path, (1, 1))
    assert rows[1].id == "2"
    text = path.read_text()
    path.write_text(text.replace('"1"', '"one"'))
    with pytest.raises(
        DataChanged, match=r"rows\.jsonl: the file was changed, removed or made unreadable while the run reads it"
    ):
        rows[1]
    with pytest.raises(DataChanged):
        each_once([rows], on_bad_row="skip")
    path.write_text(text)
    assert rows[1].id == "2", "put back as it was"
    path.write_text("")
    with pytest.raises(DataChanged):
        rows[0]
    path.unlink()
    with pytest.raises(DataChanged):
        each_once([rows], on_bad_row="skip")


def test_a_parquet_file_that_is_changed_under_a_run_ends_it_and_a_touched_one_does_not(tmp_path: Path) -> None:
    from datasets import Dataset

    path, copy = tmp_path / "rows.parquet", tmp_path / "copy.parquet"
    Dataset.from_list([{"prompt": "a", "answer": "b"}]).to_parquet(path)
    copy.write_bytes(path.read_bytes())
    rows = ParquetRows(str(path), MediaStore(), columns={"prompt": "prompt"})
    os.utime(path, (1, 1))
    assert rows[0].messages[0].text == "a"
    rows = ParquetRows(str(path), MediaStore(), columns={"prompt": "prompt"})
    copy.rename(path)
    assert rows[0].messages[0].text == "a", "another file with the same content"
    rows = ParquetRows(str(path), MediaStore(), columns={"prompt": "prompt"})
    Dataset.from_list([{"prompt": "other", "answer": "b"}] * 9).to_parquet(path)
    with pytest.raises(DataChanged, match=r"rows\.parquet"):
        rows[0]
    path.unlink()
    with pytest.raises(DataChanged, match=r"rows\.parquet"):
        each_once([rows], on_bad_row="skip")


@pytest.mark.parametrize("other", ["z", "a"])
def test_a_parquet_file_that_is_changed_within_a_read(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read while the file was written to is not used; where the content is the same again, it is read again."""
    from datasets import Dataset

    path, new = tmp_path / "rows.parquet", tmp_path / "new.parquet"
    Dataset.from_list([{"prompt": "a"}]).to_parquet(path)
    Dataset.from_list([{"prompt": other}]).to_parquet(new)
    rows = ParquetRows(str(path), MediaStore(), columns={"prompt": "prompt"})
    readings = []

    def read(*given: Any) -> Any:
        table = usual(*given)
        if not readings:
            path.write_bytes(new.read_bytes())
            os.utime(path, (1, 1))
        readings.append(table)
        return table

    usual = rows._read_group
    monkeypatch.setattr(rows, "_read_group", read)
    if other == "a":
        assert rows[0].messages[0].text == "a"
        assert len(readings) == 2
    else:
        with pytest.raises(DataChanged):
            rows[0]


def test_a_large_file_is_digested_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound every byte counts; beyond it the size, evenly spread blocks and the end."""

    def flip(path: Path, place: int) -> None:
        with path.open("r+b") as file:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    path = tmp_path / "rows"
    path.write_bytes(bytes(3 * 2**20))
    whole = content_digest(path)
    flip(path, 2**20 + 7)
    assert content_digest(path) != whole
    monkeypatch.setattr("sensorium.data.rows.WHOLE_DIGEST", 2**21)
    monkeypatch.setattr("sensorium.data.rows.DIGEST_TAIL", 2**20)
    path.write_bytes(bytes(4 * 2**20))
    part = content_digest(path)
    for place, seen in ((7, True), (2**20 + 7, False), (4 * 2**20 - 1, True)):
        flip(path, place)
        assert (content_digest(path) != part) == seen
        flip(path, place)
    with path.open("ab") as file:
        file.write(b"\0")
    assert content_digest(path) != part


@pytest.mark.parametrize("kind", ["hub", "svg_files", "vagen", "caprl", "daily_omni"])
def test_a_source_of_files_knows_its_content(kind: str, tmp_path: Path) -> None:
    """By which a resumed run finds rows that were rewritten; times are no content."""
    names = {"svg_files": "a.svg", "vagen": "envs.yaml", "daily_omni": "qa.json"}
    path = tmp_path / "data" / names.get(kind, "train.jsonl")
    (path.parent / "Videos").mkdir(parents=True)
    path.write_text(
        {
            "hub": '{"q": "one"}\n',
            "svg_files": "<svg>one</svg>",
            "vagen": "envs: [{name: sokoban, n_envs: 1, seed_list: [1]}] # one",
            "caprl": '{"prompt": "one"}\n',
            "daily_omni": '[{"Question": "one"}]',
        }[kind]
    )
    options: dict[str, Any] = {"hub": {"columns": {"prompt": "q"}}, "svg_files": {"split": "all"}}.get(kind, {})
    whole = kind in ("hub", "svg_files", "daily_omni")

    def digests() -> dict[str, str]:
        source = resolve("source", kind)(str(path.parent if whole else path), store=MediaStore(), **options)
        return dict(source.row_digests)

    before = digests()
    os.utime(path, (1, 1))
    assert digests() == before
    assert len(before) == 1
    path.write_text(path.read_text().replace("one", "two"))
    assert before.keys() == digests().keys()
    assert digests() != before


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(TaskError, match=r"empty\.jsonl: the file has no rows"):
        JsonlRows(str(tmp_path / "empty.jsonl"), MediaStore())


def test_a_text_that_cannot_be_written_is_refused_by_row(tmp_path: Path) -> None:
    bad = '"a\\ud800"'
    ask = '"messages": [{"role": "user", "content": "b"}]'
    lines = [
        f'{{"messages": [{{"role": "user", "content": {bad}}}]}}',
        f'{{{ask}, "answer": {bad}}}',
        f'{{{ask}, "id": {bad}}}',
        f'{{{ask}, "metadata": {{"k": [{bad}]}}}}',
        f'{{{ask}, "demonstration": {bad}}}',
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    rows = JsonlRows(str(tmp_path / "rows.jsonl"), MediaStore())
    for index in range(len(rows)):
        with pytest.raises(TaskError, match=rf"rows\.jsonl:{index + 1}: .*surrogate"):
            rows[index]


def test_a_parquet_file_that_is_huge_in_memory_is_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    table = pyarrow.table({"prompt": ["x" * 2**16] * 2000})
    write_table(table, tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 2**18
    rows = ParquetRows(str(tmp_path / "bomb.parquet"), MediaStore(), columns={"prompt": "prompt"}, row_group_mib=32)
    with pytest.raises(TaskError, match=r"row group 0 takes more than 32 MiB.*row_group_mib"):
        rows[0]


@pytest.mark.parametrize("nested", [False, True])
def test_a_row_that_repeats_a_value_in_a_list_is_refused_before_it_fills_memory(nested: bool, tmp_path: Path) -> None:
    """One row of 100 times the same 4 MiB, in a file of 200 KB."""
    import pyarrow
    from pyarrow.parquet import write_table

    values = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100, pyarrow.int32()), pyarrow.array(["x" * 2**22]))
    held = pyarrow.StructArray.from_arrays([values], ["content"]) if nested else values
    column = pyarrow.ListArray.from_arrays(pyarrow.array([0, 100], pyarrow.int32()), held)
    write_table(pyarrow.table({"prompt": column}), tmp_path / "bomb.parquet", store_schema=False)
    usual = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(pool)
    try:
        rows = ParquetRows(str(tmp_path / "bomb.parquet"), MediaStore(), columns={"prompt": "prompt"}, row_group_mib=32)
        with pytest.raises(TaskError, match="row_group_mib"):
            rows[0]
    finally:
        pyarrow.set_memory_pool(usual)
    assert 0 < pool.max_memory() < 2**26


def test_a_long_list_of_texts_within_the_bound_is_read(tmp_path: Path) -> None:
    from datasets import Dataset

    said = [
        {"role": "user", "content": "x" * 2**12},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "?"},
    ]
    Dataset.from_list([{"prompt": said}] * 300).to_parquet(tmp_path / "rows.parquet")
    rows = ParquetRows(str(tmp_path / "rows.parquet"), MediaStore(), columns={"prompt": "prompt"}, row_group_mib=2)
    assert len(rows[299].messages) == 3


def test_a_value_that_a_dictionary_repeats_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    """256 rows at once, each with the same 4 MiB, were 1 GiB before the first look at the bound."""
    import pyarrow
    from pyarrow.parquet import write_table

    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 256, pyarrow.int32()), pyarrow.array(["x" * 2**22]))
    write_table(pyarrow.table({"prompt": column}), tmp_path / "bomb.parquet", store_schema=False)
    usual = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(pool)
    try:
        rows = ParquetRows(str(tmp_path / "bomb.parquet"), MediaStore(), columns={"prompt": "prompt"}, row_group_mib=32)
        with pytest.raises(TaskError, match="row_group_mib"):
            rows[0]
    finally:
        pyarrow.set_memory_pool(usual)
    assert 0 < pool.max_memory() < 2**28


def hostile_columns() -> Iterator[Any]:
    import pyarrow

    yield pyarrow.array([2**62], pyarrow.timestamp("us"))
    yield pyarrow.array([2**30], pyarrow.date32())
    yield pyarrow.array([1], pyarrow.timestamp("us", tz="No/Such"))
    offsets = pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0")
    yield pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, pyarrow.py_buffer(b"\xff\xfe")])
    yield pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["x", "x"])
    yield pyarrow.array([float("nan")])


@pytest.mark.parametrize("column", hostile_columns(), ids=lambda column: str(column.type))
def test_a_parquet_value_that_python_cannot_hold_is_a_bad_row(column: Any, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.table({"prompt": ["a"], "answer": column}), tmp_path / "rows.parquet")
    columns = {"prompt": "prompt", "answer": "answer"}
    rows = ParquetRows(str(tmp_path / "rows.parquet"), MediaStore(), columns=columns)
    with pytest.raises(TaskError, match=r"rows\.parquet, row 0: "):
        rows[0]


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    several = [pyarrow.array([value]) for value in "abc"]
    write_table(pyarrow.Table.from_arrays(several, names=["prompt", "answer", "answer"]), tmp_path / "rows.parquet")
    with pytest.raises(TaskError, match="'answer' occurs twice"):
        ParquetRows(str(tmp_path / "rows.parquet"), MediaStore(), columns={"prompt": "prompt", "answer": "answer"})


def test_an_archive_that_unpacks_to_too_much_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    archive, folder = tmp_path / "videos.zip", tmp_path / "out"
    folder.mkdir()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as written:
        for number in range(5):
            written.writestr(f"{number}.mp4", b"\0" * 2**24)
    with pytest.raises(TaskError, match=r"would unpack to 80 MiB.*unpack_ratio"):
        unpack_once(archive, folder)
    assert list(folder.iterdir()) == []
    unpack_once(archive, folder, ratio=10_000)
    assert (folder / "4.mp4").stat().st_size == 2**24


def test_a_folder_of_media_that_does_not_exist_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}]}\n')
    with pytest.raises(TaskError, match=r"rows\.jsonl: media_roots names '.*nowhere', and there is no such folder"):
        JsonlRows(str(tmp_path / "rows.jsonl"), MediaStore(), media_roots=[str(tmp_path / "nowhere")])
    with pytest.raises(TaskError, match=r"No such file or directory; did you mean '.*rows\.jsonl'\?"):
        JsonlRows(str(tmp_path / "row.jsonl"), MediaStore())


def test_an_archive_of_too_many_files_is_refused_before_any_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MEMBERS", 3)
    archive, folder = tmp_path / "videos.zip", tmp_path / "out"
    folder.mkdir()
    with zipfile.ZipFile(archive, "w") as written:
        for number in range(4):
            written.writestr(f"{number}.mp4", b"")
    with pytest.raises(TaskError, match=r"videos\.zip: it has more than 3 members"):
        unpack_once(archive, folder)
    assert not list(folder.iterdir())


def test_an_archive_cannot_write_outside_of_its_folder(tmp_path: Path) -> None:
    for name in ("../evil.mp4", "/evil.mp4", "a/../../evil.mp4"):
        archive, folder = tmp_path / "videos.zip", tmp_path / "out"
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(archive, "w") as written:
            written.writestr(name, b"x")
        with pytest.raises(TaskError, match="outside of"):
            unpack_once(archive, folder)
