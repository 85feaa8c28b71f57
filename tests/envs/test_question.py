"""A question is an environment that ends after one step."""

import pytest

from sensorium.envs.question import Question
from sensorium.vocabulary.content import assistant, system, user
from sensorium.vocabulary.errors import EnvironmentFailure
from sensorium.vocabulary.task import Task


def test_head_is_the_leading_system_messages_and_one_response_ends_it() -> None:
    messages = (system("be brief"), user("a?"), assistant("b"), user("c?"))
    question = Question(Task("t", messages, demonstration=("d",)))
    head, observation = question.reset(0)
    assert (head, observation.messages) == (messages[:1], messages[1:])
    assert question.demonstrate() == "d"
    result = question.step("d")
    assert (result.observation, result.reward, result.done, result.truncated) == (None, None, True, False)
    with pytest.raises(EnvironmentFailure, match="one response"):
        question.step("e")


def test_without_system_prompt_there_is_no_head() -> None:
    assert Question(Task("t", (user("a?"),))).reset(0)[0] == ()


def test_a_task_that_asks_or_demonstrates_nothing_says_so() -> None:
    with pytest.raises(EnvironmentFailure, match="asks nothing"):
        Question(Task("t", (system("x"),))).reset(0)
    with pytest.raises(EnvironmentFailure, match="no demonstration"):
        Question(Task("t", (user("x"),))).demonstrate()
