"""The parent's side of the child process: start it, call it, end it. Every wait is bounded, and its death is an error."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from sensorium.engines.process.channel import Channel, Message
from sensorium.engines.process.messages import error_of
from sensorium.vocabulary.errors import EngineLost

CLOSE_S = 30.0
LAST_LINES = 6


class ChildProcess:
    """A process that answers one message at a time. What it prints goes to ``log``; its last lines tell why it died."""

    def __init__(self, log: Path) -> None:
        self._log = log
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sensorium.engines.process.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._channel = Channel(ours)
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, message: Message, limit_s: float) -> Message:
        """Send a message and wait for the answer; an error it answers with is raised here. From any thread."""
        with self._lock:
            try:
                self._channel.send(message, limit_s)
                answer = self._channel.receive(limit_s)
            except TimeoutError as error:
                self.end()
                raise EngineLost(
                    f"the engine process (pid {self.pid}) did not answer '{message['do']}' within {limit_s:g} s and was "
                    "ended. Raise rollout.engine.options.reply_s (start_s for its start) if the model is that slow."
                ) from error
            except (EOFError, OSError) as error:
                raise EngineLost(self._why()) from error
        if "error" in answer:
            raise error_of(answer)
        return answer

    def close(self) -> None:
        """Tell it to end, and end it if it does not."""
        if self._process.poll() is None and self._lock.acquire(timeout=CLOSE_S):
            with suppress(EOFError, OSError):
                self._channel.send({"do": "close"}, CLOSE_S)
            self._lock.release()
        self._channel.close()
        self.end(CLOSE_S)

    def end(self, after_s: float = 0.0) -> None:
        """Wait so long for it to end, then kill it."""
        try:
            self._process.wait(after_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _why(self) -> str:
        """How it ended, in one paragraph."""
        self.end(CLOSE_S)
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = " (SIGKILL often means that memory ran out)" if code == -signal.SIGKILL else ""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        said = f" It last said: {' / '.join(lines[-LAST_LINES:])}" if lines else ""
        return (
            f"the engine process (pid {self.pid}) {how}{hint}, so nothing more can be sampled. Resume the run from its "
            f"last checkpoint.{said}"
        )
