"""A long run does not grow."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sensorium.cluster import event_loop
from sensorium.report.watcher import Watcher
from sensorium.trainer.run import train

from .small import small

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("forked_python")
def test_memory_is_flat_over_three_hundred_steps_and_fifty_clips(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.trainer.many_steps", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["steps"] == 300
    assert max(found["resident"]) <= 1.05 * found["resident"][0]
    assert max(found["objects"]) <= 1.05 * found["objects"][0]
    assert found["decoded"] > 150, "with so little room clips are decoded again and again"
    assert found["evictions"] > 150


@pytest.mark.parametrize(("frozen", "expected"), [(0, ["freeze", "freeze", "unfreeze"]), (7, [])])  # after step 1 again
def test_a_run_thaws_what_it_froze_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: int, expected: list[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr(event_loop, "_excluded_by", "nobody")
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: done.append(name))
    train(small(tmp_path / "run", "steps=1"))
    assert done == expected


def test_a_run_thaws_also_where_a_watcher_fails_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(event_loop, "_excluded_by", "nobody")
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: done.append(name))

    class Broken(Watcher):
        def finished(self) -> None:
            raise ValueError("the watcher's own")

    with pytest.raises(ValueError, match="the watcher's own"):
        train(small(tmp_path / "run", "steps=1"), watchers=[Broken()])
    assert done[-1] == "unfreeze"
