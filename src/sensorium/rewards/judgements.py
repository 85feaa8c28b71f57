"""Judgements of slow terms, known by their content: an equal judgement is made once, in whichever episode or step.

What a judgement is known by: the term (its name in the recipe, its options, its ``version``), the task (all of it), and of
the episode what was shown, said and paid: texts, media, number of tokens, pay, info, status. A term that looks at anything
else, or draws, says ``deterministic = False``; then it is also known by the episode's id, and equal texts are judged apart.

A missing score is known by the episode as well: that a judge was away is repeated when a run resumes, and not held against
the same words in another episode.

Example: episodes a and b of a task both say "cat". The judge is asked about a; b gets the same scores from the cache. If
the judge failed for a, a resumed run repeats that a's score is missing, and a later episode that says "cat" is judged anew.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sensorium.caches.lru import LRU
from sensorium.vocabulary.content import Message, Text
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task

Scores = tuple[Score, ...]


class JudgementCache(Protocol):
    """Where judgements of slow terms are kept (a run's ledger)."""

    def get(self, key: str) -> Scores | None: ...

    def put(self, key: str, scores: Scores) -> None: ...


class JudgementMemory:
    """Judgements in memory, for whoever keeps no ledger; the least recently used go first."""

    def __init__(self, most: int = 100_000) -> None:
        self._kept: LRU[str, Scores] = LRU(most)

    def get(self, key: str) -> Scores | None:
        """A judgement received earlier."""
        return self._kept.get(key)

    def put(self, key: str, scores: Scores) -> None:
        """Keep a judgement."""
        self._kept.put(key, scores)


@dataclass(frozen=True)
class JudgementKeys:
    """The keys of what one call judges, episode by episode: by content, and by the episode itself."""

    content: tuple[str, ...]
    own: tuple[str, ...]

    def look_up(self, cache: JudgementCache) -> list[Scores] | None:
        """What is known of every episode; None if anything is not."""
        found = []
        for own, content in zip(self.own, self.content, strict=True):
            scores = cache.get(own)
            scores = cache.get(content) if scores is None else scores
            if scores is None:
                return None
            found.append(scores)
        return found

    def keep(self, cache: JudgementCache, judged: Sequence[Scores]) -> None:
        """Keep what was found, and that something is missing with the episode alone."""
        for own, content, scores in zip(self.own, self.content, judged, strict=True):
            cache.put(own if any(score.missing for score in scores) else content, scores)


def judgement_keys(term: str, task: Task, episodes: Sequence[Episode], *, deterministic: bool = True) -> JudgementKeys:
    """The keys of a call; ``term`` is all that tells one term from another. A call about several is one judgement."""
    whole = _digest([term, _task(task), [_episode(episode) for episode in episodes]])
    content = [_digest([whole, i]) for i in range(len(episodes))]
    own = [_digest([key, episode.id]) for key, episode in zip(content, episodes, strict=True)]
    return JudgementKeys(tuple(content if deterministic else own), tuple(own))


def term_identity(name: str, options: Any, version: Any) -> str:
    """What tells a term from another: its name in a recipe, its options and its version."""
    return _written([name, options, str(version)])


def task_digest(task: Task) -> str:
    """A digest of all that a task says and shows; a medium counts by what it is, wherever it lay."""
    return _digest(_task(task))


def _task(task: Task) -> list[Any]:
    spec = task.environment
    played = None if spec is None else [spec.name, dict(spec.options), spec.seed]
    return [task.id, _messages(task.messages), task.answer, played, list(task.demonstration), dict(task.metadata)]


def _episode(episode: Episode) -> list[Any]:
    turns = [
        [_messages(turn.observation), turn.response.text, len(turn.response.tokens), turn.reward, turn.parts, turn.info]
        for turn in episode.turns
    ]
    return [episode.status.value, _messages(episode.head), turns, episode.info]


def _messages(messages: Sequence[Message]) -> list[Any]:
    """Who said what; a medium by what it is, wherever it lay."""
    return [
        [message.role, [[block.text] if isinstance(block, Text) else [block.kind, block.key] for block in message.content]]
        for message in messages
    ]


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _digest(value: Any) -> str:
    return hashlib.blake2b(_written(value).encode(), digest_size=16).hexdigest()
