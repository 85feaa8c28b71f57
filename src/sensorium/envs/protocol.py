"""The environment protocol. A single-turn question is an environment that ends after one step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, Protocol

from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import RecipeError, nearest


@dataclass(frozen=True)
class Observation:
    """What the environment shows next: messages of role user or tool (text and media).

    ``category`` of the first one is the kind of task that this start is; success is measured for each kind. An environment
    with several conversations says which one continues: ``after`` is the turn (from 0) whose response the messages follow,
    -1 where they begin a conversation of their own; None: the last turn. ``max_new_tokens`` bounds the response, beside the
    rollout's own budget; 0: that one alone.
    """

    messages: tuple[Message, ...]
    category: str = ""
    after: int | None = None
    max_new_tokens: int = 0


@dataclass(frozen=True)
class StepResult:
    """The outcome of one model turn. ``reward`` is this turn's reward, None where the environment gives none by itself.

    It may have named parts, ``{"goal": 1.0, "format": 0.1}``, which keep their names in the metrics and the report.
    ``info`` is recorded with the turn (numbers and short strings); ``success`` is known at the end, by some environments.
    ``truncated``: the environment cut the episode off (its turn limit), so that its value may be bootstrapped.
    """

    observation: Observation | None
    reward: float | Mapping[str, float] | None = None
    done: bool = False
    truncated: bool = False
    success: bool | None = None
    info: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One environment, played once, or in a pool reset for every episode: what is shown then depends on the seed alone.

    Its methods run off the event loop, with deadlines, and may be coroutines.

    An ``instant`` one is plain computation that cannot wait on anything: it is stepped in place, without a thread, and its
    methods are no coroutines. Where it has a method ``response_usage``, that is called before each step with the tokens of
    context and response, and whether its budget cut it, where these are known (not in workers or at a service). A text
    ``last_words`` ends the error of a call that took too long.
    """

    instant: bool

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """Start: the head (system prompt, always in context) and the first observation. The seed decides everything."""
        ...

    def step(self, response: str) -> StepResult:
        """Act on what the model wrote."""
        ...

    def demonstrate(self) -> str:
        """A good response from the current state, for supervised stages; raises EnvironmentFailure if it has none."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class WatchedEnvironment:
    """An environment whose results pass through ``after_reset`` and ``after_step``; ``before_step`` sees responses."""

    def __init__(
        self,
        inner: Any,
        after_reset: Callable[[Any], Any],
        after_step: Callable[[Any], Any],
        before_step: Callable[[str], object] = lambda response: None,
    ) -> None:
        self._inner, self._after_reset, self._after_step = inner, after_reset, after_step
        self._before_step = before_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reset(self, seed: int) -> Any:
        return then(self._inner.reset(seed), self._after_reset)

    def step(self, response: str) -> Any:
        self._before_step(response)
        return then(self._inner.step(response), self._after_step)


def then(returned: Any, follow: Callable[[Any], Any]) -> Any:
    """What ``follow`` makes of a returned value, or later of an awaitable's."""
    if not isawaitable(returned):
        return follow(returned)

    async def later() -> Any:
        return follow(await returned)

    return later()


def one_of(environment: str, option: str, value: str, known: Sequence[str]) -> None:
    """Refuse an unknown value."""
    if value not in known:
        raise RecipeError(f"{environment}: option {option} cannot be '{value}'{nearest(str(value), list(known))}")


def within(environment: str, option: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside of its range."""
    if not low <= value <= high:
        raise RecipeError(f"{environment}: option {option} is {value}; it must lie between {low} and {high}.")
