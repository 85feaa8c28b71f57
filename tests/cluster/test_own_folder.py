"""Shared memory is used where it has room, and what killed processes left there or among temporary files is removed."""

import os
import resource
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from sensorium.cluster import python_process as module
from sensorium.cluster.python_process import memory_folder, temporary_folder
from sensorium.engines.weight_group import write_tensors
from sensorium.vocabulary.errors import RecordError

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_what_a_killed_process_left_is_removed_and_what_lives_is_not(shared_memory: Path) -> None:
    if not (child := os.fork()):
        file = write_tensors({"weight": torch.ones(3)})
        os._exit(0 if file.parent.parent == shared_memory else 1)  # as a kill ends it: nothing is cleaned up
    assert os.waitpid(child, 0)[1] == 0
    (left,) = shared_memory.iterdir()
    living, lock = module._make(shared_memory)
    own = memory_folder(10)
    assert own is not None
    assert set(shared_memory.iterdir()) == {own, living}
    os.close(lock)
    assert memory_folder(10) == own != left


def test_a_killed_service_leaves_no_media_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    if not (child := os.fork()):
        (temporary_folder() / "media").write_bytes(bytes(10))
        os._exit(0)  # as a kill ends it
    assert os.waitpid(child, 0)[1] == 0
    (left,) = tmp_path.glob("sensorium-own-*")
    assert (left / "media").exists()
    own = temporary_folder()
    assert list(tmp_path.glob("sensorium-own-*")) == [own] != [left]
    assert temporary_folder() == own


def test_a_link_in_the_temporary_folder_leads_to_no_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may put links there: one that is named as a folder left behind, or whose lock is one."""
    shared, precious = tmp_path / "tmp", tmp_path / "precious"
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(shared))
    for folder in (shared, precious):
        folder.mkdir()
    (precious / module.LOCK).write_text("kept")
    (shared / f"{module.PREFIX}link").symlink_to(precious)
    own = temporary_folder()
    assert (precious / module.LOCK).read_text() == "kept"
    assert (own.parent, own.is_symlink(), own.stat().st_mode & 0o777) == (shared, False, 0o700)


def test_without_room_or_shared_memory_the_disk_is_used(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: Usage(100, 81, 19))
    assert memory_folder(9) is not None
    assert memory_folder(10) is None, "a container's 64 MiB, say"
    file = write_tensors({"weight": torch.ones(3)})
    assert not file.is_relative_to(shared_memory)
    file.unlink()
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "none")
    assert memory_folder(1) is None


def test_tensors_that_find_no_room_end_the_run_and_leave_no_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(RecordError, match=r"the media \(0.4 MiB\) .*too large.*TMPDIR"):
            write_tensors({"patches": torch.ones(100_000)}, "media", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    with pytest.raises(RecordError, match="No such file or directory"):
        write_tensors({"patches": torch.ones(1)}, "media", tmp_path / "gone")
