"""run.episodes as a table of pandas or Arrow, and run.show: an episode as a page in which everything is."""

import html
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import sensorium as sn
from sensorium.data.media_store import MediaStore
from sensorium.report.page import render_episode
from sensorium.runs.durable import read_rows, write_whole
from sensorium.runs.episodes import EpisodeCredit, read_groups, write_episodes
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn, user
from tests.data.clips import middle
from tests.report.synthetic_run import make_run, make_walks
from tests.report.test_clips import CLIP, WAVE
from tests.report.test_html import Page

ATTACK = "</pre></iframe><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> sn.Run:
    return sn.Run(make_run(tmp_path_factory.mktemp("table") / "run", steps=6).path)


def stranger(folder: Path) -> sn.Run:
    """A run with one episode that shows a picture, a video and a sound, and whose texts attack the page."""
    run = RunDirectory(folder).create()
    write_whole(run.recipe, "name: strange\nmodel: {path: package:shapes}\n")
    store = MediaStore(run.media)
    media = (store.put(CLIP, "video", ATTACK, middle(frames=3)), store.put(WAVE, "sound", "row 2"))
    task = Task(f"t{ATTACK}", (user(*media, ATTACK),), answer=ATTACK, metadata={"category": ATTACK})
    said = Segment(
        "model", (1, 2), text=f"a {ATTACK}", logprobs=(-0.1, -0.2), byte_ends=(1, 2 + len(ATTACK.encode())), name="m"
    )
    thread = Thread((Segment("environment", (1,)), said), (False, True))
    scores = (Score(f"good{ATTACK}", 0.5), Score("judge", None, reason=ATTACK))
    episode = Episode("e<1>", task.id, "g", 0, (thread,), (Turn(0, task.messages, said, 0, 1),), Status.FINISHED)
    credits = {episode.id: EpisodeCredit(advantages=((0.5, -0.5),))}
    write_episodes(run.episodes_of(1), 1, [Group("g", task, (replace(episode, scores=scores),))], credits=credits)
    return sn.Run(folder)


def test_the_table_has_a_row_for_each_stored_episode_with_its_scores(made: sn.Run) -> None:
    table = made.episodes
    groups = [group for step in (1, 6) for group in read_groups(made.directory / f"episodes/step_{step:06d}.jsonl")]
    episodes = [episode for group in groups for episode in group.episodes]
    training = [row for row in table if not row["evaluation"]]
    assert [row["episode"] for row in training] == [episode.id for episode in episodes]
    assert [row["reward"] for row in training] == [episode.reward for episode in episodes]
    assert [row["reward/exact"] for row in training] == [episode.scores[0].value for episode in episodes]
    assert [row["response"] for row in training] == [episode.response for episode in episodes]
    assert {row["pictures"] for row in training} == {1}
    assert {(row["step"], row["evaluation"]) for row in table} == {(1, ""), (6, ""), (0, "sampled"), (6, "sampled")}
    frame, arrow = table.to_pandas(), table.to_arrow()
    assert frame.groupby("step")["reward"].count().to_dict() == {0: 64, 1: 64, 6: 128}
    assert arrow.num_rows == len(frame) == len(table) == 256
    assert arrow.column("correct").to_pylist() == table["correct"]
    assert repr(table).count("\n") == 5


def test_arrow_goes_to_other_libraries_and_mixed_columns_become_texts() -> None:
    import pyarrow

    table = sn.Table([{"a": 1, "b": "x"}, {"a": 2.5, "b": 3}, {"b": None}])
    read = pyarrow.table(table)
    assert read.to_pydict() == {"a": [1.0, 2.5, None], "b": ["x", "3", None]}


def test_what_a_run_writes_is_seen_and_what_it_did_not_change_is_not_read_again(
    made: sn.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made.directory, tmp_path / "run")
    run = sn.Run(tmp_path / "run")
    first = len(run.episodes)
    monkeypatch.setattr("sensorium.api.run.read_rows", lambda path: pytest.fail(f"{path} was read again"))
    assert len(run.episodes) == first
    monkeypatch.undo()
    log = tmp_path / "run/episodes/step_000006.jsonl"
    shutil.copy(log, log.with_name("step_000005.jsonl"))
    log.unlink()
    assert len(run.episodes) == first


def test_an_episode_is_shown_with_media_and_everything_that_was_written_is_text(tmp_path: Path) -> None:
    run = stranger(tmp_path / "run")
    shown = run.show(run.episodes[0])
    shutil.rmtree(tmp_path / "run/media")
    assert os.listdir(tmp_path / "run/episodes"), "the page needs nothing more of the run"
    page = Page(shown.page)
    assert [source["type"] for source in page.all("source")] == ["video/mp4", "audio/wav"]
    places = [element.get(key) or "" for _, element in page.elements for key in ("src", "href", "poster", "data")]
    assert all(place.startswith(("data:", "#")) for place in places if place), "nothing is loaded"
    assert [element for tag, element in page.elements if tag == "img" or "onerror" in element] == []
    assert len(page.all("script")) == 1
    assert shown.page.count("alert(1)") > 3
    assert "<script>alert" not in shown.page
    frame = Page(f"<div>{shown._repr_html_()}</div>")
    (inside,) = frame.all("iframe")
    assert inside["srcdoc"] == shown.page
    assert inside["sandbox"] == ""
    assert "<script>alert" not in html.unescape(shown._repr_html_().split("srcdoc=")[0])
    assert "good" in repr(shown)
    assert shown.save(tmp_path / "episode.html").read_text() == shown.page


def test_all_turns_of_a_walk_are_shown_with_their_pictures(tmp_path: Path) -> None:
    run = sn.Run(make_walks(tmp_path / "walks").path)
    long = max(run.episodes, key=lambda row: row["turns"])
    assert long["turns"] > 3
    page = Page(run.show(long["episode"]).page)
    assert len(page.all("pre")) == long["turns"]
    pictures = {use["href"] for use in page.all("use")}
    assert 1 <= len(pictures) <= long["pictures"]


def test_an_unknown_episode_is_an_error_that_names_a_near_one(made: sn.Run) -> None:
    with pytest.raises(sn.SensoriumError, match="g0/1") as error:
        made.show("g0/11")
    assert len(made.episodes) > 100
    assert len(str(error.value)) < 1000
    name = made.episodes[0]["episode"]
    row = next(row for row in read_rows(made.directory / "episodes/step_000001.jsonl") if row["episode"]["id"] == name)
    assert made.show(name).page == render_episode(RunDirectory(made.directory), row)


def test_jupyter_formats_an_episode_and_a_table(made: sn.Run) -> None:
    formatters = pytest.importorskip("IPython.core.formatters", reason="IPython is not installed")
    formatter = formatters.HTMLFormatter()
    assert "<iframe" in formatter(made.show(made.episodes[0]))
    assert "<table>" in formatter(made.episodes)


def test_marimo_formats_an_episode_and_a_table(made: sn.Run) -> None:
    marimo = pytest.importorskip("marimo", reason="marimo is not installed")
    assert "<iframe" in marimo.as_html(made.show(made.episodes[0])).text
    assert "<table>" in marimo.as_html(made.episodes).text
