r"""Geo3k: slime's geometry example. The model may try an answer with a tool before it gives the final one in ``\boxed{}``.

Each turn a response calls ``calc_score`` (or ``calc_geo3k_reward``) with an ``answer``, and is told whether it is right.
One without a call, or whose last call is no JSON, ends it: that is the final answer. So does the turn ``max_turns``. The
last ``\boxed{}`` of all that the model wrote decides, by mathematical equivalence; what the tool said never counts.
"""

from typing import Any

from sensorium.envs.option_checks import within
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.question import question_of
from sensorium.envs.tools.calls import ToolCall, calls_in, write_call
from sensorium.media.store import MediaStore
from sensorium.rewards.answer import boxed, expected_answers
from sensorium.rewards.equivalence_pool import EquivalencePool
from sensorium.vocabulary.content import Message, user
from sensorium.vocabulary.errors import EnvironmentFailure, RewardFailure
from sensorium.vocabulary.task import Task

NAMES = ("calc_score", "calc_geo3k_reward")
FORM = write_call(NAMES[0], {"answer": "your answer"})
MOST_CHARACTERS = 2000
"""An answer longer than this is wrong: no answer to a geometry problem is."""

_pool = EquivalencePool(timeout_s=5.0, count=2)
"""Started when the first answer is compared, and shared by all episodes of the process."""


class Geo3k:
    r"""A row's problem (its picture and text), with the tool that tells whether an answer is right.

    The problem should say how the tool is called and that the answer belongs into ``\boxed{}``; with ``explain`` the system
    prompt says it.
    """

    instant = False

    def __init__(
        self, store: MediaStore, task: Task, max_turns: int = 3, success_reward: float = 1.0, explain: bool = True
    ):
        within("geo3k", "max_turns", max_turns, 1, 10**6)
        self.task, self.max_turns, self.success_reward, self.explain = task, max_turns, success_reward, explain
        self._turn, self._over, self._box = 0, True, ""

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """The problem."""
        head, asked = question_of(self.task)
        expected_answers(self.task)
        self._turn, self._over, self._box = 0, False, ""
        if self.explain:
            rules = (
                f"Solve the geometry problem. You may try an answer before you give it: write\n{FORM}\nand you are told "
                "whether it is right. Give the final answer without a call, as \\boxed{answer}."
            )
            head = (*head, Message("system", user(rules).content)) if not head else (_with(head[0], rules), *head[1:])
        return head, Observation(asked)

    def step(self, response: str) -> StepResult:
        """Compare the answer of the last call, or take the response for the final one."""
        if self._over:
            raise EnvironmentFailure(
                f"task {self.task.id}: its answer was given (or nothing was asked yet); reset it first."
            )
        self._turn += 1
        self._box = boxed(response) or self._box
        calls = calls_in(response)
        told, ends, info = self._answered(calls[-1] if calls else None)
        self._over = ends or self._turn >= self.max_turns
        if not self._over:
            return StepResult(Observation((user(told),)), reward={"success": 0.0}, info=info)
        success = bool(self._box) and self._right(self._box)
        return StepResult(
            None,
            reward={"success": self.success_reward * success},
            done=True,
            truncated=not ends and not success,
            success=success,
            info={**info, "success": success},
        )

    def demonstrate(self) -> str:
        """Try the known answer, then give it."""
        if self._over:
            raise EnvironmentFailure(f"task {self.task.id}: nothing is asked; there is nothing to demonstrate.")
        known = expected_answers(self.task)[0]
        last = self._turn + 1 >= self.max_turns
        return f"The answer is \\boxed{{{known}}}." if self._turn or last else write_call(NAMES[0], {"answer": known})

    def close(self) -> None:
        """The processes are shared, and stay."""

    def _answered(self, call: ToolCall | None) -> tuple[str, bool, dict[str, Any]]:
        """What to say of a call, whether it ends the episode, and what to note of it."""
        info: dict[str, Any] = {"valid": call is not None and not call.problem, "tool": call.name[:60] if call else ""}
        if call is None or not call.is_json:
            return "No tool was called.", True, info
        if call.problem or call.name not in NAMES:
            known = (
                f"There is no tool '{call.name:.60}'." if call.name not in NAMES else f"The call failed: {call.problem}."
            )
            return f"{known} Write {FORM}", False, {**info, "valid": False}
        answer = call.arguments.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            return f"The call has no answer. Write {FORM}", False, {**info, "valid": False}
        try:
            right = self._right(str(answer)) or ((box := boxed(str(answer))) is not None and self._right(box))
        except RewardFailure:
            return "Error: the answer could not be compared in time. Write it more simply.", False, info
        return self._told(f"{answer!s:.200}", right), False, info

    def _told(self, answer: str, right: bool) -> str:
        """What the tool says of an answer."""
        if right:
            return f"{answer} matches the reference answer. Now give the final answer as \\boxed{{}}."
        last = " Your next answer is final." if self._turn + 1 >= self.max_turns else ""
        return f"{answer} does not match the reference answer. Think again.{last}"

    def _right(self, answer: str) -> bool:
        if len(answer) > MOST_CHARACTERS:
            return False
        verdicts = [_pool.equal(known, answer.strip()) for known in expected_answers(self.task)]
        if all(verdict is None for verdict in verdicts):
            raise EnvironmentFailure(
                f"task {self.task.id}: its answer {self.task.answer!r:.80} cannot be read as mathematics."
            )
        return any(verdicts)


def _with(message: Message, rules: str) -> Message:
    return Message("system", (*message.content, *user(f"\n\n{rules}").content))
