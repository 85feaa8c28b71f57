"""Accuracy by type: each kind of answer is compared in its own way, and never beyond [0, 1]."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.recipe.registry import build
from sensorium.systems.audio_visual.by_type import COMPARE, AccuracyByType, Unfit, multi_label, regression, word_error_rate
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError, TaskError
from sensorium.vocabulary.task import Task

MakeEpisode = Callable[..., Episode]


@pytest.mark.parametrize(
    ("kind", "known", "said", "value", "correct"),
    [
        ("multiple choice", "B", "B", 1.0, True),
        ("multiple choice", "B", "(b) the cat", 1.0, True),
        ("Multiple-Choice", "B. the cat", "B", 1.0, True),
        ("multiple choice", "B", "C", 0.0, False),
        ("multiple choice", "the cat", "The cat!", 1.0, True),
        ("multiple choice", "B", "Because", 0.0, False),
        ("numerical", "3.14159", "about 3.142", 1.0, True),
        ("numerical", 12, "12.004", 1.0, True),
        ("numerical", 12, "12.01", 0.0, False),
        ("numerical", 12, "twelve", 0.0, False),
        ("OCR", "STOP AT THE LINE", "STOP AT THE LINE", 1.0, True),
        ("OCR", "STOP AT THE LINE", "STOP AT LINE", 0.75, False),
        ("OCR", "STOP", "a b c d e", 0.0, False),
        ("regression", 10, "8", 0.8, None),
        ("regression", 10, "35", 0.0, None),
        ("regression", 0, "0.0", 1.0, None),
        ("regression", 0, "1", 0.0, None),
        ("regression", -4, "-5", 0.75, None),
        ("multi-label", "A,C", "C, A", 1.0, True),
        ("emer_ov_mc", "A,C", "AC", 1.0, True),
        ("emer_ov_mc", "A,C", "A", 2 / 3, False),
        ("emer_ov_mc", ["A", "C", "D"], "A. joy; B. fear", 0.4, False),
        ("multi-label", ["joy", "relief"], "Relief and joy", 1.0, True),
        ("judge", "Yes", "yes.", 1.0, True),
        ("yes/no", "No", "Yes", 0.0, False),
        ("judge", "true", "yes", 1.0, True),
        ("judge", "No", "I am not sure", 0.0, False),
    ],
)
def test_each_type_has_its_own_way(
    kind: str, known: Any, said: str, value: float, correct: bool | None, episode_of: MakeEpisode
) -> None:
    task = Task("t", answer=known, metadata={"type": kind})
    (score,) = AccuracyByType().score(task, episode_of(f"<think>hm</think><answer>{said}</answer>"))
    assert score.value == pytest.approx(value)
    assert score.correct is correct


@pytest.mark.parametrize("kind", COMPARE)
def test_no_answer_is_worth_nothing(kind: str, episode_of: MakeEpisode) -> None:
    task = Task("t", answer="no" if kind in ("judge", "yes/no") else "7", metadata={"type": kind})
    (score,) = AccuracyByType().score(task, episode_of("seven, I suppose"))
    assert (score.value, bool(score.correct)) == (0.0, False)


def test_the_type_may_be_given_for_all_and_the_whole_response_be_the_answer(episode_of: MakeEpisode) -> None:
    term = build("reward", "accuracy_by_type", {"default": "numerical", "fallback": True}, "x")
    (score,) = term.score(Task("t", answer=7), episode_of("7.0"))
    assert (score.name, score.value) == ("accuracy_by_type", 1.0)
    with pytest.raises(RecipeError, match="did you mean 'numerical'"):
        AccuracyByType(default="numercal")


@pytest.mark.parametrize(
    ("kind", "known", "what"),
    [
        ("free-form", "a joke", "type 'free-form' cannot be compared"),
        ("", "a joke", "cannot be compared"),
        ("numerical", "many", "is no number"),
        ("judge", "perhaps", "neither yes nor no"),
        ("multi-label", "...", "no list of labels"),
        ("ocr", " ", "no words"),
        ("multiple choice", "?", "no letter"),
    ],
)
def test_a_task_that_does_not_fit_its_type_gives_no_score(
    kind: str, known: str, what: str, episode_of: MakeEpisode
) -> None:
    with pytest.raises(TaskError, match=f"task t: .*{what}"):
        AccuracyByType().score(Task("t", answer=known, metadata={"type": kind}), episode_of("<answer>1</answer>"))


ANSWERS = st.one_of(st.text(max_size=20), st.sampled_from(["A", "B, C", "yes", "no", "-1.5", "1e9", "0"]))


@given(st.sampled_from(sorted(COMPARE)), ANSWERS, ANSWERS)
def test_values_stay_between_0_and_1_and_the_answer_itself_is_right(kind: str, known: str, said: str) -> None:
    try:
        value, correct = COMPARE[kind]([known], said)
        itself, right = COMPARE[kind]([known], known)
    except Unfit:
        return
    assert 0.0 <= value <= 1.0
    assert itself == 1.0
    assert right in (True, None)
    if correct is not None:
        assert correct == (value == 1.0)


WORDS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=6)


@given(WORDS.filter(bool), WORDS)
def test_word_error_rate_is_an_edit_distance(reference: list[str], heard: list[str]) -> None:
    edits = round(word_error_rate(reference, heard) * len(reference))
    assert abs(len(reference) - len(heard)) <= edits <= max(len(reference), len(heard))
    assert (edits == 0) == (reference == heard)
    if heard:
        assert edits == round(word_error_rate(heard, reference) * len(heard))
    assert word_error_rate(reference, [*reference, "d"]) == pytest.approx(1 / len(reference))


@given(st.floats(-1e6, 1e6).filter(lambda x: abs(x) > 1e-3), st.floats(0, 0.99))
def test_regression_falls_with_the_relative_error(known: float, error: float) -> None:
    for said in (known * (1 + error), known * (1 - error)):
        assert regression([repr(known)], repr(said))[0] == pytest.approx(1 - error, abs=1e-6)


@given(st.sets(st.sampled_from("ABCDEF"), min_size=1), st.sets(st.sampled_from("ABCDEF")))
def test_set_f1_is_symmetric_and_by_the_book(known: set[str], said: set[str]) -> None:
    value, _ = multi_label([",".join(sorted(known))], ", ".join(sorted(said)))
    shared = len(known & said)
    assert value == pytest.approx(2 * shared / (len(known) + len(said)))
