"""The words of FrozenLake: what the rules ask for, what a response says, how a demonstration is written.

A response names moves: ``<answer>Left, Down</answer>``, after a thought where the full prompt asks for one, or with
``bare`` the words alone. One that names none, too many or an unknown one names no move at all.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sensorium.envs.frozen_lake.maps import ACTIONS

ANSWER = re.compile(r"<answer>([^<]*)</answer>", re.IGNORECASE)
THOUGHT_AND_ANSWER = re.compile(r"\s*<think>.*?</think>\s*<answer>[^<]*</answer>\s*", re.DOTALL | re.IGNORECASE)
ANSWER_ALONE = re.compile(r"\s*<answer>[^<]*</answer>\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Grammar:
    """How many moves a response may name, whether a thought stands before them, and whether they may stand bare."""

    most_actions: int
    thought: bool
    bare: bool

    def read(self, response: str) -> tuple[tuple[int, ...], bool]:
        """The moves a response names (none if any of it is invalid), and whether it is written as asked."""
        found = ANSWER.findall(response)
        named = found[-1] if found else response if self.bare else ""
        words = [word.strip().capitalize() for word in named.split(",")]
        valid = len(words) <= self.most_actions and all(word in ACTIONS for word in words)
        actions = tuple(ACTIONS.index(word) for word in words) if valid else ()
        form = THOUGHT_AND_ANSWER if self.thought else ANSWER_ALONE
        return actions, form.fullmatch(response) is not None or (self.bare and not found and valid)

    def write(self, actions: Sequence[int]) -> str:
        """A response that names these moves."""
        said = spell(actions)
        if self.thought:
            return f"<think>The safe way goes {said.lower()}.</think><answer>{said}</answer>"
        return said if self.bare else f"<answer>{said}</answer>"

    def opening(self) -> str:
        """The words above the first look at the lake."""
        return "You see:" if self.thought else ""

    def after(self, said: str) -> str:
        """The words above the next look, by the moves that were made."""
        if self.thought:
            return f"You moved {said}. You see:" if said else "That was not a valid answer; you did not move. You see:"
        return "" if said else "Not a move."

    def rules(self, *, in_letters: bool, slippery: bool) -> str:
        """The system prompt."""
        if not self.thought:
            return "Walk to the goal."
        look = (
            "_ is ice, O a hole, S the start, G the goal and P is you."
            if in_letters
            else "Light blue is ice, dark blue a hole, yellow the start, green the goal; the red square is you."
        )
        many = self.most_actions
        how = "one move" if many == 1 else f"up to {many} moves, separated by commas"
        slip = " The ice is slippery: you may slide sideways." if slippery else ""
        return (
            f"You walk over a frozen lake. Reach the goal without falling into a hole. {look}{slip}\n"
            f"Moves: {', '.join(ACTIONS)}. Each turn, think and then give {how}:\n"
            f"<think>your thoughts</think><answer>your {'move' if many == 1 else 'moves'}</answer>\n"
            f"For example: <think>The goal is below me and the ice is safe.</think><answer>Down</answer>"
        )


def spell(actions: Sequence[int]) -> str:
    """The names of some moves."""
    return ", ".join(ACTIONS[action] for action in actions)
