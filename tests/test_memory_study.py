"""The memory study's committed results: what is claimed of them holds for every seed, and docs/tasks.md quotes them."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = {name: json.loads((ROOT / f"studies/results/memory/{name}.json").read_text()) for name in ("best", "first")}
LATER, BLANKED = "sampled, later clips", "sampled, later clips, history blanked"


@pytest.mark.parametrize("choice", RESULTS)
def test_memories_become_better_and_need_their_history_with_every_seed(choice: str) -> None:
    runs = RESULTS[choice]["runs"]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    for run in runs:
        before, after = ({name: part["accuracy"] for name, part in run[when].items()} for when in ("before", "after"))
        assert after["sampled"] >= before["sampled"] + 0.2
        assert after[LATER] >= before[LATER] + 0.2
        assert after[BLANKED] <= after[LATER] - 0.5
        assert after["greedy"] >= before["greedy"]
        assert run["after"]["sampled"]["tasks"] == 600
        assert run["prompts whose history is what the policy wrote"] == 640


def test_the_page_quotes_them() -> None:
    page = (ROOT / "docs/tasks.md").read_text()
    for name, part in RESULTS["best"]["before"].items():
        if "first" not in name:
            means = [part["mean"], *(RESULTS[choice]["after"][name]["mean"] for choice in ("best", "first"))]
            assert f"| {name} | {' | '.join(f'{mean:.3f}' for mean in means)} |" in page
