"""The learning claims are committed results, hold what the project promises, and are what the READMEs quote."""

import json
from pathlib import Path
from typing import Any

import pytest

from studies.seeds import add_run

ROOT = Path(__file__).parents[1]


def cell(summary: dict[str, Any]) -> str:
    low, high = summary["interval"]
    return f"{summary['accuracy']:.3f} [{low:.3f}–{high:.3f}]"


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "studies/results" / f"{name}.json").read_text())


CLAIMS = ["shapes", "frozen_lake", "sight_and_sound"]


def over_seeds(summary: dict[str, Any]) -> str:
    low, high = summary["range"]
    return f"{summary['mean']:.3f} ({low:.3f}–{high:.3f})"


@pytest.mark.parametrize("name", CLAIMS)
def test_the_page_of_studies_quotes_the_committed_results(name: str) -> None:
    found = result(name)
    text = (ROOT / "studies/README.md").read_text()
    for variant in found["before"]:
        assert f"{over_seeds(found['before'][variant])} | {over_seeds(found['after'][variant])}" in text, variant
    assert found["command"] in text


@pytest.mark.parametrize("name", CLAIMS)
def test_the_readme_quotes_the_fresh_tasks_and_those_without_a_picture(name: str) -> None:
    before, after = result(name)["before"], result(name)["after"]
    row = " | ".join(map(over_seeds, (before["sampled, fresh"], after["sampled, fresh"], after["blank"])))
    assert row in (ROOT / "README.md").read_text()


def test_the_page_of_families_quotes_what_was_learned_on_the_general_path() -> None:
    found, text = result("general_path"), (ROOT / "docs/guides/families.md").read_text()
    for variant in found["before"]:
        assert f"| {found['before'][variant]['mean']:.3f}, [" in text
        assert over_seeds(found["after"][variant]) in text
    assert found["command"] in text
    for variant in ("sampled", "greedy"):
        assert found["after"][variant]["interval"][0] > found["before"][variant]["interval"][1], "beyond chance"
    assert found["after"]["blank"]["interval"][1] < found["before"]["sampled"]["interval"][0], "by the picture"


def seeds_by_processor(found: dict[str, Any]) -> dict[str, list[int]]:
    seeds: dict[str, list[int]] = {}
    for run in found["runs"]:
        seeds.setdefault(run["machine"].partition(",")[0], []).append(run["seed"])
    return seeds


@pytest.mark.parametrize("name", CLAIMS)
def test_the_page_of_studies_says_on_which_machines_a_range_was_taken(name: str) -> None:
    found = result(name)
    (table,) = (
        part
        for part in (ROOT / "studies/README.md").read_text().split("\n\n")
        if over_seeds(found["after"]["sampled"]) in part
    )
    named = {"aarch64": "ARM", "x86_64": "x86"}
    head = table.splitlines()[0]
    assert {kind for kind, word in named.items() if word in head} == set(seeds_by_processor(found))


def test_runs_on_other_processors_stand_beside_each_other_and_widen_the_range(tmp_path: Path) -> None:
    def run(seed: int, machine: str, accuracy: float) -> dict[str, Any]:
        summary = {"accuracy": accuracy, "interval": [0.0, 1.0], "tasks": 500, "failed": 0, "missing": 0}
        return {"seed": seed, "machine": f"{machine}, 1 threads", "before": {}, "after": {"sampled": summary}}

    for one in (run(0, "x86_64", 0.9), run(0, "aarch64", 0.7), run(1, "x86_64", 0.8), run(0, "x86_64", 0.6)):
        found = add_run(tmp_path / "result.json", {}, one)
    assert seeds_by_processor(found) == {"aarch64": [0], "x86_64": [0, 1]}
    assert found["after"]["sampled"]["range"] == [0.6, 0.8], "a seed that is run again replaces its own run"


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_are_measured_with_three_seeds_on_enough_held_out_tasks(name: str) -> None:
    found = result(name)
    assert all(seeds == [0, 1, 2] for seeds in seeds_by_processor(found).values())
    for run in found["runs"]:
        assert len(run["commit"]) == 40
        assert run["cpu_minutes"] <= 20
        for summary in (*run["before"].values(), *run["after"].values()):
            assert summary["tasks"] >= 500
            assert summary["failed"] == summary["missing"] == 0


@pytest.mark.parametrize(("name", "rise"), [("shapes", 0.25), ("frozen_lake", 0.20), ("sight_and_sound", 0.60)])
def test_every_seed_gains_also_on_tasks_by_which_nothing_was_chosen(name: str, rise: float) -> None:
    for run in result(name)["runs"]:
        for variant in ("sampled", "greedy", "sampled, fresh", "greedy, fresh"):
            before, after = run["before"][variant], run["after"][variant]
            assert after["interval"][0] > before["interval"][1] + rise, (run["seed"], variant)


def test_no_claim_depends_on_the_seed() -> None:
    for name in CLAIMS:
        low, high = result(name)["after"]["sampled"]["range"]
        assert high - low <= 0.1, name


def test_shapes_looks() -> None:
    chance = 0.25
    for run in result("shapes")["runs"]:
        assert run["after"]["sampled"]["interval"][0] >= 0.85
        for taken_away in ("blank", "swapped"):
            assert run["after"][taken_away]["interval"][0] <= chance + 0.02


def test_frozen_lake_looks() -> None:
    for run in result("frozen_lake")["runs"]:
        assert run["after"]["sampled"]["interval"][0] > run["after"]["blank"]["interval"][1] + 0.20


def test_sight_and_sound_looks_and_listens() -> None:
    chance = 0.25
    for run in result("sight_and_sound")["runs"]:
        for taken_away in ("mute", "blank"):
            assert run["after"][taken_away]["interval"][0] <= chance


ALGORITHMS = ["grpo_clip", "rloo_clip", "grpo_gspo", "ppo_masked_gae", "ppo_bi_level_gae"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gains_and_loses_with_its_sign_flipped(name: str) -> None:
    right, flipped = (result(f"algorithms/{name}_{sign}") for sign in ("right", "flipped"))
    for found in (right, flipped):
        assert [run["seed"] for run in found["runs"]] == [0, 1, 2]
        for when in ("before", "after"):
            for summary in found[when].values():
                assert summary["tasks"] >= 500
                assert summary["failed"] == summary["missing"] == 0
    for run in right["runs"]:
        assert run["after"]["sampled"]["interval"][0] > run["before"]["sampled"]["interval"][1], run["seed"]
    assert right["after"]["sampled"]["mean"] > right["before"]["sampled"]["mean"] + 0.1
    for run in flipped["runs"]:
        assert run["after"]["sampled"]["interval"][1] < run["before"]["sampled"]["interval"][0], run["seed"]


def test_the_page_of_algorithms_quotes_the_committed_results() -> None:
    text = (ROOT / "docs/reference/algorithms.md").read_text()
    for name in ALGORITHMS:
        right, flipped = (result(f"algorithms/{name}_{sign}") for sign in ("right", "flipped"))
        for kind in ("sampled", "greedy"):
            row = " | ".join(over_seeds(part[kind]) for part in (right["before"], right["after"], flipped["after"]))
            assert row in text, (name, kind)


def test_the_digits_tutorial_reaches_nine_in_ten_with_every_seed_and_its_page_quotes_that() -> None:
    found = result("digits")
    page = (ROOT / "docs/start/digits.md").read_text()
    assert [run["seed"] for run in found["runs"]] == [0, 1, 2]
    for run in found["runs"]:
        sft, rl = run["sft"], run["rl"]
        assert sft["tasks"] == rl["tasks"] == 500
        assert rl["accuracy"] >= 0.9
        assert rl["interval"][0] > sft["interval"][1], "RL, not SFT, made the difference"
        assert run["cpu_minutes"] <= 10
        assert f"| {run['seed']} | {cell(sft)} | {cell(rl)} | {run['cpu_minutes']} |" in page


def test_two_hundred_kills_changed_nothing() -> None:
    found = result("kills")
    assert found["kills"] >= 200
    assert set(found["recipes"]) == {"LoRA", "PPO with a critic", "multi-turn", "sight and sound"}
    for name, recipe in found["recipes"].items():
        assert recipe["kills"] >= 50, name
        assert recipe["differences"] == [], name
        assert len(recipe["phases"]) >= 5, "kills fell into many phases of a run"


def test_a_seed_measured_in_more_variants_joins_the_others(tmp_path: Path) -> None:
    summary = {"accuracy": 0.5, "interval": [0.4, 0.6], "tasks": 500, "failed": 0, "missing": 0}
    place = tmp_path / "result.json"
    add_run(place, {}, {"seed": 0, "before": {}, "after": {"sampled": summary}})
    found = add_run(place, {}, {"seed": 1, "before": {}, "after": {"sampled": summary, "blank": summary}})
    assert [run["seed"] for run in found["runs"]] == [0, 1]
    assert found["after"]["blank"]["mean"] == 0.5


@pytest.mark.parametrize("part", ["engine", "environment", "reward", "learner", "driver"])
def test_kills_of_every_kind_of_process_cost_no_episode_and_train_none_twice(part: str) -> None:
    found = result("cluster_kills")[part]
    assert found["kills"] >= 10
    assert found["wrong"] == []
    assert len(found["kills by steps done"]) >= 3, "kills fell into different steps"
