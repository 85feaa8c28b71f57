"""Whole runs paid by a judge on loopback: repeated offline, with another policy, through faults, and what they cost."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sensorium.cli.main import main
from sensorium.report.watcher import Watcher
from sensorium.rewards.judges.judgements import AnswerCache
from sensorium.runs.checkpoint_layout import Best, CheckpointFolder
from sensorium.runs.durable import read_rows
from sensorium.runs.episodes import TRANSCRIPTS, read_groups, read_transcripts
from sensorium.runs.ledger import Ledger
from sensorium.runs.metrics import read_metrics, repeatable
from sensorium.trainer.run import train
from tests.recipes import HELD_OUT, SHAPES, parsed, quick
from tests.rewards.judges.server import Answer, JudgeServer, judge_server, said


def opinion(request: dict[str, Any]) -> str:
    """What the judge thinks of an answer: any opinion will do, if it is always the same."""
    text = re.search(r"\[BEGIN ANSWER (\w+)\]\n(.*?)\n\[END ANSWER \1\]", said(request), re.DOTALL)
    assert text is not None
    return json.dumps({"score": hashlib.sha256(text[2].encode()).digest()[0] % 5 / 4})


def recipe_of(run: Path, *urls: str, **judges: Any) -> Any:
    endpoints = {"judge": [{"base_url": url} for url in urls]}
    return parsed(
        quick(
            "judged",
            tasks={"train": [SHAPES], "evaluate": [HELD_OUT]},
            rollout={"max_new_tokens": 5, "temperature": 2.0},
            rewards={"terms": [{"name": "judge", "options": {"model": "judge", "prompt": "is it good"}}]},
            evaluation={"limit": 4, "every": 1},
            health={"sight_tasks": 0},
            judges={"endpoints": endpoints, "prices": {"judge": {"input": 1000, "output": 500}}, **judges},
        ),
        run,
    )


def rewards(run: Path, *folders: str) -> list[list[float | None]]:
    paths = [path for folder in folders or ("episodes", "eval") for path in sorted((run / folder).glob("*.jsonl"))]
    assert paths
    return [[episode.reward for episode in group.episodes] for path in paths for group in read_groups(path)]


def agree(run: Path) -> None:
    """Each judgement was answered once by the log of calls and is in the cache; the ledger has every episode's score."""
    cache = AnswerCache(run / "judges.sqlite")
    assert Counter(row.key for row in cache.calls() if row.outcome == "answered") == Counter(cache.keys())
    answers = [json.loads(stored.text)["score"] for key in sorted(cache.keys()) if (stored := cache.get(key))]
    cache.close()
    ledger = Ledger(run / "ledger.sqlite")
    kept = [json.loads(scores)[0]["value"] for (scores,) in ledger._db.execute("SELECT scores FROM judgements")]
    ledger.close()
    assert Counter(reward for group in rewards(run, "episodes") for reward in group) <= Counter(kept)
    assert {value for value in kept if value is not None} == {*answers}


class Notes(Watcher):
    """Hears what a run notes."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def noted(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, JudgeServer]:
    """A run whose judge answers every question well."""
    run = tmp_path_factory.mktemp("healthy") / "run"
    with judge_server(opinion) as server:
        train(recipe_of(run, server.url))
    return run, server


def test_costs_of_training_and_evaluation_are_told_apart(healthy: tuple[Path, JudgeServer]) -> None:
    run, server = healthy
    rows = read_metrics(run / "metrics.jsonl")
    total: Counter[str] = Counter()
    for row in rows:
        total.update(
            {name: row[name] for name in row if name.startswith(("judge/", "eval/judge/")) and "latency" not in name}
        )
        for name in {name.rpartition("/")[0] for name in row if "judge/judge/" in name}:
            assert row[f"{name}/cost"] == pytest.approx(row[f"{name}/calls"] * (10 * 1000 + 2 * 500) / 1e6)
            assert (f"{name}/latency_mean_s" in row) == (row[f"{name}/calls"] > 0)
    assert total["judge/judge/calls"] + total["eval/judge/judge/calls"] == len(server.asked)
    assert total["judge/judge/input_tokens"] + total["eval/judge/judge/input_tokens"] == 10 * len(server.asked)
    asked = total["eval/judge/judge/calls"] + total["eval/judge/judge/cache_hits"]
    assert 0 < asked <= 3 * 4, "at the start and after each of two steps, and equal answers are judged once"
    assert total["judge/judge/calls"] > 0


def test_what_was_said_of_one_evaluation_is_not_told_of_another(healthy: tuple[Path, JudgeServer]) -> None:
    run, _ = healthy
    groups = [group for path in sorted((run / "eval").glob("step_*.jsonl")) for group in read_groups(path)]
    episodes = [episode for group in groups for episode in group.episodes]
    assert len({episode.id for episode in episodes}) == len(episodes) == 2 * 4
    for episode in episodes:
        (asked,) = read_transcripts(run / TRANSCRIPTS, episode.id)
        words = asked["messages"][0]["content"][-1]["text"]
        assert f"\n{episode.response}\n[END ANSWER" in words
        assert json.loads(asked["answer"])["score"] == episode.reward


def test_a_run_repeated_offline_is_the_same_and_another_policy_reuses_judgements(
    healthy: tuple[Path, JudgeServer], tmp_path: Path
) -> None:
    run, first = healthy
    cache = str(run / "judges.sqlite")
    heard = Notes()
    train(recipe_of(tmp_path / "again", offline=True, cache=cache), watchers=[heard])
    (told,) = [text for text in heard.said if "checkpoint.best" in text]
    assert "eval/reward" in told, "this judge says nothing right or wrong"
    best = CheckpointFolder(tmp_path / "again" / "checkpoints").best()
    paid = {row["step"]: row["eval/reward"] for row in read_metrics(tmp_path / "again" / "metrics.jsonl")}
    assert best == Best(min(step for step in paid if paid[step] == max(paid.values())), max(paid.values()), "eval/reward")
    assert rewards(tmp_path / "again") == rewards(run)
    rows = [[repeatable(row) for row in read_metrics(place / "metrics.jsonl")] for place in (run, tmp_path / "again")]
    assert rows[0] == rows[1]
    with judge_server(opinion) as server:
        other = recipe_of(tmp_path / "other", server.url, cache=cache)
        train(other.model_copy(update={"seed": 5}))
    known = {json.dumps(request["messages"]) for request in first.asked}
    asked = [json.dumps(request["messages"]) for request in server.asked]
    assert len(asked) == len(set(asked)), "nothing is judged twice"
    assert not known & set(asked), "what the first run asked is not asked again"
    hits = sum(
        row[name] for row in read_metrics(tmp_path / "other" / "metrics.jsonl") for name in row if "cache_hits" in name
    )
    assert hits > 0


def test_faults_cost_calls_and_change_no_reward(healthy: tuple[Path, JudgeServer], tmp_path: Path) -> None:
    count = iter(range(10**6))
    faults = [
        Answer("busy", 429, {"Retry-After": "0.05"}), Answer("down", 503, {"Retry-After": "0.05"}), "Sure, it is nice!",
        '{"score": 9}', '{"score": 1, "score": 0}',
    ]  # fmt: skip

    def faulty(request: dict[str, Any]) -> Answer | str:
        number = next(count)
        return opinion(request) if number % 2 else faults[number // 2 % len(faults)]

    with judge_server(opinion) as gone:
        pass
    with judge_server(faulty) as server:
        train(recipe_of(tmp_path / "run", gone.url, server.url, retries=100, malformed_retries=50))
    assert rewards(tmp_path / "run") == rewards(healthy[0])
    agree(tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    counted: Counter[str] = Counter()
    for row in rows:
        for name in row:
            if "judge/judge/" in name and "latency" not in name:
                counted[name.rpartition("/")[2]] += row[name]
    cache = AnswerCache(tmp_path / "run" / "judges.sqlite")
    log = Counter(row.outcome for row in cache.calls())
    cache.close()
    assert counted["calls"] == sum(log.values())
    assert counted["malformed"] == log["malformed"] > 0
    assert counted["retries"] == log["429"] + log["503"] + log["unreachable"]
    assert log["answered"] == len(healthy[1].asked)
    assert counted["failures"] == 0


def test_what_is_never_answered_is_missing_and_the_rest_is_paid(healthy: tuple[Path, JudgeServer], tmp_path: Path) -> None:
    def half(request: dict[str, Any]) -> str:
        found = opinion(request)
        return "I cannot say" if json.loads(found)["score"] < 0.5 else found

    with judge_server(half) as server:
        train(recipe_of(tmp_path / "run", server.url, malformed_retries=1).model_copy(update={"steps": 1}))
    agree(tmp_path / "run")
    whole = rewards(healthy[0])
    paid = rewards(tmp_path / "run")
    assert {reward for group in paid for reward in group} <= {None, 0.5, 0.75, 1.0}
    for group, before in zip(paid[:3], whole[:3], strict=True):
        assert group == [reward if reward is not None and reward >= 0.5 else None for reward in before]
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["missing/judge"] == sum(reward is None for group in paid[:3] for reward in group) > 0


def test_an_evaluation_keeps_what_its_judges_said_and_cost(tmp_path: Path) -> None:
    with judge_server(opinion) as server:
        recipe = recipe_of(tmp_path / "run", server.url)
        (tmp_path / "recipe.yaml").write_text(recipe.model_dump_json())
        command = ["eval", str(tmp_path / "recipe.yaml"), "--model", "package:shapes", "--out", str(tmp_path / "out")]
        assert main([*command, "--chunk", "2"]) == 0
        costs = json.loads((tmp_path / "out" / "judge_costs.json").read_text())
        assert costs["judge/judge/calls"] == len(server.asked) > 0
        assert costs["judge/judge/input_tokens"] == 10 * len(server.asked)
        assert (tmp_path / "out" / "judge_transcripts.sqlite").exists()
        before = [*read_rows(tmp_path / "out" / "samples.jsonl")]
        assert main([*command, "--chunk", "2", "--fresh"]) == 0
        assert [*read_rows(tmp_path / "out" / "samples.jsonl")] == before
    again = json.loads((tmp_path / "out" / "judge_costs.json").read_text())
    assert again["judge/judge/calls"] == 0
    assert again["judge/judge/cache_hits"] > 0
