"""The learning claims are committed results, hold what the project promises, and are what the README quotes."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "studies/results" / f"{name}.json").read_text())


def cell(summary: dict[str, Any]) -> str:
    low, high = summary["interval"]
    return f"{summary['accuracy']:.3f} [{low:.3f}–{high:.3f}]"


@pytest.mark.parametrize("name", ["shapes", "frozen_lake", "sight_and_sound"])
def test_the_readme_quotes_the_committed_results(name: str) -> None:
    found = result(name)
    text = (ROOT / "README.md").read_text()
    for variant in found["before"]:
        assert f"{cell(found['before'][variant])} | {cell(found['after'][variant])}" in text, variant
    assert found["command"] in text


@pytest.mark.parametrize("name", ["shapes", "frozen_lake", "sight_and_sound"])
def test_claims_are_measured_on_enough_held_out_tasks(name: str) -> None:
    found = result(name)
    assert len(found["commit"]) == 40
    for summary in (*found["before"].values(), *found["after"].values()):
        assert summary["tasks"] >= 500
        assert summary["failed"] == summary["missing"] == 0


def test_shapes_learns_and_looks() -> None:
    before, after = result("shapes")["before"], result("shapes")["after"]
    assert before["sampled"]["accuracy"] <= 0.60
    assert after["sampled"]["interval"][0] >= 0.85
    assert after["greedy"]["accuracy"] >= before["greedy"]["accuracy"] + 0.10
    chance = 0.25
    for taken_away in ("blank", "swapped"):
        assert after[taken_away]["interval"][0] <= chance + 0.02


def test_frozen_lake_learns_and_looks() -> None:
    before, after = result("frozen_lake")["before"], result("frozen_lake")["after"]
    assert after["sampled"]["accuracy"] >= before["sampled"]["accuracy"] + 0.20
    assert after["greedy"]["accuracy"] >= before["greedy"]["accuracy"] + 0.10
    assert after["blank"]["interval"][1] < before["sampled"]["interval"][0] + 0.20
    assert after["sampled"]["interval"][0] > after["blank"]["interval"][1] + 0.20
    assert result("frozen_lake")["minutes"] <= 10


def test_sight_and_sound_learns_looks_and_listens() -> None:
    before, after = result("sight_and_sound")["before"], result("sight_and_sound")["after"]
    assert after["sampled"]["interval"][0] >= before["sampled"]["interval"][1] + 0.20
    assert after["greedy"]["accuracy"] >= before["greedy"]["accuracy"] + 0.10
    for taken_away in ("mute", "blank"):
        assert after[taken_away]["interval"][1] <= after["sampled"]["interval"][0] - 0.20
    assert result("sight_and_sound")["minutes"] <= 10


ALGORITHMS = ["grpo_clip", "rloo_clip", "grpo_gspo", "ppo_masked_gae", "ppo_bi_level_gae"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gains_and_loses_with_its_sign_flipped(name: str) -> None:
    found = result(f"algorithms/{name}")
    for sign in ("right", "flipped"):
        for when in ("before", "after"):
            for summary in found[sign][when].values():
                assert summary["tasks"] >= 500
                assert summary["failed"] == summary["missing"] == 0
    right, flipped = found["right"], found["flipped"]
    assert right["after"]["sampled"]["interval"][0] > right["before"]["sampled"]["interval"][1]
    assert flipped["after"]["sampled"]["interval"][1] < flipped["before"]["sampled"]["interval"][0]


def test_the_page_of_algorithms_quotes_the_committed_results() -> None:
    text = (ROOT / "docs/algorithms.md").read_text()
    for name in ALGORITHMS:
        found = result(f"algorithms/{name}")
        for kind in ("sampled", "greedy"):
            right = f"{cell(found['right']['before'][kind])} | {cell(found['right']['after'][kind])}"
            assert f"{right} | {cell(found['flipped']['after'][kind])}" in text, (name, kind)


@pytest.mark.parametrize(("name", "rise"), [("shapes", 0.25), ("frozen_lake", 0.20), ("sight_and_sound", 0.20)])
def test_claims_hold_on_tasks_by_which_nothing_was_chosen(name: str, rise: float) -> None:
    found = result("fresh")[name]
    text = (ROOT / "README.md").read_text()
    for variant in ("sampled", "greedy"):
        before, after = found["before"][variant], found["after"][variant]
        assert before["tasks"] >= 500
        assert after["interval"][0] > before["interval"][1] + rise
        assert f"{cell(before)} | {cell(after)}" in text
