"""Plain functions as rewards, of both signatures, through the recipe's names and as objects."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import sensorium as sn
from sensorium.data.media_store import MediaStore
from sensorium.recipe.registry import wrong_options
from sensorium.rewards.reward_term import RewardContext, as_term, build_term
from sensorium.rewards.scorer import Scorer, trial_notes
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Episode, Group, Score
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import EnvironmentSpec, Task

MakeEpisode = Callable[..., Episode]
HERE = "tests.rewards.test_function_terms"
TASK = Task("t", (user("how many?"),), answer="3", metadata={"level": 2})


def brevity(task: Task, episode: Episode, scale: float = 1.0) -> float:
    return -scale * len(episode.response)


def parts(task: Task, episode: Episode) -> dict[str, Any]:
    return {"style": np.float32(0.5), "facts": torch.tensor(1)}


async def slow(task: Task, episode: Episode) -> Score:
    await asyncio.sleep(0)
    return Score("slow", 0.25, correct=True)


def contains(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(known in said) for said, known in zip(completions, answer, strict=True)]


def by_level(prompts: Any, completions: Any, level: list[int], bonus: float = 0.0) -> Any:
    return np.array([level[0] + bonus])


def needs_more(completions: list[str], solution: list[str]) -> list[float]:
    return [1.0]


def conversation(completions: Any, prompts: Any, **columns: Any) -> list[float]:
    return [float(completions[0][-1]["role"] == "assistant" and prompts[0][0]["content"] == "how many?")]


def twice(completions: list[str], **columns: Any) -> list[float]:
    return [1.0, 2.0]


def factory(name: str = "made") -> Any:
    return as_term(brevity, name=name)


def no_factory() -> float:
    return 1.0


class Bare:
    """A term with nothing but a score."""

    def score(self, task: Task, episode: Episode) -> float:
        return 1.0


def scores(term: Any, episode: Episode) -> tuple[Score, ...]:
    return asyncio.run(Scorer([(term, 1.0)], retries=0).score(TASK, episode)).scores


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("brevity", {"scale": 2.0}, {"brevity": -10.0}),
        ("brevity", {"name": "short"}, {"short": -5.0}),
        ("parts", {}, {"parts/style": 0.5, "parts/facts": 1.0}),
        ("slow", {}, {"slow": 0.25}),
        ("contains", {}, {"contains": 1.0}),
        ("by_level", {"bonus": 0.5}, {"by_level": 2.5}),
        ("conversation", {"messages": True}, {"conversation": 1.0}),
        ("factory", {"name": "mine"}, {"mine": -5.0}),
        ("Bare", {}, {"Bare": 1.0}),
    ],
)
def test_a_recipe_names_functions_and_classes_alike(
    name: str, options: dict[str, Any], found: dict[str, float], episode_of: MakeEpisode
) -> None:
    assert wrong_options("reward", f"{HERE}:{name}", options) == ("", "")
    term = build_term(f"{HERE}:{name}", options, "rewards.terms.0")
    assert {score.name: score.value for score in scores(term, episode_of("it's3"))} == found


@pytest.mark.parametrize("form", [bool, np.bool_, torch.tensor, lambda right: sn.reward(correct=right)])
@pytest.mark.parametrize("right", [True, False])
def test_a_function_that_returns_a_bool_says_right_or_wrong(form: Any, right: bool, episode_of: MakeEpisode) -> None:
    for term in (as_term(lambda task, episode: form(right), name="mine"), as_term(lambda task, episodes: [form(right)])):
        (score,) = scores(term, episode_of("3"))
        assert (score.name, score.value, score.correct) == (term.name, float(right), right)
    (score,) = scores(as_term(lambda prompts, completions: [form(right)]), episode_of("3"))
    assert score.correct is right
    (number,) = scores(as_term(lambda task, episode: float(right)), episode_of("3"))
    assert number.correct is None
    (other,) = scores(as_term(lambda task, episode: sn.reward(0.25, correct=right)), episode_of("3"))
    assert (other.value, other.correct) == (0.25, right)


@pytest.mark.parametrize("form", [bool, np.bool_, torch.tensor])
@pytest.mark.parametrize("right", [True, False])
def test_a_bool_by_name_says_right_or_wrong_and_a_number_does_not(form: Any, right: bool, episode_of: MakeEpisode) -> None:
    term = as_term(lambda task, episode: {"right": form(right), "short": 0.5}, name="mine")
    found = {score.name: (score.value, score.correct) for score in scores(term, episode_of("3"))}
    assert found == {"mine/right": (float(right), right), "mine/short": (0.5, None)}


def test_options_that_a_function_does_not_take_are_refused_with_the_right_name() -> None:
    assert "did you mean 'scale'" in wrong_options("reward", f"{HERE}:brevity", {"scael": 1})[1]
    with pytest.raises(RecipeError, match="did you mean 'scale'"):
        as_term(brevity, scael=1)
    with pytest.raises(RecipeError, match=r"no reward term.*task, episode"):
        build_term(f"{HERE}:no_factory", {}, "rewards.terms.0")


def test_callables_of_the_python_api(episode_of: MakeEpisode) -> None:
    class Counter:
        def __call__(self, question: Task, played: Episode) -> int:
            return len(played.turns)

    (score,) = scores(as_term(lambda t, e: 0.5), episode_of("x"))
    assert (score.name, score.value) == ("reward", 0.5)
    (score,) = scores(as_term(Counter()), episode_of("x"))
    assert (score.name, score.value) == ("Counter", 1.0)
    assert as_term(Bare).name == "Bare"
    for thing in (3, "exact", lambda: 1.0, lambda a, b, c: 1.0):
        with pytest.raises(RecipeError):
            as_term(thing)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (needs_more, "takes 'solution', and the task has no such column"),
        (twice, "must return a list of 1 score"),
        (conversation, "string indices"),
    ],
)
def test_what_a_function_does_wrong_is_its_missing_score(function: Any, reason: str, episode_of: MakeEpisode) -> None:
    (score,) = scores(as_term(function), episode_of("x"))
    assert score.missing
    assert reason in score.reason


def test_a_term_or_function_that_asks_for_a_context_is_given_one(episode_of: MakeEpisode) -> None:
    context = RewardContext(MediaStore())

    class Looking:
        name = "looking"

        def __init__(self, scale: float = 1.0, *, context: RewardContext) -> None:
            self.scale, self.store = scale, context.store

        def score(self, task: Task, episode: Episode) -> float:
            return self.scale

    def looking(task: Task, episode: Episode, scale: float = 1.0, *, context: RewardContext) -> float:
        return scale * isinstance(context.store, MediaStore)

    assert as_term(Looking, context=context, scale=2.0).store is context.store  # type: ignore[union-attr]
    assert scores(as_term(looking, context=context, scale=2.0), episode_of("x"))[0].value == 2.0
    assert scores(partial(as_term, looking)(context=context, scale=3.0), episode_of("x"))[0].value == 3.0
    with pytest.raises(RecipeError, match="has no option 'context'"):
        build_term(f"{HERE}:in_context", {"context": 1}, "rewards.terms.0", context)
    assert build_term(f"{HERE}:in_context", {}, "rewards.terms.0", context).name == "in_context"


def in_context(task: Task, episode: Episode, *, context: RewardContext) -> float:
    return 1.0


def test_a_function_may_judge_a_whole_group(episode_of: MakeEpisode) -> None:
    def longest(task: Task, episodes: Sequence[Episode]) -> list[float]:
        return [float(len(e.response) == max(len(other.response) for other in episodes)) for e in episodes]

    async def distinct(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
        return [None if text == "" else 1.0 / completions.count(text) for text in completions]

    episodes = tuple(replace(episode_of(text), id=text + str(i)) for i, text in enumerate(("a", "bb", "bb", "")))
    scorer = Scorer([(as_term(longest), 1.0), (as_term(distinct, group=True), 1.0)], retries=0)
    scored = asyncio.run(scorer.score_group(Group("g", TASK, episodes))).episodes
    assert [e.scores[0].value for e in scored] == [0.0, 1.0, 1.0, 0.0]
    assert [e.scores[1].value for e in scored] == [1.0, 0.5, 0.5, None]


def boom(task: Task, episode: Episode) -> float:
    raise ValueError("boom")


def picky(task: Task, episode: Episode) -> float:
    return float(int(episode.response))


def mistyped(task: Task, episode: Episode) -> float:
    return len(episode.answer)  # type: ignore[attr-defined]


def praise(task: Task, episode: Episode) -> str:
    return "good"


def lists(prompts: list[str], completions: list[str]) -> list[str]:
    return ["good" for _ in completions]


@pytest.mark.parametrize(
    ("function", "on_demonstration", "on_nothing"),
    [(boom, True, False), (picky, False, False), (mistyped, True, True), (praise, True, True), (lists, True, True)],
)
def test_a_function_that_fails_on_a_demonstration_is_reported_before_a_run(
    function: Any, on_demonstration: bool, on_nothing: bool
) -> None:
    terms = [(as_term(function), 1.0)]
    for demonstration, fails in ((("7",), on_demonstration), ((), on_nothing)):
        notes = list(trial_notes(terms, [Task("t7", (user("?"),), "7", demonstration=demonstration)] * 3))
        assert len(notes) == fails
        assert all("task t7" in note and terms[0][0].name in note for note in notes)
    played = Task("e", environment=EnvironmentSpec("frozen_lake"), demonstration=("7",))
    assert not list(trial_notes(terms, [played]))
    assert not list(trial_notes([(terms[0][0], 0.0)], [Task("t7", (user("?"),), "7", demonstration=("7",))]))
