"""An environment that keeps a process, as one with a browser does, and a driver of a pool that can be killed."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.remote.instances import InstancePool
from sensorium.vocabulary.content import system, user

NAME = f"{__name__}:Browsing"
PLAIN = (sys.executable, "-S", "-c", "import time; time.sleep(6000)")
CHROMIUM = "/usr/bin/chromium"


class Browsing:
    """Starts ``command`` once, in a session of its own, and shows the pids of both processes and how often it was reset.

    With ``pids`` a file, they are written there, and what is shown depends on the seed alone. The first instance that steps
    makes the folder ``crash``, and ends.
    """

    def __init__(
        self, store: MediaStore, command: str = "plain", closed: str = "", pids: str = "", crash: str = ""
    ) -> None:
        self.folder, self.closed, self.pids, self.crash = TemporaryDirectory(), closed, pids, crash
        self.resets = self.turns = 0
        given = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.folder.name}"]
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        wanted = PLAIN if command == "plain" else (*given, "--remote-debugging-port=0", "about:blank")
        self.process = subprocess.Popen(wanted, start_new_session=True, **options)  # type: ignore[call-overload]
        while command != "plain" and not Path(self.folder.name, "DevToolsActivePort").exists():
            time.sleep(0.05)

    @classmethod
    def content_key(cls, seed: int, options: Any) -> str:
        return str(seed)

    def reset(self, seed: int) -> Any:
        self.resets, self.turns, self.seed = self.resets + 1, 0, seed
        shown = f"{os.getpid()} {self.process.pid} {self.resets}"
        if self.pids:
            with open(self.pids, "a") as file:
                file.write(f"{shown}\n")
            shown = f"page {seed}"
        return (system("Browse."),), Observation((user(shown),))

    def step(self, response: str) -> StepResult:
        if response == "crash":
            os._exit(3)
        if self.crash:
            with suppress(FileExistsError):
                os.mkdir(self.crash)
                os._exit(3)
        if response == "raise":
            raise ValueError("the page is gone")
        if response == "hang":
            time.sleep(6000)
        self.turns += 1
        pays = float((len(response) + self.seed) % 2)
        shown = Observation((user(f"turn {self.turns} of {self.seed}"),))
        return StepResult(shown, pays, done=self.turns == 2, success=pays > 0)

    def close(self) -> None:
        if self.closed:
            Path(self.closed).touch()
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


if __name__ == "__main__":
    pool, kept = InstancePool(2, 60.0), []
    for number in range(2):
        kept.append(pool.environment(NAME, {"command": sys.argv[1]}, MediaStore()))
        print(kept[-1].reset(number)[1].messages[0].text, flush=True)
    sys.stdin.read()
