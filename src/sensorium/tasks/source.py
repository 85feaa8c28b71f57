"""Where tasks come from: a finite, indexable source. The same index always gives the same task."""

from collections.abc import Iterable
from typing import Protocol

from sensorium.vocabulary.task import Task


class TaskSource(Protocol):
    """Random access to tasks. ``__getitem__`` may raise TaskError or MediaError for a bad row; the policy decides.

    A source whose categories have names in a published table says so in ``table_columns`` {category: name}. One that reads
    rows from files has ``row_digests`` {file: digest of its content}: a resumed run reports a file that was rewritten.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


def table_columns(sources: Iterable[TaskSource]) -> dict[str, str]:
    """The published names of the sources' categories, in the published order."""
    return {category: name for source in sources for category, name in getattr(source, "table_columns", {}).items()}
