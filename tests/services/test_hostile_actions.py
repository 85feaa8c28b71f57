"""Whatever a model writes, the service answers, by every protocol; and only what it wrote is judged."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from sensorium.data.media_store import MediaStore
from sensorium.services.sessions import Offer, Offers, SessionTable

from .running import serving
from .test_other_protocols import asked, at, form, parts

PLAYED = ["frozen_lake", "sokoban", "countdown", "svg"]
HOSTILE = {
    "half a character": "<answer>\ud800 Left</answer>",
    "nothing at all": "\0" * 50,
    "a megabyte": "<answer>" + "Left," * 200_000 + "</answer>",
    "nested tags": "<think>" * 5_000 + "<answer>" * 5_000 + "Left" + "</answer>" * 5_000,
    "other scripts": "<answer>\u202eLeft\u202c ⅬⅠ ﷽ 𝕃𝕖𝕗𝕥 \U0010ffff</answer>",
    "a use-bomb": "<answer><svg>" + '<g id="a"><use href="#a"/></g>' * 100 + "</svg></answer>",
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(SessionTable(Offers({name: Offer(name) for name in PLAYED}), MediaStore(), capacity=100)) as address:
        yield address


@pytest.fixture(scope="module")
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=60) as client:
        yield client


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("name", PLAYED)
def test_an_action_is_answered_by_every_protocol(http: httpx.Client, server: str, name: str, what: str) -> None:
    action = HOSTILE[what]
    escaped = json.dumps({"response": action}).encode()  # half a character is sent as its escape
    http.put("/v1/sessions/s", json={"environment": name, "options": {}, "seed": 1})
    stepped = http.post("/v1/sessions/s/steps/1", content=escaped, headers={"Content-Type": "application/json"})
    assert stepped.status_code in (200, 400, 422)
    if stepped.status_code == 200:
        assert stepped.json()["success"] is not True
        assert len(str(stepped.json()["info"])) < 10_000
    http.delete("/v1/sessions/s")

    def post(path: str, body: Any) -> httpx.Response:
        content, headers = form(body)
        return http.post(path, content=content, headers=headers)

    opened, _ = parts(post("/connect", {"env_config": {"env_name": name}, "seed": 1}))
    call = {"session_id": opened["session_id"], "method": "step", "params": {"action_str": action}}
    reply = post("/call", call)
    assert reply.status_code in (200, 500)
    assert parts(reply)[0]["info"]["success"] is False if reply.status_code == 200 else "detail" in reply.json()
    http.post("/environments", json={"ids2configs": {"a": {"env_name": name, "env_config": {}}}})
    http.post("/reset/a", json={"seed": 1})
    legacy = http.post("/step/a", content=json.dumps({"action": action}), headers={"Content-Type": "application/json"})
    assert (legacy.status_code, legacy.json()["info"].get("success", False)) == (200, False)
    http.request("DELETE", "/close/a")
    with connect(at(server, f"/openenv/{name}/ws"), max_size=None) as socket:
        asked(socket, {"type": "reset", "data": {"seed": 1}})
        assert asked(socket, {"type": "step", "data": {"response": action}})["type"] in ("observation", "error")
    assert http.get("/health").json()["status"] == "ok"
