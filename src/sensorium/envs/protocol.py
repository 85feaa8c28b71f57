"""The environment protocol. A single-turn question is an environment that ends after one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import RecipeError, nearest


@dataclass(frozen=True)
class Observation:
    """What the environment shows next: messages of role user or tool (text and media)."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one model turn. ``reward`` is this turn's pay, None where the environment pays nothing by itself.

    Pay may be named: ``{"goal": 1.0, "format": 0.1}``. Each part then keeps its name to the metrics and the report; a
    number is pay without a name. ``info`` goes to the turn (numbers and short strings, JSON-able); ``success`` where the
    environment knows at the end. ``truncated`` means that it cut the episode off (its turn limit), so that its value may be
    bootstrapped.
    """

    observation: Observation | None
    reward: float | Mapping[str, float] | None = None
    done: bool = False
    truncated: bool = False
    success: bool | None = None
    info: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One environment, played once. Its methods run off the event loop, with deadlines, and may be coroutines.

    An ``instant`` one is plain computation that cannot wait on anything: it is stepped in place, without a thread, and none
    of its methods is a coroutine.
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


def one_of(environment: str, option: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value that is not one of those known."""
    if value not in known:
        raise RecipeError(f"{environment}: option {option} cannot be '{value}'{nearest(str(value), list(known))}")


def within(environment: str, option: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside of its range."""
    if not low <= value <= high:
        raise RecipeError(f"{environment}: option {option} is {value}; it must lie between {low} and {high}.")
