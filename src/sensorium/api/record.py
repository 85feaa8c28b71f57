"""Recording demonstrations from Python: ``found = sn.record("frozen_lake", min_reward=1.0)``."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sensorium.api.recipes import recipe_of
from sensorium.api.run import Run, Table
from sensorium.api.train import outside_loop
from sensorium.data.demonstrations import Recording, RecordingSummary, summary_of
from sensorium.report.console import WorkBar
from sensorium.report.terminal import Terminal, say
from sensorium.runs.durable import read_rows


class Demonstrations(Sequence[dict[str, Any]]):
    """Recorded episodes, one row each: ``warm_start={"demonstrations": found.folder, "steps": …}`` learns them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._rows = list(read_rows(Recording(self.folder).rows))

    @property
    def summary(self) -> RecordingSummary:
        """How many episodes were kept, left out by reason, and are missing."""
        return summary_of(Recording(self.folder))

    @property
    def left_out(self) -> Table:
        """The episodes that were not kept, with reward and reason."""
        return Table(list(read_rows(Recording(self.folder).left_out)))

    def __getitem__(self, place: Any) -> Any:
        return self._rows[place]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return "\n".join([*self.summary.lines, f"in {self.folder}"])


def record(
    recipe: Any,
    by: str | Path | Run = "demonstrate",
    *,
    to: str | Path | None = None,
    limit: int = 0,
    samples: int = 1,
    min_reward: float | None = None,
    temperature: float | None = None,
    model: str = "",
    api_key_env: str = "",
    show: bool = True,
    **changes: Any,
) -> Demonstrations:
    """Record demonstrations of a recipe's training tasks: by themselves, ``"person"``, a checkpoint, a Run or a URL.

    Arguments are as on the command line, and ``changes`` as to train. A recording that was interrupted goes on when it is
    called again. ``show``: print progress.
    """
    from sensorium.cli.record import RecordingOrder
    from sensorium.cli.record import record as record_order

    who = str(by.directory if isinstance(by, Run) else by)
    order = RecordingOrder(
        who, None if to is None else Path(to), limit, samples, min_reward, temperature, model, api_key_env
    )
    checked = recipe_of(recipe, changes)
    with WorkBar(silent=not show) as bar:
        found = outside_loop(lambda: record_order(checked, order, bar))
    if show:
        for line in found.lines:
            say(line, Terminal())
    return Demonstrations(order.folder(checked))
