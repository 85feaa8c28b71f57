"""The engine protocol: tokens in, tokens out, with log-probs. Asynchronous; an engine declares its modalities."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from sensorium.vocabulary.episode import Segment

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens. Temperature belongs to the policy; top-p and top-k to the engine's distribution only.

    ``temperature == 0`` is greedy: the most likely token, with log-probs of the policy at temperature 1.
    ``stop`` strings end a response (the text keeps them). ``stop_tokens=False`` ignores stop tokens (benchmarks): they are
    then masked, so that every response runs to its budget. That is part of the policy, and the learner masks them too.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_tokens: bool = True


@dataclass(frozen=True)
class Request:
    """One response wanted for a thread's context.

    ``context`` are the thread's segments so far (the last one by the environment). ``order`` is the canonical place of the
    request among others of its tick: (group, episode, turn). ``key`` is the 64-bit random key of this response: token t
    draws from hash(key, t), whatever else is in the batch. ``thread`` names the thread: an engine may keep its keys and
    values until ``release(thread)``. ``name`` becomes the model segment's unique name.
    """

    thread: str
    context: tuple[Segment, ...]
    sampling: Sampling
    order: tuple[int, ...]
    key: int
    name: str


@dataclass(frozen=True)
class Response:
    """The model segment written, and why it ended."""

    segment: Segment
    finish: FinishReason


class Engine(Protocol):
    """A sampler. ``version`` counts the updates of the weights it samples with, and is stamped on what it writes.

    Lockstep: a rollout declares how many episodes are live with ``enter``/``leave``; a lockstep engine advances only when
    every live episode waits for it, so what is batched together is a function of the recipe, not of the clock.

    ``between_ticks``, where it is set, is called whenever every live episode waits, before the engine goes on; by an engine
    that is not in lockstep, whenever an episode leaves. It may cancel some of those that wait, and says so with True.
    """

    modalities: frozenset[str]
    deterministic: bool
    between_ticks: Callable[[], bool] | None

    @property
    def version(self) -> int: ...

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    async def generate(self, request: Request) -> Response: ...

    def release(self, thread: str) -> None: ...

    def refresh(self, policy_version: int) -> None:
        """New weights are in place: drop keys, values and features of the old ones."""
        ...
