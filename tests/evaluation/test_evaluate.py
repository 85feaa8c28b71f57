"""Evaluation says how sure it is, keeps accuracy apart from reward, and counts what was not judged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.evaluation.evaluate import summarize
from sensorium.evaluation.intervals import mean_interval, wilson
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn


def episode(id: str, *scores: Score, status: Status = Status.FINISHED, tokens: int = 3) -> Episode:
    response = Segment("model", tuple(range(tokens)), name=id)
    thread = Thread((Segment("environment", (1,)), response), (False, True))
    return Episode(id, "t", "g", 0, (thread,), (Turn(0, (), response, 0, 1),), status, scores=scores)


def group(category: str, *episodes: Episode) -> Group:
    return Group("g", Task("t", metadata={"category": category}), episodes)


def test_wilson_is_the_textbook_interval() -> None:
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0, 20)[0] == 0.0
    assert wilson(20, 20)[1] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least one"):
        wilson(0, 0)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=60))
def test_an_interval_holds_the_mean(values: list[float]) -> None:
    low, high = mean_interval(values)
    assert 0.0 <= low <= sum(values) / len(values) + 1e-9
    assert sum(values) / len(values) - 1e-9 <= high <= 1.0


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
    assert found["categories"]["colour"] == {"accuracy": 0.5, "tasks": 1}
    assert found["categories"]["shape"] == {"accuracy": 0.0, "tasks": 1}


def test_what_was_not_judged_is_counted_and_not_wrong() -> None:
    right = Score("exact", 1.0, correct=True)
    missing = Score("exact", None, reason="timed out")
    failed = episode("c", missing, status=Status.FAILED)
    found = summarize([group("x", e) for e in (episode("a", right), episode("b", missing), failed)], "sampled")
    assert found["accuracy"] == 1.0
    assert (found["missing"], found["failed"], found["episodes"]) == (2, 1, 3)
