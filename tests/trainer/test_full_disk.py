"""A disk without room stops a run with one paragraph, wherever it is met; with room again it goes on."""

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sensorium.recipe.load import dump_recipe, load_recipe
from sensorium.report.watcher import Watcher
from sensorium.runs.checkpoint_layout import problems_of
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import RecordError
from tests.trainer.small import small
from tests.trainer.test_going_on import Notes, assert_equal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a disk; test_a_limit_on_file_size_is_said_too runs anywhere")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small(tmp_path_factory.mktemp("whole") / "run"))


class Filler(Watcher):
    """Fills a disk to the last byte at a moment of the run."""

    def __init__(self, disk: Path, phase: str) -> None:
        self.file, self.moment = disk / "filler", phase

    def phase(self, step: int, name: str, total: int = 0) -> None:
        if (step, name) == (3, self.moment):
            with self.file.open("wb", buffering=0) as file:
                for size in (1 << 16, 4096, 1):
                    try:
                        while True:
                            file.write(b"\0" * size)
                    except OSError:
                        pass


@pytest.mark.parametrize("phase", ["draw", "rollout", "score", "record", "checkpoint"])
def test_a_disk_that_fills_up_stops_the_run_and_with_room_it_goes_on(phase: str, disk: Path, whole: Path) -> None:
    """A phase after the step itself, like ``checkpoint``, is announced with the number of the next step."""
    filler = Filler(disk, phase)
    with pytest.raises(RecordError, match=r"cannot write '.*': .*disk is full|The disk is full") as stopped:
        train(small(disk / "run"), watchers=[filler])
    assert "--resume" in "".join(stopped.value.__notes__)
    checkpoints = Checkpoints(disk / "run" / "checkpoints", 2)
    good = checkpoints.complete()
    assert good
    assert all(not problems_of(checkpoints.path(step)) for step in good)
    assert not list(checkpoints.folder.glob(".draft*")), "a draft takes room that others need"
    filler.file.unlink()
    train(load_recipe(disk / "run"), resume=True)
    assert_equal(whole, disk / "run", 3)


def test_going_on_is_refused_before_engines_start_where_the_disk_is_full(disk: Path) -> None:
    """With some KiB left, the lock and the ledger can still be written, and the recipe cannot."""
    train(small(disk / "run", steps=1))
    before = {path: path.read_bytes() for path in (disk / "run").rglob("*") if path.is_file()}
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - (36 << 10)))
    notes = Notes()
    with pytest.raises(RecordError, match=r"cannot write '.*/run.*': No space left on device\. The disk is full"):
        train(small(disk / "run", "rollout.engine=process", steps=2), resume=True, watchers=[notes])
    assert not notes.texts, "an engine was started"
    assert {path: path.read_bytes() for path in (disk / "run").rglob("*") if path.is_file()} == before
    (disk / "filler").unlink()
    train(small(disk / "run", steps=2), resume=True)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
from sensorium.cli.main import main
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.mark.usefixtures("forked_python")
def test_a_limit_on_file_size_is_said_too(tmp_path: Path) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(dump_recipe(small(tmp_path / "run", "steps=1")).replace("tiny:qwen2", str(_model(tmp_path))))
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(recipe)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert not (tmp_path / "run" / "checkpoints" / "step_000001").exists()


def _model(folder: Path) -> Path:
    """A tiny model on disk: made on the spot it would not fit the limit."""
    from sensorium.models.tiny import make_tiny

    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    return make_tiny("qwen2", folder / "model")


def test_a_disk_that_may_not_suffice_is_told_before_anything_is_spent(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (disk / "else").write_bytes(bytes(10 << 20))
    train(small(disk / "run", steps=1))
    told = capsys.readouterr().err
    assert re.search(rf"ATTENTION: the run may take 1[67].\d MiB of disk, and '{disk}/run' has 1[34].\d MiB\.", told), told
    (disk / "else").unlink()
    train(small(disk / "run", steps=2), resume=True)
    assert "ATTENTION" not in capsys.readouterr().err, "what the run has taken already is its own"


def test_before_the_first_checkpoint_nobody_is_sent_to_resume(disk: Path) -> None:
    recipe = small(disk / "run")
    recipe = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"every": 0})})
    with pytest.raises(RecordError) as stopped:
        train(recipe, watchers=[Filler(disk, "record")])
    said = str(stopped.value) + "".join(stopped.value.__notes__)
    assert "--restart" in said
    assert "--resume" not in said
