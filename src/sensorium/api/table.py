"""A table of rows: what a run measured, row by row or column by column."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, overload

from sensorium.vocabulary.errors import SensoriumError, nearest

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
        """A pandas DataFrame, by step where there is one."""
        try:
            import pandas
        except ImportError as error:
            raise SensoriumError(
                "to_pandas needs the package pandas, which is not installed: pip install pandas."
            ) from error
        frame = pandas.DataFrame(self.rows, columns=self.columns)
        return frame.set_index("step") if "step" in frame else frame

    def __repr__(self) -> str:
        shown: list[str] = [
            name for name in ("step", "reward/mean", "accuracy", "eval/accuracy", "policy/loss") if name in self.columns
        ]
        shown = shown or self.columns[:5]
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
