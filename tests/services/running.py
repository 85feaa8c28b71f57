"""Environment services for tests: a real server on loopback, and an environment that counts every act."""

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.services.environment_service import make_app
from sensorium.services.sessions import Offer, Offers, SessionTable
from sensorium.vocabulary.content import system, user
from sensorium.vocabulary.errors import EnvironmentFailure

FAILS_AT = 20  # acts of a process
ACTS: Counter[tuple[int, int]] = Counter()
"""How often each (seed, turn) was acted, in this process."""


class Counting:
    """Counts every act of each seed; says how many there were. Ends after ``turns``."""

    instant = True

    def __init__(self, store: MediaStore, turns: int = 5, secret: int = 0) -> None:
        self.turns = turns

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        return str(seed)

    def reset(self, seed: int) -> Any:
        self.seed, self.turn = seed, 0
        return (system("count"),), Observation((user(f"seed {seed}"),))

    def step(self, response: str) -> StepResult:
        self.turn += 1
        ACTS[self.seed, self.turn] += 1
        if response == "raise":
            raise ValueError("told to")
        done = self.turn >= self.turns
        return StepResult(None if done else Observation((user(f"turn {self.turn}: {response}"),)), {"act": 1.0}, done=done)

    def demonstrate(self) -> str:
        return f"demonstration {self.turn}"

    def close(self) -> None: ...


class Slow(Counting):
    """Takes a random moment for each act."""

    instant = False

    def step(self, response: str) -> StepResult:
        time.sleep(random.random() * 0.01)
        return super().step(response)


class Logged(Slow):
    """Writes every act into the file of ACT_LOG, which servers in other processes share."""

    def step(self, response: str) -> StepResult:
        result = super().step(response)
        with open(os.environ["ACT_LOG"], "ab", buffering=0) as log:
            log.write(f"{self.seed} {self.turn} {os.getpid()}\n".encode())
        return result


class Dying:
    """Rewards responses of odd length. Its process ends after as many acts as the file of DIES_AT says, once."""

    instant = True
    acts = 0
    left: int | None = None

    def __init__(self, store: MediaStore, fails: bool = False) -> None:
        self.turn, self.fails = 0, fails

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        return str(seed)

    def reset(self, seed: int) -> Any:
        self.turn = 0
        return (), Observation((user(f"seed {seed % 100}"),))

    def step(self, response: str) -> StepResult:
        self.turn += 1
        Dying.acts += 1
        dies = Path(os.environ.get("DIES_AT", "nowhere"))
        if dies.exists():
            Dying.left = (int(dies.read_text()) if Dying.left is None else Dying.left) - 1
            if not Dying.left:
                dies.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        if self.fails and Dying.acts == FAILS_AT:
            raise EnvironmentFailure("it is not there")
        return StepResult(Observation((user("again"),)), float(len(response) % 2), done=self.turn == 2)

    def close(self) -> None: ...


OFFERS = {
    "counting": Offer(f"{__name__}:Counting"),
    "slow": Offer(f"{__name__}:Slow"),
    "sokoban": Offer("sokoban"),
    "closed": Offer(f"{__name__}:Counting", {"secret": 1}),
}


def make_table(**options: Any) -> SessionTable:
    return SessionTable(Offers(OFFERS), MediaStore(), **options)


@contextmanager
def serving(table: SessionTable, key: str = "") -> Iterator[str]:
    """An environment service in a thread; gives its address."""
    with serving_app(make_app(table, key)) as (address, _):
        yield address


@contextmanager
def serving_app(app: Any) -> Iterator[tuple[str, uvicorn.Server]]:
    """A server in a thread; gives its address, and the server to stop it by."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        place.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws_max_size=1 << 28))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[place])), daemon=True)
        thread.start()
        until = time.monotonic() + 60
        while not server.started and time.monotonic() < until:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{place.getsockname()[1]}", server
        finally:
            server.should_exit = True
            thread.join(30)
