"""OpenEnv's own package, in an interpreter of its own: its client at our server, and our client at its server.

It cannot share an environment with mcp 2.x, so these run where OPENENV_PYTHON names an interpreter that has it:

    python -m venv /tmp/openenv && /tmp/openenv/bin/pip install openenv
    git clone https://github.com/huggingface/OpenEnv /tmp/OpenEnv
    export OPENENV_PYTHON=/tmp/openenv/bin/python OPENENV_ECHO=/tmp/OpenEnv/envs/echo_env
    pytest tests/services/test_stock_openenv.py
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from bench.environment_service import STOCK_SERVER
from sensorium.data.media_store import MediaStore
from sensorium.envs.adapters.openenv import OpenEnvironment

from .running import make_table, serving

PYTHON, ECHO = os.environ.get("OPENENV_PYTHON", ""), os.environ.get("OPENENV_ECHO", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="OPENENV_PYTHON names no interpreter with openenv")

CLIENT = """
import asyncio, json, sys
from openenv.core.generic_client import GenericEnvClient
async def main():
    async with GenericEnvClient(base_url=sys.argv[1]) as client:
        first = await client.reset(seed=7, max_turns=5)
        second = await client.step({"response": "<answer>Up</answer>"})
        state = await client.state()
        try:
            await client.step({"bogus": 1})
        except RuntimeError as error:
            refused = str(error)
    print(json.dumps([first.observation["system"], len(first.observation["images"]), second.reward, state, refused]))
asyncio.run(main())
"""


def test_the_stock_client_plays_at_our_server() -> None:
    with serving(make_table()) as address:
        asked = [PYTHON, "-c", CLIENT, f"{address}/openenv/sokoban"]
        said = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=300).stdout
    assert said.startswith('["Push the boxes onto the targets.", 1, 0.4, {"episode_id": ')
    assert "VALIDATION_ERROR" in said


@contextmanager
def started(command: list[str], **options: str) -> Iterator[str]:
    """A server of theirs; PORT in its command is a free one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([str(port) if part == "PORT" else part for part in command], **options)  # type: ignore[call-overload]
    until = time.monotonic() + 300
    while time.monotonic() < until and server.poll() is None:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=1)
            break
        except httpx.HTTPError:
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.fixture
def address() -> Iterator[str]:
    with started([PYTHON, "-c", STOCK_SERVER, "PORT"]) as place:
        yield place


@pytest.mark.skipif(not ECHO, reason="OPENENV_ECHO names no folder of OpenEnv's example echo_env")
def test_our_client_plays_at_their_echo_example() -> None:
    with started([PYTHON, "-m", "uvicorn", "server.app:app", "--port", "PORT"], cwd=ECHO) as place:
        call = {"type": "call_tool", "tool_name": "echo_message"}
        environment = OpenEnvironment(MediaStore(), place, field="arguments.message", action=call)
        environment.reset(1)
        result = environment.step("Is anybody there?")
        assert result.observation is not None
        assert "Is anybody there?" in result.observation.messages[0].text
        environment.close()


def test_our_client_plays_at_the_stock_server(address: str) -> None:
    environment = OpenEnvironment(MediaStore(), address, field="response")
    assert environment.reset(7)[1].messages[0].text == "begin"
    result = environment.step("x")
    assert result.observation is not None
    assert (result.observation.messages[0].text, result.reward) == ("1", 0.0)
    other = OpenEnvironment(MediaStore(), address, field="wrong")
    other.reset(0)
    assert "Field required" in other.step("x").observation.messages[0].text  # type: ignore[union-attr]
    environment.close()
    other.close()
