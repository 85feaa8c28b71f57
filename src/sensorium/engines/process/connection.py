"""The parent's side of the child process: start it, call it, end it. Every wait is bounded, and its death is an error."""

import socket
import threading
from contextlib import suppress
from pathlib import Path

from sensorium.engines.process.channel import Channel, Message
from sensorium.engines.process.messages import error_of
from sensorium.engines.python_process import CLOSE_S, PythonProcess
from sensorium.vocabulary.errors import EngineLost


class ChildProcess:
    """A process that answers one message at a time."""

    def __init__(self, log: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.python = PythonProcess("sensorium.engines.process.child", [theirs], log)
        self._channel = Channel(ours)
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.python.pid

    def ask(self, message: Message, limit_s: float) -> Message:
        """Send a message and wait for the answer; an error it answers with is raised here. From any thread."""
        with self._lock:
            try:
                self._channel.send(message, limit_s)
                answer = self._channel.receive(limit_s)
            except TimeoutError as error:
                self.python.end()
                raise EngineLost(
                    f"the engine process (pid {self.pid}) did not answer '{message['do']}' within {limit_s:g} s and was "
                    "ended. Raise rollout.engine.options.reply_s (start_s for its start) if the model is that slow."
                ) from error
            except (EOFError, OSError) as error:
                raise EngineLost(self.python.why()) from error
        if "error" in answer:
            raise error_of(answer)
        return answer

    def close(self) -> None:
        """Tell it to end, and end it if it does not."""
        if self.python.alive and self._lock.acquire(timeout=CLOSE_S):
            with suppress(EOFError, OSError):
                self._channel.send({"do": "close"}, CLOSE_S)
            self._lock.release()
        self._channel.close()
        self.python.end(CLOSE_S)
