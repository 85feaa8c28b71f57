"""Mathematical equivalence, decided by processes of this script that are asked over pipes, one JSON line a question.

Computer algebra can run for ever on what a model writes, and a thread cannot be stopped. So a process sets itself an
alarm for each question and dies by it: in CPU seconds, so that verdicts do not depend on how busy the machine is.
"""

import json
import logging
import os
import resource
import signal
import struct
import sys
import threading
import time
from typing import Any

from sensorium.cluster.python_process import PipedProcess, ProcessLost
from sensorium.vocabulary.errors import RewardFailure

MEMORY_BYTES = 4 * 1024**3
START_S = 60.0  # wall-clock seconds to start, and to answer beyond the CPU seconds, on a busy machine


class EquivalencePool:
    """At most ``count`` equivalence processes, started when needed and replaced when they die. Threads may share it."""

    def __init__(self, timeout_s: float, count: int) -> None:
        self.timeout_s = timeout_s
        self._places = threading.BoundedSemaphore(count)
        self._lock = threading.Lock()
        self._idle: list[_Comparer] = []

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
            worker = worker if worker is not None and worker.alive else _Comparer(self.timeout_s)
            try:
                reply = worker.ask(question)
            except (ProcessLost, TimeoutError) as error:
                worker.end()
                raise RewardFailure(f"mathematics: no verdict within {self.timeout_s:g} CPU seconds ({error})") from error
            with self._lock:
                self._idle.append(worker)
            return reply

    def close(self) -> None:
        with self._lock:
            for worker in self._idle:
                worker.end()
            self._idle.clear()


class _Comparer(PipedProcess):
    def __init__(self, timeout_s: float) -> None:
        surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        super().__init__([sys.executable, "-P", __file__, str(timeout_s)], surroundings, silent=True)
        self._timeout_s = timeout_s

    def ask(self, question: dict[str, str]) -> dict[str, Any]:
        until = time.monotonic() + self._timeout_s + START_S
        self.write(json.dumps(question).encode() + b"\n")
        (length,) = struct.unpack(">I", self.read(4, until))
        reply: dict[str, Any] = json.loads(self.read(length, until))
        return reply


def as_latex(text: str) -> str:
    """Mathematics as the parser expects it: between dollars, unless it is marked already."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def main(deadline_s: float) -> None:
    """Answer questions from standard input until it closes."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.WARNING)
    from math_verify import parse, verify

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
        text = json.dumps(reply).encode()
        replies.write(struct.pack(">I", len(text)) + text)


if __name__ == "__main__":
    main(float(sys.argv[1]))
