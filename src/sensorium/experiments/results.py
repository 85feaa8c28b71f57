"""What an experiment has found so far: settings with their intervals, the best by held-out reward, curves over its runs;
and report.html, which shows them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from sensorium.evaluation.comparison import Side, group_notes, measured_run, refuse_unequal, settings_of
from sensorium.experiments.experiment import SEED, Experiment, PlannedRun
from sensorium.recipe.yaml import value_text
from sensorium.report.charts import Series, line_chart
from sensorium.report.page import document, section, tile
from sensorium.report.tables import ACROSS_SEEDS, ACROSS_TASKS, Grid, markdown, settings_grid
from sensorium.runs.durable import write_whole
from sensorium.runs.metrics import read_metrics
from sensorium.vocabulary.errors import CheckpointError, TaskError
from sensorium.vocabulary.plain import counted

Row = dict[str, Any]
# Titles of the page's charts; those of evaluations first.
CURVES = {
    "eval/reward": "Held-out reward",
    "eval/accuracy": "Held-out accuracy",
    "reward/mean": "Training reward",
    "accuracy": "Training accuracy",
}


@dataclass(frozen=True)
class Curve:
    """A metric of a setting's runs by step: their mean, and the lowest and highest of them."""

    metric: str
    steps: tuple[int, ...]
    means: tuple[float, ...]
    edges: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Results:
    """``settings`` are sorted, the best first; ``best`` is empty where none was evaluated. ``curves`` are by setting."""

    name: str
    keys: tuple[str, ...]
    settings: tuple[dict[str, Any], ...]
    runs: tuple[dict[str, Any], ...]
    best: str
    by: str
    notes: tuple[str, ...]
    curves: Mapping[str, tuple[Curve, ...]] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """The table: a row a setting, with the swept keys, and ``…_across_seeds`` and ``…_across_tasks`` as [low, high]."""
        rows = []
        for one in self.settings:
            row: Row = {**one["settings"], "runs": len(one["runs"]), "planned": one["planned"]}
            for name in ("reward", "accuracy"):
                part = one[name] or {}
                row |= {name: part.get("mean"), f"{name}_by_run": part.get("by_run")}
                row |= {f"{name}_{across}": part.get(across) for across in ("across_seeds", "across_tasks")}
            rows.append(row | {"best": one["name"] == self.best})
        return rows

    def plain(self) -> dict[str, Any]:
        """Everything but the curves, for results.json."""
        return {
            "name": self.name, "keys": self.keys, "best": self.best, "by": self.by, "notes": self.notes,
            "settings": self.settings, "runs": self.runs,
        }  # fmt: skip

    def grid(self) -> Grid:
        """The table for terminal and Markdown."""
        measured = [one for one in self.settings if one["runs"]]
        best = f"; the best by {self.by}: {self.best}" if self.best else ""
        return settings_grid(measured, self.notes, f"{self.name}{best}")


def results_of(experiment: Experiment) -> Results:
    """What is known of an experiment now."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in experiment.runs:
        groups.setdefault(experiment.label(run), []).append(run)
    sides, unmeasured = [], list[str]()
    for label, runs in groups.items():
        members = []
        for run in runs:
            try:
                members += [measured_run(experiment.path / run.name)] if run.state == "finished" else []
            except CheckpointError:
                unmeasured.append(run.name)
        sides.append(Side(label, tuple(members)))
    by = "accuracy" if any(key.partition(".")[0] == "rewards" for key in experiment.keys) else "reward"
    known = [side for side in sides if side.members]
    numbers = {one["name"]: one for one in settings_of(known)} if known else {}
    ranked = sorted(
        (side for side in known if numbers[side.name][by]),
        key=lambda side: (len(side.members) == len(groups[side.name]), numbers[side.name][by]["mean"]),
        reverse=True,
    )
    ordered = [*ranked, *(side for side in known if side not in ranked)]
    settings = settings_of(ordered) if ordered else []
    empty = {"runs": [], "seeds": [], "tasks": 0, "accuracy": None, "reward": None}
    settings += [{"name": side.name, **empty} for side in sides if not side.members]
    for one in settings:
        point = groups[one["name"]][0].settings
        one["settings"] = {key: point[key] for key in experiment.keys if key != SEED}
        one["planned"] = len(groups[one["name"]])
    return Results(
        experiment.name,
        tuple(experiment.keys),
        tuple(settings),
        tuple({"name": run.name, **run.settings, "state": run.state, "why": run.why} for run in experiment.runs),
        ranked[0].name if ranked else "",
        f"held-out {by}",
        tuple(_notes(experiment, groups, ranked, unmeasured, by)),
        {side.name: tuple(_curves(experiment, groups[side.name])) for side in [*ordered, *sides] if groups[side.name]},
    )


def _notes(
    experiment: Experiment,
    groups: Mapping[str, Sequence[PlannedRun]],
    ranked: Sequence[Side],
    unmeasured: Sequence[str],
    by: str,
) -> Iterator[str]:
    if ranked:
        try:
            refuse_unequal(ranked)
        except TaskError as error:
            yield f"ATTENTION: {error}"
        yield from group_notes(ranked)
    if len(ranked) > 1:
        yield (
            f"The best of {len(ranked)} settings was chosen by these tasks, so its own numbers are flattered: measure it "
            "on other held-out tasks before you report it."
        )
    if by == "accuracy":
        yield "Rewards are swept, so that they are not comparable; settings are ordered by accuracy."
    incomplete = [label for label, runs in groups.items() if any(run.state != "finished" for run in runs)]
    if incomplete:
        states = [run.state for run in experiment.runs if run.state != "finished"]
        parts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        yield f"Not finished: {parts}, in {counted(len(incomplete), 'setting')}; settings that lack a run come last."
    for run in experiment.runs:
        if run.state in ("failed", "untrained"):
            yield f"{run.name} {'failed' if run.state == 'failed' else 'learned nothing'}: {run.why}"
    if unmeasured:
        yield (
            f"{counted(len(unmeasured), 'finished run has', 'finished runs have')} no evaluation ({unmeasured[0]}), so "
            "there is nothing held out to order them by: set evaluation.every in a sweep of its own."
        )


def _curves(experiment: Experiment, runs: Sequence[PlannedRun]) -> Iterator[Curve]:
    tables = []
    for run in runs:
        directory = experiment.directory(run)
        rows = {row["step"]: row for row in read_metrics(directory.metrics)}
        for summary in directory.summaries():
            known = {f"eval/{name}": summary[name] for name in ("reward", "accuracy") if summary.get(name) is not None}
            rows[summary["step"]] = rows.get(summary["step"], {}) | known
        if rows:
            tables.append(rows)
    for metric in CURVES:
        of_runs = [{step: row[metric] for step, row in rows.items() if metric in row} for rows in tables]
        of_runs = [values for values in of_runs if values]
        steps = sorted(set.intersection(*map(set, of_runs))) if of_runs else []  # a mean over the same runs everywhere
        if steps:
            columns = [[values[step] for values in of_runs] for step in steps]
            means = tuple(sum(column) / len(column) for column in columns)
            yield Curve(metric, tuple(steps), means, tuple((min(column), max(column)) for column in columns))


def to_json(results: Results) -> str:
    return json.dumps(results.plain(), indent=1, default=value_text) + "\n"


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
