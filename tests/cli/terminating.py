"""A reward term that terminates its own process once, in the middle of the second step."""

import os
import signal
from pathlib import Path

from sensorium.cli.main import main
from sensorium.vocabulary import Episode, Score, Task

ALL_OF_A_STEP = 8


class Terminating:
    """Pays nothing. The first episode of step 2 sends SIGTERM, unless the marker says that this was done before."""

    name = "terminating"
    instant = True

    def __init__(self, marker: str) -> None:
        self.marker, self.calls = Path(marker), 0

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        self.calls += 1
        if self.calls > ALL_OF_A_STEP and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return (Score(self.name, 0.0),)


def train(recipe: str, *flags: str) -> int:
    """The command, with SIGINT ignored as under nohup."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return main(["train", recipe, *flags])
