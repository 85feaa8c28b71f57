"""A row is whole or absent and a failed write is said, whatever the disk does; files of a run are read or named."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from sensorium.runs.durable import (
    append_row,
    cannot_write,
    drafted,
    full_disk_error,
    read_json,
    read_rows,
    refuse_full,
    rewrite_rows,
    write_all,
    write_whole,
)
from sensorium.vocabulary.errors import RecordError


def _append_until_refused(path: Path, answer: "multiprocessing.Queue[tuple[int, str]]") -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    written = 0
    try:
        for n in range(3_000):
            append_row(path, {"n": n, "text": "x" * 40})
            written += 1
    except RecordError as error:
        answer.put((written, str(error)))


def test_a_row_that_does_not_fit_is_an_error_and_leaves_whole_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    answer: multiprocessing.Queue[tuple[int, str]] = multiprocessing.get_context("fork").Queue()
    child = multiprocessing.get_context("fork").Process(target=_append_until_refused, args=(path, answer))
    child.start()
    written, said = answer.get(timeout=60)
    child.join()
    assert 0 < written < 3_000
    assert [row["n"] for row in read_rows(path)] == list(range(written))
    assert path.read_bytes().endswith(b"\n"), "the part of a row that was written is taken away"
    assert str(path) in said
    assert "ulimit -f" in said


def test_a_write_that_takes_only_a_part_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data[:7])))
    append_row(tmp_path / "rows.jsonl", {"text": "longer than seven bytes"})
    assert list(read_rows(tmp_path / "rows.jsonl")) == [{"text": "longer than seven bytes"}]
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with (tmp_path / "other").open("wb") as file, pytest.raises(OSError, match="nothing more"):
        write_all(file.fileno(), b"abc")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"A file .*choose another place"):
        write_whole(tmp_path / "file" / "inside.json", "{}")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": 1} trailing'])
def test_a_damaged_json_file_is_named_with_the_way_out(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"best\.json' is damaged: .* Remove it\."):
        read_json(path, "Remove it.")
    path.write_text(json.dumps({"a": 1}))
    assert read_json(path, "") == {"a": 1}


def test_a_row_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(RecordError, match="line 2: no JSON object"):
        list(read_rows(path))


def test_a_pipe_is_not_waited_for_and_deep_nesting_is_damage(tmp_path: Path) -> None:
    pipe, deep = tmp_path / "pipe", tmp_path / "deep"
    os.mkfifo(pipe)
    deep.write_text("[" * 100_000 + "\n")
    for path, reason in ((pipe, "a pipe"), (deep, "recursion")):
        with pytest.raises(RecordError, match=reason):
            list(read_rows(path))
        with pytest.raises(RecordError, match=reason):
            rewrite_rows(path, lambda row: True)
        with pytest.raises(RecordError, match=reason):
            read_json(path, "Remove it.")


def test_an_error_that_was_raised_from_its_own_group_is_looked_at_once() -> None:
    error = ValueError("not the disk")
    error.__cause__ = ExceptionGroup("together", [error])
    assert full_disk_error(error) is None
    full = OSError(errno.ENOSPC, "full")
    error.__cause__ = ExceptionGroup("together", [error, full])
    assert full_disk_error(error) is full


def test_what_sqlite_calls_an_input_output_error_is_a_full_disk_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    assert full_disk_error(error, tmp_path / "ledger.sqlite") is None
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    found = full_disk_error(error, tmp_path / "ledger.sqlite")
    assert found is not None
    assert "The disk is full" in str(cannot_write(tmp_path, found))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_draft_takes_the_place_of_a_file_or_a_folder_only_if_all_goes_well(
    tmp_path: Path, flushed: bool, shared: bool
) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    for content in ("first", "second"):
        with drafted(file, flushed=flushed, shared=shared) as draft:
            draft.write_text(content)
        with drafted(folder, flushed=flushed, shared=shared) as draft:
            (draft / "inner").mkdir(parents=True)
            (draft / "inner" / content).write_text(content)
    for path in (file, folder):
        with suppress(ZeroDivisionError), drafted(path, flushed=flushed, shared=shared) as draft:
            draft.write_text("half")
            raise ZeroDivisionError
    assert file.read_text() == "second"
    assert [path.name for path in folder.rglob("*")] == ["inner", "second"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"], "no draft stays"


def test_threads_that_write_one_shared_path_never_show_half_of_it(tmp_path: Path) -> None:
    path, barrier = tmp_path / "file", threading.Barrier(4)

    def write(letter: str) -> None:
        barrier.wait()
        for _ in range(20):
            with drafted(path, flushed=False, shared=True) as draft:
                draft.write_text(letter * 1000)
            assert len(set(path.read_text())) == 1

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, "abcd")) == [None] * 4
    assert len(path.read_text()) == 1000


def test_the_search_for_room_writes_through_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious.txt", tmp_path / "run"
    precious.write_text("kept")
    folder.mkdir()
    (folder / ".room.draft").symlink_to(precious)
    refuse_full(folder)
    assert precious.read_text() == "kept"
    os.mkfifo(folder / ".room.draft")
    refuse_full(folder)
    assert not list(folder.iterdir())
