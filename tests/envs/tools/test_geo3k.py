"""Geo3k: every outcome of the example's tool, and a box counts only if the model wrote it."""

from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.envs.tool_use import write_call
from sensorium.systems.geo3k.environment import Geo3k
from sensorium.vocabulary import Task
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import EnvironmentFailure, TaskError

TASK = Task("g", (user("How long is x?"),), answer="\\frac{1}{2}")


def opened(task: Task = TASK, **options: Any) -> Geo3k:
    environment = Geo3k(MediaStore(), task, **options)
    environment.reset(0)
    return environment


def told(result: Any) -> str:
    assert result.observation is not None
    (message,) = result.observation.messages
    assert message.role == "user"
    return message.text


def test_a_right_try_is_told_and_the_box_is_paid() -> None:
    environment = opened()
    assert "matches" in told(environment.step(write_call("calc_score", {"answer": "0.5"})))
    result = environment.step("So \\boxed{0.5}.")
    assert (result.done, result.truncated, result.success, result.reward) == (True, False, True, {"success": 1.0})


def test_a_wrong_try_is_told_and_before_the_last_turn_that_the_next_is_final() -> None:
    environment = opened()
    first = told(environment.step(write_call("calc_geo3k_reward", {"answer": "7"})))
    second = told(environment.step(write_call("calc_score", {"answer": "8"})))
    assert "does not match" in first
    assert ("final" in first, "final" in second) == (False, True)
    result = environment.step(write_call("calc_score", {"answer": "\\boxed{\\frac{1}{2}}"}))
    assert (result.done, result.success) == (True, True)  # the last turn; the model wrote the box


@pytest.mark.parametrize(
    "response",
    ["\\boxed{3}", "no idea", "<tool_call>{broken}</tool_call> \\boxed{3}", "<tool_call>{"],
)
def test_no_call_or_a_malformed_one_ends_it(response: str) -> None:
    result = opened().step(response)
    assert (result.done, result.truncated, result.success, result.reward) == (True, False, False, {"success": 0.0})


@pytest.mark.parametrize(
    "call",
    [
        write_call("solve", {"answer": "1"}),
        write_call("calc_score", {}),
        write_call("calc_score", {"answer": ""}),
        write_call("calc_score", {"answer": ["1"]}),
        '<tool_call>{"function": "calc_score"}</tool_call>',
        '<tool_call>{"name": "calc_score", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "calc_score", "arguments": "{"}</tool_call>',
        '<tool_call>{"function": ["x"], "arguments": 3}</tool_call>',
    ],
)
def test_a_call_that_is_not_as_it_should_be_costs_a_turn_and_is_told_the_form(call: str) -> None:
    environment = opened()
    result = environment.step(call)
    assert '"name": "calc_score"' in told(result)
    assert result.info["valid"] is False
    environment.step(call)
    result = environment.step(call)
    assert (result.done, result.truncated, result.success) == (True, True, False)


def test_the_last_call_counts() -> None:
    environment = opened()
    both = write_call("calc_score", {"answer": "7"}) + write_call("calc_score", {"answer": "\\boxed{1/2}"})
    assert "matches" in told(environment.step(both))


def test_a_box_in_what_the_model_was_told_earns_nothing() -> None:
    environment = opened(Task("g", (user("Is it \\boxed{\\frac{1}{2}}?"),), answer="\\frac{1}{2}"))
    reply = told(environment.step(write_call("calc_score", {"answer": "0.5"})))
    assert "\\boxed{" in reply
    result = environment.step("I give up.")
    assert (result.success, result.reward) == (False, {"success": 0.0})


def test_the_demonstration_tries_and_answers() -> None:
    environment = opened()
    assert "matches" in told(environment.step(environment.demonstrate()))
    assert environment.step(environment.demonstrate()).success is True
    with pytest.raises(EnvironmentFailure):
        environment.demonstrate()


def test_answers_that_cannot_be_compared_with_are_named() -> None:
    with pytest.raises(TaskError, match="no text, number"):
        opened(Task("g", (user("?"),), answer=None))
    assert opened().step("\\boxed{" + "9" * 5000 + "}").success is False


def test_the_rules_say_how_to_call() -> None:
    head, _ = Geo3k(MediaStore(), TASK).reset(0)
    assert "calc_score" in head[0].text
    assert Geo3k(MediaStore(), TASK, explain=False).reset(0)[0] == ()
