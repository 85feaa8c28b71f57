"""A worker that says what it is asked. ``python -m tests.cluster.parroting_worker FD``

It dies of "poison", and starts a process that is hard to end when asked for a "child".
"""

import os
import subprocess
import sys

from sensorium.cluster.placed_workers import serve


def parrot(question: str) -> str:
    """What is asked."""
    if question == "poison":
        os._exit(9)
    if question == "child":
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
        command = [sys.executable, "-S", "-c", code]
        child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        return str(child.pid)
    return question


if __name__ == "__main__":
    serve(lambda settings, folder: ("parrot", parrot))
