"""Scoring of groups side by side, each from the moment it is complete: judges work while other groups are still sampled.

Invariant: what comes out is a function of what went in. In which order groups were begun or ended shows nowhere.
"""

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from sensorium.rewards.scorer import Scorer
from sensorium.vocabulary.episode import Group
from sensorium.workers.side_by_side import first_error


class GroupScoring:
    """``async with GroupScoring(scorer) as scoring: scoring.begin(group); …; groups = await scoring.finish()``."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._crowd = asyncio.TaskGroup()
        self._running: dict[str, asyncio.Task[Group]] = {}

    async def __aenter__(self) -> Self:
        await self._crowd.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._crowd.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failed:
            raise first_error(failed) from failed

    def begin(self, group: Group) -> None:
        """Score a group from now on."""
        self._running[group.id] = self._crowd.create_task(self._scorer.score_group(group))

    async def finish(self) -> dict[str, Group]:
        """All groups that were begun, scored, by id."""
        return {id: await running for id, running in self._running.items()}


async def score_groups(scorer: Scorer, groups: Iterable[Group]) -> list[Group]:
    """Score every episode of every group."""
    async with GroupScoring(scorer) as scoring:
        for group in groups:
            scoring.begin(group)
        return list((await scoring.finish()).values())
