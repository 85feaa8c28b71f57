"""Mathematics: is the answer mathematically equal to the known one? Decided by math-verify in processes of its own."""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sensorium.rewards.answer import boxed, expected_answers, last_response, tagged
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError, RewardFailure, TaskError
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task

START_S = 60.0


class Mathematics:
    r"""1 if the last ``\boxed{…}`` (within ``<answer>`` where there is one), or else ``<answer>``, equals the known answer.

    A comparison that takes longer than ``timeout_s`` gives no score. ``fallback`` takes the whole response as the answer
    when it has neither mark.
    """

    instant = False
    needs_answer = True

    def __init__(self, timeout_s: float = 5.0, processes: int = 2, fallback: bool = False, name: str = "math") -> None:
        if find_spec("math_verify") is None:
            raise RecipeError(
                "reward 'math' needs the package math-verify, which is not installed: pip install math-verify."
            )
        self.name = name
        self.fallback = fallback
        self._workers = _Workers(timeout_s, processes)

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """Right or wrong; only what the model wrote in its last turn counts."""
        known = expected_answers(task)
        given = self.extract(task, episode)
        right = given is not None and any(self._equal(task, answer, given) for answer in known)
        return (Score(self.name, float(right), correct=right),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        """The answer as it is written; only what is written alike counts as one answer."""
        return mathematical_answer(last_response(episode), fallback=self.fallback)

    def close(self) -> None:
        """End the processes."""
        self._workers.close()

    def _equal(self, task: Task, known: str, given: str) -> bool:
        if known.strip() == given:
            return True
        reply = self._workers.ask({"expected": known, "given": given})
        if "unfit" in reply:
            raise TaskError(f"task {task.id}: the answer {known!r:.80} cannot be read as mathematics.")
        if "error" in reply:
            raise RewardFailure(f"math-verify failed: {reply['error']}")
        return bool(reply["equal"])


def mathematical_answer(text: str, *, fallback: bool = False) -> str | None:
    """What a response states as its answer."""
    answer = tagged(text)
    box = boxed(text if answer is None else answer)
    if box is not None:
        return box
    return text.strip() if answer is None and fallback else answer


class _Workers:
    """At most ``count`` equivalence processes, started when needed and replaced when they die."""

    def __init__(self, timeout_s: float, count: int) -> None:
        self.timeout_s = timeout_s
        self._places = threading.BoundedSemaphore(count)
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def ask(self, question: dict[str, str]) -> dict[str, Any]:
        """The answer to one question; RewardFailure if it takes too long."""
        with self._places:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            worker = worker if worker is not None and worker.poll() is None else self._start()
            try:
                assert worker.stdin is not None
                worker.stdin.write(json.dumps(question).encode() + b"\n")
                worker.stdin.flush()
                reply = _reply(worker, self.timeout_s + 1)
            except (OSError, RewardFailure) as error:
                _end(worker)
                raise RewardFailure(f"mathematics: no verdict within {self.timeout_s:g} s") from error
            with self._lock:
                self._idle.append(worker)
            return reply

    def close(self) -> None:
        with self._lock:
            for worker in self._idle:
                _end(worker)
            self._idle.clear()

    def _start(self) -> "subprocess.Popen[bytes]":
        script = str(Path(__file__).with_name("equivalence.py"))
        surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        worker = subprocess.Popen(
            [sys.executable, "-P", script, str(self.timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=surroundings,
        )
        try:
            _reply(worker, START_S)
        except RewardFailure:
            _end(worker)
            raise
        return worker


def _reply(worker: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any]:
    """The next line a worker writes, or RewardFailure when it dies or takes too long."""
    assert worker.stdout is not None
    until, line = time.monotonic() + seconds, b""
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, until - time.monotonic())):
                raise RewardFailure(f"mathematics: the process did not answer within {seconds:g} s")
            read = os.read(worker.stdout.fileno(), 65536)
            if not read:
                raise RewardFailure("mathematics: the process ended before it answered")
            line += read
    reply: dict[str, Any] = json.loads(line)
    return reply


def _end(worker: "subprocess.Popen[bytes]") -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue
