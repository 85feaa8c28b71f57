"""What sweeps of tests train: a tiny text model on sums; and a reward that stops its run in the middle."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from sensorium.cli.main import main
from sensorium.vocabulary import Episode, Score, Task
from studies.fork_server import ForkServer
from tests.forked import forked_python
from tests.recipes import quick

A_STEP = 4  # episodes


def summing(folder: Path, **changes: Any) -> dict[str, Any]:
    """Three steps of 2 × 2 episodes, saved at each and evaluated on eight held-out tasks at the end."""
    data = folder / "sums.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"{n} + {n}?"}], "answer": str(2 * n)} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": "jsonl", "options": {"path": str(data)}}
    sections: dict[str, Any] = {
        "steps": 3,
        "model": {"path": "tiny:qwen2", "device": "cpu"},
        "tasks": {"train": [source], "evaluate": [source]},
        "batch": {"prompts_per_step": 2, "group_size": 2},
        "rollout": {"max_new_tokens": 3},
        "optimizer": {"lr": 1e-3},
        "evaluation": {"every": 3},
        "checkpoint": {"every": 1},
        "health": {"sight_tasks": 0},
    }
    return quick("sums", **sections | changes)


class Gate:
    """Pays by length. While there is a pipe, the first episode of a process's second step waits there to be terminated."""

    name = "gate"
    instant = True

    def __init__(self, pipe: str) -> None:
        self.pipe, self.calls = Path(pipe), 0

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        self.calls += 1
        if self.calls == A_STEP + 1 and self.pipe.exists():
            stops: list[int] = []
            before = signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
            with self.pipe.open("w"):  # whoever opens the other end knows that the run is here
                pass
            while not stops:
                time.sleep(0.01)
            signal.signal(signal.SIGTERM, before)
            os.kill(os.getpid(), signal.SIGTERM)
        return (Score(self.name, len(episode.response) % 3 / 2),)


def sweep(shared: str, *arguments: str) -> int:
    """The command, with runs that are forks of the tests' server."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in a shell's background it is ignored
    with ForkServer(shared=Path(shared)) as server, forked_python(server):
        return main(["sweep", *arguments])
