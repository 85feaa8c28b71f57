"""How fast the environment service steps a trivial environment: latency alone, and 64 sessions beside stock OpenEnv.

    python bench/environment_service.py [--openenv PYTHON]

``--openenv`` is an interpreter with the package openenv (it cannot share an environment with mcp 2.x); its stock server and
stock client are then measured in the same run. Each server has a process of its own; the clients run here, or in that
interpreter. The result is one JSON object.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.remote.client import EnvironmentClient, socket_address
from sensorium.vocabulary.content import user

SESSIONS, ROUNDS, ALONE = 64, 100, 500


class Trivial:
    """Says how often it was stepped."""

    instant = True

    def __init__(self, store: MediaStore) -> None:
        self.count = 0

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """Every seed leads to the same."""
        return ""

    def reset(self, seed: int) -> Any:
        """Nothing is shown."""
        self.count = 0
        return (), Observation((user("begin"),))

    def step(self, response: str) -> StepResult:
        """Count."""
        self.count += 1
        return StepResult(Observation((user(f"{self.count}"),)), 0.0)

    def demonstrate(self) -> str:
        """Anything."""
        return "x"

    def close(self) -> None:
        """Nothing is held."""


STOCK_SERVER = """
import sys, uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
class Move(Action):
    response: str
class Seen(Observation):
    text: str = ""
class Trivial(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **kw):
        self.count = 0
        return Seen(text="begin")
    def step(self, action, timeout_s=None, **kw):
        self.count += 1
        return Seen(text=str(self.count), reward=0.0)
    @property
    def state(self):
        return State(step_count=self.count)
app = create_fastapi_app(Trivial, Move, Seen, max_concurrent_envs=128)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
STOCK_CLIENT = """
import asyncio, json, sys, time
from openenv.core.generic_client import GenericEnvClient
url, sessions, rounds, alone = sys.argv[1], *map(int, sys.argv[2:])
async def main():
    clients = [GenericEnvClient(base_url=url) for _ in range(sessions)]
    for client in clients:
        await client.connect()
        await client.reset()
    times = []
    for _ in range(alone):
        began = time.perf_counter()
        await clients[0].step({"response": "x"})
        times.append(time.perf_counter() - began)
    async def play(client):
        for _ in range(rounds):
            await client.step({"response": "x"})
    began = time.perf_counter()
    await asyncio.gather(*map(play, clients))
    seconds = time.perf_counter() - began
    for client in clients:
        await client.close()
    print(json.dumps({"times": times, "seconds": seconds}))
asyncio.run(main())
"""


def started(command: list[str], port: int) -> "subprocess.Popen[bytes]":
    """A server that answers."""
    import httpx

    surroundings = (
        os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, "."]))} if "-c" not in command else None
    )
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=surroundings)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=1)
            return process
        except httpx.HTTPError:
            time.sleep(0.1)
    process.kill()
    raise SystemExit(f"{command[:4]} did not begin within 120 s")


def measured(times: list[float], seconds: float) -> dict[str, float]:
    """Milliseconds of a step alone, and steps a second at once."""
    ordered = sorted(times)
    return {
        "p50_ms": round(1000 * ordered[len(ordered) // 2], 3),
        "p99_ms": round(1000 * ordered[len(ordered) * 99 // 100], 3),
        "sessions": SESSIONS,
        "steps_per_s": round(SESSIONS * ROUNDS / seconds, 1),
        "round_ms": round(1000 * seconds / ROUNDS, 2),
    }


def ours(port: int) -> dict[str, float]:
    """Our server and client."""
    served = ["-m", "sensorium.cli.main", "serve", "env", "trivial=bench.environment_service:Trivial", "--port", str(port)]
    server = started([sys.executable, *served], port)
    client = EnvironmentClient([socket_address(f"http://127.0.0.1:{port}")])

    async def play() -> tuple[list[float], float]:
        store = MediaStore()
        sessions = [(await client.open("trivial", {}, seed, store, 60))[0] for seed in range(SESSIONS)]
        times = []
        for _ in range(ALONE):
            began = time.perf_counter()
            await sessions[0].step("x", 60, 0)
            times.append(time.perf_counter() - began)

        async def steps(session: Any) -> None:
            for _ in range(ROUNDS):
                await session.step("x", 60, 0)

        began = time.perf_counter()
        await asyncio.gather(*map(steps, sessions))
        return times, time.perf_counter() - began

    try:
        return measured(*client.run(play()))
    finally:
        client.close()
        server.kill()
        server.wait()


def stock(python: str, port: int) -> dict[str, float]:
    """OpenEnv's server and client."""
    server = started([python, "-c", STOCK_SERVER, str(port)], port)
    try:
        asked = [python, "-c", STOCK_CLIENT, f"http://127.0.0.1:{port}", *map(str, (SESSIONS, ROUNDS, ALONE))]
        found = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        return measured(found["times"], found["seconds"])
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--openenv", default="")
    parser.add_argument("--port", type=int, default=8390)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"sensorium": ours(arguments.port)}
    if arguments.openenv:
        result["openenv"] = stock(arguments.openenv, arguments.port + 1)
        result["times_openenv"] = round(result["sensorium"]["steps_per_s"] / result["openenv"]["steps_per_s"], 2)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
