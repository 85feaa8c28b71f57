"""The words around what an environment with named actions shows: rules at the head, the form again at every turn."""

from dataclasses import dataclass

from sensorium.envs.actions import ActionGrammar, ActionTurn
from sensorium.envs.protocol import Observation, StepResult
from sensorium.vocabulary.content import Media, Message, Text, user


@dataclass(frozen=True)
class ActionPrompts:
    """Prompts in full repeat at every turn what was done and what to write; short ones say only what did not work."""

    grammar: ActionGrammar
    full: bool
    refusal: str = "Not a move."

    def opening(self) -> str:
        """The words above the first sight."""
        return f"{self.grammar.instruction()}\nYou see:" if self.full else ""

    def after(self, said: str) -> str:
        """The words above the next sight, by the actions that were taken."""
        if not self.full:
            return "" if said else self.refusal
        taken = f"You took: {said}." if said else "That was no valid answer; nothing was done."
        return f"{taken}\n{self.opening()}"

    def rules(self, short: str, explained: str, example: tuple[int, ...], **thought: str) -> str:
        """The system prompt: a few words, or what it is about, the actions, the form and an example."""
        if not self.full:
            return short
        written = self.grammar.write(example, **thought)
        return (
            f"{explained}\nActions: {', '.join(self.grammar.names)}.\n{self.grammar.instruction()}\nFor example: {written}"
        )


def sight(words: str, shown: str | Media) -> Observation:
    """An observation: words, if any, above a picture or a text."""
    if isinstance(shown, str):
        return Observation((user("\n".join(filter(None, (words, shown)))),))
    return Observation((Message("user", (*([Text(words + "\n")] if words else []), shown)),))


def turn_result(
    asked: ActionTurn,
    taken: str,
    observation: Observation | None,
    reward: float | dict[str, float],
    /,
    *,
    truncated: bool,
    success: bool,
    **noted: bool | float,
) -> StepResult:
    """The outcome of a turn with named actions; it is over where nothing is shown any more."""
    done = observation is None
    info = {"valid": asked.valid, "format": asked.well_formed, "actions": taken, **noted, "success": success}
    return StepResult(observation, reward, done, truncated, success if done else None, info)
