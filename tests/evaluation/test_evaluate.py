"""Evaluation keeps accuracy apart from reward, says how sure it is, and counts what was not judged."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.evaluation.evaluate import summarize
from sensorium.evaluation.summary import row_of, sample_from, sample_of, summarize_samples
from sensorium.recipe.registry import build
from sensorium.report.tables import summary_grid
from sensorium.rewards.scorer import Scorer, score_groups
from sensorium.vocabulary import Episode, Group, Score, Status, Task
from tests.evaluation.made import episode, group, sample


def test_accuracy_is_not_reward_and_categories_are_apart() -> None:
    right, wrong = Score("exact", 1.0, 0.5, correct=True), Score("exact", 0.0, 0.5, correct=False)
    polite = Score("format", 1.0, 0.2)
    found = summarize(
        [
            group("colour", episode("a", right, polite), episode("b", wrong, polite)),
            group("shape", episode("c", wrong, polite)),
        ],
        "sampled",
    )
    assert found["accuracy"] == pytest.approx(0.25), "tasks count alike, however many samples they have"
    assert found["reward"] == pytest.approx((0.7 + 0.2 + 0.2) / 3)
    assert found["terms"] == {"exact": pytest.approx(1 / 3), "format": 1.0}
    colour, shape = found["categories"]["colour"], found["categories"]["shape"]
    assert (colour["accuracy"], colour["tasks"], colour["reward"]) == (0.5, 1, pytest.approx(0.45))
    assert (shape["accuracy"], shape["tasks"], shape["terms"]) == (0.0, 1, {"exact": 0.0, "format": 1.0})
    assert colour["interval"][0] < 0.5 < colour["interval"][1]


def test_what_was_not_judged_is_counted_and_not_wrong() -> None:
    right = Score("exact", 1.0, correct=True)
    missing = Score("exact", None, reason="timed out")
    failed = episode("c", missing, status=Status.FAILED)
    cut = episode("d", right, status=Status.TRUNCATED, tokens=9)
    found = summarize([group("x", e) for e in (episode("a", right), episode("b", missing), failed, cut)], "sampled")
    assert found["accuracy"] == 1.0
    assert (found["missing"], found["failed"], found["episodes"]) == (2, 1, 4)
    assert (found["truncated"], found["truncated_share"], found["length_mean"]) == (1, 0.25, 4.5)
    assert (found["tasks"], found["judged"]) == (4, 2)
    wrong = summarize([group("x", episode("a", Score("exact", 0.0, correct=False)))], "sampled")
    assert (wrong["missing"], wrong["reward"], wrong["accuracy"]) == (0, 0.0, 0.0), "a reward of 0 is not missing"
    nothing = summarize([group("x", episode("b", missing))], "sampled")
    assert nothing["accuracy"] is nothing["interval"] is nothing["reward"] is None
    assert nothing["categories"]["x"]["tasks"] == 0


SCORES = st.builds(
    Score,
    name=st.sampled_from(["exact", "format", "judge"]),
    value=st.none() | st.floats(-2, 2),
    scope=st.sampled_from(["episode", "turn"]),
)
WEIGHTS = {"exact": 0.8, "format": 0.2, "judge": 0.5}


@given(st.lists(st.lists(SCORES, min_size=1, max_size=5), min_size=1, max_size=8))
def test_weighted_terms_sum_up_to_the_reward_in_every_sample_and_in_the_summary(drawn: list[list[Score]]) -> None:
    whole = [(*scores, *(Score(name, 0.0) for name in WEIGHTS if name not in {s.name for s in scores})) for scores in drawn]
    scored = [tuple(Score(s.name, s.value, WEIGHTS[s.name], s.scope, turn=0) for s in scores) for scores in whole]
    groups = [group("x", episode(str(i), *scores)) for i, scores in enumerate(scored)]
    for one in groups:
        row = row_of(sample_of(one.task, 0, one.episodes[0], None, False), one.task, one.episodes[0], 0)
        parts = {name: row[f"reward/{name}"] for name in WEIGHTS}
        if None in parts.values():
            assert row["reward"] is None
        else:
            assert row["reward"] == pytest.approx(sum(row["weights"][name] * value for name, value in parts.items()))
    found = summarize(groups, "x")
    if found["reward"] is not None:
        total = sum(found["weights"][name] * value for name, value in found["terms"].items())
        assert found["reward"] == pytest.approx(total)
    else:
        assert found["terms"] == {}


def test_a_line_tells_everything_that_is_counted() -> None:
    scores = (Score("exact", None, 0.5, reason="timed out"), Score("format", 1.0, 0.5))
    task = Task("t", answer=["B", 2], metadata={"category": "x"})
    for votes in (True, False):
        made = sample_of(task, 3, episode("e", *scores, text="<b>"), "b" if votes else None, votes)
        row = row_of(made, task, episode("e", *scores, text="<b>"), 7)
        assert sample_from(row) == made
        assert (row["seed"], row["response"], row["missing"]) == (7, "<b>", {"exact": "timed out"})


def test_the_scorers_terms_fill_the_samples() -> None:
    terms = [(build("reward", name, {}), weight) for name, weight in (("format", 0.2), ("exact_alnum", 0.8))]
    scorer = Scorer(terms)
    task = Task("t", answer="B", metadata={"category": "x"})
    said = ("<answer>B</answer>", "<answer>A</answer>", "<answer>b.</answer>", "B")
    played = Group("g", task, tuple(_numbered(episode(str(i), text=text), i) for i, text in enumerate(said)))
    groups = asyncio.run(score_groups(scorer, [played]))
    found = summarize(groups, "sampled", scorer.extract)
    assert found["mean@4"]["value"] == found["accuracy"] == 0.5
    assert found["best@4"]["value"] == found["majority@4"]["value"] == 1.0
    assert "majority@4" not in summarize(groups, "sampled"), "nobody could say what the answers are"


def _numbered(one: Episode, index: int) -> Episode:
    return Episode(one.id, one.task_id, one.group_id, index, one.threads, one.turns, one.status)


def test_the_majority_answer_and_its_share_are_what_always_giving_it_would_score() -> None:
    known = ["Red", "red ", ["blue", "navy"], "green", "red"]
    given = ["red", "red", "red", "green", None]
    found = summarize_samples(
        [
            sample(i, correct=i in (0, 1, 3), answer=answer, extracted=text, category="ab"[i % 2])
            for i, (answer, text) in enumerate(zip(known, given, strict=True))
        ]
        + [sample(5, correct=None, answer="blue")],
        "eval",
    )
    assert found["majority"] == {"answer": "red", "share": 0.6, "different": 4}, "a task that was not judged has no part"
    assert found["given"] == {"answer": "red", "share": 0.75, "different": 2}
    assert found["categories"]["a"]["majority"]["share"] == pytest.approx(2 / 3)
    grid = summary_grid(found)
    assert dict(grid.rows)["chance"][0] == "60.0 %"
    assert any("2 different answers given" in note and "“red” 60.0 %" in note for note in grid.notes)
    assert "majority" not in summarize_samples([sample(0, answer=None)], "eval")
