"""Mathematics: is the answer mathematically equal to the known one? Decided by math-verify in processes of its own."""

from importlib.util import find_spec

from sensorium.rewards.answer import boxed, expected_answers, last_response, tagged
from sensorium.rewards.equivalence_pool import EquivalencePool
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError, TaskError
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task


class Mathematics:
    r"""1 if the last ``\boxed{…}`` (within ``<answer>`` where there is one), or else ``<answer>``, equals the known answer.

    A comparison that takes longer than ``timeout_s`` gives no score. ``fallback`` takes the whole response as the answer
    when it has neither mark.
    """

    instant = False
    needs_answer = True

    def __init__(self, timeout_s: float = 5.0, processes: int = 2, fallback: bool = False, name: str = "math") -> None:
        if find_spec("math_verify") is None:
            raise RecipeError(
                "reward 'math' needs the package math-verify, which is not installed: pip install math-verify."
            )
        self.name = name
        self.fallback = fallback
        self._pool = EquivalencePool(timeout_s, processes)

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """Right or wrong; only what the model wrote in its last turn counts."""
        known = expected_answers(task)
        given = self.extract(task, episode)
        right = given is not None and any(self._equal(task, answer, given) for answer in known)
        return (Score(self.name, float(right), correct=right),)

    def extract(self, task: Task, episode: Episode) -> str | None:
        """The answer as it is written; only what is written alike counts as one answer."""
        return mathematical_answer(last_response(episode), fallback=self.fallback)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def _equal(self, task: Task, known: str, given: str) -> bool:
        equal = self._pool.equal(known, given)
        if equal is None:
            raise TaskError(f"task {task.id}: the answer {known!r:.80} cannot be read as mathematics.")
        return equal


def mathematical_answer(text: str, *, fallback: bool = False) -> str | None:
    """What a response states as its answer."""
    answer = tagged(text)
    box = boxed(text if answer is None else answer)
    if box is not None:
        return box
    return text.strip() if answer is None and fallback else answer
