"""A term for random models: which response is right is a lottery, and at a chosen attempt it kills the process."""

import os
import signal

from sensorium.vocabulary import Episode, Score, Task

DIES_AT = "LOTTERY_DIES_AT"


class Lottery:
    """Right if the letters of the response add up to an even number."""

    name = "lottery"
    instant = True

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        if os.environ.get(DIES_AT) == f"{task.id} {episode.index}":
            os.kill(os.getpid(), signal.SIGKILL)
        right = sum(episode.response.encode()) % 2 == 0
        return (Score(self.name, float(right), correct=right),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        return str(sum(episode.response.encode()) % 3)
