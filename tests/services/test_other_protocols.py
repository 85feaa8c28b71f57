"""The service speaks OpenEnv's WebSocket and both of VAGEN's protocols; frames and bytes are as recorded from theirs."""

import base64
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from sensorium.data.media_store import MediaStore
from sensorium.envs.adapters.openenv import OpenEnvironment
from sensorium.envs.sokoban import Sokoban
from sensorium.systems.vagen.settings import CURRENT_DEFAULTS

from .running import ACTS, make_table, serving

PNG = b"\x89PNG"
FULL = {"prompt": "full", "max_turns": 10**6}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(make_table(capacity=50)) as address:
        yield address


def asked(socket: Any, frame: Any) -> Any:
    socket.send(frame if isinstance(frame, str | bytes) else json.dumps(frame))
    return json.loads(socket.recv(timeout=30))


def at(server: str, path: str) -> str:
    return server.replace("http", "ws") + path


def test_openenv_frames(server: str) -> None:
    with connect(at(server, "/openenv/sokoban/ws")) as socket:
        first = asked(socket, {"type": "reset", "data": {"seed": 7, "episode_id": "e1", "max_turns": 3}})
        assert (first["type"], first["data"]["reward"], first["data"]["done"]) == ("observation", None, False)
        (picture,) = first["data"]["observation"]["images"]
        assert base64.b64decode(picture).startswith(PNG)
        assert first["data"]["observation"]["system"] == "Push the boxes onto the targets."
        second = asked(socket, {"type": "step", "data": {"response": "<answer>Up</answer>", "metadata": {}}})
        assert second["data"]["reward"] == pytest.approx(0.4)
        assert second["data"]["metadata"]["parts"] == {"step": -0.1, "box": 0.0, "success": 0.0, "format": 0.5}
        assert asked(socket, {"type": "state"}) == {"type": "state", "data": {"episode_id": "e1", "step_count": 1}}
        for frame, code in (
            ({"type": "step", "data": {"bogus": 1}}, "VALIDATION_ERROR"),
            ({"type": "step", "data": {"response": "", "more": 1}}, "VALIDATION_ERROR"),
            ({"type": "dance"}, "UNKNOWN_TYPE"),
            ("{", "INVALID_JSON"),
            ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR"),
            ({"type": "reset", "data": {"sise": 4}}, "VALIDATION_ERROR"),
            ({"type": "step", "data": {"response": "x"}}, "EXECUTION_ERROR"),
            ("[]", "SESSION_ERROR"),
        ):
            assert asked(socket, frame)["data"]["code"] == code, frame
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=30)
    with connect(at(server, "/openenv/sokoban/ws")) as socket:
        socket.send(json.dumps({"type": "close"}))
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=30)


def test_a_full_server_tells_openenvs_clients_unasked() -> None:
    with serving(make_table(capacity=1)) as address:
        with connect(at(address, "/openenv/counting/ws")) as first:
            asked(first, {"type": "reset"})
            with connect(at(address, "/openenv/counting/ws")) as second:
                told = json.loads(second.recv(timeout=30))["data"]
                assert (told["code"], told["active_sessions"], told["max_sessions"]) == ("CAPACITY_REACHED", 1, 1)
        until = time.monotonic() + 60
        reply = {"type": "error"}
        while reply["type"] == "error" and time.monotonic() < until:  # the place of the first is free again
            with connect(at(address, "/openenv/counting/ws")) as third:
                reply = asked(third, {"type": "reset"})
        assert reply["type"] == "observation"


def test_our_openenv_client_plays_at_our_server(server: str) -> None:
    options = {"field": "response", "media": {"images": "base64"}, "text": ["text"], "reset": {"max_turns": 4}}
    store = MediaStore()
    there, here = OpenEnvironment(store, f"{server}/openenv/sokoban", **options), Sokoban(MediaStore(), max_turns=4)  # type: ignore[arg-type]
    _, first = there.reset(3)
    assert [item.hash for item in first.messages[0].media] == [item.hash for item in here.reset(3)[1].messages[0].media]
    result, mine = there.step(here.demonstrate()), here.step(here.demonstrate())
    assert isinstance(mine.reward, dict)
    assert result.reward == pytest.approx(sum(mine.reward.values()))
    there.close()


def form(body: Any) -> tuple[bytes, dict[str, str]]:
    head = 'Content-Disposition: form-data; name="data"\r\nContent-Type: application/json; charset=utf-8'
    text = f"--B\r\n{head}\r\n\r\n{json.dumps(body)}\r\n--B--\r\n"
    return text.encode(), {"Content-Type": 'multipart/form-data; boundary="B"'}


def parts(reply: httpx.Response) -> tuple[Any, list[bytes]]:
    found = re.fullmatch(r'multipart/mixed; boundary="(gym_env_[0-9a-f]{32})"', reply.headers["content-type"])
    assert found is not None
    pieces = reply.content.split(b"--" + found[1].encode())
    assert pieces[-1] == b"--\r\n"
    contents = [piece.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n") for piece in pieces[1:-1]]
    assert all(b"Content-Type: image/png" in piece for piece in pieces[2:-1])
    return json.loads(contents[0]), contents[1:]


def test_todays_vagen(server: str) -> None:
    with httpx.Client(base_url=server) as http:

        def post(path: str, body: Any) -> httpx.Response:
            content, headers = form(body)
            return http.post(path, content=content, headers=headers)

        config = {"env_name": "Sokoban", "num_boxes": 1, "render_mode": "vision"}
        opened, images = parts(post("/connect", {"env_config": config, "seed": 7}))
        here = Sokoban(MediaStore(), **FULL | CURRENT_DEFAULTS["sokoban"] | {"view": "picture"})  # type: ignore[arg-type]
        head, first = here.reset(7)
        assert re.fullmatch("[0-9a-f]{32}", opened["session_id"])
        assert opened["obs"] == first.messages[0].text + "<image>"
        assert images == [here.store.bytes_of(first.messages[0].media[0])]
        id = opened["session_id"]
        assert parts(post("/call", {"session_id": id, "method": "system_prompt", "params": {}}))[0] == {"obs": head[0].text}
        response = here.demonstrate()
        stepped, _ = parts(post("/call", {"session_id": id, "method": "step", "params": {"action_str": response}}))
        mine = here.step(response)
        assert isinstance(mine.reward, dict)
        assert (stepped["reward"], stepped["done"]) == (pytest.approx(sum(mine.reward.values())), mine.done)
        assert parts(post("/call", {"session_id": id, "method": "close"}))[0] == {"closed": True}
        unseeded, _ = parts(post("/connect", {"env_config": {"env_name": "counting"}}))
        assert set(unseeded) == {"session_id"}
        again, _ = parts(post("/call", {"session_id": unseeded["session_id"], "method": "reset", "params": {"seed": 4}}))
        assert again == {"obs": "seed 4", "info": {}}
        for body, status in (
            ({"session_id": id, "method": "step"}, 404),
            ({"method": "step"}, 400),
            ({"session_id": unseeded["session_id"]}, 400),
            ({"session_id": unseeded["session_id"], "method": "dance"}, 500),
        ):
            refused = post("/call", body)
            assert (refused.status_code, list(refused.json())) == (status, ["detail"])
        assert http.post("/connect", json={}).status_code == 500
        assert post("/connect", {"env_config": {"env_name": "tetris"}}).status_code == 500


def test_a_reset_that_fails_leaves_no_session_behind() -> None:
    table = make_table(capacity=1)
    with serving(table) as address, httpx.Client(base_url=address) as http:
        for _ in range(3):
            content, headers = form({"env_config": {"env_name": "sokoban", "dim_room": [4, 4], "min_solution_steps": 400,
                                                    "max_solution_steps": 400}, "seed": 1})  # fmt: skip
            assert http.post("/connect", content=content, headers=headers).status_code == 500
        assert table.sessions == {}


def test_legacy_vagen_byte_for_byte(server: str) -> None:
    ACTS.clear()
    with httpx.Client(base_url=server) as http:
        health = http.get("/health").json()
        assert {"status", "message", "registered_envs", "active_services", "active_environments"} <= set(health)
        configs = {
            "a": {"env_name": "sokoban", "env_config": {"render_mode": "vision", "max_actions_per_step": 3}, "seed": 1},
            "b": {"env_name": "counting", "env_config": {"turns": 2}},
            "c": {"env_name": "tetris", "env_config": {}},
        }
        assert http.post("/environments", json={"ids2configs": configs}).content == b'{"success":true}\n'
        reset = http.post("/batch/reset", json={"ids2seeds": {"b": 5, "c": 1}})
        assert reset.content.startswith(b'{"results":{"b":[{"obs_str":"seed 5"},{}],"c":[{},{"error":"unknown environment')
        (seen, info) = http.post("/batch/reset", json={"ids2seeds": {"a": 3}}).json()["results"]["a"]
        (image,) = seen["multi_modal_data"]["<image>"]
        assert base64.b64decode(image["__pil_image__"]).startswith(PNG)
        assert (seen["obs_str"].count("<image>"), info) == (1, {})
        stepped = http.post("/batch/step", json={"ids2actions": {"b": "gö", "c": "x"}}).json()["results"]
        assert (stepped["b"][0], stepped["b"][1:3], stepped["c"][1:3]) == (
            {"obs_str": "turn 1: gö"},
            [1.0, False],
            [0.0, True],
        )
        single = http.post("/step/b", json={"action": "gö"})
        assert single.content.startswith(b'{"done":true,"info":{"metrics":{"traj_metrics":{"success":false}')
        assert http.get("/reward/b").content == b'{"reward":0.0}\n'
        assert http.get("/system_prompt/b").content == b'{"system_prompt":"count"}\n'
        assert http.post("/batch/system_prompt", json={"env_ids": ["b"]}).content == b'{"system_prompts":{"b":"count"}}\n'
        assert http.post("/batch/reward", json={"env_ids": ["b"]}).content == b'{"rewards":{"b":0.0}}\n'
        assert http.post("/reset/b", json={"seed": 9}).content == b'{"info":{},"observation":{"obs_str":"seed 9"}}\n'
        missing = http.post("/batch/step", json={})
        assert (missing.status_code, missing.content) == (400, b'{"error":"Missing required parameter: ids2actions"}\n')
        for reply, status in (
            (http.get("/reward/nobody"), 500),
            (http.post("/batch/step", json={"ids2actions": {"nobody": ""}}), 500),
            (http.post("/batch/step", content=b"{}"), 415),
            (http.post("/batch/step", content=b"{", headers={"Content-Type": "application/json"}), 400),
            (http.post("/batch/step", json={"ids2actions": [1]}), 500),
        ):
            assert (reply.status_code, reply.text.startswith("<!doctype html>")) == (status, True)
        assert http.request("DELETE", "/close/b").content == b'{"status":"success"}\n'
        assert http.post("/batch/close", json={"env_ids": ["a", "c"]}).content == b'{"status":"success"}\n'
    assert ACTS == {(5, 1): 1, (5, 2): 1}


def post_form(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    content, headers = form(body)
    return http.post(path, content=content, headers=headers)


def until(happened: Any) -> None:
    """Wait until something is so, for a minute."""
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


COUNTING = {"env_name": "counting"}
OURS = ("PUT", "/v1/sessions/mine", {"environment": "counting"})


def test_places_that_vagens_clients_took_and_left_come_back_when_the_lease_is_over() -> None:
    """Sessions of all protocols share one table; one that was never reset has a lease, too, and a full server says 503."""
    table = make_table(capacity=2, lease_s=0.5)
    with serving(table) as address, httpx.Client(base_url=address) as http:
        left = [
            lambda: post_form(http, "/connect", {"env_config": COUNTING}),
            lambda: http.post("/environments", json={"ids2configs": {"a": COUNTING}}),
        ]
        for take in (*left, *left):
            for _ in range(2):
                http.post("/environments", json={"ids2configs": {"b": COUNTING}})  # an id again takes no further place
            assert take().status_code == 200
            assert http.get("/health").json()["sessions"] == 2
            for full in (
                post_form(http, "/connect", {"env_config": COUNTING}),
                post_form(http, "/connect", {"env_config": COUNTING, "seed": 1}),
                http.post("/environments", json={"ids2configs": {"c": COUNTING}}),
                http.request(*OURS[:2], json=OURS[2]),
            ):
                assert (full.status_code, float(full.headers["Retry-After"])) == (503, 1.0)
            assert http.get("/reward/c").status_code == 500, "nothing was created beyond the capacity"
            until(lambda: not table.sessions)
            assert http.get("/reward/b").status_code == 500, "its id is gone with its session"
            assert http.request(*OURS[:2], json=OURS[2]).status_code == 200
            http.delete("/v1/sessions/mine")
        more = http.post("/environments", json={"ids2configs": {str(n): COUNTING for n in range(3)}})
        assert (more.status_code, "Retry-After" in more.headers) == (400, False)
        assert table.counts()["sessions"] == 0
        assert table.reaped == 8


def test_environments_that_cannot_be_made_take_no_more_memory_than_there_are_places() -> None:
    table = make_table(capacity=3)
    with serving(table) as address, httpx.Client(base_url=address) as http:
        made = [http.post("/environments", json={"ids2configs": {f"t{n}": {"env_name": "tetris"}}}) for n in range(5)]
        assert [reply.status_code for reply in made] == [200, 200, 200, 503, 503]
        assert len(table.sessions) == 3
        assert "error" in http.post("/batch/reset", json={"ids2seeds": {"t0": 1}}).json()["results"]["t0"][1]
        http.post("/batch/close", json={"env_ids": ["t0", "t1", "t2"]})
        assert http.post("/environments", json={"ids2configs": {"a": COUNTING}}).status_code == 200


def test_an_environment_that_failed_is_reset_under_its_id() -> None:
    with serving(make_table(capacity=1)) as address, httpx.Client(base_url=address) as http:
        http.post("/environments", json={"ids2configs": {"a": COUNTING}})
        for _ in range(2):
            assert http.post("/reset/a", json={"seed": 1}).json()["observation"] == {"obs_str": "seed 1"}
            assert "error" in http.post("/step/a", json={"action": "raise"}).json()["info"]
            assert "error" in http.post("/step/a", json={"action": "go"}).json()["info"]
        http.delete("/close/a")
        id = parts(post_form(http, "/connect", {"env_config": COUNTING, "seed": 1}))[0]["session_id"]
        step = {"session_id": id, "method": "step", "params": {"action_str": "raise"}}
        assert post_form(http, "/call", step).status_code == 500
        reset = {"session_id": id, "method": "reset", "params": {"seed": 2}}
        assert parts(post_form(http, "/call", reset))[0]["obs"] == "seed 2"


@pytest.fixture(scope="module")
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server) as client:
        yield client


SEEDS = ("7", "7.0", '"7"', '" 7.0 "', "7e0")
NO_SEEDS = ("-1", "1e400", "true", "false", "7.5", '"seven"', '""', '"-7"', "[7]", "{}", "NaN", str(2**63), '"٧"')


@pytest.mark.parametrize("spelled", [*SEEDS, *NO_SEEDS, "null"])
def test_a_seed_is_a_whole_number_in_any_of_its_spellings_or_refused(http: httpx.Client, server: str, spelled: str) -> None:
    good, headers = spelled in SEEDS, {"Content-Type": "application/json"}
    id = f"seed {spelled}"
    http.post("/environments", json={"ids2configs": {id: COUNTING, "other": COUNTING}})
    for path, body in (
        ("/batch/reset", f'{{"ids2seeds": {{"other": 1, {json.dumps(id)}: {spelled}}}}}'),
        (f"/reset/{id}", f'{{"seed": {spelled}}}'),
    ):
        reply = http.post(path, content=body.encode(), headers=headers)
        assert (reply.status_code, b"seed 7" in reply.content) == ((200, True) if good else (400, False))
        assert ("error" in reply.json()) is not good
    http.post("/batch/close", json={"env_ids": [id, "other"]})
    text = form({"env_config": COUNTING, "seed": "SEED"})[0].replace(b'"SEED"', spelled.encode())
    connected = http.post("/connect", content=text, headers=form({})[1])
    assert connected.status_code == (200 if good or spelled == "null" else 500)  # none: no reset
    assert (b"seed 7" in connected.content) is good
    if connected.status_code == 200:
        post_form(http, "/call", {"session_id": parts(connected)[0]["session_id"], "method": "close"})
    with connect(at(server, "/openenv/counting/ws")) as socket:
        first = asked(socket, f'{{"type": "reset", "data": {{"seed": {spelled}}}}}')
        expected = {True: "seed 7", False: "seed 0" if spelled == "null" else None}[good]  # there it may be left out
        assert first["data"].get("observation", {}).get("text") == expected


def test_all_of_them_ask_for_the_key() -> None:
    with serving(make_table(), key="secret") as address, httpx.Client(base_url=address) as http:
        content, headers = form({"env_config": {"env_name": "counting"}})
        assert http.post("/connect", content=content, headers=headers).status_code == 401
        assert http.post("/connect?token=secret", content=content, headers=headers).status_code == 200
        assert http.post("/environments", json={"ids2configs": {}}).status_code == 401
        with pytest.raises(Exception, match=r"403|4401"), connect(at(address, "/openenv/counting/ws")) as socket:
            socket.recv(timeout=10)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "data", "seed", "response", "session_id", "method", "params", "env_config"]), inner
        )
    ),
    max_leaves=6,
)
HTTP = httpx.Client()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    JSONS, st.binary(max_size=40), st.sampled_from(["/connect", "/call", "/environments", "/batch/step", "/batch/reset"])
)
def test_no_body_breaks_the_service(server: str, value: Any, raw: bytes, path: str) -> None:
    content, headers = form(value)
    for body, kind in (
        (content, headers["Content-Type"]),
        (raw, headers["Content-Type"]),
        (content.replace(b"--B", raw), 'multipart/form-data; boundary="' + "B" * 9 + '"'),
        (json.dumps(value).encode(), "application/json"),
        (raw, "application/json"),
    ):
        assert HTTP.post(server + path, content=body, headers={"Content-Type": kind}).status_code < 600
    assert HTTP.get(server + "/health").json()["status"] == "ok"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(JSONS.map(json.dumps), st.text(max_size=20), st.binary(max_size=20)), max_size=4))
def test_no_frame_breaks_openenvs_socket(server: str, frames: list[Any]) -> None:
    with connect(at(server, "/openenv/counting/ws")) as socket:
        try:
            for frame in frames:
                socket.send(frame)
            socket.send(json.dumps({"type": "state"}))
            while json.loads(socket.recv(timeout=30))["type"] != "state":
                pass
        except ConnectionClosed:
            pass
    assert HTTP.get(server + "/health").json()["status"] == "ok"
