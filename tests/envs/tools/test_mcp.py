"""MCP servers as a source of tools: real ones, over stdio and over HTTP, one of them from PyPI."""

import asyncio
import gc
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sensorium.assembly.playing import EnvironmentMaker
from sensorium.cli.validation import try_tools
from sensorium.data.media_store import MediaStore
from sensorium.envs.mcp import close_servers, server_tools
from sensorium.envs.tool_use import Toolbox, ToolCall, ToolContext, ToolUse, write_call
from sensorium.vocabulary import EnvironmentSpec, Task
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = {"command": [sys.executable, SERVER]}


@pytest.fixture(scope="module", autouse=True)
def _no_server_left() -> Iterator[None]:
    pytest.importorskip("mcp.server.mcpserver")  # takes seconds, which workers without these tests are spared
    yield
    close_servers()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def toolbox(server: dict[str, Any]) -> Toolbox:
    return Toolbox(server_tools(server, "x"), ToolContext(MediaStore(), Task("t")))


def everything_works(box: Toolbox) -> None:
    assert box.run(ToolCall("add", {"a": 2, "b": 3})).text == "5"
    result = box.run(ToolCall("draw", {"side": 9}))
    (picture,) = [block for block in result.content if isinstance(block, Media)]
    assert result.text == "a square"
    assert box.context.store.picture(picture).size == (9, 9)
    assert box.context.pictures == [picture]
    failed = box.run(ToolCall("fail"))
    assert failed.is_error
    assert "fail" in failed.text
    assert "'b' is a required" in box.run(ToolCall("add", {"a": 2})).text


def test_tools_over_stdio() -> None:
    everything_works(toolbox(STDIO))


def test_tools_over_http(address: str) -> None:
    everything_works(toolbox({"url": address, "headers": {"X-Key": "k"}}))


def test_a_call_that_takes_too_long_is_told_and_the_server_goes_on() -> None:
    box = toolbox({**STDIO, "deadline_s": 0.2, "only": ["wait", "add"]})
    assert set(box.tools) == {"wait", "add"}
    result = box.run(ToolCall("wait", {"seconds": 1.0}))
    assert result.is_error
    assert "within 0.2 s" in result.text
    assert toolbox(STDIO).run(ToolCall("add", {"a": 1, "b": 1})).text == "2"


def test_one_server_serves_all_and_a_dead_one_costs_the_episode_and_is_started_again() -> None:
    first, second = toolbox(STDIO), toolbox(STDIO)
    assert first.tools["add"].server is second.tools["add"].server  # type: ignore[attr-defined]
    with pytest.raises(EnvironmentFailure, match="is lost"):
        first.run(ToolCall("die"))
    with pytest.raises(EnvironmentFailure, match="is lost"):
        second.run(ToolCall("add", {"a": 1, "b": 1}))
    assert toolbox(STDIO).run(ToolCall("add", {"a": 1, "b": 1})).text == "2"


def test_a_call_in_the_last_moment_of_a_server_is_told_and_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    (tool,) = server_tools({**STDIO, "only": ["add"]}, "x")
    last_moment, handed_over = threading.Event(), threading.Event()
    hand_over = asyncio.run_coroutine_threadsafe

    def stay(task: "asyncio.Task[None]") -> None:
        last_moment.set()
        handed_over.wait(600)

    def end() -> None:
        assert tool.server._open is not None
        tool.server._open.add_done_callback(stay)  # the loop is not run once more after this
        tool.server._open.cancel()

    def handed(*given: Any) -> Any:
        asked = hand_over(*given)
        handed_over.set()
        return asked

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", handed)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tool.server._loop.call_soon_threadsafe(end)
        assert last_moment.wait(600)
        with pytest.raises(EnvironmentFailure, match="is lost: it has ended"):
            tool.server.call("add", {"a": 1, "b": 1}, 60.0)
        gc.collect()
    assert not [warning for warning in warned if "never awaited" in str(warning.message)]


def test_validation_calls_the_tools_that_only_read() -> None:
    options = {"tools": [{"mcp": {**STDIO, "only": ["add", "die"]}}], "offer": "text"}
    task = Task("t", (user("?"),), environment=EnvironmentSpec("tools", options))
    told = {name: (reply, good) for name, reply, good in try_tools([task], EnvironmentMaker(MediaStore()))}
    assert told == {"add": ("replies: 2", True), "die": ("not called: its server says that it changes things", True)}


def test_a_server_from_pypi_answers_the_model() -> None:
    pytest.importorskip("mcp_server_time")
    server = {"mcp": {"command": [sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"]}}
    environment = ToolUse(MediaStore(), Task("t", (user("What time is it in Tokyo?"),)), tools=[server, "calculator"])
    assert environment.instant is False
    head, _ = environment.reset(0)
    assert "get_current_time" in head[0].tools
    result = environment.step(write_call("get_current_time", {"timezone": "Asia/Tokyo"}))
    assert result.observation is not None
    assert "Asia/Tokyo" in result.observation.messages[0].text
    environment.close()


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        ({"command": ["/no/such/program"]}, "cannot be used"),
        ({"comand": ["x"]}, "an MCP server is"),
        ({"command": ["x"], "arg": []}, "did you mean 'args'"),
        ({**STDIO, "only": ["ad"]}, "did you mean 'add'"),
        ({"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_s": 0.5}, "did not begin"),
        (
            {"command": [sys.executable, "-m", "no_server"]},
            r"It last wrote '.*No module named no_server'\. It is given",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_before_anything_is_played(server: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        server_tools(server, "x")
