"""What a hostile or broken client cannot do to the others: block the server, fill its memory, stop its housekeeping."""

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.remote.wire import pack
from sensorium.media.store import MediaStore
from sensorium.services import environment_service
from sensorium.services.application import Refusal
from sensorium.services.environment_service import _Exchange
from sensorium.services.kept_media import sweep
from sensorium.services.offers import Offer, Offers
from sensorium.services.sessions import SessionTable
from sensorium.vocabulary.content import user

from .running import make_table, serving

SEEN: dict[str, str] = {}


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
