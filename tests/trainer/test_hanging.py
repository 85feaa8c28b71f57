"""Whole runs in processes of their own: what hangs or leaves costs its episodes, and the process ends by itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sensorium.runs.episodes import read_episodes
from sensorium.runs.metrics import read_metrics
from sensorium.vocabulary import Episode, Status
from tests.recipes import quick

pytestmark = pytest.mark.usefixtures("forked_python")
ROOT = Path(__file__).parents[2]
# A background job ignores Ctrl-C, and so would its children.
COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from sensorium.cli.main import main"
)
DEADLINE_S = 3.0
"""Of what hangs for ever. Long enough for what does not, on a machine that is busy with other things."""
RECIPE = quick(
    "hanging",
    batch={"prompts_per_step": 6, "group_size": 4},
    rollout={"max_new_tokens": 3, "max_turns": 3, "environment_deadline_s": DEADLINE_S},
    rewards={"terms": [{"name": "environment"}], "retries": 0, "deadline_s": DEADLINE_S},
)
UNWELL = {"source": "environments", "options": {"environment": "tests.trainer.hanging:Unwell", "size": 12}}


def start(folder: Path, **changes: Any) -> "subprocess.Popen[str]":
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(RECIPE | changes | {"run_dir": str(folder / "run")}))
    command = [sys.executable, "-c", f"{COMMAND}; sys.exit(main(sys.argv[1:]))", "train", str(recipe)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    surroundings = os.environ | {"PYTHONPATH": path, "STUCK": str(folder / "stuck")}
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: "subprocess.Popen[str]") -> str:
    try:
        return process.communicate(timeout=600)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it did not end by itself: {process.communicate()[0]}") from None


def episodes_of(folder: Path) -> list[Episode]:
    return [episode for _, _, episode in read_episodes(folder / "run/episodes/step_000001.jsonl")]


def test_a_run_goes_on_and_its_process_ends_although_environments_and_terms_hang_or_leave(tmp_path: Path) -> None:
    terms = [{"name": "environment"}, {"name": "tests.trainer.hanging:Leaving"}]
    process = start(tmp_path, tasks={"train": [UNWELL]}, rewards=RECIPE["rewards"] | {"terms": terms})
    said = ended(process)
    assert process.returncode == 0, said
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 2
    episodes = episodes_of(tmp_path)
    failed = [e for e in episodes if e.status == Status.FAILED]
    assert 0 < len(failed) < len(episodes)
    assert {"did not answer" in e.failure or "SystemExit" in e.failure for e in failed} == {True}
    assert rows[0]["time/reward/leaving_max_s"] >= DEADLINE_S
    reasons = {e.index: e.scores[1].reason for e in episodes if e.status != Status.FAILED}
    assert f"did not answer within {DEADLINE_S:g} s" in reasons[0]
    assert "SystemExit" in reasons[1]
    assert (reasons[2], reasons[3]) == ("", "")
    assert "'leaving' could not be closed" in said


def test_ctrl_c_ends_a_run_while_an_environment_hangs(tmp_path: Path) -> None:
    stuck = UNWELL | {"options": UNWELL["options"] | {"environment": "tests.trainer.hanging:Stuck"}}  # type: ignore[operator]
    rollout = RECIPE["rollout"] | {"environment_deadline_s": 600.0}
    process = start(tmp_path, tasks={"train": [stuck]}, rollout=rollout)
    until = time.monotonic() + 600
    while not (tmp_path / "stuck").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = ended(process)
    assert process.returncode == 130, said
