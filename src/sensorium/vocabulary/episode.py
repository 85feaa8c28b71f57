"""Segment, Turn, Thread, Episode, Group: what was sampled, exactly as it was sampled; and its Scores.

A **segment** holds the tokens of one author. A **thread** is an append-only run of segments: a context the model saw.
An **episode** is one attempt at a task: threads are for training, turns for credit. A **group** is the episodes of one task
in one step, with an explicit id; nothing is aligned by position. A
**score** is one named judgement of an episode, a turn or a span; missing is not zero.
"""

import hashlib
from codecs import getincrementaldecoder
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from sensorium.vocabulary.content import Media, Message, assistant
from sensorium.vocabulary.task import Task

Scope = Literal["episode", "turn", "span"]

LARGEST = 1e30  # no score may be larger: its square must fit in a float64 and its advantage in a float32


@dataclass(frozen=True)
class Score:
    """A named value, or missing (``value is None``) with a reason; ``correct`` if right and wrong have a meaning.

    ``weight`` is the recipe's; a score of weight 0 is measured only.
    """

    name: str
    value: float | None
    weight: float = 1.0
    scope: Scope = "episode"
    turn: int | None = None
    span: tuple[int, int] | None = None
    correct: bool | None = None
    reason: str = ""

    @property
    def missing(self) -> bool:
        """True when nothing was judged."""
        return self.value is None


def reward(value: float | None = None, *, correct: bool) -> Score:
    """What a reward function may return: right or wrong, and a value (default 1 or 0); named after its term."""
    return Score("", float(correct) if value is None else value, correct=correct)


def unusable(value: float) -> bool:
    """True for a number that cannot be trained on: NaN, infinite, or beyond ``LARGEST``."""
    return not abs(value) <= LARGEST


def by_name(scores: Iterable[Score]) -> dict[str, float | None]:
    """Each name's value for an episode, or the sum over turns and spans; None if any is missing."""
    sums: dict[str, float | None] = {}
    for score in scores:
        before = sums.get(score.name, 0.0)
        sums[score.name] = None if before is None or score.value is None else before + score.value
    return sums


def total(scores: Iterable[Score]) -> float | None:
    """The weighted sum, or None if any score that carries weight is missing (or there are none)."""
    kept = [score for score in scores if score.weight != 0.0]
    if not kept or any(score.value is None for score in kept):
        return None
    return sum(score.weight * score.value for score in kept if score.value is not None)


def correctness(scores: Iterable[Score]) -> bool | None:
    """Right if all scores that know say so; None if none knows."""
    verdicts = [score.correct for score in scores if score.correct is not None]
    return all(verdicts) if verdicts else None


Author = Literal["model", "environment"]


class Status(StrEnum):
    """How an episode ended. Truncated ones may bootstrap; aborted and failed ones are never trained on."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True)
class MediaSpan:
    """A medium in a segment, at the index of its single stored placeholder token."""

    index: int
    media: Media


@dataclass(frozen=True)
class VersionSpan:
    """Tokens ``start`` to ``end`` of a response were sampled with weights of this version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Routes:
    """The experts that an engine sent tokens of a thread to: ids [tokens, layers, top_k] of ``width`` bytes each.

    The tokens are those that the model computed, so media count with all of theirs. They begin at place ``start`` of the
    thread: first those of a response's context, the same object for all responses to it, then the response's own, but for
    the last, which was not computed. Example: a prompt of 10 tokens and a response of 3 have 12, from 0 on; the second
    turn of the thread starts at 12.
    """

    start: int
    context: bytes = field(repr=False)
    own: bytes = field(repr=False)
    layers: int
    top_k: int
    width: int

    @property
    def row(self) -> int:
        """Bytes of a token."""
        return self.layers * self.top_k * self.width


@dataclass(frozen=True)
class Segment:
    """Tokens by one author, with one placeholder per medium, which a model family expands.

    Of model segments: ``logprobs`` are the engine's, of the policy (softmax(logits / temperature), forbidden ids masked);
    ``sampled_logprobs`` of the distribution sampled from (after top-p and top-k); ``byte_ends`` is the end of every token
    in the UTF-8 bytes of ``text`` (tokens without text, like stop tokens, add no bytes). ``policy_version`` wrote all of
    it, unless ``versions`` are given: weights may change meanwhile. ``routes``: which experts the engine used, where it was
    asked to record them.
    """

    author: Author
    tokens: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    sampled_logprobs: tuple[float, ...] = ()
    byte_ends: tuple[int, ...] = ()
    policy_version: int = 0
    name: str = ""
    versions: tuple[VersionSpan, ...] = ()
    routes: Routes | None = None

    @cached_property
    def key(self) -> str:
        """Identity for sharing: content for environment segments, the unique name for model segments."""
        if self.author == "model":
            return f"model:{self.name}"
        body = repr((self.tokens, [(span.index, span.media.key) for span in self.media])).encode()
        return "env:" + hashlib.blake2b(body, digest_size=16).hexdigest()

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which weights wrote which tokens."""
        return self.versions or (VersionSpan(self.policy_version, 0, len(self.tokens)),)

    def token_texts(self) -> list[str]:
        """The text of each token; a character of several tokens is that of its last."""
        data, start, texts = self.text.encode(), 0, []
        decoder = getincrementaldecoder("utf-8")(errors="replace")
        for end in self.byte_ends:
            texts.append(decoder.decode(data[start:end]))
            start = end
        return texts

    def tokens_in(self, start: int, end: int) -> range:
        """Token indices of a byte range; a token that straddles an edge belongs to the span it ends in."""
        first = next((i for i, stop in enumerate(self.byte_ends) if stop > start), len(self.byte_ends))
        last = next((i for i, stop in enumerate(self.byte_ends) if stop > end), len(self.byte_ends))
        return range(first, last)


@dataclass(frozen=True)
class Thread:
    """One context that the model saw. ``home[i]``: segment i was generated, and is trained, in this thread."""

    segments: tuple[Segment, ...]
    home: tuple[bool, ...]

    def __post_init__(self) -> None:
        assert len(self.segments) == len(self.home), "a thread marks every segment as home or not"
        assert all(s.author == "model" for s, h in zip(self.segments, self.home, strict=True) if h)


@dataclass(frozen=True)
class Turn:
    """One exchange: observation, response, and the environment's reward.

    ``thread`` is the index of the response's home thread, ``segment`` its index there. ``parts`` are named parts of
    ``reward``, which they add up to. ``cut``: a token budget ended the response. ``after``: the turn that the observation
    follows, where the environment said so (-1: none).
    """

    index: int
    observation: tuple[Message, ...]
    response: Segment
    thread: int
    segment: int
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    cut: bool = False
    after: int | None = None


@dataclass(frozen=True)
class Episode:
    """One attempt at a task. ``head``: an environment's messages before its first observation (system prompt, rules)."""

    id: str
    task_id: str
    group_id: str
    index: int
    threads: tuple[Thread, ...]
    turns: tuple[Turn, ...]
    status: Status
    failure: str = ""
    scores: tuple[Score, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    head: tuple[Message, ...] = ()

    @property
    def reward(self) -> float | None:
        """The weighted total, or None when any weighted term is missing."""
        return total(self.scores)

    @property
    def correct(self) -> bool | None:
        """Right or wrong, if a term knows."""
        return correctness(self.scores)

    @property
    def response(self) -> str:
        """What the model wrote, turns joined by a newline."""
        return "\n".join(turn.response.text for turn in self.turns)

    @property
    def conversation(self) -> tuple[Message, ...]:
        """All messages in order: the head, then each turn's observation and response."""
        turns = ((*turn.observation, assistant(turn.response.text)) for turn in self.turns)
        return (*self.head, *(message for turn in turns for message in turn))

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the model wrote."""
        return sum(len(turn.response.tokens) for turn in self.turns)

    def with_scores(self, scores: tuple[Score, ...]) -> "Episode":
        """The same episode with other scores."""
        return replace(self, scores=scores)


def category_of(task: Task, *episodes: Episode) -> str:
    """The kind of a task: what its environment named at the start of the episodes, else its row; empty if neither did."""
    named = (episode.info.get("category") for episode in episodes)
    return str(next(filter(None, named), None) or task.metadata.get("category") or "")


@dataclass(frozen=True)
class Group:
    """The episodes of one task in one step."""

    id: str
    task: Task
    episodes: tuple[Episode, ...]
