"""A command that is interrupted or terminated ends in order, with one line and the signal's exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import sensorium as package
from sensorium.runs.metrics import read_metrics
from studies.fork_server import ForkServer

from ..cpu_budget import count

SOURCES = str(Path(package.__file__).resolve().parents[1])
RECIPE = """\
name: trial
steps: 1
model: {path: "tiny:qwen3_vl"}
tasks:
  train: [{source: shapes, options: {size: 64}}]
rewards: {terms: [{name: "sleepy:Term"}]}
"""
SLEEPY = "import time\nprint('asleep', flush=True)\ntime.sleep(600)\nclass Term: pass\n"
CODE = """\
import signal, sys
signal.signal(signal.SIGINT, {disposition})
from sensorium.cli.main import main
sys.exit(main(["train", "trial.yaml", "--dry-run"]))
"""


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(
    ("disposition", "sent", "code", "word"),
    [
        ("signal.default_int_handler", [signal.SIGINT], 130, "interrupted"),
        ("signal.default_int_handler", [signal.SIGTERM], 143, "terminated"),
        ("signal.SIG_IGN", [signal.SIGINT, signal.SIGTERM], 143, "terminated"),
    ],
)
def test_a_signal_ends_a_command_quietly(
    disposition: str, sent: list[signal.Signals], code: int, word: str, tmp_path: Path
) -> None:
    """However this test is started: the child's disposition is set, not inherited."""
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    (tmp_path / "trial.yaml").write_text(RECIPE)
    process = subprocess.Popen(
        [sys.executable, "-c", CODE.format(disposition=disposition)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": SOURCES}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "asleep\n"
    for number in sent:
        os.kill(process.pid, number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == code
    assert err == f"\n{word}\n"


TRAINING = """\
name: trial
steps: 3
threads: 1
run_dir: RUN
model: {path: "package:shapes"}
tasks:
  train: [{source: shapes, options: {size: 64, picture_size: 64}}]
batch: {prompts_per_step: 2, group_size: 4}
rollout: {max_new_tokens: 6}
rewards: {terms: [{name: exact}, {name: "tests.cli.terminating:Terminating", weight: 0.0, options: {marker: MARKER}}]}
optimizer: {lr: 1.0e-4}
checkpoint: {every: 1}
"""


def test_a_terminated_run_says_how_to_go_on_and_can_be_gone_on_with(tmp_path: Path, fork_server: ForkServer) -> None:
    marker, directory, log = tmp_path / "marker", tmp_path / "run", tmp_path / "log.txt"
    recipe = tmp_path / "trial.yaml"
    recipe.write_text(TRAINING.replace("RUN", str(directory)).replace("MARKER", str(marker)))
    ended = fork_server.run("tests.cli.terminating:train", str(recipe), log=log)
    count(ended.cpu_s)
    assert marker.exists()
    said = log.read_text()
    assert ended.code == 143, said[-2000:]
    assert "Traceback" not in said
    assert f"sensorium train {directory} --resume" in " ".join(said.split())
    assert said.endswith("\nterminated\n")
    assert len(read_metrics(directory / "metrics.jsonl")) == 1
    ended = fork_server.run("tests.cli.terminating:train", str(recipe), "--resume", log=log)
    count(ended.cpu_s)
    assert ended.code == 0, log.read_text()[-2000:]
    assert [row["step"] for row in read_metrics(directory / "metrics.jsonl")] == [1, 2, 3]


SCORING = """\
import gc, os, signal
from sensorium.cli.main import stopping_in_order
from sensorium.rewards.scorer import Scorer
from sensorium.rewards.scorer import score_groups
from sensorium.vocabulary import Episode, Group, Status, Task
from sensorium.cluster.event_loop import run_async

class Judge:
    name, instant = "judge", False
    def score(self, task, episode):
        return 1.0

class Terminating:
    name, instant = "terminating", True
    def score(self, task, episode):
        if episode.id == "e1/0":
            os.kill(os.getpid(), signal.SIGTERM)
        return 0.0

signal.signal(signal.SIGINT, signal.SIG_IGN)
groups = [
    Group(f"g{i}", Task(f"t{i}"), tuple(Episode(f"e{i}/{k}", f"t{i}", f"g{i}", k, (), (), Status.FINISHED) for k in (0, 1)))
    for i in range(4)
]
with stopping_in_order() as stop:
    try:
        run_async(score_groups(Scorer([(Judge(), 1.0), (Terminating(), 1.0)]), groups))
    except KeyboardInterrupt:
        print(stop.word, flush=True)
gc.collect()
"""


@pytest.mark.usefixtures("forked_python")
def test_a_signal_in_the_middle_of_scoring_is_followed_by_no_traceback_where_interrupts_are_ignored() -> None:
    environ = os.environ | {"PYTHONPATH": SOURCES}
    ended = subprocess.run([sys.executable, "-c", SCORING], env=environ, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "terminated\n", "")


LINGERING = """\
import time
from concurrent.futures import ThreadPoolExecutor
from sensorium.cli import main
main.LINGER_S = 0.2
ThreadPoolExecutor(1, thread_name_prefix="of_a_reward").submit(time.sleep, 3600)
main.end_without_hung_threads(3)
"""


def test_a_command_that_is_over_ends_although_a_thread_of_a_users_code_does_not() -> None:
    """Python would wait at exit for the executor's thread, for ever."""
    environment = os.environ | {"PYTHONPATH": SOURCES}
    done = subprocess.run(
        [sys.executable, "-c", LINGERING], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 3
    assert "1 threads" in done.stderr
    assert "of_a_reward" in done.stderr
