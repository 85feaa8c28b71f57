"""Stopping a rollout early: once enough groups are complete, the episodes of the others are cancelled.

Invariant: a lockstep engine asks between two ticks, when every live episode waits for it. Which groups are complete then,
and how far the others have come, is a function of the recipe, whatever the clock says.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping

from sensorium.vocabulary.episode import Episode, Status

CANCELLED = "cancelled: enough groups were complete"


class EarlyStop:
    """Cancels what is still played once ``enough`` groups are complete and have an episode that neither failed nor aborted.

    ``complete`` tells by group id at which moment it was; groups of one moment are equals, whichever the clock saw first.
    """

    def __init__(self, enough: int) -> None:
        self.complete: dict[str, int] = {}
        self._enough = enough
        self._moment = 0
        self._runs: dict[str, asyncio.Task[Episode]] = {}
        self._left: Counter[str] = Counter()
        self._sound: set[str] = set()

    def begin(self, runs: Mapping[tuple[str, str], "asyncio.Task[Episode]"]) -> None:
        """These are all the episodes, by group and episode id."""
        self._runs = {episode: run for (_, episode), run in runs.items()}
        self._left = Counter(group for group, _ in runs)

    def ended(self, episode: Episode) -> None:
        """An episode is over, well or not."""
        del self._runs[episode.id]
        self._left[episode.group_id] -= 1
        if episode.status in (Status.FINISHED, Status.TRUNCATED):
            self._sound.add(episode.group_id)
        if not self._left[episode.group_id]:
            self.complete[episode.group_id] = self._moment

    def between_ticks(self) -> bool:
        """Cancel the rest if enough groups are complete; True if anything was."""
        self._moment += 1
        if len(self._sound & self.complete.keys()) < self._enough or not self._runs:
            return False
        for run in self._runs.values():
            run.cancel()
        self._runs.clear()
        return True
