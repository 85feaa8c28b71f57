"""docs/reference/metrics.md names every metric: those that small runs of several kinds write, and those in the code."""

import re
from pathlib import Path
from typing import Any

import pytest

import sensorium as sn
from tests.api.small import PARITY, SHAPES, small_recipe

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/metrics.md").read_text()
NAMED = re.findall(r"`([\w/@…]+)`", "\n".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")))
WILD = {"TERM": r"[\w:.]+", "RULE": r"\w+", "KIND": r"\w+", "CATEGORY": r".+", "K": r"\d+", "…": r"\w+"}
KINDS: dict[str, dict[str, Any]] = {
    "warm start, KL, evaluation by category": {
        "warm_start": {"steps": 1, "prompts_per_step": 2},
        "algorithm": {"kl": {"coef": 0.1, "control": "adaptive"}},
        "evaluation": {"every": 1, "limit": 2, "samples": 2},
    },
    "critic, correction, slow term": {
        "algorithm": {
            "advantage": {"name": "gae"},
            "critic": {"trunk": "shared"},
            "correction": {"weights": "token", "mode": "band", "reject": "mean"},
        },
        "rewards": [lambda task, episode: len(episode.response) / 10, PARITY],
    },
    "selection, remax": {
        "algorithm": {"advantage": {"name": "remax"}},
        "selection": {"dynamic": True, "max_rounds": 2, "oversample": 2.0},
    },
    "experts": {
        "model": {"path": "tiny:qwen3_vl_moe"},
        "algorithm": {"router_coef": 0.01, "router_replay": True},
        "selection": {"variance_share": 0.5},
    },
    "an environment": {
        "model": {"path": "package:frozen_lake"},
        "tasks": {"train": [{"source": "environments", "options": {"environment": "frozen_lake", "size": 4}}]},
        "rollout": {"max_new_tokens": 5, "max_turns": 2, "window": 1},
        "rewards": ["environment", PARITY],
    },
}


def known(name: str) -> bool:
    return any(re.fullmatch(_pattern(told), name) for told in NAMED)


def _pattern(told: str) -> str:
    pattern = re.escape(told)
    for word, wild in WILD.items():
        pattern = re.sub(rf"(?<![A-Z]){re.escape(word)}(?![A-Z])", lambda _, wild=wild: wild, pattern)
    return pattern


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_writes_is_on_the_page(kind: str, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path / "run", steps=1, tasks={"train": [SHAPES], "evaluate": [SHAPES]})
    run = sn.train(recipe, show=False, **KINDS[kind])
    unknown = [name for name in run.metrics.columns if name != "step" and not known(name)]
    assert not unknown, f"docs/reference/metrics.md does not name {unknown}"


def test_every_metric_named_in_the_code_is_on_the_page() -> None:
    families = {told.split("/")[0] for told in NAMED} - {"accuracy"}
    literal = re.compile(rf'"((?:{"|".join(sorted(families))})/[a-z_]+)"')
    code = [
        path.read_text()
        for place in ("trainer", "learner", "rewards")
        for path in (ROOT / "src/sensorium" / place).glob("*.py")
    ]
    found = {name for text in code for name in literal.findall(text)} - {"media/eval"}
    assert len(found) > 40
    assert [name for name in sorted(found) if not known(name)] == []
