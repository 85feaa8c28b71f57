"""What the page's server gives to its page, and what it refuses everybody else."""

import json
import math
import os
import re
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import av
import httpx
import pytest
from PIL import Image
from starlette.testclient import TestClient

from sensorium.data.media_store import MediaStore
from sensorium.runs.durable import read_rows
from sensorium.runs.episodes import TRANSCRIPTS, write_episodes
from sensorium.runs.metrics import MetricsFile, Notice, write_notice
from sensorium.runs.run_directory import RunDirectory, lock_run
from sensorium.viewer.episode import places_in, places_named, places_of
from sensorium.viewer.index import EpisodeIndex
from sensorium.viewer.runs import INDEX_S, INDEX_SHARE, ViewedRun, charts
from sensorium.viewer.server import HEADERS, make_view
from sensorium.vocabulary import Episode, Group, Message, Score, Segment, Status, Task, Text, Thread, Turn, user
from sensorium.vocabulary.content import Media
from tests.data.clips import CLIP, middle
from tests.report.synthetic_run import make_rescoring, make_run, make_walks

TOKEN = "token-of-the-tests"
HERE = "http://127.0.0.1:8400"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view") / "runs"
    make_run(folder / "shapes", steps=12)
    walks = make_walks(folder / "more/lake")
    write_notice(walks.health, Notice(3, "no_answer", "began", "no answer was found", True))
    (folder / "secret.txt").write_text("not for the page")
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(make_view([folder], TOKEN), base_url=HERE) as client:
        yield client


def get(client: TestClient, path: str, **query: object) -> httpx.Response:
    return client.get(f"/{TOKEN}/{path}", params={key: str(value) for key, value in query.items()})


def run_named(client: TestClient, name: str) -> str:
    (found,) = [run["id"] for run in get(client, "api/runs").json()["runs"] if run["name"] == name]
    return str(found)


def indexed(client: TestClient, run: str) -> dict:
    """The episodes of a run once they are all indexed: each request brings the index further."""
    while (
        get(client, "api/run", run=run).json()["episodes"]["count"] == 0
        or get(client, "api/episodes", run=run).json()["busy"]
    ):
        pass
    return get(client, "api/episodes", run=run, limit=200).json()


def test_lists_runs_with_state_health_and_curves(client: TestClient, folder: Path) -> None:
    runs = {run["name"]: run for run in get(client, "api/runs").json()["runs"]}
    assert set(runs) == {"shapes", "more/lake"}
    assert runs["shapes"]["state"] == "finished"
    assert runs["shapes"]["health"] == "well"
    assert runs["shapes"]["last"]["reward/mean"] > 0
    assert runs["more/lake"]["state"] == "stopped"
    assert runs["more/lake"]["health"] == "grave"
    details = get(client, "api/run", run=runs["shapes"]["id"]).json()
    assert details["metrics"][:2] == ["reward/mean", "accuracy"]
    assert len(details["evaluations"]) == 13
    with lock_run(folder / "shapes"):
        assert {run["state"] for run in get(client, "api/runs").json()["runs"] if run["name"] == "shapes"} == {"running"}
    shown = get(client, "api/charts", runs=f"{runs['shapes']['id']},{runs['more/lake']['id']}", metrics="accuracy").json()
    assert shown["charts"][0].startswith('<figure class="plot"><figcaption><b>accuracy')


def test_curves_begin_before_training_and_small_values_are_seen(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "small")
    run.write_summary(0, {"step": 0, "name": "eval", "accuracy": 0.25, "reward": None})
    metrics = MetricsFile(run.metrics)
    metrics.append(1, {"mismatch/kl": 2e-5})
    metrics.append(2, {"mismatch/kl": 4e-5, "eval/accuracy": 0.5, "eval/reward": 0.5})
    viewed = ViewedRun(run.path, "small")
    assert viewed.series("small", "eval/accuracy", 0).points == ((0.0, 0.25), (2.0, 0.5))
    assert viewed.series("small", "eval/reward", 0).points == ((2.0, 0.5),)
    heights = [float(y) for y in re.findall(r"[ML][\d.]+,([\d.]+)", charts([viewed], ["mismatch/kl"])[0])]
    assert max(heights) - min(heights) > 50
    (run.eval / "step_000000_eval.json").write_text('{"accuracy": [')
    assert viewed.series("small", "eval/accuracy", 0).points == ((2.0, 0.5),)


def test_beside_a_run_that_goes_on_indexing_takes_a_share_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", steps=6)
    viewed = ViewedRun(run.path, "run")
    with TestClient(make_view([tmp_path], TOKEN), base_url=HERE) as client:
        id = run_named(client, "run")
        with lock_run(run.path):
            os.utime(run.path / "run.lock", (time.time() - 1000,) * 2)
            assert viewed.index_s_left == pytest.approx(INDEX_S + 1000 * INDEX_SHARE, abs=0.5)
            viewed.index_s = 10.0
            assert viewed.index_s_left < 0
            os.utime(run.path / "run.lock")  # it is resumed
            assert viewed.index_s_left == pytest.approx(INDEX_S, abs=0.05)
            monkeypatch.setattr("sensorium.viewer.runs.INDEX_S", -1.0)
            found = get(client, "api/episodes", run=id).json()
            assert (found["count"], found["waits"]) == (0, True)
        assert indexed(client, id)["waits"] is False
        assert viewed.index_s_left == math.inf


def test_the_address_of_an_episode_leads_to_it_before_its_log_is_indexed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=6)
    log = sorted(run.episodes.iterdir())[-1]
    name = next(read_rows(log))["episode"]["id"]
    with TestClient(make_view([tmp_path], TOKEN), base_url=HERE) as client:
        asked = {"run": run_named(client, "run"), "file": f"episodes/{log.name}"}
        assert get(client, "api/episode", **asked, id=name).status_code == 200
        assert get(client, "api/episode", **asked, id="nobody").status_code == 404


def test_a_damaged_run_hides_neither_itself_nor_others(tmp_path: Path) -> None:
    make_run(tmp_path / "well", steps=6)
    run = make_run(tmp_path / "odd", steps=6)
    run.recipe.write_text("steps: .inf\nwarm_start: 5\nmodel: [1]\n")
    huge = f'{{"step": 7, "accuracy": 1{"0" * 400}}}\n'
    run.metrics.write_text(f'{{"step": NaN}}\n{huge}{{"step": 8, "accuracy": 1e999}}\n{{"step": 9, "accuracy": 0.5}}\n')
    run.health.write_text("[1]\n")
    EpisodeIndex(run).path.mkdir()
    with TestClient(make_view([tmp_path], TOKEN), base_url=HERE) as client:
        shown = {one["name"]: one for one in get(client, "api/runs").json()["runs"]}
        assert set(shown) == {"well", "odd"}
        assert shown["odd"]["step"] == 9
        assert "metrics.jsonl" in shown["odd"]["problem"]
        assert [one["rule"] for one in shown["odd"]["findings"]] == ["health.jsonl"]
        details = get(client, "api/run", run=shown["odd"]["id"])
        assert "view.sqlite" in details.json()["episodes"]["problems"][0]
        (chart,) = get(client, "api/charts", runs=shown["odd"]["id"], metrics="accuracy").json()["charts"]
        assert "nan" not in chart
        assert indexed(client, shown["well"]["id"])["count"] > 0


def test_names_the_keys_in_which_recipes_differ(client: TestClient) -> None:
    ids = ",".join(run_named(client, name) for name in ("shapes", "more/lake"))
    found = get(client, "api/differences", runs=ids).json()
    assert found["runs"] == ["shapes", "more/lake"]
    keys = {one["key"]: one["values"] for one in found["keys"]}
    assert keys["steps"] == ["12", "40"]
    assert "seed" not in keys


def test_an_episode_of_several_turns_has_its_pictures_and_its_group(client: TestClient) -> None:
    run = run_named(client, "more/lake")
    rows = indexed(client, run)["episodes"]
    row = next(row for row in rows if row["log"] == "train" and row["turns"] > 2)
    page = get(client, "api/episode", run=run, file=row["file"], id=row["name"]).json()
    assert len(page["turns"]) == row["turns"]
    assert len(page["attempts"]) == 4
    assert {other["file"] for other in page["others"]} == {row["file"] for row in rows if row["log"] == "train"} - {
        row["file"]
    }
    assert [shot["turn"] for shot in page["film"]] == list(range(row["turns"]))
    shown = get(client, "api/medium", run=run, file=row["file"], id=row["name"], n=page["film"][0]["medium"])
    assert shown.headers["content-type"] == "image/png"
    frames = Image.open(BytesIO(get(client, "api/film", run=run, file=row["file"], id=row["name"]).content))
    assert frames.format == "GIF"
    assert getattr(frames, "n_frames", 1) >= 2
    asked = {"run": run, "file": row["file"], "id": row["name"]}
    small = get(client, "api/thumb", **asked)
    assert max(Image.open(BytesIO(small.content)).size) <= 96
    kept = client.get(f"/{TOKEN}/api/thumb", params=asked, headers={"If-None-Match": small.headers["etag"]})
    assert (kept.status_code, kept.content) == (304, b"")
    assert small.headers["cache-control"] == "private, no-cache"  # a new run may have another picture there
    assert get(client, "api/medium", **asked, n=1).headers["etag"] != small.headers["etag"]
    assert {get(client, f"api/{part}", **asked, n=0).status_code for part in ("given", "heard", "strip")} == {422}
    searched = get(client, "api/episodes", run=run, text="Right", sort="turns", limit=3).json()
    assert searched["count"] >= 3
    assert len(searched["episodes"]) == 3


def test_rescorings_beside_a_run_are_shown_with_the_episodes_that_they_change(tmp_path: Path) -> None:
    run = make_run(tmp_path / "again", steps=6)
    make_run(tmp_path / "another", steps=6)
    with TestClient(make_view([tmp_path], TOKEN), base_url=HERE) as client:
        id = run_named(client, "again")
        assert get(client, "api/rescorings", run=id).json() == {"rescorings": []}
        assert str(run.path) in get(client, "api/run", run=id).json()["rescore"]
        folder = make_rescoring(run)
        indexed(client, id)
        (found,) = get(client, "api/rescorings", run=id).json()["rescorings"]
        assert found["name"] == folder.name
        assert {name for name, _ in found["rows"]} >= {"reward", "learning share", "reward/exact", "reward/token_length"}
        assert "token_length" in found["rewards"]
        assert str(run.path) not in found["rewards"]
        assert get(client, "api/rescorings", run=run_named(client, "another")).json() == {"rescorings": []}

        rows = list(read_rows(folder / "episodes.jsonl"))
        pairs = {(row["step"], row["episode"]): row for row in rows}
        turned = {key for key, row in pairs.items() for a, b in zip(*row["advantages"], strict=True) if a * b < 0}
        assert len(turned) == found["signs"]["episodes"] > 0
        asked = {"run": id, "name": folder.name, "limit": 200}
        opposite = get(client, "api/rescored", **asked, turned=True).json()
        assert {(row["step"], row["name"]) for row in opposite["episodes"]} == turned
        changed = get(client, "api/rescored", **asked).json()
        assert changed["count"] == sum(row["reward"][0] != row["reward"][1] for row in rows)
        sizes = [abs(row["reward"][1] - row["reward"][0]) for row in changed["episodes"]]
        assert sizes == sorted(sizes, reverse=True)
        gains = get(client, "api/rescored", **{**asked, "limit": 3}, sort="loss", offset=1).json()["episodes"]
        losses = sorted(row["reward"][1] - row["reward"][0] for row in rows)
        assert [row["reward"][1] - row["reward"][0] for row in gains] == losses[1:4]

        log = folder / "episodes.jsonl"
        before = log.read_text()
        missing = rows[0] | {"reward": [None, 1.0]}
        log.write_text("".join(f"{json.dumps(row)}\n" for row in [missing, *rows[1:]]))
        found = get(client, "api/rescored", **asked).json()["episodes"]
        assert [row["name"] for row in found if row["reward"][0] is None] == [found[-1]["name"]] == [missing["episode"]]
        log.write_text(before)

        row = changed["episodes"][0]
        page = get(client, "api/episode", run=id, file=row["file"], id=row["name"]).json()
        assert page["step"] == row["step"]
        (again,) = page["rescored"]
        assert again["reward"] == row["reward"] == pairs[row["step"], row["name"]]["reward"]
        assert again["terms"]["token_length"][0] is None
        for name in ("another", "../again", ""):
            assert get(client, "api/rescored", run=id, name=name).status_code == 404
        (folder / "rescoring.json").write_text("[]")
        (damaged,) = get(client, "api/rescorings", run=id).json()["rescorings"]
        assert folder.name in damaged["problem"]


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[tuple[TestClient, str, dict, RunDirectory]]:
    """A run of one episode with a clip, an infinite reward, markup, and in media/ a link to a file outside the run."""
    run = RunDirectory(tmp_path / "odd").create()
    run.recipe.write_text("name: odd\nrewards: {terms: [{name: x, options: {headers: {Key: sk-123456789}}}]}\n")
    video = MediaStore(run.media).put(CLIP, "video", "a clip", middle(frames=4, use_audio_in_video=True))
    outside = Media("picture", "a" * 64)
    (run.media / ("a" * 64)).symlink_to("/etc/passwd")
    climbing = Media("picture", "../recipe.yaml")
    text = "<img src=x onerror=alert(1)> at 1.0 s: click(3, 4) é"
    ends = tuple(range(1, len(text.encode())))  # the last character's bytes are one token each
    response = Segment(
        "model", (7,) * (len(ends) + 1), text=text, logprobs=(-0.5,) * (len(ends) + 1),
        sampled_logprobs=(-0.25,) * (len(ends) + 1), byte_ends=(*ends, len(text.encode())), name="e",
    )  # fmt: skip
    prompt = Segment("environment", (1, 2), text="Look.")
    turn = Turn(0, (user("Look.", video, outside, climbing),), response, 0, 1, info={"target_box": [1, 2, 3, 4]})
    scores = (Score("exact", float("inf")), Score("judge", None, reason="it was busy"))
    episode = Episode(
        "<e>", "t", "g", 0, (Thread((prompt, response), (False, True)),), (turn,), Status.FINISHED, "", scores
    )
    write_episodes(run.episodes_of(1), 1, [Group("g", Task("t", turn.observation), (episode,))])
    with TestClient(make_view([run.path], TOKEN), base_url=HERE) as client:
        name = run_named(client, "odd")
        yield client, name, indexed(client, name)["episodes"][0], run


def test_a_clip_plays_and_says_what_the_model_was_given(odd: tuple) -> None:
    client, run, row, _ = odd
    asked = {"run": run, "file": row["file"], "id": row["name"], "n": 0}
    whole = get(client, "api/medium", **asked)
    assert whole.headers["content-type"] == "video/mp4"
    part = client.get(f"/{TOKEN}/api/medium", params=asked, headers={"Range": "bytes=10-19"})
    assert part.status_code == 206
    assert part.content == whole.content[10:20]
    with av.open(BytesIO(whole.content)) as container:
        assert container.streams.video
    given, sound = get(client, "api/given", **asked).json()["parts"]
    assert given["frames"] == len(given["times"]) == 4
    assert max(sound["loudness"]) == pytest.approx(0.5, abs=0.05)
    assert get(client, "api/heard", **asked).content[:4] == b"RIFF"
    strip = Image.open(BytesIO(get(client, "api/strip", **asked).content))
    assert strip.size == (4 * given["tile"][0], given["tile"][1])


def test_the_system_prompt_of_a_question_is_shown(tmp_path: Path) -> None:
    """It is no observation, and the log has it in the task alone."""
    run = RunDirectory(tmp_path / "runs/asked").create()
    run.recipe.write_text("name: asked\nsteps: 1\nmodel: {path: 'tiny:qwen3_vl'}\n")
    asked, told = user("Which colour?"), Message("system", (Text("Be brief."),))
    prompt, response = Segment("environment", (1,), text="?"), Segment("model", (2,), text="red", name="a")
    turn = Turn(0, (asked,), response, 0, 1)
    episode = Episode("e", "t", "g", 0, (Thread((prompt, response), (False, True)),), (turn,), Status.FINISHED)
    write_episodes(run.episodes_of(1), 1, [Group("g", Task("t", (told, asked)), (episode,))])
    with TestClient(make_view([tmp_path / "runs"], TOKEN), base_url=HERE) as client:
        named = run_named(client, "asked")
        (row,) = indexed(client, named)["episodes"]
        page = get(client, "api/episode", run=named, file=row["file"], id=row["name"]).json()
    assert [(one["role"], one["blocks"]) for one in page["head"]] == [("system", [{"text": "Be brief."}])]
    assert [one["role"] for one in page["turns"][0]["observation"]] == ["user"]


def test_tokens_and_numbers_are_as_they_were_logged(odd: tuple) -> None:
    client, run, row, _ = odd
    page = get(client, "api/episode", run=run, file=row["file"], id=row["name"]).json()
    (turn,) = page["turns"]
    tokens = turn["tokens"]
    assert "".join(tokens["texts"]) == turn["response"]
    assert tokens["texts"][-2:] == ["", "é"]
    assert set(tokens["logprobs"]) == {-0.5}
    assert set(tokens["sampled"]) == {-0.25}
    assert tokens["advantages"] == []
    assert page["stored"] == {
        "advantage": False, "logprob": True, "sampled": True, "entropy": False, "mismatch": False
    }  # fmt: skip
    assert page["unmeasured"]
    assert [(place["kind"], place["at"]) for place in turn["places"]] == [("point", [3, 4]), ("box", [1, 2, 3, 4])]
    assert page["scores"][0]["value"] == "Infinity"
    assert row["reward"] is None
    assert page["scores"][1]["reason"] == "it was busy"


def test_a_file_outside_the_run_is_not_served(odd: tuple) -> None:
    client, run, row, directory = odd
    asked = {"run": run, "file": row["file"], "id": row["name"]}
    page = get(client, "api/episode", **asked).json()
    for n, medium in enumerate(page["media"]):
        answer = get(client, "api/medium", **asked, n=n)
        assert (answer.status_code == 200) == (medium["kind"] == "video")
        assert b"root:" not in answer.content
        assert b"rewards" not in answer.content
    for file in ("../recipe.yaml", "recipe.yaml", "/etc/passwd", "episodes/../recipe.yaml", row["file"] + "\0"):
        assert get(client, "api/episode", run=run, file=file, id=row["name"]).status_code == 404
    assert "sk-123456789" not in get(client, "api/run", run=run).text
    assert directory.recipe.read_text().count("sk-123456789") == 1


def test_a_damaged_file_of_judges_is_named_on_the_page(odd: tuple) -> None:
    client, run, row, directory = odd
    (directory.path / TRANSCRIPTS).write_bytes(b"no database at all" * 100)
    page = get(client, "api/episode", run=run, file=row["file"], id=row["name"]).json()
    assert TRANSCRIPTS in page["judges"][0]["answer"]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (f"/{TOKEN}/", {}, 200),
        (f"/{TOKEN}/", {"Host": "localhost:9000"}, 200),
        (f"/{TOKEN}/api/runs", {"Origin": HERE}, 200),
        (f"/{TOKEN}/api/runs", {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
        (f"/{TOKEN}/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ("/", {}, 404),
        ("/api/runs", {}, 404),
        (f"/{TOKEN[:-1]}/api/runs", {}, 404),
        (f"/{TOKEN}x/api/runs", {}, 404),
        (f"/x/{TOKEN}/api/runs", {}, 404),
        (f"//{TOKEN}/api/runs", {}, 404),
        ("/%F0%9F%98%80/api/runs", {}, 404),
        (f"/api/runs?token={TOKEN}", {}, 404),
        (f"/{TOKEN}/api/runs", {"Host": "evil.example:8400"}, 403),
        (f"/{TOKEN}/api/runs", {"Host": "192.168.0.7:8400"}, 403),
        (f"/{TOKEN}/api/runs", {"Origin": "https://evil.example"}, 403),
        (f"/{TOKEN}/api/runs", {"Origin": "http://127.0.0.1:9999"}, 403),
        (f"/{TOKEN}/api/runs", {"Origin": "null"}, 403),
        (f"/{TOKEN}/api/runs", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        (f"/{TOKEN}/api/runs", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 403),
        (f"/{TOKEN}/openapi.json", {}, 404),
        (f"/{TOKEN}/docs", {}, 404),
        (f"/{TOKEN}/secret.txt", {}, 404),
        (f"/{TOKEN}/assets/viewer/..%2F..%2Fpy.typed", {}, 404),
        (f"/{TOKEN}/assets/..%2Fsrc/x", {}, 404),
        (f"/{TOKEN}/assets/viewer/%2e%2e%2findex.py", {}, 404),
        (f"/{TOKEN}/assets/viewer/index.py", {}, 404),
        (f"/{TOKEN}/..%2f..%2f..%2fetc/passwd", {}, 404),
    ],
)
def test_only_the_page_itself_is_answered(client: TestClient, path: str, headers: dict[str, str], status: int) -> None:
    answer = client.get(path, headers=headers)
    assert answer.status_code == status
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "access-control-allow-origin" not in answer.headers
    if status != 200:
        assert "shapes" not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    assert client.request(method, f"/{TOKEN}/api/runs").status_code == 405


def test_questions_that_make_no_sense_are_answered_by_what_is_wrong(client: TestClient) -> None:
    run = run_named(client, "shapes")
    for query, status in [
        ({"limit": 100_000}, 400),
        ({"first": 10**30}, 400),
        ({"low": "nan"}, 200),
        ({"sort": "name; DROP TABLE episodes"}, 400),
        ({"nothing": 1}, 400),
        ({"text": "w " * 30}, 422),
        ({"text": "x" * 2000}, 400),
    ]:
        answer = get(client, "api/episodes", run=run, **query)
        assert answer.status_code == status
        assert status == 200 or answer.json()["problem"]
    for path in ("api/run", "api/episodes", "api/charts?metrics=x", "api/differences"):
        key = "runs" if "charts" in path or "differences" in path else "run"
        assert client.get(f"/{TOKEN}/{path}", params={key: "../../etc"}).status_code in (404, 400)


def test_the_policy_admits_no_inline_script_or_style(client: TestClient) -> None:
    page = get(client, "")
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", page.text)
    for address in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert get(client, address).status_code == 200


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("click(320, 200)", [("point", [320, 200])]),
        ("I tap: left_click(x=3,y=4.5) now", [("point", [3, 4.5])]),
        ('{"bbox_2d": [10, 20, 60, 80], "label": "cat"}', [("box", [10, 20, 60, 80])]),
        ('{"name": "computer", "arguments": {"action": "x", "coordinate": [50, 60]}}', [("point", [50, 60])]),
        ("<|box_start|>(10,20),(60,80)<|box_end|>", [("box", [10, 20, 60, 80])]),
        ('<point x="63.5" y="44.5" alt="a dog">', [("percent", [63.5, 44.5])]),
        ("<point>0.25 0.75</point>", [("point", [0.25, 0.75])]),
        ("drag(1, 2, 30, 40)", [("box", [1, 2, 30, 40])]),
        ("There are 3, 4 or 5 of them (see 12, 13).", []),
        ("[1, 2, 3]", []),
        ("click" * 20_000, []),  # in linear time
    ],
)
def test_places_named_by_a_response(text: str, places: list) -> None:
    found = places_in(text)
    assert [(one["kind"], one["at"]) for one in found] == places
    for one in found:
        assert text[one["start"] : one["end"]]


def test_places_named_by_an_environment() -> None:
    info = {
        "action": {"click": [1, 2]},
        "steps": [1, 2],
        "bbox": (1, 2, 3, 4),
        "deep": {"a": {"b": {"c": {"point": [1, 2]}}}},
    }
    assert [(one["kind"], one["by"]) for one in places_named(info)] == [("point", "click"), ("box", "bbox")]
    assert [one["of"] for one in places_of("click(80, 105)", {"screen": [160, 210]})] == [[160, 210]]
    assert all("of" not in one for one in places_of("click(80, 105)", {"screen": [0, 210]}))
