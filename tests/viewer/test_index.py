"""The index over episodes follows the logs whatever happens to them, and finds by anything that is known of an episode."""

import json
import os
import shutil
import sqlite3
import threading
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.view_index import write_run
from sensorium.runs.episodes import TRANSCRIPTS, EpisodeCredit, TranscriptLine, Transcripts, read_groups, write_episodes
from sensorium.runs.run_directory import RunDirectory
from sensorium.viewer.index import EpisodeIndex, Search, Sort, index_path
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn, user
from sensorium.vocabulary.errors import RecordError, SensoriumError
from tests.report.synthetic_run import make_run, make_walks


def episode(name: str, text: str, reward: float | None, *, group: str = "g", index: int = 0, failure: str = "") -> Episode:
    response = Segment("model", (5, 6), text=text, logprobs=(-0.5, -1.5), byte_ends=(1, len(text.encode())), name=name)
    score = Score("exact", reward, reason="" if reward is not None else "the judge was busy")
    turn = Turn(0, (user("Which colour is the kite?"),), response, 0, 1)
    thread = Thread((Segment("environment", (1,)), response), (False, True))
    return Episode(name, "task-1", group, index, (thread,), (turn,), Status.FINISHED, failure, (score,))


def write_step(run: RunDirectory, step: int, *episodes: Episode, **credits: EpisodeCredit) -> Path:
    task = Task("task-1", (user("Which colour is the kite?"),), "magenta", metadata={"category": "colour"})
    write_episodes(run.episodes_of(step), step, [Group("g", task, episodes)], credits=credits)
    return run.episodes_of(step)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def found(index: EpisodeIndex, **asked: object) -> list[str]:
    return [row["name"] for row in index.search(Search(**asked))["episodes"]]


def test_a_run_that_began_before_is_indexed_whole_and_as_its_episodes_say(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=12)
    index = EpisodeIndex(run)
    assert index.update()
    logs = [*run.episodes.glob("*.jsonl"), *run.eval.glob("*.jsonl")]
    there = {
        (f"{log.parent.name}/{log.name}", e.id): e for log in logs for group in read_groups(log) for e in group.episodes
    }
    rows = [row for page in range(2) for row in index.search(Search(limit=200, offset=200 * page))["episodes"]]
    assert {(row["file"], row["name"]) for row in rows} == set(there)
    for row in rows:
        kept = there[row["file"], row["name"]]
        assert row["reward"] == pytest.approx(kept.reward)
        assert row["correct"] == kept.correct
        assert row["tokens"] == kept.sampled_tokens
        assert row["surprise"] == pytest.approx(0.1)
        stored = index.row(row["file"], row["name"])
        assert stored is not None
        assert stored["episode"]["id"] == row["name"]


def test_a_new_step_is_read_and_nothing_is_read_twice(run: RunDirectory) -> None:
    index = EpisodeIndex(run)
    write_step(run, 1, episode("a", "red", 1.0))
    assert index.update()
    assert found(index) == ["a"]
    write_step(run, 2, episode("b", "blue", 0.0))
    assert index.update()
    assert found(index) == ["b", "a"]
    assert not index.update()


def test_a_log_that_was_rewritten_or_removed_is_followed(run: RunDirectory) -> None:
    index = EpisodeIndex(run)
    write_step(run, 1, episode("a", "red", 1.0), episode("b", "green", 0.0, index=1))
    log = write_step(run, 2, episode("c", "blue", 1.0))
    index.update()
    write_step(run, 1, episode("d", "black", 1.0))
    log.unlink()
    assert index.update()
    assert found(index) == ["d"]
    assert found(index, text="red") == []
    assert index.row("episodes/step_000001.jsonl", "a") is None


def test_an_episode_is_found_though_its_log_was_rewritten_since(run: RunDirectory) -> None:
    index = EpisodeIndex(run)
    log = write_step(run, 1, episode("a", "red", 1.0), episode("b", "green", 0.0, index=1))
    index.update()
    write_step(run, 1, episode("b", "green", 0.0))
    row = index.row(f"episodes/{log.name}", "b")
    assert row is not None
    assert row["episode"]["id"] == "b"


def test_a_log_that_grows_is_read_again_and_a_torn_row_waits(run: RunDirectory) -> None:
    index = EpisodeIndex(run)
    log = write_step(run, 1, episode("a", "red", 1.0), episode("b", "green", 0.0, index=1))
    whole = log.read_bytes()
    first = whole.index(b"\n") + 1
    log.write_bytes(whole[: first + 40])
    index.update()
    assert found(index) == ["a"]
    with log.open("ab") as file:
        file.write(whole[first + 40 :])
    assert EpisodeIndex(run).update()
    assert sorted(found(index)) == ["a", "b"]
    rows = index.search(Search())["episodes"]
    assert {row["disagreement"] for row in rows} == {0.5}


def test_a_damaged_row_is_left_out_and_named(run: RunDirectory) -> None:
    log = write_step(run, 1, episode("a", "red", 1.0), episode("b", "green", 0.0, index=1))
    lines = log.read_bytes().splitlines(keepends=True)
    row = json.loads(lines[1])
    odd = [{"step": 1, "task": {}}, row | {"step": 10**30}, row | {"reward": 10**400}, row | {"correct": {}}, [], None]
    damaged = "".join(json.dumps(one) + "\n" for one in odd).encode()
    log.write_bytes(lines[0] + damaged + b"\xff\xfe\n" + lines[1])
    index = EpisodeIndex(run)
    index.update()
    assert sorted(found(index)) == ["a", "b"]
    (problem,) = index.facets()["problems"]
    assert "step_000001.jsonl" in problem
    assert f"byte {len(lines[0]):,}" in problem


@pytest.mark.parametrize("damage", ["garbage", "middle", "empty tables", "other version"])
def test_a_damaged_index_is_made_again(run: RunDirectory, damage: str) -> None:
    write_step(run, 1, *(episode(str(i), f"red {i} " * 50, 1.0, index=i) for i in range(50)))
    index = EpisodeIndex(run)
    index.update()
    size = index.path.stat().st_size
    for end in ("-wal", "-shm"):
        Path(f"{index.path}{end}").unlink(missing_ok=True)
    if damage == "garbage":
        index.path.write_bytes(os.urandom(9000))
    elif damage == "middle":
        with index.path.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(size - 8192))
    else:
        with sqlite3.connect(index.path) as db:
            db.execute("DROP TABLE episodes" if damage == "empty tables" else "PRAGMA user_version = 99")
    again = EpisodeIndex(run)
    again.update()
    again.search(Search(text="red", sort="reward"))  # what no update reads is found damaged by the first search
    again.update()
    assert again.search(Search(text="red"))["count"] == 50
    for path in index.path.parent.glob("view.sqlite*"):
        path.unlink()
    again.search(Search())  # makes an empty one
    again.update()
    assert again.search(Search(text="red"))["count"] == 50


def test_a_run_that_is_gone_is_not_made_again(run: RunDirectory) -> None:
    index = EpisodeIndex(run)
    write_step(run, 1, episode("a", "red", 1.0))
    index.update()
    shutil.rmtree(run.path)
    for ask in (index.update, index.facets, lambda: index.search(Search())):
        with pytest.raises(RecordError):
            ask()
    assert not run.path.exists()


def test_pipes_and_links_that_came_with_a_run_are_left_alone(run: RunDirectory, tmp_path: Path) -> None:
    write_step(run, 1, episode("a", "red", 1.0))
    os.mkfifo(run.episodes_of(2))
    other = tmp_path / "other.sqlite"
    sqlite3.connect(other).execute("CREATE TABLE mine (x)").connection.close()
    before = other.read_bytes()
    index = EpisodeIndex(run)
    index.path.symlink_to(other)
    index.update()
    assert found(index) == ["a"]
    assert other.read_bytes() == before
    assert not index.path.is_symlink()


def test_several_that_index_at_once_agree(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 600)
    several = [EpisodeIndex(run) for _ in range(3)]
    threads = [threading.Thread(target=index.update) for index in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert several[0].search(Search())["count"] == 768
    assert (
        len(
            {
                row["name"]
                for page in range(4)
                for row in several[1].search(Search(limit=200, offset=200 * page))["episodes"]
            }
        )
        == 768
    )


def test_a_run_that_cannot_be_written_has_its_index_in_the_cache(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(run, 1, episode("a", "red", 1.0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # whoever runs the tests may write anywhere
    index = EpisodeIndex(run)
    index.update()
    assert found(index) == ["a"]
    assert index.path.is_relative_to(tmp_path / "cache")
    assert index_path(RunDirectory(tmp_path / "other")) != index.path
    assert not (run.path / "view.sqlite").exists()


def test_finds_by_words_of_prompt_response_judge_and_failure(run: RunDirectory) -> None:
    write_step(run, 1, episode("a", "a scarlet kite", 1.0), episode("b", "blue", None, index=1, failure="it timed out"))
    transcripts = Transcripts(run.path / TRANSCRIPTS)
    transcripts.replace(["a"], "helpful", [TranscriptLine("judge-1", "rate", "Is it good?", "Splendid, 9 of 10")])
    transcripts.close()
    index = EpisodeIndex(run)
    index.update()
    for text in ("scarlet", "SCARLET KITE", '"scarlet kite"', "scar*", "response:scarlet", "judge:splendid magenta"):
        assert found(index, text=text) == ["a"], text
    for text in ("timed", "failure:busy", '"it timed out" blue'):
        assert found(index, text=text) == ["b"], text
    assert sorted(found(index, text="kite colour prompt:magenta")) == ["a", "b"]
    for text in ("judge:scarlet", "response:magenta", '"kite scarlet"', "nowhere"):
        assert found(index, text=text) == [], text


def test_finds_by_what_is_known_and_sorts(run: RunDirectory) -> None:
    write_step(
        run, 3, episode("a", "red", 1.0), episode("b", "green", 0.25, index=1), episode("c", "blue", None, index=2),
        a=EpisodeCredit(advantages=((0.5, 1.5),)), b=EpisodeCredit(advantages=((-1.0, -1.0),)),
        c=EpisodeCredit("dropped: a score is missing"),
    )  # fmt: skip
    index = EpisodeIndex(run)
    index.update()
    assert found(index, low=0.2, high=0.5) == ["b"]
    assert found(index, term="exact", low=0.5) == ["a"]
    assert found(index, term="exact", sort="term", ascending=True) == ["b", "a", "c"]
    assert found(index, failed=True) == ["c"]
    assert found(index, fate="dropped") == ["c"]
    assert found(index, category="colour", first=3, last=3, most_tokens=2, least_turns=1, log="train") == ["c", "b", "a"]
    assert found(index, first=4) == found(index, log="eval") == found(index, task="task-2") == []
    assert found(index, sort="advantage") == ["a", "b", "c"]
    rows = {row["name"]: row for row in index.search(Search())["episodes"]}
    assert [rows[name]["advantage"] for name in "abc"] == [1.0, -1.0, None]
    assert rows["a"]["surprise"] == 1.0
    assert rows["a"]["disagreement"] == rows["c"]["disagreement"] == 0.375
    attempts, others = index.related("episodes/step_000003.jsonl", "b")
    assert [row["name"] for row in attempts] == ["a", "b", "c"]
    assert others == []


def test_the_same_task_is_found_at_other_steps_and_in_evaluations(tmp_path: Path) -> None:
    index = EpisodeIndex(make_walks(tmp_path / "run"))
    index.update()
    _, others = index.related("eval/step_000000_eval.jsonl", "e3/0")
    assert [(row["file"], row["name"]) for row in others] == [("eval/step_000040_eval.jsonl", "e3/0")]


@given(text=st.text(max_size=60), field=st.sampled_from(["", "judge:", "nothing:", '"']))
@settings(max_examples=60)
def test_no_sign_of_a_search_means_anything_to_the_database(shared: EpisodeIndex, text: str, field: str) -> None:
    shown = field + text
    try:
        assert shared.search(Search(text=shown))["count"] in (0, 1)
    except SensoriumError:
        assert len(shown.split()) > 12


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> EpisodeIndex:
    run = RunDirectory(tmp_path_factory.mktemp("words") / "run").create()
    write_step(run, 1, episode("a", "red", 1.0))
    index = EpisodeIndex(run)
    index.update()
    return index


def test_words_are_looked_up_once_pages_are_read_in_order_and_filters_visit_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bench/view_index.py measures with 100,000 episodes: nothing sorts or counts them all."""
    index, asked, connect = EpisodeIndex(write_run(tmp_path / "run", 256)), list[str](), sqlite3.connect
    index.update()
    sorts = [sort for sort in get_args(Sort) if sort != "term"]
    whole = {sort: found(index, sort=sort, limit=200) for sort in sorts}
    few = {sort: found(index, sort=sort, text='"w0 w1" w0* prompt:w1', limit=200) for sort in sorts}

    def traced(*given: Any, **more: Any) -> sqlite3.Connection:
        db = connect(*given, **more)
        db.set_trace_callback(asked.append)
        return db

    monkeypatch.setattr(sqlite3, "connect", traced)
    monkeypatch.setattr("sensorium.viewer.index.FEW", 10)
    for sort in sorts:
        assert found(index, sort=sort, limit=20, offset=40) == whole[sort][40:60]
        assert found(index, sort=sort, text='"w0 w1" w0* prompt:w1', limit=20) == few[sort][:20]
    facets = index.facets()
    assert [facets["log"][0]["count"], facets["category"][0]["count"], facets["count"]] == [256, 256, 256]
    assert facets["terms"] == ["exact", "format"]
    pages = [one for one in asked if "LIMIT 20 " in one]
    assert len(pages) == 2 * len(sorts)
    assert sum("SELECT rowid FROM words" in one for one in asked) == len(sorts), "w0* is in all of them"
    with closing(connect(index.path)) as db:
        db.execute("CREATE TEMP TABLE hits (id INTEGER PRIMARY KEY)")
        for one in [*pages, *(one for one in asked if "GROUP BY" in one or "DISTINCT" in one)]:
            plan = " ".join(row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {one}"))
            assert "SCAN episodes" not in plan, plan
            if one in pages:
                assert "SCAN r USING" in plan, plan
                assert "TEMP B-TREE" not in plan, plan


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    log = write_step(run, 1, *(episode(str(i), "a word and another " * 20, 1.0, index=i) for i in range(100)))
    row = json.loads(log.read_text().splitlines()[0])
    with log.open("w") as file:
        for i in range(1500):
            row["episode"]["id"] = str(i)
            file.write(json.dumps(row) + "\n")
    index = EpisodeIndex(run)
    tracemalloc.start()
    index.update()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.search(Search())["count"] == 1500
    assert most < log.stat().st_size / 2
