"""docs/reference/algorithms.md agrees with the code in names, needs, choices and recipe lines; its own code runs."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch

from sensorium.algorithms.losses import Tokens
from sensorium.learner.update import Objective
from sensorium.recipe.estimators_and_losses import ESTIMATORS, LOSSES, SEQUENCE_MEAN
from sensorium.recipe.load import parse_recipe
from sensorium.recipe.registry import NAMES
from sensorium.recipe.schema import (
    AdvantageSection,
    AlgorithmSection,
    CorrectionSection,
    CriticSection,
    KLSection,
    LoraSection,
    LossSection,
    Recipe,
    Section,
    SelectionSection,
)
from sensorium.recipe.yaml import read_yaml, write_yaml
from sensorium.trainer.credit import estimate
from sensorium.vocabulary.errors import RecipeError
from tests.algorithms.batches import of_rewards, per_episode

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/algorithms.md").read_text()
MINIMAL = """
name: minimal
steps: 4
model: {path: "tiny:qwen3_vl"}
tasks: {train: [{source: shapes, options: {split: train, size: 64}}]}
batch: {prompts_per_step: 4, group_size: 4}
rewards: {terms: [{name: exact}, {name: format, weight: 0.1}]}
"""
FILLED = ("formula", "for", "needs", "recipe")
Row = dict[str, str]


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


SECTIONS = "|".join(key for key, field in Recipe.model_fields.items() if is_section(field.annotation))
SNIPPET = re.compile(rf"`((?:{SECTIONS}): [^`\n]+)`")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def table(title: str) -> list[Row]:
    """The first table under a heading, each row by column."""
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if re.fullmatch(rf"##+ {re.escape(title)}", line))
    first = next(i for i in range(start, len(lines)) if lines[i].startswith("|"))
    after = next(i for i in range(first, len(lines) + 1) if i == len(lines) or not lines[i].startswith("|"))
    header, rule, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[first:after]]
    assert set("".join(rule)) == {"-"}
    return [dict(zip(header, row, strict=True)) for row in rows]


def recipe_with(snippet: str, *overrides: str) -> Recipe:
    """A minimal recipe with the page's lines in it, loaded and checked as any other."""
    data, _ = read_yaml(MINIMAL, "minimal")
    lines, _ = read_yaml(snippet, "page")
    return parse_recipe(write_yaml(over(data, lines)), snippet, overrides)


def over(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: over(below.get(key), value) for key, value in above.items()}


def refused(*overrides: str) -> bool:
    try:
        parse_recipe(MINIMAL, "minimal", overrides)
    except RecipeError:
        return True
    return False


TABLES = {
    title: table(title)
    for title in (
        "Advantage estimators",
        "After the estimator",
        "Policy losses",
        "KL to the reference",
        "Aggregation",
        "Mismatch corrections",
        "Selection",
    )
}
ESTIMATOR_ROWS, POST_ROWS, LOSS_ROWS, KL_ROWS, AGGREGATION_ROWS, CORRECTION_ROWS, SELECTION_ROWS = TABLES.values()
CHOICES: list[tuple[list[Row], type[Section], str]] = [
    (POST_ROWS, AdvantageSection, "post"),
    (AGGREGATION_ROWS, LossSection, "aggregation"),
    *((KL_ROWS, KLSection, setting) for setting in ("place", "estimator", "control")),
    *((CORRECTION_ROWS, CorrectionSection, setting) for setting in ("weights", "mode", "reject", "estimator")),
]


def of_setting(rows: list[Row], setting: str) -> list[Row]:
    """The rows of one setting, where a table has several."""
    return [row for row in rows if row.get("setting", setting) == setting]


@pytest.mark.parametrize("title", TABLES)
def test_every_row_is_filled_in(title: str) -> None:
    for row in TABLES[title]:
        assert {*FILLED, "paper"} <= row.keys()
        assert all(row[column] for column in FILLED), row
        assert SNIPPET.findall(row["recipe"]), f"no recipe lines: {row}"
        assert not SNIPPET.sub("", row["recipe"]).strip(), f"something else than recipe lines: {row['recipe']}"


def test_the_estimators_are_those_of_the_registry() -> None:
    names = [row["name"] for row in ESTIMATOR_ROWS]
    assert sorted(names) == sorted(ESTIMATORS) == sorted(NAMES["advantage"])


def test_the_losses_are_those_of_the_registry() -> None:
    names = [row["name"] for row in LOSS_ROWS]
    assert sorted([*names, "likelihood"]) == sorted(LOSSES) == sorted(NAMES["loss"])
    assert "`likelihood`" in PAGE


@pytest.mark.parametrize(("rows", "section", "setting"), CHOICES, ids=[f"{s.__name__}.{key}" for _, s, key in CHOICES])
def test_every_choice_has_its_row_and_no_other(rows: list[Row], section: type[Section], setting: str) -> None:
    names = [row["name"] for row in of_setting(rows, setting)]
    assert sorted(names) == sorted(get_args(section.model_fields[setting].annotation))


def test_no_row_is_of_an_unknown_setting() -> None:
    assert {row["setting"] for row in KL_ROWS} == {"place", "estimator", "control"}
    assert {row["setting"] for row in CORRECTION_ROWS} == {"weights", "mode", "reject", "estimator", "engine_logprobs"}


def test_every_setting_of_selection_has_its_row() -> None:
    settings = [row["setting"].split("`")[1] for row in SELECTION_ROWS]
    own = [setting.removeprefix("selection.") for setting in settings if setting.startswith("selection.")]
    assert sorted(own) == sorted(SelectionSection.model_fields)
    terms = [row["setting"].split()[-1] for row in SELECTION_ROWS if row["setting"].startswith("`rewards.terms`")]
    assert set(terms) <= set(NAMES["reward"])


@pytest.mark.parametrize("row", ESTIMATOR_ROWS, ids=lambda row: row["name"])
def test_an_estimator_needs_what_its_traits_say(row: Row) -> None:
    traits, needs = ESTIMATORS[row["name"]], row["needs"]
    assert ("critic" in needs) == traits.critic
    assert ("groups ≥ 2" in needs) == traits.compares
    assert ("greedy attempt" in needs) == traits.greedy
    assert ("one thread" in needs) == traits.observations
    assert ("reward terms" in needs) == traits.per_term
    assert (needs == "nothing") == (not any((traits.critic, traits.compares, traits.greedy)))


@pytest.mark.parametrize("row", LOSS_ROWS, ids=lambda row: row["name"])
def test_a_loss_needs_what_its_traits_say(row: Row) -> None:
    traits, needs = LOSSES[row["name"]], row["needs"]
    assert ("whole sequences" in needs) == (traits.over == "sequence")
    assert ("whole update" in needs) == (traits.over == "update")
    assert ("sequence_mean_token_mean" in needs) == (traits.aggregations == SEQUENCE_MEAN)
    assert (needs == "nothing") == (traits.over == "token" and not traits.aggregations)


@pytest.mark.parametrize("row", of_setting(KL_ROWS, "estimator"), ids=lambda row: row["name"])
def test_a_kl_estimator_is_refused_where_its_row_does_not_place_it(row: Row) -> None:
    places = set(re.findall(r"`(\w+)`", row["needs"]))
    for place in get_args(KLSection.model_fields["place"].annotation):
        kl = ("algorithm.kl.coef=0.01", f"algorithm.kl.estimator={row['name']}", f"algorithm.kl.place={place}")
        assert refused(*kl) == (place not in places), place


@pytest.mark.parametrize("row", AGGREGATION_ROWS, ids=lambda row: row["name"])
def test_an_aggregation_is_refused_for_losses_over_sequences_where_its_row_says_so(row: Row) -> None:
    for name, traits in LOSSES.items():
        if traits.aggregations:
            assert refused(f"algorithm.loss={{name: {name}, aggregation: {row['name']}}}") == (row["needs"] != "nothing")
        elif name != "likelihood":
            assert not refused(f"algorithm.loss={{name: {name}, aggregation: {row['name']}}}")


@pytest.mark.parametrize("snippet", [*dict.fromkeys(SNIPPET.findall(PAGE)), *BLOCKS])
def test_recipe_lines_are_a_recipe(snippet: str) -> None:
    recipe_with(snippet)


@pytest.mark.parametrize(
    ("rows", "key", "traits"),
    [(ESTIMATOR_ROWS, "advantage", ESTIMATORS), (LOSS_ROWS, "loss", LOSSES)],
    ids=["advantage", "loss"],
)
def test_recipe_lines_name_their_row_and_only_settings_it_takes(rows: list[Row], key: str, traits: dict[str, Any]) -> None:
    for row in rows:
        for snippet in SNIPPET.findall(row["recipe"]):
            written = read_yaml(snippet, "page")[0]["algorithm"][key]
            assert written["name"] == row["name"]
            assert set(written) - {"name"} <= set(traits[row["name"]].settings)


@pytest.mark.parametrize(("rows", "section", "setting"), CHOICES, ids=[f"{s.__name__}.{key}" for _, s, key in CHOICES])
def test_recipe_lines_make_the_choice_of_their_row(rows: list[Row], section: type[Section], setting: str) -> None:
    for row in of_setting(rows, setting):
        for snippet in SNIPPET.findall(row["recipe"]):
            algorithm = recipe_with(snippet).algorithm
            (chosen,) = [part for _, part in algorithm if type(part) is section]
            assert getattr(chosen, setting) == row["name"]


def test_every_setting_is_on_the_page() -> None:
    sections = (AdvantageSection, LossSection, KLSection, CorrectionSection, CriticSection, SelectionSection, LoraSection)
    for section in sections:
        for key in section.model_fields:
            assert re.search(rf"\b{key}\b", PAGE), f"{section.__name__}.{key}"


def test_dotted_keys_exist() -> None:
    found = re.findall(rf"`((?:{SECTIONS})(?:\.\w+)+)", PAGE)
    assert len(found) > 20
    for dotted in found:
        model: Any = Recipe
        for part in dotted.split("."):
            assert is_section(model), dotted
            assert part in model.model_fields, dotted
            model = model.model_fields[part].annotation


def test_years_and_arxiv_numbers_agree() -> None:
    papers = re.findall(r"(\d{4}), (\d{2})(\d{2})\.\d{5}\b", PAGE)
    assert len(papers) > 30
    for year, first, month in papers:
        assert year == f"20{first}"
        assert 1 <= int(month) <= 12


def test_the_readme_points_to_the_page() -> None:
    assert "docs/reference/algorithms.md" in (ROOT / "README.md").read_text()


@pytest.fixture
def own_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's Python as a module; what it registers is taken back."""
    tables: list[dict[str, Any]] = [NAMES["advantage"], NAMES["loss"], ESTIMATORS, LOSSES]
    before = [dict(one) for one in tables]
    module = ModuleType("page_code")
    monkeypatch.setitem(sys.modules, "page_code", module)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, module.__dict__)
    yield module
    for one, old in zip(tables, before, strict=True):
        one.clear()
        one.update(old)


@pytest.mark.parametrize("name", ["against_best", "page_code:against_best"])
def test_an_own_estimator_credits(own_code: ModuleType, name: str) -> None:
    section = recipe_with("{}", f"algorithm.advantage.name={name}").algorithm.advantage
    batch = of_rewards([0.5, 1.0], [2.0, 0.0, 1.0], tokens=2)
    assert per_episode(batch, estimate(batch.episodes(), section).advantages_P) == [-0.5, 0, 0, -2, -1]


def test_an_own_loss_takes_its_setting(own_code: ModuleType) -> None:
    section = AlgorithmSection(loss=LossSection(name="capped", ratio_cap=2.0))
    logprobs_N, old_N = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -3.0])
    tokens = Tokens(logprobs_N, old_N, torch.tensor([1.0, 1.0]), torch.tensor([0, 0]))
    assert Objective("capped", section).loss(tokens).loss_N.tolist() == [-1, -2]


def test_own_traits_are_checked_at_start(own_code: ModuleType) -> None:
    assert not refused("algorithm.loss={name: capped, ratio_cap: 2.0}", "algorithm.advantage.name=against_best")
    assert refused("algorithm.loss={name: capped, clip_low: 0.1}")
    assert refused("algorithm.advantage.name=against_best", "batch.group_size=1")
