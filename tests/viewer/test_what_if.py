"""What-if requests over a real run: a step of the shipped model on questions about pictures and walks on a lake."""

import base64
import json
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest
from PIL import Image
from starlette.testclient import TestClient

import sensorium as sn
from sensorium.data.media_store import MediaStore
from sensorium.data.shapes import Shapes
from sensorium.data.sound import DecodedAudio
from sensorium.data.video import DecodedVideo
from sensorium.viewer import View
from sensorium.viewer.server import make_view
from sensorium.viewer.what_if import MOST_WAITING, Job, MediumEdit, WhatIf, default_checkpoint, edited
from sensorium.vocabulary.errors import MediaError
from tests.recipes import quick
from tests.viewer.test_server import HERE, TOKEN, get, indexed, run_named

ASKED: dict[str, Any] = {"size": 64, "kinds": ["colour", "count"], "picture_size": 64}
LAKE = {"environment": "frozen_lake", "size": 4, "distinct": False, "options": {"max_turns": 3, "cell": 32}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("what_if")
    sources = [{"source": "shapes", "options": ASKED, "weight": 3}, {"source": "environments", "options": LAKE}]
    sn.train(
        quick(
            "asked",
            run_dir=folder / "asked",
            steps=1,
            tasks={"train": sources},
            batch={"prompts_per_step": 16, "group_size": 2},
            rollout={"max_new_tokens": 6, "max_turns": 3},
            optimizer={"lr": 1e-3},
            rewards={"terms": [{"name": "exact"}, {"name": "tests.trainer.small:ByParity"}]},
            logging={"episodes": 32},
        ),
        show=False,
    )
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(make_view([folder], TOKEN, device="cpu"), base_url=HERE) as client:
        yield client


def ask(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    """The last line of an answer: its result, or the problem."""
    reply = client.post(f"/{TOKEN}/api/what_if/{path}", json=body)
    assert reply.status_code == 200, reply.text
    last: dict[str, Any] = json.loads(reply.text.splitlines()[-1])
    return last


@pytest.fixture(scope="module")
def episodes(client: TestClient) -> dict[str, dict[str, Any]]:
    """The address of one episode of each task."""
    run = run_named(client, "asked")
    return {one["task"]: {"run": run, "file": one["file"], "id": one["name"]} for one in indexed(client, run)["episodes"]}


@pytest.fixture(scope="module")
def walk(episodes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return next(at for task, at in episodes.items() if task.startswith("frozen_lake"))


def test_a_blank_picture_costs_the_answer_and_a_blank_corner_does_not(
    client: TestClient, episodes: dict[str, dict[str, Any]]
) -> None:
    source = Shapes(store=MediaStore(), **ASKED)
    falls: dict[str, list[float]] = {"whole": [], "empty": []}
    for task, at in episodes.items():
        scene = source.scene(int(task.rpartition("/")[2])) if task.startswith("shapes") else None
        if scene is None or scene.kind != "colour":  # the shipped model only guesses at the others
            continue
        used = {thing.quarter for thing in scene.things}
        for quarter in sorted(set(range(4)) - used)[:1]:
            left, top = quarter % 2 / 2, quarter // 2 / 2
            for name, box in (("whole", (0, 0, 1, 1)), ("empty", (left, top, left + 0.5, top + 0.5))):
                found = ask(client, "answer", **at, media=[{"medium": 0, "change": "blank", "box": box}])["result"]
                assert found["before"]["logprobs"] == pytest.approx(found["stored"], abs=2e-5), "by what sampled it"
                falls[name].append(found["before"]["sum"] - found["after"]["sum"])
    assert len(falls["whole"]) >= 4
    assert mean(falls["whole"]) > 0.5
    assert abs(mean(falls["empty"])) < 0.1 * mean(falls["whole"])
    offered = get(client, "api/what_if", **at).json()
    assert {one["name"] for one in offered["checkpoints"]} == {"start", "1"}
    assert offered["usual_new"] == 6, "as many tokens as the run's answers may have"


def test_a_map_and_a_swap_agree_with_the_edit_that_does_the_same(
    client: TestClient, episodes: dict[str, dict[str, Any]]
) -> None:
    (first, one), (second, other) = [(task, at) for task, at in episodes.items() if task.startswith("shapes")][:2]
    found = ask(client, "map", **one, medium=0)["result"]
    assert found["across"] == found["down"] == [0, 0.25, 0.5, 0.75, 1]
    row, column = max(((y, x) for y in range(4) for x in range(4)), key=lambda at: abs(found["changes"][at[0]][at[1]]))
    picture = Image.open(BytesIO(get(client, "api/medium", **one, n=0).content)).convert("RGB")
    pixels = list(picture.getdata())
    covered = picture.copy()
    covered.paste(
        tuple(round(mean(values)) for values in zip(*pixels, strict=True)),
        (16 * column, 16 * row, 16 * column + 16, 16 * row + 16),
    )
    buffer = BytesIO()
    covered.save(buffer, format="PNG")
    sent = base64.b64encode(buffer.getvalue()).decode()
    moved = ask(client, "answer", **one, media=[{"medium": 0, "change": "swap", "picture": sent}])["result"]
    change = moved["after"]["sum"] - moved["before"]["sum"]
    assert change == pytest.approx(found["changes"][row][column], abs=1e-4)
    swap = {"medium": 0, "change": "swap", "other": {"file": other["file"], "id": other["id"]}}
    text = get(client, "api/what_if", **other).json()["texts"][0] | {"turn": 0}
    texts = [{key: text[key] for key in ("turn", "message", "block", "text")}]
    asked = ask(client, "answer", **one, checkpoint="start", media=[swap], texts=texts, new={"seed": 3})["result"]
    alone = ask(client, "answer", **other, checkpoint="start", new={"seed": 3})["result"]
    assert (asked["new"]["text"], alone["after"]) == (alone["new"]["text"], None), (first, second)
    assert asked["new"]["logprobs"] == pytest.approx(alone["new"]["logprobs"], abs=1e-5)
    assert [(one["name"], one["correct"]) for one in alone["new"]["scores"]] == [("exact", True), ("parity", None)]
    later = ask(client, "answer", **one, checkpoint="1")["result"]
    assert later["before"]["logprobs"] != pytest.approx(later["stored"], abs=1e-6), "the weights of step 1 did not write it"


def test_an_episode_is_forked_where_its_environment_repeats(client: TestClient, walk: dict[str, Any]) -> None:
    page = get(client, "api/episode", **walk).json()
    stored = [turn["response"] for turn in page["turns"]]
    own = ask(client, "fork", **walk, turn=1, responses=["<answer>Down</answer>"], go_on=False)["result"]
    assert [(turn["index"], turn["by"], turn["text"]) for turn in own["turns"]] == [(1, "person", "<answer>Down</answer>")]
    assert own["turns"][0]["reward"] is not None
    assert own["next"][0]["role"] == "user"
    assert any(block.get("picture", "").startswith("data:image/png;base64,") for block in own["next"][0]["blocks"])
    on = ask(client, "fork", **walk, turn=2, new={"temperature": 1, "seed": 1, "max_new_tokens": 6})["result"]
    assert [(turn["index"], turn["by"]) for turn in on["turns"]] == [(2, "model")]
    again = ask(client, "fork", **walk, turn=2, new={"temperature": 1, "seed": 1, "max_new_tokens": 6})["result"]
    assert on["turns"] == again["turns"]
    assert on["status"] in ("finished", "truncated")
    late = ask(client, "answer", **walk, turn=2)["result"]
    assert late["before"]["logprobs"] == pytest.approx(late["stored"], abs=2e-5)
    assert "".join(late["tokens"]) == stored[2]


def test_a_fork_says_where_the_environment_shows_something_else(
    client: TestClient, walk: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    log = folder / "asked" / walk["file"]
    row = next(row for row in map(json.loads, log.read_text().splitlines()) if row["episode"]["id"] == walk["id"])
    row["task"]["environment"]["seed"] += 1
    (tmp_path / "moved").mkdir()
    for name in ("media", "recipe.yaml"):
        (tmp_path / "moved" / name).symlink_to(folder / "asked" / name)
    (tmp_path / "moved" / "episodes").mkdir()
    (tmp_path / "moved" / walk["file"]).write_text(json.dumps(row) + "\n")
    with TestClient(make_view([tmp_path], TOKEN, device="cpu"), base_url=HERE) as other:
        at = walk | {"run": run_named(other, "moved")}
        indexed(other, at["run"])
        assert "something else" in ask(other, "fork", **at, turn=1)["problem"]
        recipe = tmp_path / "moved/recipe.yaml"
        text = recipe.read_text().replace("package:shapes", "nobody/absent")
        recipe.unlink()
        recipe.write_text(text)
        assert "hf download nobody/absent" in ask(other, "answer", **at, checkpoint="start")["problem"]


@pytest.mark.parametrize(
    "body",
    [
        {"turn": 7},
        {"checkpoint": "7"},
        {"media": [{"medium": 9, "change": "blank"}]},
        {"media": [{"medium": 0, "change": "mute"}]},
        {"media": [{"medium": 0, "change": "swap", "picture": "bm8gcGljdHVyZQ=="}]},
        {"texts": [{"turn": 0, "message": 0, "block": 9, "text": ""}]},
    ],
)
def test_what_cannot_be_asked_is_a_problem_in_words(
    client: TestClient, episodes: dict[str, dict[str, Any]], body: dict[str, Any]
) -> None:
    at = next(at for task, at in episodes.items() if task.startswith("shapes"))
    assert ask(client, "answer", **at, **body)["problem"]


def test_only_the_page_may_ask_and_only_so_much(client: TestClient, episodes: dict[str, dict[str, Any]]) -> None:
    at = next(iter(episodes.values()))
    path = f"/{TOKEN}/api/what_if/answer"

    def status(path: str = path, body: Any = at, **headers: str) -> int:
        return client.post(
            path, content=json.dumps(body), headers={"content-type": "application/json"} | headers
        ).status_code

    assert status(path.replace(TOKEN, "another")) == 404
    assert status(**{"origin": "https://evil.example"}) == 403
    assert status(**{"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}) == 403
    assert status(**{"content-type": "text/plain"}) == 415
    assert status(f"/{TOKEN}/api/runs") == 405
    assert status(body=at | {"media": [{"medium": 0, "change": "blank"}] * 17}) == 400
    assert status(body=at | {"new": {"max_new_tokens": 10**6}}) == 400
    assert status(body=at | {"padding": "x" * (25 << 20)}) == 413


def test_a_request_that_would_wait_too_long_is_refused(
    client: TestClient, episodes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, begun, open_ = next(iter(episodes.values())), threading.Event(), threading.Event()

    def waiting(self: Any, job: Any, *given: Any) -> dict[str, Any]:
        begun.set()
        open_.wait(60)
        return {}

    monkeypatch.setattr(WhatIf, "answer", waiting)
    replies: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: replies.append(client.post(f"/{TOKEN}/api/what_if/answer", json=at)))
        for _ in range(MOST_WAITING + 2)
    ]
    try:
        threads[0].start()
        assert begun.wait(60)
        for thread in threads[1:]:
            thread.start()
        while not replies:
            threads[-1].join(0.01)
    finally:
        open_.set()
    for thread in threads:
        thread.join()
    assert sorted(reply.status_code for reply in replies) == [200] * (MOST_WAITING + 1) + [503]


def test_a_request_ends_with_its_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(self: Any, job: Job, *given: Any) -> dict[str, Any]:
        begun.set()
        try:
            while not job.cancelled.wait(60):
                pass
            job.check()
        finally:
            ended.set()
        return {}

    monkeypatch.setattr(WhatIf, "answer", endless)
    with View([folder], device="cpu") as view, httpx.Client(base_url=view.address, timeout=60) as page:
        run = page.get("api/runs").json()["runs"][0]["id"]
        while not (rows := page.get("api/episodes", params={"run": run}).json()["episodes"]):
            pass
        at = {"run": run, "file": rows[0]["file"], "id": rows[0]["name"]}
        with page.stream("POST", "api/what_if/answer", json=at):
            assert begun.wait(60)
        assert ended.wait(60)


def test_clips_are_edited_as_they_were_decoded() -> None:
    import numpy as np

    frames = np.arange(4 * 8 * 8 * 3, dtype=np.uint8).reshape(4, 8, 8, 3)
    seconds = np.arange(4.0)
    video = DecodedVideo(frames, seconds, 1.0, 4.0, (8, 8), 0.0, 4.0, np.arange(4), 1.0)
    dropped = edited(video, MediumEdit(medium=0, change="drop", frame=2))
    assert isinstance(dropped, DecodedVideo)
    assert (dropped.frames[2] == frames[1]).all()
    assert (dropped.frames[[0, 1, 3]] == frames[[0, 1, 3]]).all()
    grey = edited(video, MediumEdit(medium=0, change="blank", frame=0, box=(0, 0, 0.5, 1)))
    assert isinstance(grey, DecodedVideo)
    assert (grey.frames[0, :, :4] == 127).all()
    assert (grey.frames[0, :, 4:] == frames[0, :, 4:]).all()
    sound = DecodedAudio(np.ones(40, np.float32), 10, 6.0, 2.0, 6.0)
    muted = edited(sound, MediumEdit(medium=0, change="mute", start=3, end=4))
    assert isinstance(muted, DecodedAudio)
    assert muted.samples.tolist() == [1.0] * 10 + [0.0] * 10 + [1.0] * 20
    with pytest.raises(MediaError):
        edited(sound, MediumEdit(medium=0, change="mute", start=0, end=1))
    with pytest.raises(MediaError):
        edited(video, MediumEdit(medium=0, change="drop", frame=4))


def test_the_default_checkpoint_is_the_last_from_before_the_episode() -> None:
    known = [{"name": "start", "step": 0}, {"name": "4", "step": 4}, {"name": "8", "step": 8}]
    assert default_checkpoint(known, "episodes/step_000004.jsonl", 4) == "start"
    assert default_checkpoint(known, "episodes/step_000005.jsonl", 5) == "4"
    assert default_checkpoint(known, "eval/step_000008_eval.jsonl", 8) == "8"
    assert default_checkpoint(known[2:], "episodes/step_000003.jsonl", 3) == "8"
    assert default_checkpoint([], "episodes/step_000003.jsonl", 3) == ""
