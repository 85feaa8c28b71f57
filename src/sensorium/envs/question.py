"""Question: a task's messages as an environment that ends after one step."""

from sensorium.envs.protocol import Observation, StepResult
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import EnvironmentFailure
from sensorium.vocabulary.task import Task


class Question:
    """Shows the task's messages, takes one response, pays nothing by itself: reward terms judge the answer."""

    instant = True

    def __init__(self, task: Task) -> None:
        self.task = task
        self._open = False

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """The head is the leading system messages, the observation all others."""
        head, asked = question_of(self.task)
        self._open = True
        return head, Observation(asked)

    def step(self, response: str) -> StepResult:
        """The response ends it."""
        if not self._open:
            raise EnvironmentFailure(f"task {self.task.id}: a question takes one response after each reset.")
        self._open = False
        return StepResult(None, done=True)

    def demonstrate(self) -> str:
        """The task's worked response."""
        if not self.task.demonstration:
            raise EnvironmentFailure(f"task {self.task.id} has no demonstration to learn from; give its row one.")
        return self.task.demonstration[0]

    def close(self) -> None:
        """Nothing is held."""


def question_of(task: Task) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """A task's leading system messages, and what it asks."""
    start = next((i for i, message in enumerate(task.messages) if message.role != "system"), None)
    if start is None:
        raise EnvironmentFailure(f"task {task.id} asks nothing: it needs a message that is not a system prompt.")
    return task.messages[:start], task.messages[start:]
