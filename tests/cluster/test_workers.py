"""Runs whose environments are played, and whose episodes are scored, by workers; and what happens when one is killed."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sensorium.assembly.workers import EnvironmentWorkers, RunWorkers
from sensorium.cluster.placed_workers import PlacedWorker, PlacedWorkers
from sensorium.cluster.python_process import HostedProcess, ProcessHost, ThisMachine
from sensorium.data.media_store import MediaStore
from sensorium.envs.remote.client import PlacedEnvironment, socket_address
from sensorium.report.console import ConsoleWatcher
from sensorium.runs.ledger import Ledger
from sensorium.runs.metrics import UNREPEATABLE, read_metrics
from sensorium.runs.process_table import read_processes
from sensorium.trainer.run import train
from sensorium.vocabulary.content import Message, Text
from sensorium.vocabulary.errors import RecipeError, RewardFailure, WorkersLost, WorkGivenUp
from sensorium.vocabulary.task import EnvironmentSpec, Task
from tests.trainer.small import small

NUMBERS = {
    "tasks": {"train": [{"source": "environments", "options": {"environment": "countdown", "size": 4}}]},
    "rollout": {"max_new_tokens": 3, "max_turns": 2},
    "rewards": {"terms": [{"name": "environment"}]},
}
SLOW = {"rewards": {"terms": [{"name": "tests.cluster.slow_term:SlowParity"}]}}


def fates_of(run: Path, steps: int) -> list[str]:
    ledger = Ledger(run / "ledger.sqlite")
    fates = [fate for step in range(1, steps + 1) for fate in ledger.fates(step).values()]
    ledger.close()
    return fates


def halt(pid: int, by: signal.Signals) -> None:
    """Kill or stop a process, and wait until none of its threads runs.

    SIGSTOP reaches one thread, which stops the others when it is scheduled. Until then they go on and may still answer.
    """
    os.kill(pid, by)
    while not set(thread_states(pid)) <= {"T", "Z", "X"}:
        time.sleep(0.001)


def thread_states(pid: int) -> list[str]:
    """The state of each thread of a process, as a letter; none of a process that is gone."""
    states: list[str] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it ended
            states.append(thread.read_text().rpartition(")")[2].split()[0])
    return states


def killing(
    monkeypatch: pytest.MonkeyPatch, kind: type, method: str, at: int, by: signal.Signals = signal.SIGKILL
) -> "Future[HostedProcess]":
    """Kill or stop a worker when ``method`` is called for the n-th time: the environment's player, or the first.

    Returns the future of its process, which is known when it is killed.
    """
    calls, original, placed = count(1), getattr(kind, method), list[PlacedWorkers]()  # of several threads at once
    start = PlacedWorkers.start
    killed: Future[HostedProcess] = Future()

    def started(self: PlacedWorkers) -> None:
        placed.append(self)
        start(self)

    def counted(self: Any, *given: Any) -> Any:
        if next(calls) == at:
            address = self._session.server.connection.url if kind is PlacedEnvironment else ""
            workers = placed[0].workers
            # One that is being replaced has reported nothing yet.
            playing = (w for w in workers if not address or (w.report and socket_address(w.report) == address))
            process = next(playing).process
            assert process is not None
            halt(process.pid, by)
            killed.set_result(process)
        return original(self, *given)

    monkeypatch.setattr(PlacedWorkers, "start", started)
    monkeypatch.setattr(kind, method, counted)
    return killed


def watching_only(monkeypatch: pytest.MonkeyPatch, watched: "Future[HostedProcess]") -> None:
    """Ask only this process for signs of life, once it is known: others are not taken for hung on a slow machine."""
    watch = PlacedWorkers._watch

    def watch_it(self: PlacedWorkers, worker: PlacedWorker, process: HostedProcess, *given: Any) -> None:
        if watched.result() is process:
            watch(self, worker, process, *given)

    monkeypatch.setattr(PlacedWorkers, "_watch", watch_it)


@pytest.mark.usefixtures("forked_python")
def test_a_killed_environment_worker_is_replaced_and_its_episodes_are_rolled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killing(monkeypatch, PlacedEnvironment, "step", 2)
    run = train(small(tmp_path / "run", "cluster.environments=2", "rollout.schedule=eager", "steps=2", **NUMBERS))
    rows = read_metrics(run / "metrics.jsonl")
    assert rows[-1]["worker/environment_replaced"] == 1
    assert any("health/lost_processes" in row for row in rows)
    assert rows[-1]["worker/rolled_again"] >= 1
    assert all(row["episodes/failed"] == 0 for row in rows)
    assert len(fates_of(run, 2)) == 8, "each episode once"
    told = read_processes(run)
    assert told is not None
    assert [row.part for row in told.rows] == ["driver", "environment worker 0", "environment worker 1"]


@pytest.mark.usefixtures("forked_python")
def test_a_killed_reward_worker_is_replaced_and_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killing(monkeypatch, PlacedWorkers, "ask", 2)
    run = train(small(tmp_path / "run", "cluster.rewards=2", "steps=2", **SLOW))
    rows = read_metrics(run / "metrics.jsonl")
    assert rows[-1]["worker/reward_replaced"] == 1
    assert fates_of(run, 2) == ["trained"] * 8
    assert all(row["reward/mean"] == 0.5 for row in rows), "nothing is missing"


@pytest.mark.usefixtures("forked_python")
def test_an_episode_that_kills_two_reward_workers_has_no_score_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"rewards": {"terms": [{"name": "tests.cluster.slow_term:Deadly"}]}, "steps": 4}
    run = train(small(tmp_path / "run", "cluster.rewards=1", "cluster.restarts=2", **changes), watchers=[ConsoleWatcher()])
    rows = read_metrics(run / "metrics.jsonl")
    assert (rows[-1]["worker/reward_replaced"], rows[-1]["worker/given_up"]) == (2, 1)
    assert sum(row["missing/slow parity"] for row in rows) == 1
    dropped = [fate for fate in fates_of(run, 4) if fate != "trained"]
    assert len(dropped) == 2, "its group"
    assert any("2 reward workers were lost" in fate for fate in dropped)
    assert "2 reward workers were lost" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("forked_python")
def test_workers_that_hang_are_ended_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watching_only(monkeypatch, killing(monkeypatch, PlacedEnvironment, "step", 2, signal.SIGSTOP))
    changes = NUMBERS | {"steps": 1}
    overrides = (
        "cluster.environments=2",
        "cluster.hang_s=1",
        "rollout.schedule=eager",
        "rollout.environment_deadline_s=600",
    )
    run = train(small(tmp_path / "run", *overrides, **changes), watchers=[ConsoleWatcher()])
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row["worker/environment_replaced"] == 1
    assert row["worker/rolled_again"] >= 1
    assert row["episodes/failed"] == 0
    assert "gave no sign of life for 1 s (cluster.hang_s) and is ended" in " ".join(capsys.readouterr().out.split())


def answers_though_one_hangs(host: ProcessHost, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stop one of two workers by SIGSTOP and ask; what was said of it. It is watched from when it has the question."""
    asked: Future[HostedProcess] = Future()
    watching_only(monkeypatch, asked)
    parrots = PlacedWorkers(host, "tests.cluster.parroting_worker", {}, 2, "parrot", RewardFailure, hang_s=1.0)
    said: list[str] = []
    parrots.noted = said.append
    parrots.start()
    try:
        stopped, channel = parrots.workers[0].process, parrots.workers[0].channel
        assert stopped is not None
        assert channel is not None
        halt(stopped.pid, signal.SIGSTOP)
        send = channel.send

        def sent(message: Any) -> None:
            send(message)
            if not asked.done():
                asked.set_result(stopped)

        monkeypatch.setattr(channel, "send", sent)
        assert [parrots.ask(word) for word in ("polly", "again")] == ["polly", "again"]
        assert (parrots.replaced, parrots.asked_again) == (1, 1)
        assert not stopped.alive
    finally:
        parrots.close()
    return said


def test_a_question_to_a_worker_that_hangs_is_answered_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    said = answers_though_one_hangs(ThisMachine(), monkeypatch)
    assert any("parrot 0" in one and "gave no sign of life for 1 s" in one and "It is replaced" in one for one in said)


@pytest.mark.usefixtures("forked_python")
def test_a_question_that_ends_two_workers_is_given_up_and_those_beside_it_are_answered() -> None:
    parrots = PlacedWorkers(ThisMachine(), "tests.cluster.parroting_worker", {}, 1, "parrot", RewardFailure, restarts=2)
    parrots.start()
    words = [*map(str, range(6)), "poison", *map(str, range(6, 12))]
    try:
        with ThreadPoolExecutor(len(words)) as threads:
            answers = {word: threads.submit(parrots.ask, word, word) for word in words}
        with pytest.raises(WorkGivenUp, match=r"2 parrots were lost while they did this.*exit code 9"):
            answers.pop("poison").result()
        assert {word: answer.result() for word, answer in answers.items()} == {word: word for word in answers}
        with pytest.raises(WorkGivenUp):
            parrots.ask("poison", "poison")
        assert (parrots.replaced, parrots.given_up) == (2, 1)
    finally:
        parrots.close()


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_worker_has_started_ends_with_it(killed: bool) -> None:
    """As browsers do, the child ignores SIGTERM and leads a session of its own."""
    parrots = PlacedWorkers(ThisMachine(), "tests.cluster.parroting_worker", {}, 1, "parrot", RewardFailure, restarts=0)
    parrots.start()
    try:
        child = Path("/proc") / parrots.ask("child")
        assert child.exists()
        if killed:
            assert parrots.workers[0].process is not None
            os.kill(parrots.workers[0].process.pid, signal.SIGKILL)
    finally:
        parrots.close()
    assert not child.exists() or ") Z " in (child / "stat").read_text()


DRIVER = """
import sys, time
from sensorium.vocabulary.errors import RewardFailure
from sensorium.cluster.python_process import ThisMachine
from sensorium.cluster.placed_workers import PlacedWorkers
parrots = PlacedWorkers(ThisMachine(), "tests.cluster.parroting_worker", {}, 1, "parrot", RewardFailure)
parrots.start()
print(parrots.ask("child"), flush=True)
time.sleep(600)
"""


def test_what_a_worker_has_started_ends_when_its_driver_is_killed() -> None:
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, env=os.environ | path)
    assert driver.stdout is not None
    child = Path("/proc") / driver.stdout.readline().decode().strip()
    assert child.exists()
    driver.kill()
    driver.wait()
    until = time.monotonic() + 60
    while child.exists() and ") Z " not in (child / "stat").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_worker_that_nobody_replaces_is_told_as_lost() -> None:
    parrots = PlacedWorkers(ThisMachine(), "tests.cluster.parroting_worker", {}, 1, "parrot", RewardFailure, restarts=0)
    parrots.start()
    try:
        told = RunWorkers(rewards=parrots).processes[0]
        assert (told.does, told.lost) == ("works", False)
        os.kill(told.pid or 0, signal.SIGKILL)
        with pytest.raises(WorkersLost, match="no parrot is left"):
            parrots.ask("polly")
        told = RunWorkers(rewards=parrots).processes[0]
        assert (told.does, told.lost) == ("is lost: cluster.restarts are used up", True)
    finally:
        parrots.close()


@pytest.mark.usefixtures("forked_python")
def test_when_no_worker_is_left_the_run_ends_in_a_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killing(monkeypatch, PlacedWorkers, "ask", 3)
    with pytest.raises(WorkersLost, match=r"no reward worker is left.*killed by SIGKILL.*--resume"):
        train(small(tmp_path / "run", "cluster.rewards=1", "cluster.restarts=0", **SLOW))


@pytest.mark.parametrize(
    ("overrides", "changes", "said"),
    [
        (["cluster.environments=1"], {"tasks": {"train": [{"source": "shapes"}]}}, "all tasks are questions"),
        (["cluster.rewards=1"], {"rewards": {"terms": [{"name": "python:mine"}]}}, "no other can import"),
    ],
)
def test_what_workers_cannot_do_is_refused(
    overrides: list[str], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=said):
        small(tmp_path / "run", *overrides, **changes)


def test_an_environment_that_plays_the_question_of_a_row_is_refused() -> None:
    workers = EnvironmentWorkers(ThisMachine(), 1, 5.0, restarts=0, start_s=1.0)
    row = Task("row", (Message("user", (Text("how much?"),)),), environment=EnvironmentSpec("tools", {}, 0))
    with pytest.raises(RecipeError, match="'tools' plays the question of its row"):
        workers.environment(row, MediaStore())
    workers.close()


@pytest.mark.usefixtures("forked_python")
def test_what_workers_play_and_score_is_what_the_driver_would(tmp_path: Path) -> None:
    terms = [{"name": "environment"}, {"name": "tests.cluster.slow_term:SlowParity"}]
    changes = NUMBERS | {"steps": 1, "rewards": {"terms": terms}}
    here = train(small(tmp_path / "here", **changes))
    there = train(small(tmp_path / "there", "cluster.environments=1", "cluster.rewards=1", **changes))
    rows = [
        [{key: row[key] for key in row if not key.startswith(UNREPEATABLE)} for row in read_metrics(run / "metrics.jsonl")]
        for run in (here, there)
    ]
    assert rows[0] == rows[1]
    assert rows[0][0]["reward/slow parity"] == 0.5


def test_terms_that_stay_with_the_driver_leave_nothing_to_place(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'parity' is plain computation"):
        train(small(tmp_path / "run", "cluster.rewards=1"))


def test_a_worker_that_is_not_ready_in_time_is_told(tmp_path: Path) -> None:
    workers = EnvironmentWorkers(ThisMachine(), 1, 5.0, restarts=0, start_s=0.01)
    with pytest.raises(WorkersLost, match=r"was not ready within 0.01 s \(cluster.start_s\)"):
        workers.placed.start()
