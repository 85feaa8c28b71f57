"""A recorded episode, played again: the observations and rewards of the recording, whatever the environment was.

The task of a recording (``data/demonstrations.py``) names it, and nothing else can: it is not in the table of environments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from sensorium.data.demonstrations import RecordedEnd
from sensorium.envs.protocol import Observation, StepResult
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import EnvironmentFailure
from sensorium.vocabulary.task import Task


class RecordedEnvironment:
    """Shows what the recorded episode showed; its demonstration is what was answered then."""

    instant = True

    def __init__(self, task: Task) -> None:
        assert task.environment is not None
        options = task.environment.options
        self._responses, self._turn = task.demonstration, 0
        self._head: tuple[Message, ...] = task.messages[: options["head"]]
        ends = accumulate(options["turns"], initial=options["head"])
        self._observations = [
            Observation(task.messages[start:end], after=after)
            for (start, end), after in zip(pairwise(ends), options["after"], strict=True)
        ]
        self._rewards: Sequence[float | Mapping[str, float] | None] = options["rewards"]
        self._end = RecordedEnd(**options["end"])

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self._turn = 0
        return self._head, replace(self._observations[0], category=self._end.category)

    def step(self, response: str) -> StepResult:
        reward = self._rewards[self._turn]
        self._turn += 1
        if self._turn < len(self._observations):
            return StepResult(self._observations[self._turn], reward)
        return StepResult(None, reward, not self._end.truncated, self._end.truncated, self._end.success)

    def demonstrate(self) -> str:
        if self._turn >= len(self._responses):
            raise EnvironmentFailure("the recorded episode has ended.")
        return self._responses[self._turn]

    def close(self) -> None:
        """Nothing to release."""
