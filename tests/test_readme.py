"""The code of the README and of the page on own parts runs, and what it defines trains a model."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sensorium.recipe.load import parse_recipe
from sensorium.recipe.registry import NAMES, table
from sensorium.runs.metrics import read_metrics
from sensorium.trainer.run import train

README = Path(__file__).parents[1] / "README.md"
OWN_PARTS = README.parent / "docs/guides/own_parts.md"
RECIPE = """
name: own
steps: 2
threads: 1
run_dir: {folder}
model: {{path: "tiny:qwen2"}}
tasks:
  train:
    - {{source: "readme_code:Sums", options: {{size: 8}}}}
    - source: environments
      weight: 0.5
      options: {{environment: "readme_code:HigherLower", size: 6, options: {{top: 5}}}}
batch: {{prompts_per_step: 3, group_size: 3}}
rollout: {{max_new_tokens: 12, max_turns: 2}}
rewards: {{terms: [{{name: "readme_code:Brevity"}}]}}
"""


@pytest.fixture
def readme_code(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The Python blocks of both pages as one module."""
    families = dict(table("family"))
    module = ModuleType("readme_code")
    monkeypatch.setitem(sys.modules, "readme_code", module)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text() + OWN_PARTS.read_text(), re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, module.__dict__)
    yield module
    NAMES["family"] = families


def test_own_tasks_rewards_and_environments_train(readme_code: ModuleType, tmp_path: Path) -> None:
    train(parse_recipe(RECIPE.format(folder=tmp_path / "run"), "README", []))
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 2
    assert all(0 < row["reward/brevity"] <= 1 for row in rows)
    assert any(row["episodes/turns_mean"] > 1 for row in rows), "the environment was played for more than one turn"


def test_an_own_family_is_known_by_name(readme_code: ModuleType) -> None:
    from sensorium.models.load_chat import family_of

    assert family_of("my_vl") == "my_vl"


def test_the_recipe_in_the_readme_is_the_shipped_one() -> None:
    from sensorium.recipe.load import load_recipe

    (block,) = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    told = parse_recipe(block, "README", []).model_dump()
    shipped = load_recipe("shapes").model_dump()
    assert {**told, "logging": shipped["logging"]} == shipped


def test_the_python_of_the_readme_runs(readme_code: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme_code.main()
    rows = read_metrics(tmp_path / "runs/mine/metrics.jsonl")
    assert len(rows) == 2
    assert all("reward/short_answer" in row for row in rows)
