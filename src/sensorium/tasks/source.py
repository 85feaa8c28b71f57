"""Where tasks come from: a finite, indexable source. The same index always gives the same task."""

from typing import Protocol

from sensorium.vocabulary.task import Task


class TaskSource(Protocol):
    """Random access to tasks. ``__getitem__`` may raise TaskError or MediaError for a bad row; the policy decides."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...
