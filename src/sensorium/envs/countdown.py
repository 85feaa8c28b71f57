"""Countdown: reach a target from given numbers with + - * /, each number used exactly once. Text alone."""

import random
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.envs.actions import turn_reward
from sensorium.envs.protocol import Observation, StepResult, within
from sensorium.envs.responses import ResponseFormat
from sensorium.envs.shipped_tools import NotArithmetic, evaluate, in_words, numbers_in
from sensorium.vocabulary.content import Message, system, user
from sensorium.vocabulary.errors import EnvironmentFailure

NAME = "countdown"
MAX_TRIES = 10_000
DEFAULTS = {"numbers": 3, "max_number": 20, "max_target": 100}


class Countdown:
    """One target, ``max_turns`` attempts; after a wrong one its value is shown.

    Solvable by construction: the target is the value of some expression of the numbers. Gives ``success_reward`` for the
    target and ``format_reward`` for each response in the form of ``response_format`` whose answer is an expression.
    """

    instant = True

    def __init__(
        self,
        store: MediaStore,
        numbers: int = 3,
        max_number: int = 20,
        max_target: int = 100,
        max_turns: int = 1,
        response_format: str = "free_think",
        success_reward: float = 1.0,
        format_reward: float = 0.1,
    ) -> None:
        within(NAME, "numbers", numbers, 2, 8)
        within(NAME, "max_number", max_number, 2, 10**6)
        within(NAME, "max_target", max_target, 1, 10**9)
        within(NAME, "max_turns", max_turns, 1, 10**6)
        self.format, self.max_turns = ResponseFormat(response_format), max_turns
        self.weights = {"success": success_reward, "format": format_reward}
        self._kind = (numbers, max_number, max_target)
        self._numbers: tuple[int, ...] = ()
        self._target, self._solution, self._turn, self._over = 0, "", 0, True

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """The numbers of a seed, in any order, and the target."""
        numbers, target, _ = problem(*(options.get(key, value) for key, value in DEFAULTS.items()), seed)
        return f"{sorted(numbers)} {target}"

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self._numbers, self._target, self._solution = problem(*self._kind, seed)
        self._turn, self._over = 0, False
        rules = (
            "Combine the given numbers with + - * / and parentheses so that they come to the target. Use each number "
            f"exactly once. Answer with the expression, in this form:\n{self.format.shown('expression')}"
        )
        return (system(rules),), Observation((user(self._question()),))

    def step(self, response: str) -> StepResult:
        self._refuse_over()
        parsed = self.format.parse(response)
        success, verdict = self._judge(parsed.answer)
        self._turn += 1
        truncated = not success and self._turn >= self.max_turns > 1
        self._over = success or self._turn >= self.max_turns
        valid = parsed.well_formed and not verdict.startswith("Not")
        return StepResult(
            None if self._over else Observation((user(f"{verdict} {self._question()}"),)),
            turn_reward(self.weights, success=success, format=valid),
            done=self._over,
            truncated=truncated,
            success=success if self._over else None,
            info={"valid": valid, "format": parsed.well_formed, "success": success, "told": verdict},
        )

    def demonstrate(self) -> str:
        self._refuse_over()
        reason = f"{self._solution} comes to {self._target}."
        sections = {"observation": f"The numbers are {', '.join(map(str, self._numbers))}.", "prediction": "It is solved."}
        return self.format.write(self._solution, think=reason, reasoning=reason, **sections)

    def close(self) -> None:
        """Nothing to release."""

    def _refuse_over(self) -> None:
        if self._over:
            raise EnvironmentFailure("countdown: the episode is over (or has not begun); reset it first.")

    def _question(self) -> str:
        return f"Numbers: {', '.join(map(str, self._numbers))}. Target: {self._target}."

    def _judge(self, answer: str | None) -> tuple[bool, str]:
        """Whether an answer reaches the target, and what to report."""
        if answer is None:
            return False, "Not an answer in the form asked for."
        try:
            value, used = evaluate(answer), numbers_in(answer)
        except NotArithmetic as error:
            return False, f"Not an expression: {error}."
        if sorted(used) != sorted(map(Fraction, self._numbers)):
            return False, f"{answer.strip()} does not use each number exactly once."
        return value == self._target, f"{answer.strip()} comes to {in_words(value)}, not {self._target}."


@lru_cache(maxsize=4096)
def problem(count: int, largest: int, largest_target: int, seed: int) -> tuple[tuple[int, ...], int, str]:
    """The numbers and the target of a seed, and an expression that solves it."""
    chance = random.Random(f"countdown/{count}/{largest}/{largest_target}/{seed}")
    for _ in range(MAX_TRIES):
        numbers = [chance.randint(1, largest) for _ in range(count)]
        parts = [(Fraction(number), str(number)) for number in numbers]
        while len(parts) > 1:
            chance.shuffle(parts)
            (left, left_text), (right, right_text) = parts.pop(), parts.pop()
            sign = chance.choice("+-*/" if right else "+-*")
            parts.append((evaluate(f"({left}){sign}({right})"), f"({left_text} {sign} {right_text})"))  # type: ignore[arg-type]
        value, text = parts[0]
        if value.denominator == 1 and 1 <= value <= largest_target and value not in numbers:
            return tuple(numbers), int(value), text[1:-1]
    raise EnvironmentFailure(
        f"countdown: no target up to {largest_target} was found for {count} numbers up to {largest}; raise max_target."
    )
