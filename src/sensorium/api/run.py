"""A run as Python code sees it: its metrics, evaluations, checkpoints and report, read from its directory."""

from html import escape
from pathlib import Path
from typing import Any

from sensorium.api.table import Table
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.record.metrics import read_metrics
from sensorium.record.run_directory import RunDirectory
from sensorium.report.html import write_report
from sensorium.vocabulary.errors import CheckpointError

PathType = type(Path())


class Run:
    """A run's directory, finished or not. Everything is read when it is asked for."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._record = RunDirectory(self.directory)
        if not self._record.exists():
            raise CheckpointError(f"'{directory}' holds no run: it has no recipe.yaml.")

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe, every default written out."""
        return load_recipe(self.directory)

    @property
    def metrics(self) -> Table:
        """One row a step; docs/metrics.md says what the columns mean."""
        return Table(read_metrics(self._record.metrics))

    @property
    def evaluations(self) -> Table:
        """One row an evaluation: step, name, tasks, accuracy with its interval, reward and the terms' means."""
        return Table([dict(summary) for summary in self._record.summaries()])

    @property
    def checkpoint(self) -> Path:
        """The best checkpoint by ``checkpoint.best``, else the last: a Hugging Face model."""
        from sensorium.record.checkpoint_files import checkpoint_of_run

        return checkpoint_of_run(self.directory)

    @property
    def last_checkpoint(self) -> Path:
        """The last complete checkpoint."""
        from sensorium.record.checkpoint_files import checkpoint_of_run

        return checkpoint_of_run(self.directory, last=True)

    def report(self) -> "Report":
        """Write report.html anew; returns its path, which a notebook shows as the page itself."""
        return Report(write_report(self._record))

    def model(self, **options: Any) -> Any:
        """The best checkpoint's model, ready to chat; ``options`` are those of ``sensorium.load``."""
        from sensorium.api.chat import load

        return load(self.checkpoint, **options)

    def __repr__(self) -> str:
        rows = len(self.metrics)
        return f"Run('{self.directory}', {rows} step{'s' if rows != 1 else ''} on record)"


class Report(PathType):  # type: ignore[misc, valid-type]
    """The path of a report. Jupyter shows the page."""

    def _repr_html_(self) -> str:
        page = escape(self.read_text(), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:720px;border:1px solid #ccc"></iframe>'
