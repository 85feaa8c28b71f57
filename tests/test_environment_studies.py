"""The studies of environments are committed results, hold what is said of them, and are what the page quotes."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/environments.md").read_text()
COMPARED = {
    ("FrozenLake", "GRPO"): "environments/frozen_lake_grpo",
    ("FrozenLake", "PPO, masked GAE"): "algorithms/ppo_masked_gae_right",
    ("FrozenLake", "PPO, turn-wise GAE"): "environments/frozen_lake_turn_wise_gae",
    ("FrozenLake", "PPO, bi-level GAE"): "algorithms/ppo_bi_level_gae_right",
    ("Sokoban", "GRPO"): "environments/sokoban_grpo",
    ("Sokoban", "PPO, masked GAE"): "environments/sokoban_masked_gae",
    ("Sokoban", "PPO, turn-wise GAE"): "environments/sokoban_turn_wise_gae",
    ("Sokoban", "PPO, bi-level GAE"): "environments/sokoban_bi_level_gae",
}


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "studies/results" / f"{name}.json").read_text())


def over_seeds(summary: dict[str, Any]) -> str:
    low, high = summary["range"]
    return f"{summary['mean']:.3f} ({low:.3f}–{high:.3f})"


@pytest.mark.parametrize(("environment", "estimator"), COMPARED)
def test_the_page_quotes_the_comparison_of_estimators_by_three_seeds(environment: str, estimator: str) -> None:
    found = result(COMPARED[environment, estimator])
    assert [run["seed"] for run in found["runs"]] == [0, 1, 2]
    cells = [over_seeds(found[when][kind]) for kind in ("sampled", "greedy") for when in ("before", "after")]
    assert f"| {environment} | {estimator} | {' | '.join(cells)} |" in PAGE
    for when in ("before", "after"):
        for summary in found[when].values():
            assert summary["tasks"] >= 500
            assert summary["failed"] == summary["missing"] == 0


@pytest.mark.parametrize("environment", ["sokoban", "geometry"])
def test_runs_through_the_service_have_the_numbers_of_runs_in_one_process(environment: str) -> None:
    here, there = (result(f"environments/alike/{environment}_{way}")["runs"][0] for way in ("process", "service"))
    assert here["seed"] == there["seed"] == 0
    assert len(here["curve"]) >= 60
    for part in ("curve", "before", "after"):
        assert here[part] == there[part], part


@pytest.mark.parametrize("environment", ["sokoban", "geometry"])
def test_it_is_learned_through_the_service_as_in_one_process(environment: str) -> None:
    here, there = (result(f"environments/{environment}{way}")["runs"][0] for way in ("", "_service"))
    assert (here["seed"], here["curve"], here["before"]) == (there["seed"], there["curve"], there["before"])
    assert all(there["after"][kind] == summary for kind, summary in here["after"].items())


def cell(summary: dict[str, Any]) -> str:
    low, high = summary["interval"]
    return f"{summary['accuracy']:.3f} [{low:.3f}–{high:.3f}]"


@pytest.mark.parametrize("environment", ["sokoban", "geometry"])
def test_tiny_runs_learn_and_the_page_quotes_them(environment: str) -> None:
    run = result(f"environments/{environment}")["runs"][0]
    before, after = run["before"], run["after"]
    assert all(summary["tasks"] >= 500 for summary in (*before.values(), *after.values()))
    assert after["sampled"]["accuracy"] >= before["sampled"]["accuracy"] + 0.2
    assert after["greedy"]["accuracy"] >= before["greedy"]["accuracy"] + 0.1
    assert after["sampled"]["interval"][0] > after["blank"]["interval"][1] + 0.1, "it looks"
    for kind in ("sampled", "greedy"):
        assert f"{kind} | {cell(before[kind])} | {cell(after[kind])} |" in PAGE


def test_the_tool_is_used() -> None:
    after = result("environments/geometry")["runs"][0]["after"]
    for kind, garbled in (("sampled", "garbled"), ("greedy", "garbled, greedy")):
        assert after[kind]["interval"][0] > after[garbled]["interval"][1] + 0.1
        assert f"| {cell(after[garbled])} |" in PAGE
