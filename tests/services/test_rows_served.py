"""Rows with tools are served by seed, and a tool's picture arrives by every protocol as it is made here."""

import base64
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from websockets.sync.client import connect

from sensorium.data.environment_tasks import EnvironmentTasks, side
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.envs.question import RowsEnvironment
from sensorium.envs.remote.client import RemoteEnvironment
from sensorium.envs.tool_use import write_call
from sensorium.services.sessions import Offers, SessionTable, rows_offer
from sensorium.vocabulary.errors import RecipeError

from .running import serving
from .test_other_protocols import asked, at, form, parts

LOOK = write_call("crop", {"box": [0, 0, 500, 500]})


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows for the tool ``crop``, and two for geo3k; in files that describe a source each."""
    folder = tmp_path_factory.mktemp("rows")
    for n in range(2):
        pixels = np.zeros((40, 40, 3), np.uint8)
        pixels[:20, :20] = (200, 100 * n, 50)
        (folder / f"{n}.png").write_bytes(encode_png(pixels))
    shown = [[{"type": "image", "image": f"{n}.png"}, {"type": "text", "text": "Which?"}] for n in range(2)]
    look = [{"messages": [{"role": "user", "content": content}], "answer": "red"} for content in shown]
    solve = [{"messages": [{"role": "user", "content": f"How much is {n} + 1?"}], "answer": str(n + 1)} for n in range(2)]
    tools = {
        "name": "tools",
        "options": {"tools": [{"name": "crop", "options": {"side": 32}}], "offer": "text", "max_turns": 3},
    }
    for name, held, environment in (("look", look, tools), ("solve", solve, {"name": "geo3k"})):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, held)))
        source = {"source": "jsonl", "options": {"path": str(folder / f"{name}.jsonl"), "environment": environment}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(source))
    return folder


def test_a_tools_picture_arrives_by_every_protocol(rows: Path) -> None:
    offers = Offers(dict(rows_offer(f"{name}={rows / name}.yaml") for name in ("look", "solve")))
    here = RowsEnvironment(MediaStore(), **offers.offers["look"].options)
    _, first = here.reset(1)
    shown = here.step(LOOK).observation
    assert shown is not None
    question, part = (here._store.bytes_of(seen.messages[-1].media[0]) for seen in (first, shown))
    assert question != part
    with serving(SessionTable(offers, MediaStore(), capacity=20)) as address, httpx.Client(base_url=address) as http:
        store = MediaStore()
        there = RemoteEnvironment(store, address, "look")
        _, opening = there.reset(1)
        step = there.step(LOOK)
        assert step.observation is not None
        assert [store.bytes_of(o.messages[-1].media[0]) for o in (opening, step.observation)] == [question, part]
        with connect(at(address, "/openenv/look/ws")) as socket:
            frames = [
                asked(socket, {"type": "reset", "data": {"seed": 1}}),
                asked(socket, {"type": "step", "data": {"response": LOOK}}),
            ]
            assert [base64.b64decode(f["data"]["observation"]["images"][0]) for f in frames] == [question, part]

        def post(path: str, body: object) -> tuple[dict[str, object], list[bytes]]:
            content, headers = form(body)
            return parts(http.post(path, content=content, headers=headers))

        opened, images = post("/connect", {"env_config": {"env_name": "look"}, "seed": 1})
        call = {"session_id": opened["session_id"], "method": "step", "params": {"action_str": LOOK}}
        assert (images, post("/call", call)[1]) == ([question], [part])
        http.post("/environments", json={"ids2configs": {"a": {"env_name": "look", "env_config": {}}}})
        seen = [
            http.post("/reset/a", json={"seed": 1}).json()["observation"],
            http.post("/step/a", json={"action": LOOK}).json()["observation"],
        ]
        assert [base64.b64decode(o["multi_modal_data"]["<image>"][0]["__pil_image__"]) for o in seen] == [question, part]
        solving = RemoteEnvironment(MediaStore(), address, "solve")
        solving.reset(1)
        solving.step(solving.demonstrate())
        last = solving.step(solving.demonstrate())
        assert (last.reward, last.success) == ({"success": 1.0}, True)


def test_rows_are_split_by_what_they_ask_and_clients_cannot_choose_the_source(rows: Path) -> None:
    name, offer = rows_offer(f"solve={rows / 'solve'}.yaml")
    options = dict(offer.options)
    keys = {RowsEnvironment.content_key(seed, options) for seed in range(10)}
    assert len(keys) == 2
    whole = EnvironmentTasks("rows", MediaStore(), options, side(min(keys)), 1)
    assert RowsEnvironment.content_key(whole.seeds[0], options) in keys
    with pytest.raises(RecipeError, match="the server's own"):
        Offers({name: offer}).chosen(name, {"source": "parquet"})


@pytest.mark.parametrize("held", ["[1]", "{path: x}", "{source: jsonl, more: 1}", "{"])
def test_a_file_that_describes_no_source_is_refused(held: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(held)
    with pytest.raises(RecipeError, match="--rows x="):
        rows_offer(f"x={tmp_path / 'x.yaml'}")
    with pytest.raises(RecipeError, match="cannot be read"):
        rows_offer("x=/nowhere.yaml")
