"""Answers are read strictly; repair changes fences, commas and quotes, and nothing of what was meant."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.rewards.judges.answer_forms import FreeText, JsonAnswer, Number, OneOf, RankingAnswer

SCORE = JsonAnswer({"score": Number(0, 1), "why": OneOf(("x", ""))})


@pytest.mark.parametrize(
    "text",
    [
        '{"score": 0.5, "why": "x"}',
        '```json\n{"score": 0.5, "why": "x"}\n```',
        'Sure, here it is:\n{"score": 0.5, "why": "x",}\nI hope this helps.',
        "{'score': 0.5, 'why': 'x'}",
        '<think>maybe {"score": 1}</think>{"score": 0.5, "why": "x"}',
    ],
)
def test_json_is_read_through_its_wrapping(text: str) -> None:
    assert SCORE.parse(text) == {"score": 0.5, "why": "x"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no JSON"),
        ("0.5", "no JSON"),
        ('{"score": 0.5}', "lacks 'why'"),
        ('{"score": 2, "why": ""}', "not between"),
        ('{"score": "0.5", "why": ""}', "no number"),
        ('{"score": true, "why": ""}', "no number"),
        ('{"score": NaN, "why": ""}', "no JSON"),
        ('{"score": 0.1, "why": ""} or {"score": 0.9, "why": ""}', "several"),
        ("[0.5]", "no JSON object"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_what_is_not_in_its_form_is_no_answer(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SCORE.parse(text)


def test_one_of_several_is_no_other_number() -> None:
    verdict = JsonAnswer({"verdict": OneOf((0, 1))})
    assert verdict.parse('{"verdict": 1, "more": 2}') == {"verdict": 1}
    with pytest.raises(ValueError, match="none of 0, 1"):
        verdict.parse('{"verdict": 1.5}')


@given(st.permutations(range(1, 6)))
def test_a_ranking_gives_each_candidate_its_place(order: list[int]) -> None:
    for text in (str(order), f'{{"ranking": {order}}}', str([f"Candidate {n}" for n in order])):
        places = RankingAnswer(5).parse(text)
        assert [places[n - 1] for n in order] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("text", ["[1, 2]", "[1, 2, 2]", "[0, 1, 2]", "[1, 2, 4]", "[]", '{"order": [1, 2, 3]}', "1 2 3"])
def test_a_wrong_ranking_is_no_answer(text: str) -> None:
    with pytest.raises(ValueError):
        RankingAnswer(3).parse(text)


def test_a_partial_ranking_says_who_was_left_out() -> None:
    assert RankingAnswer(3, partial=True).parse("[3, 1]") == (1, None, 0)


@settings(max_examples=30)
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    for form in (SCORE, RankingAnswer(2), FreeText()):
        with suppress(ValueError):
            form.parse(text)
