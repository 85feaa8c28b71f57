"""Evaluation: play held-out tasks greedily or sampled, score them, and say how sure we can be."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sensorium.engines.protocol import Sampling
from sensorium.evaluation.intervals import mean_interval
from sensorium.rewards.scorer import Scorer
from sensorium.rollout.play import Attempt, Rollout
from sensorium.vocabulary.episode import Episode, Group, Status
from sensorium.vocabulary.task import Task


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: a summary of plain numbers, and the scored groups behind it."""

    summary: dict[str, Any]
    groups: tuple[Group, ...]


async def evaluate(
    rollout: Rollout, scorer: Scorer, tasks: Sequence[Task], sampling: Sampling, *, samples: int, seed: int, name: str
) -> Evaluation:
    """Play every task ``samples`` times. The same seed and name draw the same random numbers at every call."""
    groups = await rollout.groups(tasks, samples, Attempt(seed, 0, f"eval:{name}"), sampling)
    scored = tuple(await score_groups(scorer, groups))
    return Evaluation(summarize(scored, name), scored)


async def score_groups(scorer: Scorer, groups: Sequence[Group]) -> list[Group]:
    """Score every episode of every group."""

    async def one(group: Group) -> Group:
        episodes = await asyncio.gather(*(scorer.score(group.task, episode) for episode in group.episodes))
        return Group(group.id, group.task, tuple(episodes))

    return list(await asyncio.gather(*(one(group) for group in groups)))


def summarize(groups: Sequence[Group], name: str) -> dict[str, Any]:
    """Accuracy with an interval, reward by term, and accuracy by category. What was not judged is counted, not zero."""
    episodes = [episode for group in groups for episode in group.episodes]
    judged = [group for group in groups if any(e.correct is not None for e in group.episodes)]
    per_task = [_share_correct(group.episodes) for group in judged]
    by_category: dict[str, list[float]] = defaultdict(list)
    for group, share in zip(judged, per_task, strict=True):
        by_category[str(group.task.metadata.get("category", "all"))].append(share)
    terms: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for score in episode.scores:
            if score.value is not None and score.scope == "episode":
                terms[score.name].append(score.value)
    rewards = [e.reward for e in episodes if e.reward is not None]
    return {
        "name": name,
        "tasks": len(groups),
        "episodes": len(episodes),
        "accuracy": _mean(per_task),
        "interval": list(mean_interval(per_task)) if per_task else None,
        "reward": _mean(rewards),
        "terms": {term: _mean(values) for term, values in sorted(terms.items())},
        "categories": {
            category: {"accuracy": _mean(shares), "tasks": len(shares)} for category, shares in sorted(by_category.items())
        },
        "length_mean": _mean([float(e.sampled_tokens) for e in episodes]),
        "turns_mean": _mean([float(len(e.turns)) for e in episodes]),
        "truncated": sum(e.status == Status.TRUNCATED for e in episodes),
        "failed": sum(e.status in (Status.FAILED, Status.ABORTED) for e in episodes),
        "missing": sum(e.reward is None for e in episodes),
    }


def _share_correct(episodes: Sequence[Episode]) -> float:
    verdicts = [e.correct for e in episodes if e.correct is not None]
    return sum(verdicts) / len(verdicts)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
