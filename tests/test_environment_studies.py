"""The studies of environments are committed results, hold what is said of them, and are what the page quotes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/guides/environments.md").read_text()
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


def cell(values: Sequence[float]) -> str:
    """The mean over seeds, and each where they differ."""
    each = [f"{value:.3f}" for value in values]
    return f"{sum(values) / len(values):.3f}" + (f" ({', '.join(each)})" if len(set(each)) > 1 else "")


def accuracies(runs: list[dict[str, Any]], when: str, kind: str) -> list[float]:
    return [run[when][kind]["accuracy"] for run in runs]


@pytest.mark.parametrize("environment", ["sokoban", "geometry"])
def test_tiny_runs_learn_and_the_page_quotes_them(environment: str) -> None:
    """The claim is of the mean over seeds; the page tells each of them."""
    runs = result(f"environments/{environment}")["runs"]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    assert all(summary["tasks"] >= 500 for run in runs for when in ("before", "after") for summary in run[when].values())
    for kind, least in (("sampled", 0.2), ("greedy", 0.1)):
        before, after = (accuracies(runs, when, kind) for when in ("before", "after"))
        assert sum(after) / 3 >= sum(before) / 3 + least
        assert min(now - was for was, now in zip(before, after, strict=True)) > 0.7 * least, "and no seed is far from it"
        assert f"{kind} | {cell(before)} | {cell(after)} |" in PAGE
    blank = accuracies(runs, "after", "blank")
    assert min(accuracies(runs, "after", "sampled")) > max(blank) + 0.1, "it looks"


def test_the_tool_is_used() -> None:
    runs = result("environments/geometry")["runs"]
    for kind, garbled in (("sampled", "garbled"), ("greedy", "garbled, greedy")):
        whole, without = accuracies(runs, "after", kind), accuracies(runs, "after", garbled)
        assert min(whole) > max(without) + 0.1
        assert f"| {cell(without)} |" in PAGE
