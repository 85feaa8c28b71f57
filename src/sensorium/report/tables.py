"""Tables for the terminal and in Markdown: the plan of a run, evaluations, before against after.

Categories are columns, as in published tables; if there are too many, or the terminal is too narrow, they are rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sensorium.recipe.plan import Plan
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Summary
from sensorium.vocabulary.plain import counted

GIB, MIB = 1 << 30, 1 << 20


def plan_table(plan: Plan) -> RenderableType:
    """The dry run's numbers."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    parameters = "not counted: the model's files are not on this disk"
    if plan.model is not None:
        parts = ", ".join(f"{group} {count_text(count)}" for group, count in plan.model.parameters.items() if count)
        counted = "" if plan.model.exact else " by its config"
        parameters = f"{count_text(plan.model.total)}{counted} ({parts}); {count_text(plan.trainable)} are trained"
    updates = "one update" if plan.updates_per_step == 1 else f"{plan.updates_per_step} updates"
    step = f"{plan.episodes_per_step:,} episodes, {updates} of {plan.groups_per_update} groups"
    rows.add_row("a step", f"{step}; at most {plan.sampled_tokens_per_step:,} tokens written")
    for label, words in (("selection", plan.selection), ("schedule", plan.schedule), ("processes", plan.processes)):
        if words:
            rows.add_row(label, words)
    warm = f", of them {plan.warm_start_updates:,} supervised" if plan.warm_start_updates else ""
    run = f"{plan.steps:,} steps, {plan.total_updates:,} updates{warm}; {plan.total_episodes:,} episodes"
    if plan.epochs:
        run = f"{plan.epochs:g} epochs; the rows of tasks.train, which were not counted, say how many steps that is"
    rows.add_row("the run", run)
    if not plan.epochs:
        rows.add_row("evaluations", str(plan.evaluations) if plan.evaluations else "none")
    if plan.sight_check:
        rows.add_row("sight check", plan.sight_check)
    rows.add_row("parameters", parameters)
    if plan.precision:
        rows.add_row("precision", plan.precision)
    rows.add_row("repeats exactly", Text(plan.determinism, style="" if plan.deterministic else "yellow"))
    if plan.sharing:
        rows.add_row("tokens", plan.sharing)
    if plan.memory:
        total, width = sum(plan.memory.values()), max(18, *(len(use) + 2 for use in plan.memory))
        pictures = f" if prompts of up to {plan.longest_prompt:,} tokens are all picture (rollout.max_context_tokens)"
        shown = pictures if "vision tower" in plan.memory else ""
        rows.add_row("memory at most", Text.assemble((bytes_text(total), "bold"), shown))
        for use, amount in plan.memory.items():
            bar = "█" * round(24 * amount / total) or "▏"
            rows.add_row("", Text.assemble(f"{use:<{width}}{bytes_text(amount):>10}  ", (bar, "cyan")))
    if plan.interpreters:
        parts = ", ".join(f"{part} {bytes_text(amount)}" for part, amount in plan.interpreters.items())
        all_of_them = bytes_text(sum(plan.interpreters.values()))
        rows.add_row(
            "interpreters", f"about {all_of_them} of the machine's memory on top, for Python and its libraries ({parts})"
        )
    if plan.media:
        rows.add_row(
            "media", f"at most {bytes_text(plan.media)} more of it, for decoded and preprocessed media (media.memory_gib)"
        )
    if plan.disk:
        parts = ", ".join(f"{use} {bytes_text(amount)}" for use, amount in plan.disk.items())
        free = "" if plan.free_disk is None else f"; {bytes_text(plan.free_disk)} are there for it"
        rows.add_row("disk about", f"{bytes_text(sum(plan.disk.values()))} ({parts}) and the media it shows{free}")
    return rows


def disk_note(recipe: Recipe, plan: Plan) -> str:
    """A warning if a run may take more disk than is free; else empty."""
    needed, free = sum(plan.disk.values()), plan.free_disk
    if free is None or needed <= free:
        return ""
    return (
        f"ATTENTION: the run may take {bytes_text(needed)} of disk, and '{recipe.directory}' has {bytes_text(free)}. "
        "When the disk is full the run ends, and goes on from its last checkpoint if it has written one by then. Make "
        "room, put it elsewhere (run_dir=…), or keep less: checkpoint.keep, logging.episodes_gib."
    )


def comparison_table(before: Sequence[Summary], after: Sequence[Summary], title: str = "before and after") -> Table:
    """Evaluations before and after training side by side, matched by name; categories below the first of them."""
    table = _house_table(title, "before", "", "after", "", "change", "n")
    earlier = {summary["name"]: summary for summary in before}
    for i, summary in enumerate(after):
        was: Mapping[str, Any] = earlier.get(summary["name"], {})
        table.add_row(Text(str(summary["name"]), style="bold" if i == 0 else ""), *_compared(was, summary))
        if i == 0:
            for name, category in summary.get("categories", {}).items():
                old = was.get("categories", {}).get(name, {})
                table.add_row(Text(f"  {name}", style="dim"), *_compared(old, category))
            table.add_section()
    return table


def _compared(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Text]:
    cells = []
    for part in (was, now):
        interval = interval_text(part)
        cells += [Text(share(part.get("accuracy"))), Text(f"[{interval}]" if interval else "", style="dim")]
    count = int(now.get("tasks", now.get("episodes", 0)))
    old, new = was.get("accuracy"), now.get("accuracy")
    change = Text("–", style="dim")
    if old is not None and new is not None:
        a, b = was.get("interval"), now.get("interval")
        apart = a[1] < b[0] or b[1] < a[0] if a and b else abs(new - old) >= 0.05  # else it may be chance
        change = Text(f"{100 * (new - old):+.1f}", style="dim" if not apart else "green" if new > old else "red")
    return [*cells, change, Text(str(count), style="dim")]


def share(value: float | None) -> str:
    """A share as a percentage; – if nothing was judged."""
    return "–" if value is None else f"{100 * value:.1f} %"


def share_or_reward(summary: Summary) -> str:
    """What an evaluation measured: ``81.2 %`` right, or ``reward 0.388`` if no term says right or wrong."""
    accuracy, reward = summary.get("accuracy"), summary.get("reward")
    return f"reward {reward:.3f}" if accuracy is None and reward is not None else share(accuracy)


def interval_text(summary: Mapping[str, Any]) -> str:
    """The interval of a summary's accuracy: ``78.2–84.9``."""
    interval = summary.get("interval")
    return "" if not interval else f"{100 * interval[0]:.1f}–{100 * interval[1]:.1f}"


def majority_text(part: Mapping[str, Any], name: str = "majority") -> str:
    """The most frequent known answer, or of ``given`` ones, and its share: ``“yellow” 14.1 %``; empty if there is none."""
    found = part.get(name)
    if not found:
        return ""
    answer = found["answer"]
    return f"“{answer if len(answer) <= LONGEST_ANSWER else answer[: LONGEST_ANSWER - 1] + '…'}” {share(found['share'])}"


def count_text(count: float) -> str:
    """A count in few characters: 1.2 k, 34.5 M, 3.1 B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"


def bytes_text(amount: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / MIB:.1f} MiB"


def _house_table(title: str, *columns: str) -> Table:
    table = Table(
        box=SIMPLE_HEAD, title=Text(title, style="bold"), title_justify="left", header_style="dim", pad_edge=False
    )
    table.add_column("")
    for column in columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    return table


MOST_COLUMNS = 10
CHANCE = "chance"  # by always giving the most frequent known answer, which a note names
LONGEST_ANSWER = 16  # characters of an answer in a table
INTERVAL = "95 % interval"
ACROSS_TASKS, ACROSS_SEEDS = "95 % across tasks", "95 % across seeds"
Part = Mapping[str, Any]


@dataclass(frozen=True)
class Grid:
    """Rows of cells under columns, with notes below; the first column is all tasks, the others are categories."""

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
    """One evaluation: accuracy with its interval, rewards, and notes on the samples."""
    columns, parts = _parts({**summary, "tasks": summary.get("judged", summary["tasks"])}, summary)
    k = summary.get("samples", 1)
    rows = [
        ("accuracy" if k == 1 else f"accuracy (mean@{k})", [share(part.get("accuracy")) for part in parts]),
        (INTERVAL, [interval_text(part) or "–" for part in parts]),
    ]
    if "majority" in summary:
        whole, *kinds = (part.get("majority", {}) for part in parts)
        kinds = [{} if kind.get("different") == 1 else kind for kind in kinds]  # one with a single answer is no choice
        rows.append((CHANCE, [share(known.get("share")) for known in (whole, *kinds)]))
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
    """Two sides on the same tasks: both accuracies, the difference, and how many tasks changed sides."""
    names = tuple(f"{side.upper()}: {comparison[side]['folder']} ({comparison[side]['model']})" for side in ("a", "b"))
    columns, rows = ["all"], list[tuple[str, Sequence[str]]]()
    if "all" in comparison:
        columns, parts = _parts(comparison["all"], comparison)
        rows = _paired_rows(parts)
    if "differences" in comparison:
        changes = comparison["differences"]
        blank = ["–"] * (len(columns) - 1)
        if "accuracy" in changes:
            rows.insert(6, (ACROSS_SEEDS, [_change_edges(changes["accuracy"], "across_seeds", 100), *blank]))
            rows[5] = (ACROSS_TASKS, rows[5][1])
        if (change := changes["reward"]) is not None:
            sides = comparison["groups"]
            rows += [
                (f"{name} reward", [_number(side["reward"]["mean"]), *blank])
                for name, side in zip("AB", sides, strict=True)
            ]
            rows.append(("B − A, reward", [f"{change['difference']:+.3f}", *blank]))
            rows.append((ACROSS_TASKS, [_change_edges(change, "across_tasks"), *blank]))
            rows.append((ACROSS_SEEDS, [_change_edges(change, "across_seeds"), *blank]))
    return _grid("A and B on the same tasks", columns, rows, (*names, *comparison["notes"]))


def _paired_rows(parts: Sequence[Part]) -> list[tuple[str, Sequence[str]]]:
    return [
        ("A accuracy", [share(part["a"]["accuracy"]) for part in parts]),
        (INTERVAL, [interval_text(part["a"]) or "–" for part in parts]),
        ("B accuracy", [share(part["b"]["accuracy"]) for part in parts]),
        (INTERVAL, [interval_text(part["b"]) or "–" for part in parts]),
        ("B − A, points", [f"{100 * part['difference']:+.1f}" for part in parts]),
        (INTERVAL, [" to ".join(f"{100 * edge:+.1f}" for edge in part["interval"]) for part in parts]),
        ("only A right", [f"{part['only_a']:,}" for part in parts]),
        ("only B right", [f"{part['only_b']:,}" for part in parts]),
        ("p (McNemar)", ["< 0.001" if part["p"] < 0.001 else f"{part['p']:.3f}" for part in parts]),
        ("n", [f"{part['tasks']:,}" for part in parts]),
    ]


def settings_grid(settings: Sequence[Part], notes: Sequence[str], title: str = "settings on the same tasks") -> Grid:
    """Settings as rows: held-out reward and accuracy, each with its interval across seeds and the one across tasks."""
    measured = [name for name in ("reward", "accuracy") if any(one[name] for one in settings)]
    columns = ["runs", *(column for name in measured for column in (name, ACROSS_SEEDS, ACROSS_TASKS))]
    changed = next((name for name in measured if any(one.get(f"{name}_change") for one in settings)), "")
    if changed:
        columns += [f"{changed} against the first", ACROSS_SEEDS, ACROSS_TASKS]
    rows = []
    for one in settings:
        cells = [f"{len(one['runs'])}"]
        for name in measured:
            show, part = (_number if name == "reward" else share), one[name]
            cells.append(show(part["mean"] if part else None))
            cells += [_edges(part, across, 1 if name == "reward" else 100) for across in ("across_seeds", "across_tasks")]
        if changed:
            change, scale = one.get(f"{changed}_change"), 1 if changed == "reward" else 100
            cells.append(f"{scale * change['difference']:+.3g}" if change else "–")
            cells += [_change_edges(change, across, scale) for across in ("across_seeds", "across_tasks")]
        rows.append((one["name"], cells))
    return _grid(title, columns, rows, notes)


MOST_SHOWN = 10


def rescoring_grids(found: Summary) -> list[Grid]:
    """Stored episodes that were scored again: what changed by term, and the episodes that change most."""
    rows = [("reward", _old_and_new(found["reward"]))]
    if any(found["accuracy"]["n"]):
        rows.append(("right", _old_and_new(found["accuracy"], share)))
    learning = found["learning"]
    if any(learning["groups"]):
        rows.append(("learning share", _old_and_new({"mean": learning["share"], "n": learning["groups"]}, share)))
    rows += [(f"reward/{name}", _old_and_new(term)) for name, term in found["terms"].items()]
    steps = found["steps"]
    span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    what = "held-out episodes" if found["evaluations"] else "episodes"
    title = f"{found['run']}: {found['episodes']:,} {what} of {counted(found['groups'], 'group')} ({span}), scored again"
    columns = ["weight", "mean", "n", "new weight", "new mean", "new n", "change"]
    grids = [_grid(title, columns, rows, list(_rescoring_notes(found)))]
    if found["changed"]:
        shown = found["changed"][:MOST_SHOWN]
        lines = [
            (row["episode"], [str(row["step"]), *map(_number, row["reward"]), _change(row["reward"]), row["term"]])
            for row in shown
        ]
        title = "the episodes that change most"
        grids.append(_grid(title, ["step", "reward", "new reward", "change", "mostly by"], lines, ()))
    return grids


def _old_and_new(part: Part, text: Callable[[float | None], str] | None = None) -> list[str]:
    cells = []
    weights = part.get("weight", (None, None))
    for weight, mean, n in zip(weights, part["mean"], part["n"], strict=True):
        cells += ["" if weight is None else f"{weight:g}", (text or _number)(mean), f"{n:,}"]
    change = _change(part["mean"]) if text is None else _change(part["mean"], 100, ".1f")
    return [*cells, change]


def _change(pair: Sequence[float | None], scale: int = 1, form: str = ".3f") -> str:
    old, new = pair
    return "–" if old is None or new is None else f"{scale * (new - old):+{form}}"


def _rescoring_notes(found: Summary) -> Iterator[str]:
    signs, related = found["signs"], found["correlation"]
    if signs is not None:
        turns = (
            f", {signs['turns']:,} of {signs['all_turns']:,} turns" if signs["all_turns"] > signs["all_episodes"] else ""
        )
        yield (
            f"advantages change sign in {signs['groups']:,} of {counted(signs['compared'], 'group')}: "
            f"{signs['episodes']:,} of {counted(signs['all_episodes'], 'episode')}{turns}."
        )
    names = {"pearson": "Pearson", "rank": "of ranks", "within_groups": "within groups"}
    known = [f"{related[key]:.3f} ({name})" for key, name in names.items() if related[key] is not None]
    which = f"old and new reward of {counted(related['n'], 'episode')}"
    yield f"correlation of the {which}: {', '.join(known)}." if known else f"no correlation: the {which} do not both vary."
    for name, reasons in found["missing"].items():
        reason, count = next(iter(reasons.items()))
        yield f"'{name}' gave no score to {counted(count, 'episode')} because: {reason}"
    yield from found["notes"]


def _edges(part: Part | None, across: str, scale: int = 1) -> str:
    edges = part.get(across) if part else None
    places = 3 if scale == 1 else 1
    return "–" if edges is None else f"{scale * edges[0]:.{places}f}–{scale * edges[1]:.{places}f}"


def _change_edges(part: Part | None, across: str, scale: int = 1) -> str:
    edges = part.get(across) if part else None
    places = 3 if scale == 1 else 1
    return "–" if edges is None else " to ".join(f"{scale * edge:+.{places}f}" for edge in edges)


def markdown(grid: Grid) -> str:
    """A grid as a page of Markdown."""
    shown = grid.turned() if grid.wide else grid
    lines = [["", *shown.columns], ["---", *("---:" for _ in shown.columns)]]
    lines += [[name, *cells] for name, cells in shown.rows]
    table = "\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in lines)
    notes = "".join(f"\n{_escaped(note)}\n" for note in grid.notes)
    return f"# {_escaped(grid.title)}\n\n{table}\n{notes}"


def print_grid(grid: Grid, console: Console) -> None:
    """Print a grid and its notes, turned if the terminal is too narrow; a log is as wide as needed."""
    table = _table(grid.turned() if grid.wide else grid)
    width = console.width
    needed = _width(table, console)
    if needed > width and not console.is_terminal:
        console.width = needed
    elif needed > width:
        table = _table(grid.turned())
        if _width(table, console) > width:  # a note below has the chance of all tasks
            table = _table(replace(grid, rows=tuple(row for row in grid.rows if row[0] != CHANCE)).turned())
    console.print(table)
    console.width = width
    for note in grid.notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(width=10_000), table).maximum


def _table(grid: Grid) -> Table:
    table = _house_table(grid.title, *grid.columns)
    for i, (name, cells) in enumerate(grid.rows):
        style = "bold" if i == 0 else "dim" if name in (INTERVAL, ACROSS_TASKS, ACROSS_SEEDS) else ""
        table.add_row(Text(name), *(Text(cell) for cell in cells), style=style)
    return table


def _parts(whole: Part, summary: Summary) -> tuple[list[str], list[Part]]:
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
    if summary.get("given") and summary.get("majority"):
        notes.append(
            f"{counted(summary['given']['different'], 'different answer')} given, most often "
            f"{majority_text(summary, 'given')}; the tasks have {summary['majority']['different']:,}, most often "
            f"{majority_text(summary)}: what always giving that one would score."
        )
    if summary.get("blanked"):
        notes.append(f"{' and '.join(f'{kind}s' for kind in summary['blanked'])} shown blank (--blank).")
    if summary.get("skipped"):
        notes.append(f"{counted(summary['skipped'], 'bad row')} skipped (tasks.on_bad_row).")
    return notes


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
