"""The environment protocol. A single-turn question is an environment that ends after one step."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from sensorium.vocabulary.content import Message


@dataclass(frozen=True)
class Observation:
    """What the environment shows next: messages of role user or tool (text and media)."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one model turn. ``reward`` is this turn's pay, None where the world pays nothing by itself.

    ``info`` goes to the turn (numbers and short strings, JSON-able); ``success`` where the world knows at the end.
    ``truncated`` means the world cut the episode off (its turn limit), so that its value may be bootstrapped.
    """

    observation: Observation | None
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    success: bool | None = None
    info: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One world, played once. Methods are plain functions; the rollout runs them off the event loop, with deadlines.

    ``instant`` worlds are plain computation that cannot wait on anything: they are stepped in place, without a thread.
    """

    instant: bool

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """Start: the head (system prompt and rules, always in context) and the first observation. The seed decides all."""
        ...

    def step(self, response: str) -> StepResult:
        """Act on what the model wrote."""
        ...

    def demonstrate(self) -> str:
        """A good response from the current state, for supervised stages; raises EnvironmentFailure if it has none."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
