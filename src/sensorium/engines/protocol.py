"""What an engine is: requests, responses, capabilities, and its life as a run drives it; and the simplest one.

engine = NAME(policy=…, lockstep=…, **options)    rollout.engine in the recipe; nothing heavy happens yet
engine.start()                                    ready to sample, with the weights of ``policy``
await engine.generate(request, episodes)          any number at once, from one rollout or several
engine.release(thread)                            that thread will not be continued
engine.update_weights(source, version)            between rollouts: later responses use these weights
engine.close()                                    processes and memory are released
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sensorium.vocabulary.episode import Segment, VersionSpan
from sensorium.vocabulary.errors import EngineError

if TYPE_CHECKING:  # an engine's protocol needs no model
    from sensorium.models.chat_processor import ChatProcessor


def response_key(seed: int, step: int, task_id: str, episode: int, turn: int) -> int:
    """The 64-bit random key (as a signed integer) of one response of a run.

    A response's random numbers depend on its task and turn, not on the order of events.
    """
    body = repr((seed, step, task_id, episode, turn)).encode()
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little", signed=True)


FinishReason = Literal["stop", "length"]
SAMPLING_OPTIONS = frozenset(["temperature", "greedy", "top_p", "top_k", "stop", "ignore_stop_tokens"])


@dataclass(frozen=True)
class Sampling:
    """How to sample tokens. Temperature belongs to the policy; top-p and top-k to the engine's distribution only.

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

    def __post_init__(self) -> None:
        """Refuse impossible values; every request for tokens comes through here."""
        wrong = {
            "temperature must be a finite number, 0 (greedy) or more": not 0 <= self.temperature < float("inf"),
            "top_p must be above 0 and at most 1": not 0 < self.top_p <= 1,
            "top_k must be a whole number, 0 (all tokens) or more": self.top_k != int(self.top_k) or self.top_k < 0,
            "max_new_tokens must be 1 or more": self.max_new_tokens < 1,
        }
        for rule, broken in wrong.items():
            if broken:
                raise EngineError(f"sampling: {rule}; got {getattr(self, rule.split()[0])!r}.")


@dataclass(frozen=True)
class Request:
    """One response wanted for a thread's context.

    ``context`` are the thread's segments so far (the last one by the environment). ``order`` is the canonical place of the
    request among others of its tick: (group, episode, turn). ``key`` is the 64-bit random key of this response: token t
    draws from hash(key, t), whatever else is in the batch. ``thread`` names the thread, and is unique among all rollouts
    that run at once: an engine may keep its keys and values until ``release(thread)``. ``name`` becomes the model
    segment's unique name.
    """

    thread: str
    context: tuple[Segment, ...]
    sampling: Sampling
    order: tuple[int, ...]
    key: int
    name: str


@dataclass(frozen=True)
class Response:
    """The model segment written, and why it ended.

    ``versions`` is empty unless weights were updated while it was written; its segment is then stamped with the first.
    """

    segment: Segment
    finish: FinishReason
    versions: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; a recipe that needs more is refused before anything is sampled.

    ``deterministic``: the same requests give the same bits. ``lockstep``: it advances only when every live episode waits
    for it, so what is batched together is a function of the recipe and not of the clock. ``sampling`` names the options of
    the recipe's rollout section (and ``greedy``, for evaluation) that it follows. ``matched``: it computes in the order of
    ``model.precision: matched``. ``in_flight``: it has ``push_weights``, so weights may change while responses are open.
    ``own_weights``: it can sample while its policy is being trained, and not on the same GPU.
    """

    modalities: frozenset[str]
    deterministic: bool
    lockstep: bool = False
    sampling: frozenset[str] = SAMPLING_OPTIONS
    matched: bool = False
    in_flight: bool = False
    own_weights: bool = False


class LiveEpisodes:
    """The episodes of one rollout that are being played now, and the rollout's decision between ticks.

    A lockstep engine waits for all of them, and calls ``between_ticks`` when they all wait for it, before it goes on. That
    may cancel some of them, and returns True then. Other engines never call it.
    """

    def __init__(self, between_ticks: Callable[[], bool] | None = None) -> None:
        self.count = 0
        self.between_ticks = between_ticks
        self._listeners: set[Callable[[], None]] = set()

    def enter(self) -> None:
        """An episode begins."""
        self._change(1)

    def leave(self) -> None:
        """An episode ends."""
        self._change(-1)

    def listen(self, changed: Callable[[], None]) -> None:
        """Have a function called whenever the count changes."""
        self._listeners.add(changed)

    def _change(self, by: int) -> None:
        self.count += by
        for changed in self._listeners:
            changed()


class WeightSource(Protocol):
    """Where an engine gets weights from: the policy that is trained."""

    def tensors(self) -> Mapping[str, Any]:
        """Every parameter and buffer by name, as torch tensors; not copies."""


class InFlightEngine(Protocol):
    """What an engine has in addition to ``Engine`` where its capabilities say ``in_flight``."""

    def push_weights(self, source: WeightSource, version: int) -> None:
        """Sample with these weights now. Open responses go on with them, and their ``versions`` say from which token."""

    def paused(self) -> AbstractContextManager[None]:
        """Sample nothing inside, though requests may come. Only engines without ``own_weights`` need it."""

    async def take_turn(self, seconds: float) -> None:
        """Inside ``paused``, while nobody computes: sample until no request is open, for so long at most."""


class Engine(Protocol):
    """A sampler. ``version`` counts the updates of the weights it samples with, and is stamped on what it writes."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int: ...

    def start(self) -> None:
        """Get ready to sample. Raises now if something is missing."""

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        """Write one response for an episode among ``episodes``. Cancelling the wait withdraws the request."""

    def release(self, thread: str) -> None:
        """The thread will not be continued: what is kept for it may be dropped."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Sample with these weights from now on, and keep nothing computed with earlier ones. No response may be open."""

    def reset_cache(self) -> None:
        """Keep nothing of earlier rollouts: what follows is as in an engine that has just started."""

    def close(self) -> None:
        """Release all resources; a closed engine cannot sample."""


class ScriptedEngine:
    """Replays given answers as if they were sampled, with log-probs of zero: for validation, tests and demonstrations."""

    def __init__(self, chat: "ChatProcessor", answers: Callable[[Request], str]) -> None:
        self.capabilities = Capabilities(chat.modalities, deterministic=True)
        self.version = 0
        self._chat = chat
        self._answers = answers

    def start(self) -> None:
        """Nothing to start."""

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        """The scripted answer as a model segment that stops by itself."""
        return Response(self._chat.respond(self._answers(request), request.name, self.version), "stop")

    def release(self, thread: str) -> None:
        """Nothing is kept."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Only the version changes."""
        self.version = version

    def reset_cache(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to release."""
