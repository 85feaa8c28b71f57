"""Training in a pool of environment instances: more episodes than instances, exact on resume, and nothing left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sensorium.recipe.load import dump_recipe
from sensorium.runs.episodes import read_groups
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import train
from tests.envs.browsing import NAME
from tests.envs.test_instances import alive, wait_for
from tests.trainer.run_contents import assert_equal
from tests.trainer.small import small


def browsing(folder: Path, *overrides: str, pool: int = 2, **options: Any) -> Any:
    given = {"environment": NAME, "size": 40, "options": {"pids": str(folder.parent / "pids"), **options}}
    return small(
        folder, *overrides, tasks={"train": [{"source": "environments", "options": given}]}, environments={"pool": pool},
        rollout={"max_new_tokens": 3, "max_turns": 3, "schedule": "lockstep"},
        batch={"prompts_per_step": 2, "group_size": 3},
        rewards={"terms": [{"name": "environment"}, {"name": "tests.trainer.small:ByParity"}]},
    )  # fmt: skip


def begun(folder: Path) -> list[list[int]]:
    """Of each episode: the pids of its instance and of what that started, and how often the instance had been reset."""
    return [[int(word) for word in line.split()] for line in (folder / "pids").read_text().splitlines()]


def test_few_instances_play_all_episodes_and_a_resumed_run_repeats_them(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(browsing(whole / "run"))
    train(browsing(broken / "run", "steps=1"))
    train(browsing(broken / "run"), resume=True)
    assert_equal(whole / "run", broken / "run", 3)
    rows = read_metrics(whole / "run" / "metrics.jsonl")
    assert all(row["episodes/failed"] == 0 and row["time/instance_wait_mean_s"] > 0 for row in rows)
    episodes = begun(whole)
    assert len(episodes) == 1 + 3 * 6, "the check of media at the start, and the episodes"
    assert len({process for process, _, _ in episodes}) == 2
    assert not any(alive(pid) for folder in (whole, broken) for pids in begun(folder) for pid in pids[:2])


def test_an_episode_whose_instance_dies_is_rolled_again_on_a_fresh_one(tmp_path: Path) -> None:
    train(browsing(tmp_path / "whole" / "run", "steps=1"))
    train(browsing(tmp_path / "crashed" / "run", "steps=1", crash=str(tmp_path / "crash")))
    (row,) = read_metrics(tmp_path / "crashed" / "run" / "metrics.jsonl")
    assert (row["episodes/failed"], row["worker/instances_replaced"], row["worker/rolled_again"]) == (0, 1, 1)
    assert len(begun(tmp_path / "crashed")) == 1 + 6 + 1
    assert written(tmp_path / "crashed" / "run") == written(tmp_path / "whole" / "run")


def test_workers_keep_the_instances_and_end_them(tmp_path: Path) -> None:
    train(browsing(tmp_path / "run", "steps=2", "cluster.environments=2"))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["episodes/failed"] == 0 for row in rows)
    episodes = begun(tmp_path)
    assert len(episodes) == 1 + 2 * 6
    assert max(resets for _, _, resets in episodes) > 2
    assert not any(alive(pid) for pids in episodes for pid in pids[:2])


def written(run: Path) -> list[tuple[int, ...]]:
    """The tokens of all responses of the first step."""
    groups = read_groups(RunDirectory(run).episodes_of(1))
    return [turn.response.tokens for group in groups for episode in group.episodes for turn in episode.turns]


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    recipe, closed = tmp_path / "recipe.yaml", tmp_path / "closed"
    recipe.write_text(dump_recipe(browsing(tmp_path / "run", "steps=10000", closed=str(closed))))
    # Where tests run in a shell's background, Ctrl-C is ignored.
    heard = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from sensorium.cli.main import main"
    )
    command = [sys.executable, "-c", f"{heard}; sys.exit(main(sys.argv[1:]))", "train", str(recipe)]
    given = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=given)
    try:
        wait_for(lambda: (tmp_path / "run" / "checkpoints" / "step_000001").exists() or run.poll() is not None)
        run.send_signal(number)
        assert run.wait() == 128 + number
    finally:
        run.kill()
    assert closed.exists(), "instances closed themselves"
    assert not any(alive(pid) for pids in begun(tmp_path) for pid in pids[:2])
