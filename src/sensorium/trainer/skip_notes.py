"""Notes about tasks that a run skips: the first few of each kind by name and reason; further ones are only counted.

rows.jsonl:2 cannot be read         → "a task is skipped, because it cannot be read: rows.jsonl:2 …"
the same in the next epoch          → nothing
a fourth that cannot be read        → "further tasks that cannot be read are skipped without a note; …", once
"""

from collections.abc import Callable, Sequence

from sensorium.tasks.mixture import SkippedRow

MOST_TOLD = 3
"""Tasks of a kind that are named."""


class SkipNotes:
    """Tells of skipped tasks as they come. It remembers only what it told, so a long run costs no memory."""

    def __init__(self, noted: Callable[[str], None]) -> None:
        self._bad = _KindNotes(noted, "a task is skipped, because it cannot be read", "tasks that cannot be read", "bad")
        self._long = _KindNotes(noted, "a task is skipped, because its prompt is too long", "long prompts", "long")

    def tell(self, skipped: Sequence[SkippedRow]) -> None:
        """Name those that are new, as long as few were named."""
        for skip in skipped:
            (self._long if skip.long_prompt else self._bad).tell(skip.reason)


class _KindNotes:
    """The notes of one kind: ``opening`` begins each, ``many`` is what tasks of this kind are called."""

    def __init__(self, noted: Callable[[str], None], opening: str, many: str, metric: str) -> None:
        self._noted, self._opening = noted, opening
        self._last = f"further {many} are skipped without a note; the metric tasks/skipped_{metric} counts them"
        self._told: set[str] = set()
        self._over = False

    def tell(self, reason: str) -> None:
        if self._over or reason in self._told:
            return
        self._over = len(self._told) == MOST_TOLD
        self._told.add(reason)
        self._noted(self._last if self._over else f"{self._opening}: {' '.join(reason.split())}")
