"""The memory study's committed results: the claims hold for every seed, and docs/guides/tasks.md quotes them."""

import json
from pathlib import Path

import pytest

from sensorium.rewards.judges.client import LEASE_S

ROOT = Path(__file__).parents[1]
NAMES = ("best", "first", "early_best", "early_first")
RESULTS = {name: json.loads((ROOT / f"studies/results/memory/{name}.json").read_text()) for name in NAMES}
LATER, BLANKED = "sampled, later clips", "sampled, later clips, history blanked"


@pytest.mark.parametrize("name", NAMES)
def test_memories_become_better_and_need_their_history_with_every_seed(name: str) -> None:
    runs = RESULTS[name]["runs"]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    for run in runs:
        before, after = ({name: part["accuracy"] for name, part in run[when].items()} for when in ("before", "after"))
        assert after["sampled"] >= before["sampled"] + 0.2
        assert after[LATER] >= before[LATER] + 0.2
        assert after[BLANKED] <= after[LATER] - 0.3
        assert after["greedy"] >= before["greedy"] + (0.4 if "early" in name else 0.1)
        assert after["greedy, later clips, history blanked"] <= after["greedy, later clips"] - 0.5
        assert run["after"]["sampled"]["tasks"] == 600
        assert run["prompts whose history is what the policy wrote"] == (1280 if "early" in name else 640)


@pytest.mark.parametrize("start", ["", "early_"])
def test_the_page_quotes_them(start: str) -> None:
    page = (ROOT / "docs/guides/tasks.md").read_text()
    best, first = RESULTS[f"{start}best"], RESULTS[f"{start}first"]
    for name, before in best["before"].items():
        if "first clips" not in name:
            means = [before["mean"], best["after"][name]["mean"], first["after"][name]["mean"]]
            assert f"| {name} | {' | '.join(f'{mean:.3f}' for mean in means)} |" in page


def test_judged_runs_were_killed_and_resumed_and_nothing_differed() -> None:
    found = json.loads((ROOT / "studies/results/judged_kills.json").read_text())
    for name in ("alone", "one of two", "both of two"):
        assert found[name]["kills"] >= 10, name
        assert found[name]["differences"] == [], name
        assert found[name].get("longest judgement, s", 0) < LEASE_S, "nobody waited for a claim of the dead to run out"
    assert found["alone"]["prompts of each run whose history is what the policy wrote"] == [16]
