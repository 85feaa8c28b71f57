"""The environment protocol. A single-turn question is an environment that ends after one step.

What an environment returns is checked: numbers are converted, another wrong type is an EnvironmentFailure that names it. So
it fails the episode, and not the run later in the renderer, the learner or the log.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from typing import Any, Protocol, TypeVar, get_args

from sensorium.vocabulary.content import Media, MediaKind, Message, Role, Text
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError, nearest
from sensorium.vocabulary.plain import attempt, json_of, number_of, printable, shown, text_of, truth_of, words


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


ROLES: tuple[str, ...] = get_args(Role)
KINDS: tuple[str, ...] = get_args(MediaKind)

# Characters that an environment may show at once. No context holds more, and tokenizing tens of megabytes exhausts memory.
MOST_TEXT = 4_000_000
LONGEST_CATEGORY = 80  # characters of the name of a kind of task
Checked = TypeVar("Checked")


def checked_reset(returned: Any, environment: str) -> tuple[tuple[Message, ...], Observation]:
    """The head and the first observation."""
    return checked(_reset, returned, environment, "reset")


def checked_step(returned: Any, environment: str) -> StepResult:
    """The outcome of a turn, every field of the type it is declared with."""
    return checked(_step, returned, environment, "step")


def checked(check: Callable[[Any], Checked], returned: Any, environment: str, what: str) -> Checked:
    """What ``check`` makes of it; a ValueError, or whatever reading it raises, becomes an EnvironmentFailure."""
    value, error = attempt(check, returned)
    if error is not None:  # of the check, or of the returned object, which may raise when it is read
        reason = printable(str(error)) if type(error) is ValueError else words(error)
        raise EnvironmentFailure(f"environment '{environment}' failed in {what}: {reason}") from error
    return value


def _reset(returned: Any) -> tuple[tuple[Message, ...], Observation]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ValueError(f"it must return the head and the first observation, not {shown(returned)}")
    head, observation = returned
    found = _observation(observation)
    if found is None:
        raise ValueError("the first observation is None")
    return _messages(head, "the head"), found


def _step(returned: Any) -> StepResult:
    field = ""
    try:
        if not isinstance(returned, StepResult):
            raise ValueError(f"it must return a StepResult, not {shown(returned)}")
        observation = _observation(returned.observation)
        field = "the reward: "
        reward = None if returned.reward is None else _reward(returned.reward)
        field = "done: "
        done = truth_of(returned.done)
        field = "truncated: "
        truncated = truth_of(returned.truncated)
        field = "success: "
        success = None if returned.success is None else truth_of(returned.success)
        field = "info: "
        info = json_of(returned.info)
        if not isinstance(info, dict):
            raise ValueError(f"{shown(returned.info)} is no object")
    except ValueError as error:
        raise ValueError(f"{field}{error}") from error
    return replace(
        returned, observation=observation, reward=reward, done=done, truncated=truncated, success=success, info=info
    )


def _reward(reward: Any) -> float | dict[str, float]:
    """A number, or named numbers; no reward at all is None and not an empty mapping."""
    if not isinstance(reward, Mapping):
        return number_of(reward)
    parts = {text_of(name): number_of(value) for name, value in reward.items()}
    if not parts or "" in parts:
        raise ValueError(f"{shown(reward)} names no part; return a number, or numbers by name as in {{'goal': 1.0}}")
    return parts


def _observation(observation: Any) -> Observation | None:
    if observation is None:
        return None
    if not isinstance(observation, Observation):
        raise ValueError(f"the observation must be an Observation, not {shown(observation)}")
    messages = _messages(observation.messages, "the observation")
    if not messages:
        raise ValueError("the observation has no message")
    for name, least in (("after", -1), ("max_new_tokens", 0)):
        number = getattr(observation, name)
        if number is not None and (not isinstance(number, int) or number < least):
            raise ValueError(f"{name} of the observation is {shown(number)}, and must be a whole number from {least}")
    if len(text_of(observation.category)) > LONGEST_CATEGORY:
        raise ValueError(f"the category {shown(observation.category)} is longer than {LONGEST_CATEGORY} characters")
    return observation if messages is observation.messages else replace(observation, messages=messages)


def _messages(messages: Any, what: str) -> tuple[Message, ...]:
    if not isinstance(messages, tuple | list):
        raise ValueError(f"{what} must be a tuple of messages, not {shown(messages)}")
    for message in messages:
        _check_message(message, what)
    length = sum(len(block.text) for message in messages for block in message.content if isinstance(block, Text))
    if length > MOST_TEXT:
        raise ValueError(f"{what} has {length:,} characters of text, and no more than {MOST_TEXT:,} can be shown at once")
    return messages if isinstance(messages, tuple) else tuple(messages)


def _check_message(message: Any, what: str) -> None:
    if not isinstance(message, Message):
        raise ValueError(f"{what} must hold messages, not {shown(message)}")
    if not isinstance(message.role, str) or message.role not in ROLES:
        raise ValueError(f"the role of a message is one of {', '.join(ROLES)}, not {shown(message.role)}")
    if not isinstance(message.content, tuple):
        raise ValueError(f"the content of a message is a tuple of blocks, not {shown(message.content)}")
    text_of(message.tools)
    for block in message.content:
        if isinstance(block, Text):
            text_of(block.text)
        elif not isinstance(block, Media):
            looks_like_picture = type(block).__module__.split(".")[0] in ("PIL", "numpy", "torch") or isinstance(
                block, bytes
            )
            way_out = (
                ". A picture becomes one by the store that the environment was made with: store.put_picture(bytes, where "
                "from), given the bytes of a PNG or JPEG file"
            )
            raise ValueError(f"a block is Text or Media, not {shown(block)}{way_out if looks_like_picture else ''}")
        elif not isinstance(block.kind, str) or block.kind not in KINDS:
            raise ValueError(f"a medium is one of {', '.join(KINDS)}, not {shown(block.kind)}")
        else:
            text_of(block.hash)
            text_of(block.origin)
