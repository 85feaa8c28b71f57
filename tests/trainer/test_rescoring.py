"""Stored episodes scored again: as the trainer would with these rewards, and the run stays as it is, to the byte."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sensorium as sn
from sensorium.cli.main import main
from sensorium.data.media_store import MediaStore
from sensorium.recipe.estimators_and_losses import ESTIMATORS
from sensorium.rewards.judges.judgements import AnswerCache
from sensorium.runs.durable import read_rows
from sensorium.runs.episodes import (
    TRANSCRIPTS,
    credit_from_json,
    episode_from_json,
    read_groups,
    read_transcripts,
    write_episodes,
)
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.rescoring import RescoringOrder, correlations, rescore, rescoring_recipe, steps_of
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import RecipeError, RecordError
from tests.recipes import HELD_OUT, SHAPES, parsed, quick
from tests.report.synthetic_run import make_walks
from tests.rewards.judges.server import JudgeServer, judge_server, said
from tests.trainer.small import small


def brevity(task: Any, episode: Any) -> float:
    """The fewer characters the better."""
    return -len(episode.response) / 10


def colour_of_first_pixel(task: Any, episode: Any, *, context: Any) -> float:
    """Reads the picture that the model was shown."""
    (picture,) = task.messages[0].media
    return context.store.picture(picture).getpixel((0, 0))[0] / 255


def opinion(request: dict[str, Any]) -> str:
    """A judge that always says the same of an answer."""
    text = re.search(r"\[BEGIN ANSWER (\w+)\]\n(.*?)\n\[END ANSWER \1\]", said(request), re.DOTALL)
    assert text is not None
    return json.dumps({"score": hashlib.sha256(text[2].encode()).digest()[0] % 5 / 4})


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Every file and folder of a run: its content, and when it was changed."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns)
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run rewarded for right answers."""
    folder = tmp_path_factory.mktemp("rescored") / "run"
    sections: dict[str, Any] = {
        "tasks": {"train": [SHAPES], "evaluate": [HELD_OUT]},
        "batch": {"prompts_per_step": 4, "group_size": 4},
        "rollout": {"max_new_tokens": 5, "temperature": 2.0},
        "evaluation": {"limit": 4, "every": 2},
        "health": {"sight_tasks": 0},
    }
    train(parsed(quick("rescored", **sections), folder))
    return folder


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, JudgeServer]:
    """A run rewarded by a judge, which does not answer any more."""
    folder = tmp_path_factory.mktemp("judged") / "run"
    with judge_server(opinion) as server:
        terms = [{"name": "judge", "options": {"model": "judge", "prompt": "is it good"}}]
        judges = {"endpoints": {"judge": [{"base_url": server.url}]}, "retries": 0}
        changes = {"rewards": {"terms": terms, "retries": 0}, "judges": judges, "steps": 1}
        train(parsed(quick("judged", **changes), folder))
    return folder, server


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_the_runs_own_rewards_give_the_same_scores_and_advantages(run: Path, tmp_path: Path) -> None:
    found = rescore(run, rescoring_recipe(run, None), tmp_path / "out")
    assert found["episodes"] == 2 * 4 * 4
    for part in (found["reward"], found["accuracy"], found["terms"]["exact"]):
        assert part["mean"][0] == part["mean"][1] is not None
        assert part["n"] == [32, 32]
    assert found["learning"]["share"][0] == found["learning"]["share"][1] > 0
    assert found["signs"]["groups"] == found["signs"]["turns"] == 0
    assert found["signs"]["compared"] == 8
    assert found["changed"] == []
    assert found["correlation"]["pearson"] == pytest.approx(1)
    logged = {row["episode"]["id"]: row for path in (run / "episodes").glob("*") for row in read_rows(path)}
    rows = list(read_rows(tmp_path / "out/episodes.jsonl"))
    assert len(rows) == len(logged)
    for row in rows:
        credit = credit_from_json(logged[row["episode"]], episode_from_json(logged[row["episode"]]["episode"]))
        assert credit is not None
        stored = [turn[0] for turn in credit.advantages]
        assert row["advantages"][0] == row["advantages"][1] == pytest.approx(stored, abs=1e-6)


@pytest.mark.parametrize("name", [name for name, traits in ESTIMATORS.items() if not traits.critic])
def test_advantages_of_every_estimator_without_a_critic_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    terms = [{"name": "tests.trainer.small:ByParity"}, {"name": f"{__name__}:brevity", "weight": 0.1}]
    changes: dict[str, Any] = {"rewards": {"terms": terms}, "algorithm": {"advantage": {"name": name}}, "steps": 2}
    run = tmp_path / "runs" / "run"
    train(small(run, **changes))
    found = rescore(run, rescoring_recipe(run, None), tmp_path / "out")
    assert found["signs"]["compared"] > 0
    assert found["signs"]["turns"] == 0
    logged = {row["episode"]["id"]: row for path in (run / "episodes").glob("*") for row in read_rows(path)}
    for row in read_rows(tmp_path / "out/episodes.jsonl"):
        credit = credit_from_json(logged[row["episode"]], episode_from_json(logged[row["episode"]]["episode"]))
        assert credit is not None
        stored = [sum(turn) / len(turn) for turn in credit.advantages]
        assert row["advantages"][1] == pytest.approx(stored, abs=1e-6)


def test_other_terms_are_rewarded_as_a_run_with_them_would(run: Path, tmp_path: Path) -> None:
    from scipy.stats import pearsonr, spearmanr  # here: a second that every worker would pay

    before = snapshot(run)
    mine = written(tmp_path, f"rewards: {{terms: [{{name: exact, weight: 0.5}}, {{name: '{__name__}:brevity'}}]}}")
    recipe = rescoring_recipe(run, mine)
    found = rescore(run, recipe, tmp_path / "out")
    assert snapshot(run) == before, "neither a byte nor a time of the run has changed"
    episodes = {e.id: e for path in (run / "episodes").glob("*") for group in read_groups(path) for e in group.episodes}
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for row in read_rows(tmp_path / "out/episodes.jsonl"):
        old, new = row["reward"]
        assert new == pytest.approx(old * 0.5 - len(episodes[row["episode"]].response) / 10)
        groups.setdefault(row["group"], []).append((old, new, row["advantages"][1][0]))
    turned = 0
    for members in groups.values():
        old, new, advantage = np.array(members).T
        spread = new.std(ddof=1)
        expected = (new - new.mean()) / (spread + 1e-6) if spread > 1e-9 else np.zeros(4)
        assert advantage == pytest.approx(expected, abs=2e-3)
        turned += bool((np.sign(old - old.mean()) * np.sign(advantage) < 0).any() and old.std() > 0)
    assert found["signs"]["groups"] == turned
    assert found["learning"]["share"][1] == np.mean([np.ptp([new for _, new, _ in group]) > 0 for group in groups.values()])
    pairs = np.array([member[:2] for group in groups.values() for member in group])
    assert found["correlation"]["pearson"] == pytest.approx(pearsonr(*pairs.T).statistic)
    assert found["correlation"]["rank"] == pytest.approx(spearmanr(*pairs.T).statistic)
    assert found["terms"]["brevity"]["mean"][0] is None
    assert found["terms"]["exact"]["weight"] == [1.0, 0.5]
    changes = [abs(new - old) for old, new in (row["reward"] for row in found["changed"])]
    assert changes == sorted(changes, reverse=True)
    assert changes[0] == pytest.approx(max(abs(new - old) for old, new in pairs))


def test_steps_limits_and_evaluations_choose_what_is_scored(run: Path, tmp_path: Path) -> None:
    recipe = rescoring_recipe(run, None, ["rewards.terms.0.weight=3"])
    second = rescore(run, recipe, tmp_path / "second", RescoringOrder(*steps_of("2..")))
    assert (second["steps"], second["groups"]) == ([2], 4)
    three = rescore(run, recipe, tmp_path / "three", RescoringOrder(limit=3))
    assert (three["steps"], three["groups"]) == ([1, 2], 3)
    held_out = rescore(run, recipe, tmp_path / "held_out", RescoringOrder(evaluations=True))
    stored = [e for path in (run / "eval").glob("*.jsonl") for group in read_groups(path) for e in group.episodes]
    assert held_out["episodes"] == len(stored) > 0
    assert held_out["signs"] is None
    assert held_out["reward"]["mean"][1] == pytest.approx(3 * held_out["reward"]["mean"][0])
    with pytest.raises(RecordError, match="1 to 2"):
        rescore(run, recipe, tmp_path / "none", RescoringOrder(7, 9))
    assert [steps_of(text) for text in ("3..8", "3..", "..8", "5")] == [(3, 8), (3, 0), (0, 8), (5, 5)]
    for wrong in ("8..3", "..", "a"):
        with pytest.raises(RecipeError, match=re.escape(wrong)):
            steps_of(wrong)


def test_media_are_read_where_they_lie_and_a_lost_one_is_a_missing_score(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    mine = written(tmp_path, f"rewards: {{terms: [{{name: '{__name__}:colour_of_first_pixel'}}], retries: 0}}")
    found = rescore(copy, rescoring_recipe(copy, mine), tmp_path / "seen")
    assert found["terms"]["colour_of_first_pixel"]["n"][1] == 32
    groups = [group for path in sorted((copy / "episodes").glob("*")) for group in read_groups(path)]
    (lost,) = groups[0].task.messages[0].media
    (copy / "media" / lost.hash).unlink()
    showing = sum(len(group.episodes) for group in groups if group.task.messages[0].media[0].hash == lost.hash)
    before = snapshot(copy)
    found = rescore(copy, rescoring_recipe(copy, mine), tmp_path / "lost")
    assert snapshot(copy) == before
    assert found["reward"]["n"] == [32, 32 - showing]
    (reason,) = found["missing"]["colour_of_first_pixel"]
    assert lost.hash[:12] in reason


def test_equal_questions_are_answered_from_the_run_and_a_silent_judge_is_no_zero(
    judged: tuple[Path, JudgeServer], tmp_path: Path
) -> None:
    run, _ = judged
    before = snapshot(run)
    again = rescore(run, rescoring_recipe(run, None, ["rewards.terms.0.weight=2"]), tmp_path / "again")
    assert again["reward"]["n"] == [9, 9], "the judge is gone, and its answers are not"
    assert again["reward"]["mean"][1] == pytest.approx(2 * again["reward"]["mean"][0])
    other = rescoring_recipe(run, None, ["rewards.terms.0.options.prompt=is it short", "judges.total_deadline_s=5"])
    found = rescore(run, other, tmp_path / "silent")
    assert found["reward"] == {"weight": [None, None], "mean": [again["reward"]["mean"][0], None], "n": [9, 0]}
    assert found["missing"]["judge"]
    assert found["correlation"]["n"] == 0
    assert snapshot(run) == before


def test_a_new_judge_is_asked_once_and_its_questions_stay_beside_the_result(
    judged: tuple[Path, JudgeServer], tmp_path: Path
) -> None:
    run, _ = judged
    before = snapshot(run)
    with judge_server(lambda request: json.dumps({"score": len(said(request)) % 2})) as server:
        mine = written(
            tmp_path,
            "rewards: {terms: [{name: judge, options: {model: other, prompt: is it kind}}]}\n"
            f"judges: {{endpoints: {{other: [{{base_url: '{server.url}'}}]}}}}",
        )
        found = rescore(run, rescoring_recipe(run, mine), tmp_path / "out")
        asked = len(server.asked)
        assert 0 < asked <= 9
        rescore(run, rescoring_recipe(run, mine), tmp_path / "out")
        assert len(server.asked) == asked, "repeated into the same folder, nothing is asked again"
    assert found["reward"]["n"] == [9, 9]
    row = next(iter(read_rows(tmp_path / "out/episodes.jsonl")))
    (transcript,) = read_transcripts(tmp_path / "out" / TRANSCRIPTS, row["episode"])
    assert (transcript["model"], json.loads(transcript["answer"])["score"]) == ("other", row["reward"][1])
    assert snapshot(run) == before


def test_answers_of_a_killed_run_are_taken_without_changing_its_files(tmp_path: Path) -> None:
    from sensorium.rewards.judges.judgements import CallRow, StoredAnswer

    (tmp_path / "live").mkdir()
    open_cache = AnswerCache(tmp_path / "live/judges.sqlite")
    for number in range(3):
        open_cache.put(
            f"key{number}", "p/1", StoredAnswer(f"answer {number}", "judge"), CallRow("k", "judge", "at", "answered")
        )
    shutil.copytree(tmp_path / "live", tmp_path / "killed")  # with its log, as a kill leaves it
    assert (tmp_path / "killed/judges.sqlite-wal").stat().st_size > 0
    for folder in ("live", "killed"):
        before = snapshot(tmp_path / folder)
        mine = AnswerCache(tmp_path / f"of_{folder}.sqlite")
        mine.take(tmp_path / folder / "judges.sqlite")
        assert snapshot(tmp_path / folder) == before
        assert [mine.get(f"key{number}").text for number in range(3)] == ["answer 0", "answer 1", "answer 2"]  # type: ignore[union-attr]
        mine.close()
    open_cache.close()
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"no database" * 100)
    with pytest.raises(RecordError, match="broken"):
        AnswerCache(tmp_path / "new.sqlite").take(broken)


def test_rewards_of_environments_are_taken_as_stored_turn_by_turn(tmp_path: Path) -> None:
    run = make_walks(tmp_path / "walks").path
    data = json.dumps(quick("walks", rewards={"terms": [{"name": "environment"}]}))
    (run / "recipe.yaml").write_text(data)
    found = rescore(run, rescoring_recipe(run, None, ["rewards.terms.0.options.per_turn=true"]), tmp_path / "out")
    assert any("environment" in note and "stored" in note for note in found["notes"])
    rows = list(read_rows(tmp_path / "out/episodes.jsonl"))
    logged = {e.id: e for path in (run / "episodes").glob("*") for group in read_groups(path) for e in group.episodes}
    assert len(rows) == 8
    for row in rows:
        episode = logged[row["episode"]]
        assert row["reward"][1] == pytest.approx(sum(turn.reward or 0 for turn in episode.turns))
        assert len(row["scores"][1]) == sum(turn.reward is not None for turn in episode.turns)
        assert len(row["advantages"][1]) == len(episode.turns)


def test_what_depends_on_training_is_named(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    text = (copy / "recipe.yaml").read_text()
    for key, value in {"advantage": "gae", "place": "reward"}.items():
        assert key in text, value
    data, _ = sn.recipe.load.read_recipe(copy)
    data["algorithm"]["advantage"] = {"name": "gae"}
    data["algorithm"]["kl"] |= {"coef": 0.1, "place": "reward"}
    data["selection"] |= {"oversample": 2.0}
    data["tasks"]["planner"] = {"name": "success_curriculum"}
    (copy / "recipe.yaml").write_text(json.dumps(data))
    found = rescore(copy, rescoring_recipe(copy, None, ["rewards.terms.0.weight=-1"]), tmp_path / "out")
    notes = " ".join(found["notes"])
    for word in ("success_curriculum", "selection", "gae", "KL"):
        assert word in notes
    assert found["signs"]["groups"] == found["learning"]["share"][0] * 8, "every reward's sign was turned"


def test_groups_that_were_cancelled_are_left_out_and_thinned_steps_named(run: Path, tmp_path: Path) -> None:
    from sensorium.rollout.play import CANCELLED
    from sensorium.runs.episodes import EpisodeCredit

    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    directory = RunDirectory(copy)
    groups = read_groups(directory.episodes_of(2))
    cancelled = {e.id: EpisodeCredit(CANCELLED) for e in groups[0].episodes}
    write_episodes(directory.episodes_of(5), 5, groups, credits=cancelled)
    found = rescore(copy, rescoring_recipe(copy, None), tmp_path / "out")
    assert found["groups"] == 4 + 4 + 3
    assert any("cancelled" in note for note in found["notes"])
    assert any("3 of the 5 steps" in note for note in found["notes"])


def test_the_folder_is_beside_the_run_and_never_in_it_or_over_something_else(run: Path, tmp_path: Path) -> None:
    recipe = rescoring_recipe(run, None)
    for place in (run, run / "deeper/out"):
        with pytest.raises(RecordError, match="in the run"):
            rescore(run, recipe, place)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/thesis.tex").write_text("all my work")
    with pytest.raises(RecordError, match="taken"):
        rescore(run, recipe, tmp_path / "taken")
    assert os.listdir(tmp_path / "taken") == ["thesis.tex"]


def test_strange_files_of_rewards_are_refused_with_their_place(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"line 2.*exakt"):
        rescoring_recipe(run, written(tmp_path, "rewards:\n  terms: [{name: exakt}]\n"))
    with pytest.raises(RecipeError, match="rewords"):
        rescoring_recipe(run, written(tmp_path, "rewords: {}\n"))
    with pytest.raises(RecipeError, match=r"optimizer\.lr"):
        rescoring_recipe(run, None, ["optimizer.lr=1"])
    kept = rescoring_recipe(run, written(tmp_path, "rewards: {terms: [{name: format}]}\n"), ["rewards.retries=7"])
    assert (kept.rewards.retries, kept.rewards.terms[0].name, kept.rewards.on_missing) == (7, "format", "drop_episode")


def test_the_command_prints_tables_or_json(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    mine = written(tmp_path, "rewards: {terms: [{name: exact, weight: 0.5}, {name: format}]}")
    assert main(["rescore", str(copy), "--rewards", mine, "--limit", "3"]) == 0
    shown = capsys.readouterr().out
    (folder,) = tmp_path.glob("run_rescored*")
    for word in ("format", "learning share", "Pearson", folder.name):
        assert word in shown.replace("\n", "")
    assert main(["rescore", str(copy), "--rewards", mine, "--steps", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads((Path(found["out"]) / "rescoring.json").read_text()) == found
    assert main(["rescore", str(tmp_path), "--rewards", mine]) == 2


def test_from_python_functions_of_a_notebook_score_again(run: Path, tmp_path: Path) -> None:
    offset = 0.25
    found = sn.rescore(run, ["exact", lambda task, episode: offset], out=tmp_path / "out", steps=(1, 1), show=False)
    assert found["reward"]["mean"][1] == pytest.approx(found["reward"]["mean"][0] + offset)
    assert len(found.episodes) == found["episodes"] == 16
    assert "| reward |" in repr(found)
    by_file = sn.rescore(run, written(tmp_path, "rewards: {terms: [{name: format}]}"), out=tmp_path / "file", show=False)
    assert "format" in by_file["terms"]


def test_a_run_begun_with_functions_and_rows_of_a_process_is_scored_in_another(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(4)]
    changes = {"tasks": rows, "rewards": [lambda task, episode: len(episode.response)], "run_dir": tmp_path / "run"}
    sn.train(quick("passed", model={"path": "tiny:qwen2", "device": "cpu"}, steps=1) | changes, show=False)
    data = (tmp_path / "run/recipe.yaml").read_text()
    assert "python:" in data
    (tmp_path / "run/recipe.yaml").write_text(data.replace("python:", "python:of_another_process_"))
    mine = written(tmp_path, "rewards: {terms: [{name: exact}]}")
    found = rescore(tmp_path / "run", rescoring_recipe(tmp_path / "run", mine), tmp_path / "out")
    assert found["terms"]["exact"]["n"][1] == 9


def test_stored_media_never_write_to_their_folder(tmp_path: Path) -> None:
    from sensorium.data.media_store import StoredMedia

    media = MediaStore(tmp_path / "media").put(b"abc", "sound")
    before = snapshot(tmp_path)
    store = StoredMedia(tmp_path / "media")
    assert store.bytes_of(media) == b"abc"
    more = store.put(b"more", "sound")
    assert (store.bytes_of(more), store.size_of(more), store.source_of(more)) == (b"more", 4, b"more")
    assert snapshot(tmp_path) == before


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=30))
def test_correlations_are_those_of_scipy_or_none_where_one_side_is_constant(pairs: list[tuple[float, float]]) -> None:
    from scipy.stats import pearsonr, spearmanr

    found = correlations(pairs)
    a, b = np.array(pairs, dtype=float).T
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert found["pearson"] is None
        assert found["rank"] is None
    else:
        assert found["pearson"] == pytest.approx(pearsonr(a, b).statistic, abs=1e-9)
        assert found["rank"] == pytest.approx(spearmanr(a, b).statistic, abs=1e-9)
