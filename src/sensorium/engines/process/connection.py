"""The parent's side of the child process: start it, call it, end it. Every wait is bounded, and its death is an error."""

import threading
from contextlib import suppress
from pathlib import Path

from sensorium.engines.lost_process import process_lost
from sensorium.engines.process.messages import engine_error
from sensorium.vocabulary.errors import EngineLost
from sensorium.workers.channel import Channel, Message
from sensorium.workers.hosts import ProcessHost
from sensorium.workers.python_process import CLOSE_S


class ChildProcess:
    """A process that answers one message at a time."""

    def __init__(self, host: ProcessHost, log: Path) -> None:
        self.python, (frames,) = host.start("sensorium.engines.process.child", 1, log)
        self._channel = Channel(frames)
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
                raise process_lost(self.python) from error
        if "error" in answer:
            raise engine_error(answer)
        return answer

    def close(self) -> None:
        """Tell it to end, and end it if it does not."""
        if self.python.alive and self._lock.acquire(timeout=CLOSE_S):
            with suppress(EOFError, OSError):
                self._channel.send({"do": "close"}, CLOSE_S)
            self._lock.release()
        self._channel.close()
        self.python.end(CLOSE_S)
