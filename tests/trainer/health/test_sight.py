"""The sight check sees what an environment shows through a veil, whether its methods are plain or async."""

import asyncio
from typing import Any

import pytest

from sensorium.envs.protocol import Observation, StepResult
from sensorium.runs.metrics import SightResult
from sensorium.trainer.health.sight import _compared, blanked, spread
from sensorium.vocabulary import Episode, Group, Message, Score, Segment, Status, Task, Turn, system, user


class Veil:
    """Blanks by replacing whatever is shown."""

    def messages(self, messages: Any) -> tuple[Message, ...]:
        return tuple(user("blank") for _ in messages)


class Plain:
    def reset(self, seed: int) -> Any:
        return (system("head"),), Observation((user("picture"),))

    def step(self, response: str) -> Any:
        return StepResult(Observation((user("picture"),)), reward=0.5, info={"said": response})

    def close(self) -> Any:
        self.closed = True


class Later(Plain):
    async def reset(self, seed: int) -> Any:
        return super().reset(seed)

    async def step(self, response: str) -> Any:
        return super().step(response)

    async def close(self) -> Any:
        super().close()


@pytest.mark.parametrize("environment", [Plain(), Later()], ids=["plain", "async"])
def test_what_an_environment_shows_is_blanked_and_what_it_pays_is_not(environment: Any) -> None:
    watched = blanked(environment, Veil().messages)
    assert getattr(watched, "instant", False) is False

    async def call(method: Any, *arguments: Any) -> Any:
        returned = method(*arguments)
        return await returned if asyncio.iscoroutine(returned) else returned

    head, observation = asyncio.run(call(watched.reset, 0))
    result = asyncio.run(call(watched.step, "left"))
    assert [message.text for message in (*head, *observation.messages)] == ["blank", "blank"]
    assert result.observation.messages[0].text == "blank"
    assert (result.reward, result.info) == (0.5, {"said": "left"})
    asyncio.run(call(watched.close))
    assert environment.closed


@pytest.mark.parametrize(("correct", "measure", "shown"), [(True, "accuracy", 1.0), (None, "mean reward", -0.25)])
def test_what_is_compared_is_called_by_its_name(correct: bool | None, measure: str, shown: float) -> None:
    scores = (Score("judge", -0.25, correct=correct),)
    episode = Episode("e", "t", "g", 0, (), (), Status.FINISHED, scores=scores)
    found = _compared("picture", [Group("g", Task("t"), (episode,))], [Group("g", Task("t"), (episode,))])
    assert (found.measure, found.shown, found.blanked) == (measure, shown, shown)


def test_shown_and_blanked_are_not_mixed_up() -> None:
    def group(right: bool, text: str) -> Group:
        response = Segment("model", (1,), text=text)
        scores = (Score("exact", float(right), correct=right),)
        return Group(
            "g", Task("t"), (Episode("e", "t", "g", 0, (), (Turn(0, (), response, 0, 0),), Status.FINISHED, scores=scores),)
        )

    found = _compared("sound", [group(True, "a"), group(True, "b")], [group(False, "a"), group(True, "c")])
    assert found == SightResult("sound", tasks=2, shown=1.0, blanked=0.5, same=1)


def test_the_tasks_of_the_check_are_of_all_kinds_where_kinds_take_turns() -> None:
    tasks = [Task(str(i), metadata={"category": "abcd"[i % 4]}) for i in range(512)]
    few = spread(tasks, 32)
    assert len({task.id for task in few}) == 32
    assert {task.metadata["category"] for task in few} == set("abcd")
    assert spread(tasks[:5], 32) == tasks[:5]
