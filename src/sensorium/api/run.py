"""A run as Python code sees it: its metrics, evaluations, checkpoints and report, read from its directory."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, overload

from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.report.page import write_report
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import CheckpointError, SensoriumError, nearest

SHOWN_ROWS = 20


class Table(Sequence[dict[str, Any]]):
    """Rows (``table[0]``, ``table[-1]``) and columns (``table["reward/mean"]``; None where a row has no such value)."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = [dict(row) for row in rows]

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in the order in which they first occur."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> "Table": ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            if key not in self.columns:
                raise SensoriumError(f"the table has no column '{key}'{nearest(key, self.columns)}")
            return [row.get(key) for row in self.rows]
        return Table(self.rows[key]) if isinstance(key, slice) else self.rows[key]

    def to_pandas(self) -> Any:
        """A pandas DataFrame; ``step``, where there is one, is a column and the index."""
        try:
            import pandas
        except ImportError as error:
            raise SensoriumError(
                "to_pandas needs the package pandas, which is not installed: pip install pandas."
            ) from error
        frame = pandas.DataFrame(self.rows, columns=self.columns)
        # The index has no name: pandas would not know which "step" is meant.
        return frame.set_index(frame["step"].rename(None)) if "step" in frame else frame

    def __repr__(self) -> str:
        shown: list[str] = [
            name for name in ("step", "reward/mean", "accuracy", "eval/accuracy", "policy/loss") if name in self.columns
        ]
        shown = shown if "step" in shown else self.columns[:5]
        head = f"Table of {len(self)} rows, {len(self.columns)} columns: {', '.join(self.columns[:8])}, …"
        body = ["  ".join(f"{name} {_short(row[name])}" for name in shown if name in row) for row in self.rows[-5:]]
        return "\n".join([head, *body])

    def _repr_html_(self) -> str:
        columns = self.columns
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        last = self.rows[-SHOWN_ROWS:]
        rows = "".join(f"<tr>{''.join(f'<td>{escape(_short(row.get(n)))}</td>' for n in columns)}</tr>" for row in last)
        more = f"<p>the last {SHOWN_ROWS} of {len(self)} rows</p>" if len(self) > SHOWN_ROWS else ""
        return f'<div style="overflow-x:auto"><table><tr>{head}</tr>{rows}</table>{more}</div>'


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


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
        """One row a step; docs/reference/metrics.md says what the columns mean."""
        return Table(read_metrics(self._record.metrics))

    @property
    def evaluations(self) -> Table:
        """One row an evaluation: step, name, tasks, accuracy with its interval, reward and the terms' means."""
        return Table([dict(summary) for summary in self._record.summaries()])

    @property
    def checkpoint(self) -> Path:
        """The best checkpoint by ``checkpoint.best``, else the last: a Hugging Face model."""
        from sensorium.runs.checkpoint_layout import checkpoint_of_run

        return checkpoint_of_run(self.directory)

    @property
    def last_checkpoint(self) -> Path:
        """The last complete checkpoint."""
        from sensorium.runs.checkpoint_layout import checkpoint_of_run

        return checkpoint_of_run(self.directory, last=True)

    def report(self) -> "Report":
        """Write report.html again; returns its path, which a notebook shows as the page itself."""
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
