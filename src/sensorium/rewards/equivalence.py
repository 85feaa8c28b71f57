"""Mathematical equivalence, decided by processes of this script that are asked over pipes, one JSON line a question.

Computer algebra can run for ever on what a model writes, and a thread cannot be stopped. So a process sets itself an
alarm for each question and dies by it: in CPU seconds, so that verdicts do not depend on how busy the machine is.
"""

import json
import logging
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from sensorium.vocabulary.errors import RewardFailure

MEMORY_BYTES = 4 * 1024**3
START_S = 60.0  # wall-clock seconds to start, and to answer beyond the CPU seconds, on a busy machine


class EquivalencePool:
    """At most ``count`` equivalence processes, started when needed and replaced when they die. Threads may share it."""

    def __init__(self, timeout_s: float, count: int) -> None:
        self.timeout_s = timeout_s
        self._places = threading.BoundedSemaphore(count)
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def equal(self, known: str, given: str) -> bool | None:
        """Whether two answers are equal as mathematics; None if the known one cannot be read. RewardFailure: no verdict."""
        if known.strip() == given.strip():
            return True
        reply = self._ask({"expected": known, "given": given})
        if "error" in reply:
            raise RewardFailure(f"math-verify failed: {reply['error']}")
        return None if "unfit" in reply else bool(reply["equal"])

    def _ask(self, question: dict[str, str]) -> dict[str, Any]:
        with self._places:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            worker = worker if worker is not None and worker.poll() is None else self._start()
            try:
                assert worker.stdin is not None
                worker.stdin.write(json.dumps(question).encode() + b"\n")
                worker.stdin.flush()
                reply = _reply(worker, self.timeout_s + START_S)
            except (OSError, RewardFailure) as error:
                _end(worker)
                raise RewardFailure(f"mathematics: no verdict within {self.timeout_s:g} CPU seconds") from error
            with self._lock:
                self._idle.append(worker)
            return reply

    def close(self) -> None:
        with self._lock:
            for worker in self._idle:
                _end(worker)
            self._idle.clear()

    def _start(self) -> "subprocess.Popen[bytes]":
        worker = subprocess.Popen(
            [sys.executable, "-P", __file__, str(self.timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            _reply(worker, START_S)
        except RewardFailure:
            _end(worker)
            raise
        return worker


def _reply(worker: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any]:
    """The next line that a process writes; RewardFailure when it dies or takes too long."""
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
            with suppress(OSError):
                pipe.close()


def as_latex(text: str) -> str:
    """Mathematics as the parser expects it: between dollars, unless it is marked already."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def main(deadline_s: float) -> None:
    """Answer questions from standard input until it closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.WARNING)
    from math_verify import parse, verify

    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        question = json.loads(line)
        reply: dict[str, bool | str]
        signal.setitimer(signal.ITIMER_PROF, deadline_s)
        try:
            known = parse(as_latex(question["expected"]), parsing_timeout=None)
            given = parse(as_latex(question["given"]), parsing_timeout=None)
            reply = {"equal": bool(verify(known, given, timeout_seconds=None))} if known else {"unfit": True}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main(float(sys.argv[1]))
