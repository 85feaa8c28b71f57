"""An evaluation, or two side by side, as a grid of words: for the terminal and for Markdown, in the same words.

Categories are the columns, as in published tables, unless there are too many of them or the terminal is too narrow; then
the grid is turned, and they are the rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sensorium.report.tables import house_table, interval_text, share
from sensorium.report.watcher import Summary

MOST_COLUMNS = 10
INTERVAL = "95 % interval"
Part = Mapping[str, Any]


@dataclass(frozen=True)
class Grid:
    """Rows of cells under columns; the first column is all tasks, the others are categories. Notes stand below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...] = ()

    @property
    def wide(self) -> bool:
        """Whether there are too many categories for columns."""
        return len(self.columns) > MOST_COLUMNS + 1

    def turned(self) -> "Grid":
        """The same with columns as rows."""
        rows = tuple((name, tuple(cells[i] for _, cells in self.rows)) for i, name in enumerate(self.columns))
        return Grid(self.title, tuple(name for name, _ in self.rows), rows, self.notes)


def summary_grid(summary: Summary) -> Grid:
    """One evaluation: accuracy with its interval, then what was paid, and below what the samples were like."""
    columns, parts = _parts({**summary, "tasks": summary.get("judged", summary["tasks"])}, summary)
    k = summary.get("samples", 1)
    rows = [
        ("accuracy" if k == 1 else f"accuracy (mean@{k})", [share(part.get("accuracy")) for part in parts]),
        (INTERVAL, [interval_text(part) or "–" for part in parts]),
    ]
    for name in (f"best@{k}", f"majority@{k}"):
        if name in summary:
            rows.append((name, [share(part[name]["value"]) for part in parts]))
            rows.append((INTERVAL, [interval_text(part[name]) or "–" for part in parts]))
    rows.append(("n", [f"{part['tasks']:,}" for part in parts]))
    rows.append(("reward", [_number(part.get("reward")) for part in parts]))
    rows += [(f"reward/{term}", [_number(part["terms"].get(term)) for part in parts]) for term in summary["terms"]]
    title = f"{summary['name']}: {summary.get('model', '')}".rstrip(": ")
    return _grid(title, columns, rows, _notes(summary))


def comparison_grid(comparison: Summary) -> Grid:
    """Two evaluations of the same tasks: both accuracies, the difference, and how many tasks changed sides."""
    columns, parts = _parts(comparison["all"], comparison)
    rows = [
        ("A accuracy", [share(part["a"]["accuracy"]) for part in parts]),
        (INTERVAL, [interval_text(part["a"]) or "–" for part in parts]),
        ("B accuracy", [share(part["b"]["accuracy"]) for part in parts]),
        (INTERVAL, [interval_text(part["b"]) or "–" for part in parts]),
        ("B − A, points", [_points(part["difference"]) for part in parts]),
        (INTERVAL, [_between(part["interval"]) for part in parts]),
        ("only A right", [f"{part['only_a']:,}" for part in parts]),
        ("only B right", [f"{part['only_b']:,}" for part in parts]),
        ("p (McNemar)", [_chance(part["p"]) for part in parts]),
        ("n", [f"{part['tasks']:,}" for part in parts]),
    ]
    names = tuple(f"{side.upper()}: {comparison[side]['folder']} ({comparison[side]['model']})" for side in ("a", "b"))
    return _grid("A and B on the same tasks", columns, rows, (*names, *comparison["notes"]))


def markdown(grid: Grid) -> str:
    """A grid as a page of Markdown."""
    shown = grid.turned() if grid.wide else grid
    lines = [["", *shown.columns], ["---", *("---:" for _ in shown.columns)]]
    lines += [[name, *cells] for name, cells in shown.rows]
    table = "\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in lines)
    notes = "".join(f"\n{_escaped(note)}\n" for note in grid.notes)
    return f"# {_escaped(grid.title)}\n\n{table}\n{notes}"


def print_grid(grid: Grid, console: Console) -> None:
    """Print a grid and its notes; turned where that is what fits the terminal. A log is as wide as it needs to be."""
    table = _table(grid.turned() if grid.wide else grid)
    width = console.width
    needed = Measurement.get(console, console.options.update(width=10_000), table).maximum
    if needed > width and not console.is_terminal:
        console.width = needed
    elif needed > width and not grid.wide:
        table = _table(grid.turned())
    console.print(table)
    console.width = width
    for note in grid.notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


def _table(grid: Grid) -> Table:
    table = house_table(grid.title, *grid.columns)
    for i, (name, cells) in enumerate(grid.rows):
        style = "bold" if i == 0 else "dim" if name == INTERVAL else ""
        table.add_row(Text(name), *(Text(cell) for cell in cells), style=style)
    return table


def _parts(whole: Part, summary: Summary) -> tuple[list[str], list[Part]]:
    """The names and parts of all tasks and of each category; a single nameless category is no category."""
    categories: Mapping[str, Part] = summary.get("categories", {})
    if list(categories) == ["all"]:
        categories = {}
    names = summary.get("columns", {})
    return ["all", *(names.get(category, category) for category in categories)], [whole, *categories.values()]


def _grid(title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], notes: Sequence[str]) -> Grid:
    return Grid(title, tuple(columns), tuple((name, tuple(cells)) for name, cells in rows), tuple(notes))


def _notes(summary: Summary) -> list[str]:
    episodes, k = summary["episodes"], summary.get("samples", 1)
    drawn = "greedy" if summary.get("temperature") == 0 else f"{k} {'sample' if k == 1 else 'samples'} a task"
    warm = f" at temperature {summary['temperature']:g}" if summary.get("temperature") else ""
    length = summary["length_mean"] or 0.0
    cut = f"{summary['truncated']:,} of {episodes:,} cut short ({share(summary.get('truncated_share'))})"
    notes = [
        f"{drawn}{warm}; {length:.1f} tokens an episode; {cut}; {summary['failed']:,} failed; "
        f"{summary['missing']:,} without a whole reward."
    ]
    if summary.get("skipped"):
        notes.append(f"{summary['skipped']:,} rows were skipped because they are bad (tasks.on_bad_row).")
    return notes


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _between(interval: Sequence[float]) -> str:
    return f"{100 * interval[0]:+.1f} to {100 * interval[1]:+.1f}"


def _chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
