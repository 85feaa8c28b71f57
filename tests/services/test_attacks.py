"""What a hostile or broken client cannot do to the others: block the server, fill its memory, stop its housekeeping."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.remote.client import RemoteEnvironment
from sensorium.envs.remote.wire import pack
from sensorium.services import environment_service
from sensorium.services.application import Refusal, refuse_open, sweep
from sensorium.services.environment_service import _Exchange, make_app
from sensorium.services.model_service import make_model_app
from sensorium.services.sessions import Offer, Offers, SessionTable
from sensorium.systems.caprl.service import make_reward_app
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError

from . import test_model_service, test_reward_service
from .running import make_table, serving, serving_app

SEEN: dict[str, str] = {}
HTTP = httpx.Client()


class Searching:
    """An instant environment whose start, way and content take a search; it notes in which thread each ran."""

    instant = True

    def __init__(self, store: MediaStore, wait: bool = False) -> None:
        self.wait = wait

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        SEEN["content_key"] = threading.current_thread().name
        if options.get("wait"):
            threading.Event().wait(30)
        return str(seed)

    def reset(self, seed: int) -> Any:
        SEEN["reset"] = threading.current_thread().name
        if self.wait:
            threading.Event().wait(30)
        return (), Observation((user("?"),))

    def step(self, response: str) -> StepResult:
        SEEN["step"] = threading.current_thread().name
        return StepResult(None, 0.0, done=True)

    def demonstrate(self) -> str:
        SEEN["demonstrate"] = threading.current_thread().name
        return "go"

    def close(self) -> None: ...


def test_a_search_that_a_clients_options_ask_for_blocks_nobody_else() -> None:
    async def play() -> None:
        table = SessionTable(Offers({"searching": Offer(f"{__name__}:Searching")}), MediaStore(), deadline_s=0.2)
        await table.open("s", "searching", {}, 1)
        await table.demonstrate("s")
        await table.step("s", 1, "go")
        assert await table.content_keys("searching", {}, [1, 2]) == ["1", "2"]
        here = threading.current_thread().name
        assert SEEN.pop("step") == here, "plain steps stay in place"
        assert here not in SEEN.values()
        for asked in (
            table.open("t", "searching", {"wait": True}, 1),
            table.content_keys("searching", {"wait": True}, [1]),
        ):
            with pytest.raises(Refusal, match="did not answer"):
                await asked
        assert len(table.sessions) == 1
        await table.shut()

    asyncio.run(play())


def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_service, "MOST_BODY", 10_000)
    with serving(make_table()) as address, httpx.Client(base_url=address) as http:
        http.put("/v1/sessions/s", json={"environment": "counting"})
        for path, body in (
            ("/v1/sessions/s/steps/1", {"response": "x" * 20_000}),
            ("/batch/step", {"ids2actions": {"s": "x" * 20_000}}),
        ):
            assert http.post(path, json=body).status_code == 413
        assert http.post("/v1/sessions/s/steps/1", json={"response": "x" * 5_000}).status_code == 200


class Deaf:
    """A WebSocket whose client asks and asks, and reads nothing."""

    def __init__(self) -> None:
        self.asked = 0

    async def receive_bytes(self) -> bytes:
        self.asked += 1
        await asyncio.sleep(0)
        return pack({"ops": [{"id": n, "op": "lease", "session": "none"} for n in range(50)]}, {})

    async def send_bytes(self, data: bytes) -> None:
        await asyncio.Event().wait()


def test_a_client_that_does_not_read_is_not_listened_to_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_service, "MOST_WAITING", 200)

    async def talk() -> int:
        socket = Deaf()
        exchange = asyncio.create_task(_Exchange(socket, make_table()).serve())  # type: ignore[arg-type]
        await asyncio.sleep(0.5)
        exchange.cancel()
        return socket.asked

    assert asyncio.run(talk()) < 20


def test_sweeping_goes_on_where_a_file_or_the_folder_is_gone(tmp_path: Path) -> None:
    assert sweep(tmp_path / "none", 0.0) == 0
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").touch()
    assert sweep(tmp_path, -10.0) >= 1
    assert not (tmp_path / "old").exists()


def model_app(folder: Path, **options: Any) -> Any:
    return make_model_app(test_model_service.make_service(folder), **options)


def reward_app(folder: Path, **options: Any) -> Any:
    return make_reward_app(test_reward_service.make_service(folder, "http://127.0.0.1:9/v1"), **options)


def environment_app(folder: Path, **options: Any) -> Any:
    return make_app(make_table(), **options)


def status_of(address: str, path: str, method: str = "POST", **headers: str) -> int:
    """The status of a request whose Host, where given, is not the address's own."""
    return HTTP.request(method, address + path, content=b"{}", headers=headers, timeout=30).status_code


ROUTES = {
    environment_app: [
        ("PUT", "/v1/sessions/s"), ("POST", "/connect"), ("POST", "/call"), ("POST", "/environments"),
        ("POST", "/batch/reset"),
        ("GET", "/health"), ("GET", "/openenv/counting/schema"), ("GET", "/openapi.json"), ("GET", "/nowhere"),
    ],
    model_app: [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/health")],
    reward_app: [("POST", "/get_reward"), ("GET", "/metrics"), ("GET", "/health")],
}  # fmt: skip


@pytest.mark.parametrize("make", list(ROUTES))
def test_a_web_page_of_another_site_uses_no_route(make: Callable[..., Any], tmp_path: Path) -> None:
    with serving_app(make(tmp_path)) as (address, _):
        port = address.rpartition(":")[2]
        own = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
        for method, path in ROUTES[make]:
            for headers in (
                {"Host": f"evil.example:{port}"},
                {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"},
                {"Host": f"localhost@evil.example:{port}"},
                {"Host": "10.0.0.5"},
                {"Origin": "https://evil.example"},
                {"Origin": "null"},
                {"Origin": "http://127.0.0.1:1"},
                {"Origin": f"http://localhost:{port}"},
            ):
                assert status_of(address, path, method, **headers) == 403, (path, headers)
            for headers in ({}, own, {"Host": f"[::1]:{port}"}, {"Host": "LocalHost."}):
                assert status_of(address, path, method, **headers) != 403, (path, headers)
        assert httpx.get(f"{address}/docs").status_code == httpx.get(f"{address}/redoc").status_code == 404


@pytest.mark.parametrize("path", ["/v1/ws", "/openenv/counting/ws"])
def test_a_web_page_of_another_site_opens_no_web_socket(path: str) -> None:
    with serving(make_table()) as address:
        port = int(address.rpartition(":")[2])
        url = address.replace("http", "ws") + path
        for asked, origin in ((url, "https://evil.example"), (f"ws://evil.example:{port}{path}", None), (url, "null")):
            place = socket.create_connection(("127.0.0.1", port))
            with pytest.raises(InvalidStatus) as refused:
                connect(asked, sock=place, origin=origin)  # type: ignore[arg-type]
            assert refused.value.response.status_code == 403
            assert b"--allowed-host" in (refused.value.response.body or b"")
        for origin in (None, address):
            connect(url, origin=origin).close()  # type: ignore[arg-type]


def test_names_of_a_proxy_and_of_the_machine_are_taken_where_a_key_is_needed() -> None:
    name = socket.gethostname()
    for key, hosts, granted, refused in (
        ("", ["Proxy.example"], ["proxy.example", "proxy.example:443"], ["evil.example", name, "10.0.0.5"]),
        ("secret", [], [name.upper(), f"{name}:1", "10.0.0.5:8300", "[fd00::1]:8300"], ["evil.example", "proxy.example"]),
    ):
        with serving_app(make_app(make_table(), key, hosts)) as (address, _):
            assert [status_of(address, "/health", "GET", Host=host) for host in granted] == [200] * len(granted)
            assert [status_of(address, "/health", "GET", Host=host) for host in refused] == [403] * len(refused)
            described = httpx.get(f"{address}/openapi.json").status_code
            assert described == (401 if key else 200)
            assert httpx.get(f"{address}/openapi.json", headers={"X-API-Key": key}).status_code == 200
            if hosts:  # a proxy that ends TLS, and one that puts the server's own address into Host
                assert status_of(address, "/health", "GET", Host="proxy.example", Origin="https://proxy.example") == 200
                assert status_of(address, "/health", "GET", Origin="https://proxy.example") == 200


def test_a_client_by_a_name_that_the_server_does_not_have_hears_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **named: resolve("127.0.0.1" if host == "node7" else host, *more, **named),
    )
    with serving(make_table(), key="secret") as address:
        there = RemoteEnvironment(MediaStore(), address.replace("127.0.0.1", "node7"), "counting", deadline_s=600)
        with pytest.raises(EnvironmentFailure, match="--allowed-host node7"):  # at once: trying again cannot help
            there.reset(1)
        with pytest.raises(EnvironmentFailure, match="key"):
            RemoteEnvironment(MediaStore(), address, "counting", deadline_s=600).reset(1)
        with serving(make_table()) as open_to_all:
            both = RemoteEnvironment(MediaStore(), [address, open_to_all], "counting", deadline_s=60)
            assert both.reset(3)[1].messages[0].text == "seed 3"
            both.close()


@pytest.mark.parametrize("make", list(ROUTES))
def test_without_the_key_no_route_is_reached_and_no_body_is_read(make: Callable[..., Any], tmp_path: Path) -> None:
    with serving_app(make(tmp_path, key="secret")) as (address, _):
        port = int(address.rpartition(":")[2])
        for method, path in ROUTES[make]:
            keyless = path == "/health" or path.endswith("/schema")
            with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
                head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                raw.sendall(f"{head}Content-Length: {0 if keyless else 1 << 20}\r\n\r\n".encode())  # the body never comes
                assert raw.recv(4096).split()[1] == (b"200" if keyless else b"401"), path
            if path != "/nowhere":
                for headers in ({"X-API-Key": "secret"}, {"Authorization": "bearer secret"}):
                    assert status_of(address, path, method, **headers) not in (401, 403)
                assert status_of(address, f"{path}?token=secret", method) not in (401, 403)


@pytest.mark.parametrize("key", ["abc\n", " ", "schlüssel", "a b"])
def test_a_key_that_no_client_can_send_is_refused_at_the_start(key: str) -> None:
    with pytest.raises(RecipeError, match="SENSORIUM_SERVICE_KEY"):
        refuse_open("127.0.0.1", key)


@pytest.mark.usefixtures("forked_python")
def test_a_client_that_sends_half_a_body_does_not_keep_a_stopped_service_alive() -> None:
    command = [
        sys.executable,
        "-m",
        "sensorium.cli.main",
        "serve",
        "env",
        "frozen_lake",
        "--port",
        "0",
        "--deadline-s",
        "1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().partition("http://127.0.0.1:")[2].split()[0])
            with socket.create_connection(("127.0.0.1", port), timeout=30) as half, httpx.Client() as http:
                half.sendall(b"PUT /v1/sessions/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
                assert http.get(f"http://127.0.0.1:{port}/health").status_code == 200  # it was read before this
                server.terminate()
                assert server.wait(50) == 128 + signal.SIGTERM
        finally:
            server.kill()
