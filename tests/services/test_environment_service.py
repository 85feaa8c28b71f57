"""The environment service, over real sockets: its routes, its WebSocket, and environments played through it."""

import asyncio
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.sync.client import connect
from websockets.sync.server import serve

from sensorium.cluster.pool import WorkerPool
from sensorium.data.environment_tasks import EnvironmentTasks
from sensorium.data.media_store import MediaStore
from sensorium.envs.remote.client import KEY, EnvironmentClient, RemoteEnvironment, shared_client, socket_address
from sensorium.envs.remote.wire import WireError, pack, unpack
from sensorium.envs.sokoban import Sokoban
from sensorium.rollout.live import Deadlines, LiveEnvironment
from sensorium.services.application import refuse_open
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.task import EnvironmentSpec, Task

from .running import make_table, serving


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(make_table(capacity=400)) as address:
        yield address


def test_a_session_over_http(server: str) -> None:
    with httpx.Client(base_url=server) as http:
        assert http.get("/health").json()["status"] == "ok"
        wish = {"environment": "sokoban", "options": {"max_turns": 3}, "seed": 7}
        opened = http.put("/v1/sessions/s1", json=wish)
        picture = opened.json()["observation"][0]["content"][0]
        assert http.get(f"/v1/media/{picture['hash']}").content.startswith(b"\x89PNG")
        first = http.post("/v1/sessions/s1/steps/1", json={"response": "<answer>Up</answer>"})
        again = http.post("/v1/sessions/s1/steps/1", json={"response": "<answer>Up</answer>"})
        assert (first.status_code, first.content) == (200, again.content)
        assert http.post("/v1/sessions/s1/lease").json() == {"step": 1, "done": False}
        assert http.post("/v1/sessions/s1/steps/3", json={"response": ""}).status_code == 409
        assert http.delete("/v1/sessions/s1").json() == {"closed": True}
        assert http.post("/v1/sessions/s1/steps/2", json={"response": ""}).status_code == 404
        assert http.put("/v1/sessions/s2", json={"environment": "tetris"}).status_code == 404
        for seed, status in ((True, 422), (-1, 422), (1.5, 422), (2**53, 422), ("1", 422), (7.0, 200)):
            assert http.put("/v1/sessions/s2", json={"environment": "sokoban", "seed": seed}).status_code == status
        senseless = http.put("/v1/sessions/s4", json={"environment": "sokoban", "options": {"size": 1}})
        assert (senseless.status_code, "option size is 1" in senseless.json()["detail"]) == (422, True)
        beyond = http.put(
            "/v1/sessions/s3",
            content=b'{"environment": "sokoban", "seed": 1e400}',
            headers={"Content-Type": "application/json"},
        )
        assert (beyond.status_code, beyond.json()["detail"][0]["loc"]) == (422, ["body", "seed"])
        assert http.get("/v1/media/" + "0" * 64).status_code == 404
        other = http.post("/v1/sessions/s2")
        assert (other.status_code, other.headers["Allow"]) == (405, "DELETE, PUT")


def test_a_full_server_says_when_to_try_again() -> None:
    with serving(make_table(capacity=1)) as address, httpx.Client(base_url=address) as http:
        assert http.put("/v1/sessions/a", json={"environment": "counting"}).status_code == 200
        full = http.put("/v1/sessions/b", json={"environment": "counting"})
        assert (full.status_code, full.headers["Retry-After"]) == (503, "1")


def test_an_episode_that_finds_no_place_says_so_and_leaves_no_session_behind() -> None:
    table = make_table(capacity=1)
    with serving(table) as address:
        holder = RemoteEnvironment(MediaStore(), address, "counting")
        holder.reset(1)

        async def waited() -> str:
            task = Task("late", environment=EnvironmentSpec("remote", seed=2))
            late = RemoteEnvironment(MediaStore(), address, "counting")
            live = LiveEnvironment(WorkerPool("test"), lambda task: late, task, 0.4, Deadlines(), "late")
            with pytest.raises(EnvironmentFailure) as failure:
                await live.reset(2)
            await live.close()
            return str(failure.value)

        told = asyncio.run(waited())
        assert "did not answer reset within 0.4 s; it waits for a place" in told
        assert "the server is full: 1 sessions are open" in told
        holder.close()
        while table.opened < 2 or table.sessions:  # it is opened late, and given back at once
            time.sleep(0.01)


def test_the_key_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_table(), key="secret") as address, httpx.Client(base_url=address) as http:
        assert http.get("/health").status_code == 200
        assert http.put("/v1/sessions/a", json={"environment": "counting"}).status_code == 401
        for headers in ({"X-API-Key": "secret"}, {"Authorization": "Bearer secret"}):
            assert http.put("/v1/sessions/a", json={"environment": "counting"}, headers=headers).status_code == 200
        with pytest.raises(EnvironmentFailure, match="the key"):
            RemoteEnvironment(MediaStore(), address, "counting", deadline_s=0.5).reset(0)
        monkeypatch.setenv(KEY, "secret")
        environment = RemoteEnvironment(MediaStore(), address, "counting")
        assert environment.reset(3)[1].messages[0].text == "seed 3"
        environment.close()
    for host in ("0.0.0.0", "10.0.0.1", "example.org"):
        with pytest.raises(RecipeError, match="key"):
            refuse_open(host, "")
        refuse_open(host, "secret")
    refuse_open("127.0.0.1", "")


def test_an_environment_at_the_service_plays_as_the_one_here(server: str) -> None:
    options = {"max_turns": 6, "max_actions_per_turn": 2, "prompt": "full"}
    for seed in (1, 2):
        store = MediaStore()
        here, there = Sokoban(MediaStore(), **options), RemoteEnvironment(store, server, "sokoban", options)  # type: ignore[arg-type]
        assert here.reset(seed) == there.reset(seed)
        for _ in range(6):
            response = here.demonstrate()
            assert there.demonstrate() == response
            mine, its = here.step(response), there.step(response)
            assert mine == its
            if its.observation is None:
                break
            assert store.picture(its.observation.messages[0].media[0]).size == (168, 168)
        there.close()


def test_tasks_of_a_remote_environment_are_split_as_here(server: str) -> None:
    options = {"servers": server, "environment": "sokoban"}
    there = EnvironmentTasks("remote", MediaStore(), options, split="test", size=8)
    assert there.seeds == EnvironmentTasks("sokoban", MediaStore(), split="test", size=8).seeds


def started(port: int, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "sensorium.cli.main", "serve", "env", *arguments, "--port", str(port)]
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    assert "serving" in process.stdout.readline()
    return process


@dataclass
class Played:
    """What became of an episode: where it was, the turns that were replied to, and whether it failed."""

    url: str
    replied: int = 0
    failed: str = ""


@pytest.mark.usefixtures("forked_python")
def test_no_act_is_lost_or_doubled_by_delays_dropped_connections_and_a_kill(
    unused_ports: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 sessions at two servers; connections are cut again and again, and one server is killed. Every act is counted."""
    log = tmp_path / "acts"
    log.touch()
    monkeypatch.setenv("ACT_LOG", str(log))
    servers = [started(port, "logged=tests.services.running:Logged", "--capacity", "300") for port in unused_ports]
    addresses = [f"http://127.0.0.1:{port}" for port in unused_ports]
    client, over, played = shared_client(addresses, ""), threading.Event(), {}

    def cut() -> None:
        while not over.wait(0.05):
            for server in client.servers:
                client._loop.call_soon_threadsafe(server.connection._break, "cut by the test")

    def kill() -> None:
        while log.stat().st_size < 256 * 12 and not over.wait(0.01):  # each has acted once, or so
            pass
        servers[0].send_signal(signal.SIGKILL)

    def play(seed: int) -> None:
        environment = RemoteEnvironment(MediaStore(), addresses, "logged", {"turns": 4}, deadline_s=120, retry_s=15)
        environment.reset(seed)
        assert environment._session is not None
        episode = played[seed] = Played(environment._session.server.connection.url)
        try:
            while not environment.step("go").done:
                episode.replied += 1
            episode.replied += 1
        except EnvironmentFailure as failure:
            episode.failed = str(failure)
        environment.close()
        if episode.failed and seed < 1000:
            play(seed + 1000)  # rolled again, as another episode

    at_work = [threading.Thread(target=work, daemon=True) for work in (cut, kill)]
    try:
        for thread in at_work:
            thread.start()
        with ThreadPoolExecutor(256) as crowd:
            list(crowd.map(play, range(256)))
    finally:
        over.set()
        for thread in at_work:
            thread.join()
        for process in servers:
            process.kill()
            process.wait()
    acts = Counter(tuple(map(int, line.split()[:2])) for line in log.read_text().splitlines())
    assert set(acts.values()) == {1}, "a step acted twice"
    dead, left = map(socket_address, addresses)
    for seed, episode in played.items():
        acted = [turn for turn in range(1, 5) if acts[seed, turn]]
        assert acted[: episode.replied] == list(range(1, episode.replied + 1)), "a reply without an act"
        assert len(acted) <= episode.replied + bool(episode.failed), "an act without a reply, in an episode that goes on"
        assert bool(episode.failed) == (episode.replied < 4)
        assert not episode.failed or episode.url == dead
    assert {episode.url for episode in played.values() if episode.failed} == {dead}
    assert all(played[seed + 1000].url == left for seed in range(256) if played[seed].failed)


@pytest.mark.usefixtures("forked_python")
def test_a_session_from_before_a_restart_fails_and_the_next_one_is_played(unused_ports: list[int]) -> None:
    port = unused_ports[0]
    environment = RemoteEnvironment(MediaStore(), f"http://127.0.0.1:{port}", "frozen_lake", deadline_s=60, retry_s=30)
    servers = []
    try:
        servers.append(started(port, "frozen_lake"))
        first = environment.reset(3)[1].messages
        assert not environment.step("<answer>Up</answer>").done
        servers[0].kill()
        servers[0].wait()
        servers.append(started(port, "frozen_lake"))
        with pytest.raises(EnvironmentFailure, match=str(port)):
            environment.step("<answer>Up</answer>")
        environment.close()
        assert environment.reset(3)[1].messages == first
        assert httpx.get(f"http://127.0.0.1:{port}/health").json()["active_environments"] == 1
    finally:
        environment.close()
        for server in servers:
            server.kill()
            server.wait()


@pytest.fixture
def unused_ports() -> list[int]:
    import socket

    places = [socket.socket() for _ in range(2)]
    for place in places:
        place.bind(("127.0.0.1", 0))
    ports = [place.getsockname()[1] for place in places]
    for place in places:
        place.close()
    return ports


def test_the_command_refuses_what_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    from sensorium.cli.main import main

    assert main(["serve", "env", "frozen_lak"]) == 2
    assert "did you mean 'frozen_lake'" in " ".join(capsys.readouterr().err.split())
    assert main(["serve", "env", "--host", "0.0.0.0"]) == 2
    assert "SENSORIUM_SERVICE_KEY" in " ".join(capsys.readouterr().err.split())


FRAMES = st.one_of(
    st.binary(max_size=60),
    st.builds(lambda n, b: struct.pack(">I", n) + b, st.integers(0, 2**32 - 1), st.binary(max_size=40)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["ops", "id", "op", "media", "session"]), inner)
        ),
        max_leaves=8,
    ).map(lambda value: pack(value if isinstance(value, dict) else {"ops": value}, {})),
    st.fixed_dictionaries(
        {"id": st.integers(0, 9), "op": st.sampled_from(["open", "step", "close", "lease", "content_keys", "x"])},
        optional={
            "session": st.text(max_size=5) | st.integers(),
            "environment": st.sampled_from(["sokoban", "counting", "x"]) | st.none(),
            "options": st.dictionaries(st.sampled_from(["size", "turns"]), st.integers() | st.text(max_size=3)),
            "seed": st.integers() | st.booleans(),
            "number": st.integers(),
            "response": st.text(max_size=30),
            "seeds": st.lists(st.integers(), max_size=3),
        },
    ).map(lambda operation: pack({"ops": [operation]}, {})),
)


HTTP = httpx.Client()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(FRAMES, max_size=4), st.booleans())
def test_no_frame_breaks_the_service(server: str, frames: list[bytes], as_text: bool) -> None:
    from websockets.exceptions import ConnectionClosed

    with connect(server.replace("http", "ws") + "/v1/ws", max_size=None) as socket:
        try:
            for frame in frames:
                socket.send(frame.hex() if as_text else frame)
            socket.send(pack({"ops": [{"id": -1, "op": "lease", "session": "none"}]}, {}))
            while True:
                body, _ = unpack(socket.recv(timeout=30))  # type: ignore[arg-type]
                if any(reply["id"] == -1 for reply in body["replies"]):
                    break
        except ConnectionClosed:
            pass
    assert HTTP.get(server + "/health").json()["status"] == "ok"


@given(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)), st.lists(st.binary(max_size=20), max_size=3)
)
def test_a_frame_is_read_as_it_was_written(body: dict[str, Any], blobs: list[bytes]) -> None:
    import hashlib

    body.pop("media", None)
    media = {hashlib.sha256(blob).hexdigest(): blob for blob in blobs}
    frame = pack(body, media)
    assert unpack(frame) == (body, media)
    if media and any(media.values()):
        with pytest.raises(WireError):
            unpack(frame[:-1] + bytes([frame[-1] ^ 1]))


def test_a_server_that_sends_the_key_back_gets_it_into_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-0123456789ab"
    monkeypatch.setenv(KEY, secret)

    def answer(socket: Any) -> None:
        for frame in socket:
            whys = [{"id": asked["id"], "status": 422, "why": f"bad: {secret}"} for asked in unpack(frame)[0]["ops"]]
            socket.send(pack({"replies": whys}, {}))

    with serve(answer, "127.0.0.1", 0) as hostile:
        threading.Thread(target=hostile.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{hostile.socket.getsockname()[1]}"
        with pytest.raises(EnvironmentFailure, match="bad") as refused:
            RemoteEnvironment(MediaStore(), address, "counting", deadline_s=20).reset(1)
        assert secret not in str(refused.value)


def test_one_of_two_servers_that_is_away_is_named_once(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = f"127.0.0.1:{free.getsockname()[1]}"
    played = [RemoteEnvironment(MediaStore(), [f"http://{away}", server], "counting") for _ in range(4)]
    for seed, environment in enumerate(played):
        environment.reset(seed)
    for environment in played:
        environment.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert away in line


def test_a_client_is_shared_and_addresses_are_checked() -> None:
    assert shared_client(["http://a:1"], "") is shared_client(["ws://a:1/v1/ws"], "")
    with pytest.raises(RecipeError, match="no address"):
        EnvironmentClient([socket_address("a:1")])
    for server in ("http://user:word-of-pass@a:1", "ws://a:1/v1/ws?token=word-of-pass"):  # recipes are logged and reported
        with pytest.raises(RecipeError, match="SENSORIUM_SERVICE_KEY") as refused:
            RemoteEnvironment(MediaStore(), ["http://a:1", server], "counting")
        assert "word-of-pass" not in str(refused.value)


@pytest.mark.parametrize("seed", [-1, True, "seven", 7.5, None, 2**63])
def test_no_operation_takes_a_seed_that_is_no_whole_number_from_0(server: str, seed: Any) -> None:
    wish = {"session": "s", "environment": "counting", "options": {}}
    operations = [
        {"id": 0, "op": "open", "seed": seed, **wish},
        {"id": 1, "op": "content_keys", "seeds": [0, seed], **wish},
        {"id": 2, "op": "lease", "session": "s"},
    ]
    statuses = {}
    with connect(server.replace("http", "ws") + "/v1/ws") as socket:
        socket.send(pack({"ops": operations}, {}))
        while len(statuses) < len(operations):
            replies = unpack(socket.recv(timeout=30))[0]["replies"]  # type: ignore[arg-type]
            statuses |= {reply["id"]: reply.get("status") for reply in replies}
    assert statuses == {0: 422, 1: 422, 2: 404}
    assert HTTP.put(f"{server}/v1/sessions/s", json={"environment": "counting", "seed": seed}).status_code == 422


def test_many_sessions_step_at_once_and_fast_enough_to_notice_a_stall(server: str) -> None:
    environments = [RemoteEnvironment(MediaStore(), server, "counting", {"turns": 1000}) for _ in range(16)]
    for environment in environments:
        environment.reset(random.randrange(10**6, 10**9))
    began = time.monotonic()
    with ThreadPoolExecutor(16) as crowd:
        list(crowd.map(lambda environment: [environment.step("go") for _ in range(20)], environments))
    assert time.monotonic() - began < 60
    for environment in environments:
        environment.close()
