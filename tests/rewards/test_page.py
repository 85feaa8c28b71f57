"""docs/reference/rewards.md: every term and option is on it, and each of its examples pays what it says."""

import asyncio
import re
from inspect import Parameter, signature
from pathlib import Path

import numpy as np
import pytest
import yaml

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.recipe.registry import resolve, table
from sensorium.rewards.reward_term import RewardContext, as_term, build_term
from sensorium.rewards.scorer import Scorer
from sensorium.vocabulary.content import user
from sensorium.vocabulary.task import Task
from tests.rewards.conftest import MakeEpisode

PAGE = (Path(__file__).parents[2] / "docs/reference/rewards.md").read_text()
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE))


def tables(text: str, head: str) -> list[list[str]]:
    """The rows of the tables that begin with ``head``, cell by cell, without the marks of code."""
    rows = []
    for found in re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        rows += [[cell.strip().strip("`") for cell in line.strip().strip("|").split("|")] for line in found.splitlines()]
    return rows


EXAMPLES = [(term, *row) for term, text in SECTIONS.items() for row in tables(text, "options")]


def test_every_term_is_on_the_page_with_an_example() -> None:
    assert set(SECTIONS) == set(table("reward"))
    assert {example[0] for example in EXAMPLES} == set(SECTIONS)


@pytest.mark.parametrize("term", sorted(SECTIONS))
def test_every_option_is_on_the_page_with_its_default(term: str) -> None:
    told = {name: default for name, default, _ in tables(SECTIONS[term], "option")}
    parameters = dict(signature(resolve("reward", term)).parameters)
    parameters.pop("context", None)
    assert list(told) == list(parameters)
    for name, parameter in parameters.items():
        if parameter.default is Parameter.empty:
            assert told[name] == "needed"
        elif term != "format" or name != "tags":
            assert yaml.safe_load(told[name]) in (parameter.default, str(parameter.default))
    if term == "format":
        assert yaml.safe_load(told["tags"]) == as_term(resolve("reward", "format")).tags


@pytest.mark.parametrize(("term", "options", "answer", "response", "pays"), EXAMPLES)
def test_an_example_pays_what_it_says(
    term: str, options: str, answer: str, response: str, pays: str, episode_of: MakeEpisode
) -> None:
    built = build_term(term, yaml.safe_load(options) or {} if options else {}, "page")
    known = yaml.safe_load(answer) if answer[:1] in ("[", "n") else answer or None
    scorer = Scorer([(built, 1.0)])
    try:
        scored = asyncio.run(scorer.score(Task("t", answer=known), episode_of(response)))
    finally:
        scorer.close()
    (score,) = scored.scores
    if pays == "missing":
        assert score.missing
    else:
        assert score.value == pytest.approx(float(pays), abs=1e-3)


def test_the_code_on_the_page_is_a_reward(episode_of: MakeEpisode) -> None:
    code: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, code)
    task = Task("t")
    assert as_term(code["brevity"], scale=2.0).score(task, episode_of("a")) == 2.0
    assert as_term(code["longest"]).score_group(task, [episode_of("a"), episode_of("bb")]) == [0.0, 1.0]
    store = MediaStore()
    day = store.put(encode_png(np.full((4, 4, 3), 200, np.uint8)), "picture", "day.png")
    light = as_term(code["Light"], context=RewardContext(store))
    scored = asyncio.run(Scorer([(light, 1.0)]).score(Task("t", (user(day),)), episode_of("day")))
    assert scored.reward == 1.0
    assert as_term(code["Mentions"], word="cat").score(task, episode_of("a cat")).value == 1.0
