"""Sample: one attempt at a held-out task as evaluation counts it, and the line it is in ``samples.jsonl``."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sensorium.runs.episodes import messages_to_json
from sensorium.vocabulary.content import Message, assistant
from sensorium.vocabulary.episode import Episode, Status
from sensorium.vocabulary.score import by_name
from sensorium.vocabulary.task import Task

Row = dict[str, Any]
TERM = "reward/"


@dataclass(frozen=True)
class Sample:
    """``position`` is the task's place in the list of tasks, ``index`` the attempt's among those at this task.

    ``terms`` are the named parts of the reward before their ``weights``: the weighted parts sum up to ``reward``.
    ``votes``: a term can extract an answer; ``extracted`` is what it took for it. ``question`` stands for what was shown.
    """

    task: str
    position: int
    index: int
    category: str
    status: Status
    correct: bool | None
    reward: float | None
    terms: Mapping[str, float | None] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    answer: Any = None
    extracted: str | None = None
    votes: bool = False
    length: int = 0
    turns: int = 0
    question: str = ""


def sample_of(task: Task, position: int, episode: Episode, extracted: str | None, votes: bool) -> Sample:
    """A scored episode as a sample."""
    return Sample(
        task=task.id,
        position=position,
        index=episode.index,
        category=str(task.metadata.get("category", "all")),
        status=episode.status,
        correct=episode.correct,
        reward=episode.reward,
        terms=by_name(episode.scores),
        weights={score.name: score.weight for score in episode.scores},
        answer=task.answer,
        extracted=extracted,
        votes=votes,
        length=episode.sampled_tokens,
        turns=len(episode.turns),
        question=_question(messages_to_json(_shown(task, episode))),
    )


def row_of(sample: Sample, task: Task, episode: Episode, seed: int) -> Row:
    """The line of a sample: what was counted, then what was asked and written; of an environment, all turns in order."""
    reasons = {score.name: score.reason for score in episode.scores if score.missing}
    environment = task.environment
    return {
        "task": sample.task,
        "position": sample.position,
        "sample": sample.index,
        "category": sample.category,
        "seed": seed,
        "status": sample.status.value,
        "correct": sample.correct,
        "reward": sample.reward,
        **{f"{TERM}{name}": value for name, value in sample.terms.items()},
        "weights": dict(sample.weights),
        "answer": sample.answer,
        **({"extracted": sample.extracted} if sample.votes else {}),
        "length": sample.length,
        "turns": sample.turns,
        **({"missing": reasons} if reasons else {}),
        **({"failure": episode.failure} if episode.failure else {}),
        **({"environment": {"name": environment.name, "seed": environment.seed}} if environment is not None else {}),
        "messages": messages_to_json(_shown(task, episode)),
        **({"conversation": messages_to_json([*_conversation(episode)])} if environment is not None else {}),
        "response": episode.response,
    }


def sample_from(row: Row) -> Sample:
    """The sample of a line."""
    return Sample(
        task=row["task"],
        position=row["position"],
        index=row["sample"],
        category=row["category"],
        status=Status(row["status"]),
        correct=row["correct"],
        reward=row["reward"],
        terms={key.removeprefix(TERM): value for key, value in row.items() if key.startswith(TERM)},
        weights=row["weights"],
        answer=row["answer"],
        extracted=row.get("extracted"),
        votes="extracted" in row,
        length=row["length"],
        turns=row["turns"],
        question=_question(row["messages"]),
    )


def _shown(task: Task, episode: Episode) -> tuple[Any, ...]:
    """The prompt; of a task that is played in an environment, what that showed first."""
    return task.messages or (episode.turns[0].observation if episode.turns else ())


def _conversation(episode: Episode) -> Iterator[Message]:
    """All that was shown and written in an environment, in order: its head, then each observation and its response."""
    yield from episode.head
    for turn in episode.turns:
        yield from turn.observation
        yield assistant(turn.response.text)


def _question(messages: Sequence[Row]) -> str:
    """What was asked and shown, in few letters. Where a file lay is no part of it."""
    blocks = [[{k: v for k, v in block.items() if k != "origin"} for block in message["content"]] for message in messages]
    return hashlib.blake2b(json.dumps(blocks, sort_keys=True).encode(), digest_size=12).hexdigest()


# A sample that was not judged (it failed, or its judge did) is left out; a task without judged samples has no number.


def mean_at_k(samples: Sequence[Sample]) -> float | None:
    """The share of right samples."""
    verdicts = _verdicts(samples)
    return sum(verdicts) / len(verdicts) if verdicts else None


def best_at_k(samples: Sequence[Sample]) -> float | None:
    """1 if any sample is right (pass@k), else 0."""
    verdicts = _verdicts(samples)
    return float(any(verdicts)) if verdicts else None


def majority_at_k(samples: Sequence[Sample]) -> float | None:
    """1 if the answer most samples gave is right, else 0.

    Of answers given equally often the one that was given first wins. A sample without an answer does not vote; if none
    votes, the task is wrong. An answer is as right as the first sample that gave it.
    """
    judged = [sample for sample in samples if sample.correct is not None]
    if not judged:
        return None
    votes = Counter(sample.extracted for sample in judged if sample.extracted is not None)
    if not votes:
        return 0.0
    [(winner, _)] = votes.most_common(1)
    return float(next(sample.correct is True for sample in judged if sample.extracted == winner))


def _verdicts(samples: Sequence[Sample]) -> list[bool]:
    return [sample.correct for sample in samples if sample.correct is not None]
