"""Libraries are compiled once and kept; what is wrong with compilers, folders and users is told in words, once."""

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sensorium.compiled import library
from sensorium.compiled.kept_files import cache_folder, keep, read_kept
from sensorium.compiled.library import NoLibrary, load_library


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a small source, and a cache of its own."""
    folder = tmp_path / "some" / "c"
    folder.mkdir(parents=True)
    (folder / "answer.c").write_text("int answer(void) { return 42; }")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    try:
        library._compiler()
    except NoLibrary as error:
        pytest.skip(str(error))
    return folder


@pytest.fixture
def answer(sources: Path) -> Callable[[], int]:
    """What the library answers, loaded as by a new process."""

    def ask() -> int:
        library._tried.cache_clear()
        return int(load_library(sources).answer())

    return ask


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Those that were made."""
    made: list[object] = []
    original = library._compile
    monkeypatch.setattr(library, "_compile", lambda *given: (made.append(given), original(*given)))
    return made


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a shell script that stands for a compiler; its path."""

    def write(text: str) -> str:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("gcc 'x", "the environment variable CC is no command"),
        ("/no/such/compiler", "CC names a C compiler that is not there"),
        ("sh -c false", "sh ended with 1: it said nothing"),
    ],
)
def test_a_bad_command_is_told_in_words(command: str, said: str, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", command)
    with pytest.raises(NoLibrary, match=said):
        load_library(sources)


def test_a_failure_is_found_once(
    sources: Path, script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("CC", script(f"echo asked >> {log}; printf '\\344' >&2; exit 3"))
    for _ in range(3):
        with pytest.raises(NoLibrary, match="ended with 3: \ufffd"):
            load_library(sources)
    assert log.read_text().split() == ["asked"]


def test_a_compiler_that_hangs_is_left_with_all_that_it_started(
    sources: Path, script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("CC", script(f"case $1 in --version) echo one;; *) (sleep 1000) 3> {fifo}; esac"))
    monkeypatch.setattr(library, "PATIENCE_S", 0.5)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(NoLibrary, match=r"did not end within 0\.5 s"):
        load_library(sources)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # nobody holds the other end any longer
    os.close(reader)


def test_without_a_home_folder_nothing_is_kept(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert load_library(sources).answer() == 42


def test_a_library_is_compiled_once_and_again_when_it_is_broken(
    answer: Callable[[], int], compilations: list[object]
) -> None:
    assert answer() == answer() == 42
    assert len(compilations) == 1
    (kept,) = library.cache_folder().iterdir()
    whole = kept.read_bytes()
    for broken in (whole[:1000], b"", whole[:-1] + b"x"):
        kept.unlink()
        kept.write_bytes(broken)
        assert answer() == 42
        assert kept.read_bytes()[:-32] != broken[:-32] or kept.read_bytes() == whole
    assert len(compilations) == 4


def test_what_others_could_have_written_is_not_loaded(answer: Callable[[], int], compilations: list[object]) -> None:
    assert answer() == 42
    (kept,) = library.cache_folder().iterdir()
    kept.chmod(0o666)
    assert answer() == 42
    assert len(compilations) == 2
    library.cache_folder().chmod(0o777)
    assert answer() == 42
    assert len(compilations) == 3


def test_a_cache_that_cannot_be_written_costs_a_compilation(
    answer: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert answer() == 42


def test_a_source_that_does_not_compile_is_refused_with_what_the_compiler_says(sources: Path) -> None:
    (sources / "wrong.c").write_text("int wrong(void) { return nothing; }")
    with pytest.raises(NoLibrary, match="nothing"):
        load_library(sources)


def test_where_temporary_files_may_not_be_executed_the_kept_one_is_loaded(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = library.ctypes.CDLL

    def load(path: str) -> object:
        if str(library.cache_folder()) not in path:
            raise OSError("failed to map segment from shared object")
        return original(path)

    monkeypatch.setattr(library.ctypes, "CDLL", load)
    assert load_library(sources).answer() == 42


def test_kept_code_is_read_from_the_folder_that_was_checked(tmp_path: Path) -> None:
    """A link on the way to the cache is switched all the time between our folder and one that anybody can write to."""
    ours, theirs, link, over = tmp_path / "ours", tmp_path / "theirs", tmp_path / "link", threading.Event()
    for folder in (ours, theirs):
        folder.mkdir()
        keep(folder.name.encode(), folder / "code")
    theirs.chmod(0o777)
    assert read_kept(theirs / "code") is None
    keep(b"more", theirs / "more")
    assert not (theirs / "more").exists(), "nothing is written where others may replace it"
    link.symlink_to(ours)

    def switch() -> None:
        for turn in itertools.cycle((theirs, ours)):
            (tmp_path / "new").symlink_to(turn)
            (tmp_path / "new").rename(link)
            if over.is_set():
                return

    attacker = threading.Thread(target=switch)
    attacker.start()
    try:
        found = {read_kept(link / "code") for _ in range(20_000)}
    finally:
        over.set()
        attacker.join()
    assert found <= {b"ours", None}


def test_a_cache_folder_is_named_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled library is loaded by its path after the check."""
    (tmp_path / "own").mkdir()
    (tmp_path / "sensorium").symlink_to("own")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path.resolve() / "own"
