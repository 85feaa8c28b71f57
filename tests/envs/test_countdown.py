"""Countdown and the arithmetic behind it: exact, bounded, and nothing is executed."""

import time
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.data.media_store import MediaStore
from sensorium.envs.countdown import Countdown, problem
from sensorium.envs.shipped_tools import NotArithmetic, evaluate, in_words, numbers_in
from sensorium.vocabulary.errors import EnvironmentFailure


@given(st.integers(0, 2**31 - 1), st.integers(2, 5))
def test_every_problem_can_be_solved(seed: int, count: int) -> None:
    numbers, target, expression = problem(count, 20, 100, seed)
    assert evaluate(expression) == target
    assert sorted(numbers_in(expression)) == sorted(numbers)


def test_right_wrong_and_malformed_answers() -> None:
    environment = Countdown(MediaStore(), max_turns=5)
    _, first = environment.reset(3)
    numbers, target, _ = problem(3, 20, 100, 3)
    assert first.messages[0].text == f"Numbers: {', '.join(map(str, numbers))}. Target: {target}."
    told = []
    for answer in ("1 + 1", "__import__('os')", str(target), " + ".join(map(str, numbers))):
        result = environment.step(f"<think></think><answer>{answer}</answer>")
        assert result.observation is not None
        assert result.reward["success"] == 0.0  # type: ignore[index]
        told.append((result.reward["format"], result.observation.messages[0].text))  # type: ignore[index]
    assert [paid for paid, _ in told] == [0.1, 0.0, 0.1, 0.1]
    assert "exactly once" in told[0][1]
    assert "Not an expression" in told[1][1]
    assert f"comes to {sum(numbers)}, not {target}" in told[3][1]
    result = environment.step(environment.demonstrate())
    assert (result.reward, result.done, result.success) == ({"success": 1.0, "format": 0.1}, True, True)
    with pytest.raises(EnvironmentFailure):
        environment.step("again")


def test_one_attempt_is_a_finished_episode_and_a_last_of_several_is_cut_off() -> None:
    once, twice = Countdown(MediaStore()), Countdown(MediaStore(), max_turns=2)
    once.reset(0), twice.reset(0)
    twice.step("?")
    for environment, truncated in ((once, False), (twice, True)):
        result = environment.step("?")
        assert (result.done, result.truncated, result.success) == (True, truncated, False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * (3 + 4) / 7", 2),
        ("1/3 + 1/6", Fraction(1, 2)),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("-2 ** 2", -4),
        ("2^10", 1024),
        ("6 ÷ 4 × 2", 3),
        ("7 // 2 + 7 % 2", 4),
    ],
)
def test_arithmetic_is_exact(text: str, value: Fraction) -> None:
    assert evaluate(text) == value


def test_functions_are_for_calculators_only() -> None:
    assert evaluate("sqrt(2) * sin(radians(45))", functions=True) == pytest.approx(1.0)
    assert in_words(evaluate("2 * pi", functions=True)) == "6.283185307"
    with pytest.raises(NotArithmetic, match="not allowed"):
        evaluate("sqrt(2)")


@pytest.mark.parametrize(
    "text",
    [
        "", "1 +", "1/0", "9**9**9", "9**999999", "(" * 300 + "1" + ")" * 300, "__import__('os').system('true')",
        "x", "'a'*9",
        "True", "1e999", "[1]", "1 if 1 else 2", "(-8)**0.5", "sqrt(-1)", "1;2", "lambda: 1", "\0", "1" * 501, "max()",
        "10**200*10**200*10**200*10**200*10**200*10**200*10**200", "exp(1000)", "round(1, 'a')",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused_in_a_moment(text: str) -> None:
    began = time.process_time()
    with pytest.raises(NotArithmetic):
        evaluate(text, functions=True)
    assert time.process_time() - began < 5


@given(st.text(alphabet="0123456789+-*/()^.% piesqrt,", max_size=60))
def test_any_text_is_worked_out_or_refused(text: str) -> None:
    with suppress(NotArithmetic):
        evaluate(text, functions=True)
