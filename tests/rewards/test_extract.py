"""Terms that compare say what they take for the answer, in a form in which equal answers are equal texts."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.recipe.registry import build
from sensorium.rewards.reward_term import ComparingTerm
from sensorium.rewards.scorer import Scorer
from sensorium.vocabulary.episode import Episode, Segment, Status, Thread, Turn
from sensorium.vocabulary.task import Task

MakeEpisode = Callable[..., Episode]


def term(name: str, **options: object) -> ComparingTerm:
    built = build("reward", name, options)
    assert isinstance(built, ComparingTerm)
    return built


def written(text: str) -> Episode:
    response = Segment("model", (1,), text=text, name="e")
    thread = Thread((Segment("environment", (0,)), response), (False, True))
    return Episode("e", "t", "g", 0, (thread,), (Turn(0, (), response, 0, 1),), Status.FINISHED)


@pytest.mark.parametrize(
    ("name", "answers", "extracted"),
    [
        ("exact", ["B.", " b ", "(B)"], "b"),
        ("choice", ["B.", " b ", "Option B", "(B) the cat"], "B"),
        ("numeric", ["1,000", "1e3", "1000 m"], "1000.0"),
        ("gsm8k", ["#### 1,200", "#### $1200.00 a year", "\\boxed{1{,}200}", "\\boxed{3} #### **1200**."], "1200.0"),
        ("bbox_iou", ["[1, 2, 3, 4]", "it is at 1 2 3 4"], "[1.0, 2.0, 3.0, 4.0]"),
        ("math", ["x = \\boxed{2}", "\\boxed{2}"], "2"),
    ],
)
def test_equal_answers_are_equal_texts(name: str, answers: list[str], extracted: str) -> None:
    for answer in answers:
        assert term(name).extract(Task("t", answer="?"), written(f"<answer>{answer}</answer>")) == extracted


@pytest.mark.parametrize("name", ["exact", "choice", "numeric", "bbox_iou", "math", "accuracy_by_type"])
def test_without_the_tag_there_is_no_answer_unless_the_whole_response_is_taken(name: str) -> None:
    task = Task("t", answer="?", metadata={"type": "multiple choice"})
    said = "1, 2, 3, 4" if name == "bbox_iou" else "2" if name == "numeric" else "B"
    assert term(name).extract(task, written(said)) is None
    assert term(name, fallback=True).extract(task, written(said)) is not None


@pytest.mark.parametrize(
    ("kind", "answers", "extracted"),
    [
        ("multiple choice", ["B", "(b)", "B. a dog"], "B"),
        ("multiple choice", ["a dog", "A dog."], "adog"),
        ("numerical", ["2.499", "2.5", "2.501 m"], "2.5"),
        ("regression", ["2.5", "2.50"], "2.5"),
        ("ocr", ["red  light", " red light"], "red light"),
        ("emer_ov_mc", ["A, C", "c; a", "CA"], "a,c"),
        ("judge", ["Yes.", "true", "y"], "yes"),
        ("judge", ["perhaps"], None),
        ("numerical", ["many"], None),
        ("free-form", ["joy"], None),
    ],
)
def test_each_type_reads_an_answer_its_own_way(kind: str, answers: list[str], extracted: str | None) -> None:
    for answer in answers:
        found = term("accuracy_by_type").extract(
            Task("t", answer="?", metadata={"type": kind}), written(f"<answer>{answer}</answer>")
        )
        assert found == extracted


@given(st.lists(st.sampled_from(["B", "b.", "C", "7", "7.0", " 7 m", "", "?", "red", "Red!"]), min_size=2, max_size=2))
def test_what_is_extracted_alike_is_judged_alike(answers: list[str]) -> None:
    episodes = [written(f"<answer>{answer}</answer>") for answer in answers]
    for name, known in (("exact", "red"), ("choice", "B"), ("numeric", "7")):
        one, other = (term(name).extract(Task("t", answer=known), episode) for episode in episodes)
        if one == other:
            scores = [term(name).score(Task("t", answer=known), episode)[0].correct for episode in episodes]
            assert scores[0] == scores[1]


def test_the_first_comparing_term_speaks_for_the_answer(episode_of: MakeEpisode) -> None:
    task = Task("t", answer="B")
    terms = [(build("reward", name, {}), 1.0) for name in ("format", "choice", "exact")]
    episode = asyncio.run(Scorer(terms).score(task, episode_of("<answer>(b)</answer>")))
    assert Scorer(terms).extract(task, episode) == "B"
    assert Scorer(terms[:1]).comparing is None
    assert Scorer(terms[:1]).extract(task, episode) is None


def test_what_could_not_be_judged_has_no_answer(episode_of: MakeEpisode) -> None:
    scorer = Scorer([(build("reward", "choice", {}), 1.0)])
    failed = asyncio.run(scorer.score(Task("t", answer="B"), episode_of(status=Status.FAILED)))
    assert scorer.extract(Task("t", answer="B"), failed) is None
    unfit = Task("t", answer="not a letter")
    assert scorer.extract(unfit, asyncio.run(scorer.score(unfit, episode_of("<answer>B</answer>")))) is None
