"""report.html of an experiment: the best setting, the table of all, curves overlaid with bands, and its runs."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sensorium.experiments.experiment import Experiment
from sensorium.experiments.results import CURVES, Results, results_of, to_json
from sensorium.report.charts import Series, line_chart
from sensorium.report.page import document, section, tile
from sensorium.report.tables import ACROSS_SEEDS, ACROSS_TASKS, Grid, markdown
from sensorium.runs.durable import write_whole

COLOURS = (0, 2, 3, 4, 5, 1)  # of the page's six
STATES = {"finished": "up", "failed": "down", "untrained": "down"}


def write_results(experiment: Experiment) -> Results:
    """Write report.html, results.json and table.md of an experiment; returns what is in them."""
    results = results_of(experiment)
    write_whole(experiment.results, to_json(results))
    write_whole(experiment.path / "table.md", markdown(results.grid()))
    write_whole(experiment.report, page(results))
    return results


def page(results: Results) -> str:
    """The page."""
    shown = [one["name"] for one in results.settings if one["name"] in results.curves][: len(COLOURS)]
    seeds = sorted({run["seed"] for run in results.runs})
    finished = sum(run["state"] == "finished" for run in results.runs)
    facts = [f"{len(results.settings)} settings", f"{len(seeds)} seeds", f"{finished} of {len(results.runs)} runs finished"]
    facts += [f"swept: {', '.join(key for key in results.keys if key != 'seed')}"] if len(results.keys) > 1 else []
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in results.notes)
    sections = [
        section("Settings", "table", f"{notes}{_table(results.grid())}"),
        section("Curves", "curves", _charts(results, shown)),
        section("Runs", "table runs", _runs(results.runs)),
    ]
    return document(results.name, facts, _tiles(results), sections)


def _tiles(results: Results) -> str:
    best = next((one for one in results.settings if one["name"] == results.best), None)
    if best is None:
        return ""
    tiles = [tile("best setting", best["name"], "", f"by {results.by}, of {len(results.settings)}")]
    for name, scale, unit in (("reward", 1, ""), ("accuracy", 100, " %")):
        if part := best[name]:
            places = 3 if scale == 1 else 1
            spans = []
            for across in ("seeds", "tasks"):
                if edges := part[f"across_{across}"]:
                    spans.append(f"{scale * edges[0]:.{places}f}–{scale * edges[1]:.{places}f} across {across}")
            tiles.append(tile(f"held-out {name}", f"{scale * part['mean']:.{places}f}{unit}", "", "; ".join(spans)))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _table(grid: Grid) -> str:
    if not grid.rows:
        return '<p class="empty">No run is finished yet.</p>'
    below = {ACROSS_SEEDS: "seeds", ACROSS_TASKS: "tasks"}
    head = "".join(f"<th>{escape(column)}</th>" for column in ("", *grid.columns) if column not in below)
    rows = ""
    for name, cells in grid.rows:
        drawn: list[str] = []
        for column, cell in zip(grid.columns, cells, strict=True):
            if column in below:
                drawn[-1] += f'<br><span class="interval">{below[column]} {escape(cell)}</span>'
            else:
                drawn.append(escape(cell))
        rows += f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in drawn)}</tr>'
    note = '<p class="note">Below each mean its 95 % intervals, across seeds and across tasks.</p>'
    return f'{note}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _charts(results: Results, shown: Sequence[str]) -> str:
    drawn = []
    for metric, title in CURVES.items():
        series = []
        for name, colour in zip(shown, COLOURS, strict=False):
            for curve in results.curves[name]:
                if curve.metric == metric:
                    points = tuple(zip(map(float, curve.steps), curve.means, strict=True))
                    band = curve.edges if any(low < high for low, high in curve.edges) else ()
                    series.append(Series(name, points, colour, marks=metric.startswith("eval/"), band=band))
        if any(len(one.points) > 1 for one in series):
            drawn.append(line_chart(title, series))
    if not drawn:
        return ""
    most = f" The best {len(shown)} of {len(results.settings)} settings." if len(shown) < len(results.settings) else ""
    note = f"Lines are means over the runs of a setting; bands go from the lowest run to the highest.{most}"
    return f'<p class="note">{note}</p><div class="charts">{"".join(drawn)}</div>'


def _runs(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = ""
    for run in runs:
        name, state = escape(run["name"]), escape(run["state"])
        link = f'<a href="{name}/report.html">{name}</a>' if run["state"] in ("finished", "untrained") else name
        rows += (
            f'<tr><th scope="row">{link}</th><td class="change {STATES.get(run["state"], "")}">{state}</td>'
            f"<td>{escape(run['why'][:300])}</td></tr>"
        )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'
