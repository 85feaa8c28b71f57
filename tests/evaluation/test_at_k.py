"""Several samples of a task as one number, held against plain loops."""

from hypothesis import example, given
from hypothesis import strategies as st

from sensorium.evaluation.summary import Sample, best_at_k, majority_at_k, mean_at_k, summarize_samples
from tests.evaluation.made import sample

ANSWERS = st.none() | st.sampled_from(["a", "b", "c"])
JUDGED = st.sampled_from([True, True, True, False])


@st.composite
def attempts(draw: st.DrawFn) -> list[Sample]:
    """Samples of one task: an answer is right or wrong whoever gives it, some give none, some are not judged."""
    right = draw(st.sampled_from(["a", "b", "c", "d"]))
    said = draw(st.lists(st.tuples(ANSWERS, JUDGED), min_size=1, max_size=9))
    return [sample(0, i, (answer == right) if judged else None, answer) for i, (answer, judged) in enumerate(said)]


def plain_majority(samples: list[Sample]) -> float | None:
    """The most frequent answer, by counting each against all others; the earlier one where counts are equal."""
    judged = [s for s in samples if s.correct is not None]
    if not judged:
        return None
    best, most = None, 0
    for one in judged:
        count = 0
        for other in judged:
            if one.extracted is not None and other.extracted == one.extracted:
                count += 1
        if count > most:
            best, most = one, count
    return 1.0 if best is not None and best.correct else 0.0


@given(attempts())
@example([sample(0, 0, None, "a"), sample(0, 1, None, None)])
def test_mean_best_and_majority_are_what_plain_loops_find(samples: list[Sample]) -> None:
    right = wrong = 0
    for one in samples:
        right += one.correct is True
        wrong += one.correct is False
    judged = right + wrong
    assert mean_at_k(samples) == (right / judged if judged else None)
    assert best_at_k(samples) == ((1.0 if right else 0.0) if judged else None)
    assert majority_at_k(samples) == plain_majority(samples)


def test_of_equally_frequent_answers_the_first_wins() -> None:
    assert majority_at_k([sample(0, 0, True, "a"), sample(0, 1, False, "b")]) == 1.0
    assert majority_at_k([sample(0, 0, False, "b"), sample(0, 1, True, "a")]) == 0.0


def test_samples_without_an_answer_do_not_vote() -> None:
    silent = [sample(0, i, False) for i in range(3)]
    assert majority_at_k([*silent, sample(0, 3, True, "a")]) == 1.0
    assert majority_at_k(silent) == 0.0
    assert majority_at_k([sample(0, 0, None, "a"), sample(0, 1, None, "a"), sample(0, 2, False, "b")]) == 0.0


@given(st.lists(attempts(), min_size=1, max_size=6), st.randoms())
def test_a_summary_has_the_mean_over_tasks_in_any_order_of_samples(tasks: list[list[Sample]], random: object) -> None:
    placed = [sample(i, s.index, s.correct, s.extracted, category=str(i % 2)) for i, task in enumerate(tasks) for s in task]
    shuffled = list(placed)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    found = summarize_samples(shuffled, "x")
    assert found == summarize_samples(placed, "x")
    k = max(len(task) for task in tasks)
    for name, measure in (("mean", mean_at_k), ("best", best_at_k), ("majority", majority_at_k)):
        values = [value for task in tasks if (value := measure(task)) is not None]
        if k > 1 and values:
            part = found[f"{name}@{k}"]
            assert part["value"] == sum(values) / len(values)
            assert part["interval"][0] - 1e-9 <= part["value"] <= part["interval"][1] + 1e-9
    assert sum(part["tasks"] for part in found["categories"].values()) == found["judged"]
