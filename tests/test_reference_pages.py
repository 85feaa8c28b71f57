"""The pages on tasks and environments name what there is; the rows on them and on that of own parts are rewarded."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml
from PIL import Image

from sensorium.data.media_store import MediaStore
from sensorium.data.row_format import FIELDS, PARTS
from sensorium.data.rows import JsonlRows
from sensorium.recipe.registry import GIVEN, parameters_of, resolve, table
from sensorium.rewards.reward_term import build_term
from sensorium.rewards.scorer import Scorer
from sensorium.runs.episodes import read_groups
from sensorium.systems.caprl.caption_rows import CaptionRows
from sensorium.trainer.health.rules import RULES
from sensorium.trainer.run import train
from tests.rewards.conftest import (
    MakeEpisode,
    episode_of,  # noqa: F401  (a fixture)
)
from tests.trainer.small import small

ROOT = Path(__file__).parents[1]
ROW = re.compile(r'\{"id": "1", "messages".*\}(?=`|\n)')


def first_cells(page: str, head: str) -> set[str]:
    """The code in the first cells of the tables whose head begins so."""
    found: set[str] = set()
    for body in re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE):
        found |= {name for line in body.splitlines() for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    return found


def test_the_page_on_health_says_of_every_rule_what_to_do() -> None:
    page = (ROOT / "docs/reference/health.md").read_text()
    told = re.findall(r"^\| (\w+) \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    assert sorted(told) == sorted(["finding", *(rule.name for rule in RULES)])


def options_of(kind: str, name: str) -> set[str]:
    return set(parameters_of(resolve(kind, name))) - set(GIVEN[kind])


def test_the_page_on_tasks_names_every_field_part_and_source() -> None:
    page = (ROOT / "docs/guides/tasks.md").read_text()
    assert first_cells(page, "field") == set(FIELDS)
    assert first_cells(page, "part") == set(PARTS)
    assert first_cells(page, "source") == set(table("source"))


@pytest.mark.parametrize("source", ["jsonl", "parquet", "hub"])
def test_the_page_on_tasks_names_every_option(source: str) -> None:
    page = (ROOT / "docs/guides/tasks.md").read_text()
    (line,) = re.findall(rf"^\| `{source}` \|.*$", page, re.MULTILINE)
    told = set(re.findall(r"`(\w+)`", line)) - {source} | first_cells(page, "option")
    assert told == options_of("source", source)


def test_the_page_on_environments_names_every_one_and_every_option() -> None:
    page = (ROOT / "docs/guides/environments.md").read_text()
    assert first_cells(page, "name") | {"question"} == set(table("environment"))
    assert first_cells(page, "option of `environments`") == options_of("source", "environments")
    for name in first_cells(page, "name"):
        (line,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", line.rsplit("|", 2)[1])) == options_of("environment", name)


def test_the_page_on_tasks_names_every_planner_and_every_option() -> None:
    page = (ROOT / "docs/guides/tasks.md").read_text()
    assert first_cells(page, "planner") == set(table("planner"))
    for name in table("planner"):
        (line,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", line.split("|")[2])) == options_of("planner", name)


def test_the_planner_shown_on_the_page_on_tasks_plans_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(
        r"```python\n((?:(?!```).)*class Diary.*?)```", (ROOT / "docs/guides/tasks.md").read_text(), re.DOTALL
    )
    (tmp_path / "shown_diary.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    train(small(tmp_path / "run", "tasks.planner.name=shown_diary:Diary", "steps=2"))
    first, second = (read_groups(tmp_path / f"run/episodes/step_00000{step}.jsonl") for step in (1, 2))
    said = " ".join(group.episodes[0].response for group in first)
    assert {group.task.messages[0].text for group in second} == {f"So far: {said}"}


def test_the_source_shown_on_the_page_on_tasks_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/guides/tasks.md").read_text()
    (code,) = re.findall(r"```python\n(.*?class Animals.*?)```", page, re.DOTALL)
    (section,) = re.findall(r"```yaml\n(tasks:\n  train:\n    - \{source: \"my_tasks.*?)```", page, re.DOTALL)
    (tmp_path / "my_tasks.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/animals").mkdir(parents=True)
    for shade, name in enumerate(("cat", "dog", "cow")):
        Image.new("RGB", (64, 64), (shade * 90, 0, 0)).save(tmp_path / f"data/animals/{name}.png")
    (tmp_path / "data/animals/emu.png").touch()
    tasks = yaml.safe_load(section)["tasks"] | {"on_bad_row": "skip"}
    warm = {"steps": 1, "prompts_per_step": 3}
    train(small(tmp_path / "run", steps=1, tasks=tasks, warm_start=warm, model={"path": "tiny:qwen3_vl", "device": "cpu"}))
    played = read_groups(tmp_path / "run/episodes/step_000002.jsonl")
    assert {group.task.id for group in played} <= {"cat", "dog", "cow"}
    assert all(len(group.task.messages[0].media) == 1 for group in played)


@pytest.mark.parametrize("page", ["docs/guides/own_parts.md", "docs/guides/tasks.md"])
def test_the_row_that_is_shown_is_paid_when_its_question_is_answered_as_it_asks(
    page: str,
    tmp_path: Path,
    episode_of: MakeEpisode,  # noqa: F811
) -> None:
    (row,) = ROW.findall((ROOT / page).read_text())
    Image.new("RGB", (64, 64)).save(tmp_path / "cat.png")
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    (task,) = [source[0] for source in [JsonlRows(str(tmp_path / "rows.jsonl"), MediaStore())]]
    (form,) = re.findall(r"<answer>\w+</answer>", task.messages[-1].text)
    answered = episode_of(re.sub(r">\w+<", f">{json.loads(row)['answer']}<", form))
    scorer = Scorer([(build_term("exact", {}, page), 1.0)])
    (score,) = asyncio.run(scorer.score(task, answered)).scores
    assert score.value == 1.0


def test_the_picture_to_be_described_that_is_shown_is_read(tmp_path: Path) -> None:
    (row,) = re.findall(r'^\{"id".*"reward_model".*$', (ROOT / "docs/guides/tasks.md").read_text(), re.MULTILINE)
    Image.new("RGB", (64, 64)).save(tmp_path / "cat.png")
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    (task,) = [source[0] for source in [CaptionRows(str(tmp_path / "rows.jsonl"), MediaStore())]]
    assert task.metadata["questions"][0]["answer"] == "B"
    assert len(task.messages[0].media) == 1
