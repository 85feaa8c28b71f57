"""OpenEnv: our client against a server that speaks the recorded frames, and loses, refuses and breaks as stock ones do."""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.envs.adapters.openenv import OpenEnvironment
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError

server = pytest.importorskip("websockets.sync.server")
PNG = base64.b64encode(encode_png(np.full((6, 5, 3), 200, np.uint8))).decode()

Answer = Callable[[dict[str, Any], dict[str, Any]], "dict[str, Any] | str | None"]


def observation(fields: dict[str, Any], reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"metadata": {}, **fields}, "reward": reward, "done": done}}


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def walk(frame: dict[str, Any], state: dict[str, Any]) -> dict[str, Any] | str | None:
    """A walk to place 2: reset gives a picture, step moves by l and r."""
    if frame["type"] == "reset":
        state["pos"], state["seed"] = 0, frame["data"]["seed"]
        return observation({"text": f"seed {state['seed']}", "image_b64": PNG})
    move = frame["data"].get("move")
    if move is None:
        missing = {"type": "missing", "loc": ["move"], "msg": "Field required"}
        return error("VALIDATION_ERROR", "Invalid message", errors=[missing])
    if move == "x":
        return error("EXECUTION_ERROR", "the ice broke")
    if move == "drop":
        return None
    if move == "hang":
        return "hang"
    state["pos"] += {"r": 1, "l": -1}.get(move, 0)
    return observation({"text": f"pos {state['pos']}"}, float(state["pos"] == 2), state["pos"] == 2)


@contextmanager
def serving(answer: Answer, places: int = 99) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server; every frame that reached it is noted. Past ``places`` connections it says so unasked, and closes."""
    frames: list[dict[str, Any]] = []
    free = threading.Semaphore(places)

    def handle(connection: Any) -> None:
        if not free.acquire(blocking=False):
            frames.append({"type": "full"})
            connection.send(json.dumps(error("CAPACITY_REACHED", "Server at capacity", active_sessions=1, max_sessions=1)))
            return
        state: dict[str, Any] = {}
        try:
            for text in connection:
                frames.append(json.loads(text))
                reply = answer(frames[-1], state)
                if reply is None:
                    return
                if reply == "hang":
                    continue
                connection.send(json.dumps(reply))
        finally:
            free.release()

    with server.serve(handle, "127.0.0.1", 0) as serving_on:
        thread = threading.Thread(target=serving_on.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{serving_on.socket.getsockname()[1]}", frames
        serving_on.shutdown()


MOVES = {"left": {"move": "l"}, "right": {"move": "r"}}


def test_an_episode_is_played_over_the_recorded_frames() -> None:
    with serving(walk) as (url, frames):
        environment = OpenEnvironment(
            MediaStore(), url, actions=MOVES, media={"image_b64": "base64"}, reset={"size": 5}, response_format="no_think"
        )
        head, first = environment.reset(7)
        assert "Answers: left, right." in head[0].text
        (message,) = first.messages
        assert message.text == "seed 7"
        assert environment.store.picture(message.media[0]).size == (5, 6)
        result = environment.step("<answer>Right</answer>")
        assert (result.reward, result.done) == (0.0, False)
        assert result.observation is not None
        assert result.observation.messages[0].text == "pos 1"
        assert environment.step("<answer>jump</answer>").info["valid"] is False
        result = environment.step("<answer>right</answer>")
        assert (result.reward, result.done, result.truncated, result.success) == (1.0, True, False, True)
        environment.close()
        assert frames == [
            {"type": "reset", "data": {"seed": 7, "size": 5}},
            {"type": "step", "data": {"move": "r"}},
            {"type": "step", "data": {"move": "r"}},
        ]


def test_free_text_goes_into_a_field_and_what_the_server_refuses_is_told() -> None:
    with serving(walk) as (url, frames):
        environment = OpenEnvironment(MediaStore(), url, field="move", action={"metadata": {"by": "us"}}, max_turns=2)
        environment.reset(0)
        environment.step("r")
        assert frames[-1]["data"] == {"metadata": {"by": "us"}, "move": "r"}
        other = OpenEnvironment(MediaStore(), url, field="bogus")
        other.reset(0)
        result = other.step("r")
        assert result.observation is not None
        assert result.observation.messages[0].text == "The action was refused: Invalid message; move: Field required"
        assert (result.reward, result.info["valid"]) == (0.0, False)
        environment.close()
        other.close()


@pytest.mark.parametrize(("move", "why"), [("x", "the ice broke"), ("drop", "lost"), ("hang", "no reply within 0.3 s")])
def test_what_is_lost_ends_the_episode_and_is_never_sent_again(move: str, why: str) -> None:
    with serving(walk) as (url, frames):
        environment = OpenEnvironment(MediaStore(), url, field="move")
        environment.reset(0)
        environment.deadline_s = 0.3 if move == "hang" else 60.0
        with pytest.raises(EnvironmentFailure, match=why):
            environment.step(move)
        with pytest.raises(EnvironmentFailure, match="reset"):
            environment.step("r")
        assert [frame["type"] for frame in frames] == ["reset", "step"]
        environment.close()


def test_a_full_server_is_asked_again_until_there_is_a_place() -> None:
    with serving(walk, places=1) as (url, frames):
        first, second = (OpenEnvironment(MediaStore(), url, field="move") for _ in range(2))
        first.reset(1)
        leaving = threading.Timer(0.5, first.close)
        leaving.start()
        _, shown = second.reset(2)
        assert "seed 2" in shown.messages[0].text
        assert {"type": "full"} in frames
        third = OpenEnvironment(MediaStore(), url, field="move", connect_s=5)
        with pytest.raises(EnvironmentFailure, match="Server at capacity"):
            third.reset(3)
        second.close()


def test_every_form_of_picture_is_taken() -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    block = {"type": "image", "data": PNG, "mimeType": "image/png"}
    fields = {
        "shots": [PNG, f"data:image/png;base64,{PNG}"],
        "grid": pixels.tolist(),
        "screen": pixels.ravel().tolist(),
        "screen_shape": [2, 3, 3],
        "result": {"content": [{"type": "text", "text": "a crop"}, block], "is_error": False},
        "score": 3,
    }
    media = {"shots": "base64", "grid": "pixels", "screen": "screen_shape", "result": "mcp", "absent": "base64"}
    with serving(lambda frame, state: observation(fields)) as (url, _):
        environment = OpenEnvironment(MediaStore(), url, field="move", media=media, text=["score"])
        (message,) = environment.reset(0)[1].messages
        assert message.text == "3"
        sizes = [environment.store.picture(item).size for item in message.media]
        assert sizes == [(5, 6), (5, 6), (3, 2), (3, 2), (5, 6)]
        environment.close()


@pytest.mark.parametrize("fields", [{"image": "no picture!"}, {"image": "aGVsbG8="}, {"image": [[300]]}, {"image": {}}])
def test_a_broken_picture_fails_the_episode_by_name(fields: dict[str, Any]) -> None:
    from sensorium.vocabulary.errors import MediaError

    with serving(lambda frame, state: observation(fields)) as (url, _):
        environment = OpenEnvironment(MediaStore(), url, field="move", media={"image": "pixels"})
        with pytest.raises((EnvironmentFailure, MediaError), match="seed 0 turn 0"):
            environment.reset(0)
        environment.close()


def test_seeds_are_told_apart_by_what_is_shown() -> None:
    with serving(walk) as (url, _):
        options = {"url": url, "field": "move"}
        assert len({OpenEnvironment.content_key(seed, options) for seed in (1, 2, 2)}) == 2


def test_what_cannot_be_reached_is_named() -> None:
    with pytest.raises(EnvironmentFailure, match="no connection"):
        OpenEnvironment(MediaStore(), "ws://127.0.0.1:9/ws", field="move", connect_s=2).reset(0)
    for options in ({"url": "x", "field": "move"}, {"url": "ws://a"}):
        with pytest.raises(RecipeError, match="openenv"):
            OpenEnvironment(MediaStore(), **options)
