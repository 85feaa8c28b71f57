"""A run on the console: a live display on a terminal, else plain lines; and the bar of an evaluation.

Without a terminal a line is printed for the first step, for evaluations, for the last step, and otherwise at most every ten
seconds.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sensorium.report.cards import first_group_lines
from sensorium.report.charts import bounds, chart, smooth, sparkline
from sensorium.report.tables import count_text, interval_text, majority_text, share_or_reward
from sensorium.report.terminal import Terminal, say
from sensorium.report.watcher import Metrics, RunStart, Summary, Watcher
from sensorium.runs.metrics import Notice
from sensorium.vocabulary.episode import Group as EpisodeGroup
from sensorium.vocabulary.metric_names import TROUBLES
from sensorium.vocabulary.plain import counted

QUIET_S = 10.0
WARM_START, RL = "warm start", "RL"
EVALUATING = {"evaluate": "evaluating the held-out tasks", "sight check": "the sight check"}  # phases that say they begin
PHASES = ("draw", "rollout", "score", "credit", "update", "record")
KINDS = 12  # kinds of tasks that are listed
PRINTED_BEFORE = frozenset({"slower_computing"})  # findings whose reasons are printed when they occur


class ConsoleWatcher(Watcher):
    """Shows a run. ``opening`` is called once before anything is shown: a run that cannot start shows only why."""

    shown = True

    def __init__(self, console: Console | None = None, opening: Callable[[], None] | None = None) -> None:
        self.console = console or Terminal()
        self._opening = opening
        terminal = self.console.is_terminal and not self.console.is_dumb_terminal
        self.lively = terminal and "utf" in self.console.encoding.lower()
        self._state = _State()
        self._live: Live | None = None
        self._last_line = -QUIET_S

    def started(self, run: RunStart) -> None:
        self._open()
        self._state.start(run)
        if self.lively:
            self._live = Live(self._state, console=self.console, refresh_per_second=2)
            self._live.start()
        else:
            left = run.steps - run.first
            since = f", from step {run.first}" if run.first else ""
            say(f"{run.name}: {left} {'step' if left == 1 else 'steps'} to go{since}", self.console)

    def phase(self, step: int, name: str, total: int = 0) -> None:
        begun = name in EVALUATING and self._state.phase != name
        self._state.phase, self._state.done, self._state.of = name, 0, total
        if self._live is None and begun and (self._state.step == 0 or self._quiet()):
            self._last_line = time.monotonic()
            say(f"step {self._state.step}: {EVALUATING[name]} ...", self.console)

    def progress(self, done: int) -> None:
        self._state.done = done
        if self._live is None and self._state.phase in EVALUATING and done < self._state.of and self._quiet():
            self._last_line = time.monotonic()
            say(f"step {self._state.step}: {self._state.phase}, {done:,} of {self._state.of:,} episodes", self.console)

    def _quiet(self) -> bool:
        return time.monotonic() - self._last_line >= QUIET_S

    def stepped(self, step: int, metrics: Metrics) -> None:
        self._state.take(step, metrics)
        if self._live is None:
            now = time.monotonic()
            if now - self._last_line >= QUIET_S or step == self._state.run.steps:
                self._last_line = now
                say(self._state.line(), self.console)

    def evaluated(self, step: int, summary: Summary) -> None:
        self._state.evaluations.append((step, summary))
        if self._live is None:
            interval = f" [{interval_text(summary)}]".replace("–", " to ") if summary.get("interval") else ""
            judged, tasks = summary.get("judged"), summary.get("tasks")
            few = f", {judged} of {tasks} tasks judged" if judged and tasks and judged < tasks else ""
            chance = f", majority answer {majority}" if (majority := _majority(summary)) else ""
            say(f"step {step}: {summary['name']} {_measured(summary)}{interval}{few}{chance}", self.console)
            for line in category_lines(summary):
                say(f"  {line}", self.console)

    def began(self, group: EpisodeGroup) -> None:
        """Print the first group: the task, one response and its scores."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, words in first_group_lines(group):
            table.add_row(Text(label), Text(self._encodable(words)))
        self.console.print(table)
        self.console.print()

    def diagnosed(self, notice: Notice) -> None:
        """Print a finding, and list it on the display while it lasts."""
        if notice.rule in PRINTED_BEFORE:
            return
        if notice.state == "ended":
            self._state.findings.pop(notice.rule, None)
            self.console.print(
                f"step {notice.step}: health: over: {notice.rule}", style="green", markup=False, highlight=False
            )
            return
        self._state.findings.setdefault(notice.rule, notice)
        begin = f"step {notice.step}: health: {'still: ' if notice.state == 'goes on' else ''}"
        if notice.state == "before":
            begin = f"health since step {notice.step}, found before the run was resumed: "
        style = "red" if notice.grave else "yellow"
        text = self._encodable(f"{begin}{notice.text}")
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=self._live is None)

    def noted(self, text: str) -> None:
        self._open()
        self.console.print(text, style="yellow", markup=False, highlight=False)

    def finished(self) -> None:
        self._state.phase = ""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _open(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening()

    def _encodable(self, text: str) -> str:
        encoding = self.console.encoding
        return text.encode(encoding, "replace").decode(encoding)


class _State:
    """The state of the display, drawn at every refresh."""

    def __init__(self) -> None:
        self.run = RunStart("", 0)
        self.step = 0
        self.phase, self.done, self.of = "", 0, 0
        self.metrics: Metrics = {}
        self.curves: dict[str, list[float]] = {}
        self.evaluations: list[tuple[int, Summary]] = []
        self.troubles: dict[str, float] = {}
        self.findings: dict[str, Notice] = {}
        self._began = self._stepped_at = time.monotonic()
        self._ended: float | None = None
        self._durations: dict[str, deque[float]] = {}  # by stage, without its first step, which compiles and warms up

    def start(self, run: RunStart) -> None:
        self.run, self.step = run, run.first
        self._began = self._stepped_at = time.monotonic()

    def take(self, step: int, metrics: Metrics) -> None:
        now = time.monotonic()
        stage = WARM_START if step <= self.run.warm_start else RL
        if stage in self._durations:
            self._durations[stage].append(now - self._stepped_at)
        else:
            self._durations[stage] = deque(maxlen=20)
        self._stepped_at = now
        self.step, self.metrics = step, metrics
        if step >= self.run.steps:
            self._ended = now
        for name, value in metrics.items():
            if name.startswith(("reward/", "accuracy/")) or name in ("accuracy", "policy/loss"):
                self.curves.setdefault(name, []).append(value)
            if name in TROUBLES:
                self.troubles[name] = self.troubles.get(name, 0) + value

    @property
    def elapsed(self) -> float:
        return (self._ended or time.monotonic()) - self._began

    @property
    def left(self) -> str:
        """The remaining time by a stage's second step on; of the warm start alone while no step of RL was measured."""
        warm = self.run.warm_start
        steps = {WARM_START: max(0, warm - self.step), RL: self.run.steps - max(self.step, warm)}
        needed = {
            stage: count * statistics.median(self._durations[stage])
            for stage, count in steps.items()
            if count and self._durations.get(stage)
        }
        if not needed or (steps[WARM_START] and WARM_START not in needed):
            return ""
        whole = len(needed) == sum(count > 0 for count in steps.values())
        return f"{duration(sum(needed.values()))} left{'' if whole else ' of the warm start'}"

    def line(self) -> str:
        """The state as one plain line, ASCII only."""
        parts = [f"step {self.step}/{self.run.steps}"]
        for name, metric in (("reward", "reward/mean"), ("accuracy", "accuracy"), ("loss", "policy/loss")):
            if metric in self.metrics and (name != "loss" or "reward/mean" not in self.metrics):
                parts.append(f"{name} {self.metrics[metric]:.3f}")
        if "planner/level" in self.metrics:
            parts.append(f"level {self.metrics['planner/level']:.0f}")
        if "throughput/episodes_per_s" in self.metrics:
            parts.append(f"{self.metrics['throughput/episodes_per_s']:.1f} episodes/s")
        if troubles := _trouble_counts(self.metrics):
            parts.append(f"in this step: {', '.join(troubles)}")
        if self.left:
            parts.append(self.left)
        return "  ".join(parts)

    def __rich__(self) -> RenderableType:
        total = max(1, self.run.steps)
        bar = ProgressBar(total=total, completed=self.step, complete_style="cyan", finished_style="green")
        rows = list(self._facts())
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim", no_wrap=True, min_width=max((len(label) for label, _ in rows), default=0))
        facts.add_column(overflow="ellipsis")
        for label, fact in rows:
            facts.add_row(label, fact)
        return Group(self._head(), bar, self._charts(), facts)

    def _head(self) -> RenderableType:
        head = Table.grid(expand=True)
        head.add_column(no_wrap=True)
        head.add_column(justify="right", no_wrap=True)
        place = Text.assemble((self.run.name, "bold"), f"  step {self.step} of {self.run.steps}")
        if self.phase:
            place.append(f"  {self.phase}", style="cyan")
            place.append(f" {self.done}/{self.of}" if self.of else "", style="dim")
        clock = f"{duration(self.elapsed)} elapsed"
        if self.left:
            clock += f", {self.left}"
        head.add_row(place, Text(clock, style="dim"))
        return head

    def _charts(self) -> RenderableType:
        known = [("reward", "reward/mean", "cyan"), ("accuracy", "accuracy", "green")]
        shown = [curve for curve in known if curve[1] in self.curves] or [("loss", "policy/loss", "magenta")]
        charts = [_Chart(title, self.curves[name], style) for title, name, style in shown if name in self.curves]
        grid = Table.grid(expand=True, padding=(0, 3, 0, 0))
        for _ in charts:
            grid.add_column(ratio=1)
        grid.add_row(*charts)
        return Group(Text(""), grid, Text("")) if charts else Text("")

    def _facts(self) -> Iterator[tuple[str, RenderableType]]:
        for label, family in (("terms", "reward/"), ("by kind", "accuracy/")):
            names = [name for name in self.curves if name.startswith(family) and name != "reward/mean"]
            lines = []
            for name in sorted(names, key=lambda name: self.curves[name][-1])[:KINDS] if family == "accuracy/" else names:
                value = (f"{self.curves[name][-1]:.2f} ", "bold")
                line = Text.assemble(f"{name.removeprefix(family)} ", value, (sparkline(self.curves[name], 10), "cyan"))
                line.no_wrap = True
                lines.append(line)
            if len(names) > len(lines):
                lines.append(Text(f"the lowest {len(lines)} of {len(names)}", style="dim"))
            if lines:
                yield label, Columns(lines, padding=(0, 3))
        if "planner/level" in self.metrics:
            success = self.metrics.get("planner/success")
            yield (
                "level",
                Text(f"{self.metrics['planner/level']:.0f}{'' if success is None else f'  success {success:.2f}'}"),
            )
        if self.evaluations:
            step, last = self.evaluations[-1]
            line = Text()
            for at, earlier in self.evaluations[:-1]:
                if at in (self.evaluations[0][0], self.run.warm_start):
                    stage = " after the warm start" if at == self.run.warm_start > 0 else ""
                    line.append(f"{share_or_reward(earlier)}{stage} → ", style="dim")
            line.append(share_or_reward(last), style="bold green")
            line.append(f"  [{interval_text(last)}]" if last.get("interval") else "", style="dim")
            line.append(f"  at step {step}", style="dim")
            line.append(f"  majority answer {majority}" if (majority := _majority(last)) else "", style="dim")
            yield "held out", line
        if "throughput/episodes_per_s" in self.metrics:
            line = Text(f"{count_text(self.metrics['throughput/episodes_per_s'])} episodes/s")
            if "throughput/tokens_per_s" in self.metrics:
                line.append(f"  {count_text(self.metrics['throughput/tokens_per_s'])} tokens/s")
            if whole := self.metrics.get("time/step_s", 0.0):
                line.append(f"  {whole:.2f} s a step")
                shares = [(phase, self.metrics.get(f"time/{phase}_s", 0.0) / whole) for phase in PHASES]
                words = ", ".join(f"{phase} {100 * part:.0f}\u00a0%" for phase, part in shares if part >= 0.01)
                line.append(f"  ({words})" if words else "", style="dim")
            yield "speed", line
        if self.findings:
            words = ", ".join(f"{rule.replace('_', ' ')} (since step {n.step})" for rule, n in self.findings.items())
            grave = any(notice.grave for notice in self.findings.values())
            yield "health", Text(words, style="red" if grave else "yellow")
        if troubles := _trouble_counts(self.troubles):
            yield "left out", Text(", ".join(troubles), style="yellow")


def _trouble_counts(counts: Metrics) -> list[str]:
    return [counted(counts[name], *words) for name, words in TROUBLES.items() if counts.get(name)]


class _Chart:
    """One curve with its name, last value and axis, in the available width."""

    def __init__(self, title: str, values: list[float], style: str, height: int = 6) -> None:
        self.title, self.values, self.style, self.height = title, values, style, height

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(20, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        low, high = bounds(self.values)
        yield Text.assemble((f"{self.title} ", "dim"), (f"{self.values[-1]:.3f}", f"bold {self.style}"))
        labels = {0: f"{high:.3g}", self.height - 1: f"{low:.3g}"}
        room = max(len(label) for label in labels.values())
        lines = chart(smooth(self.values), max(8, options.max_width - room - 2), self.height, low, high)
        for i, line in enumerate(lines):
            yield Text.assemble((f"{labels.get(i, ''):>{room}} ▏", "dim"), (line, self.style))


def duration(seconds: float) -> str:
    """Seconds as a clock shows them: 0:42, 12:05, 3:07:44."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def category_lines(summary: Summary) -> list[str]:
    """A line for each kind of task with its success and interval, ASCII only; the lowest where there are many."""
    kinds = {name: part for name, part in summary.get("categories", {}).items() if part.get("accuracy") is not None}
    if len(kinds) < 2:
        return []
    lowest = sorted(kinds, key=lambda name: kinds[name]["accuracy"])[:KINDS]
    lines = [
        f"{name.encode('ascii', 'replace').decode()}: {share_or_reward(part)} "
        f"[{interval_text(part).replace('–', ' to ')}], n = {part['tasks']}"
        for name, part in kinds.items()
        if name in lowest
    ]
    return lines + ([f"the lowest {len(lowest)} of {len(kinds)} kinds of tasks"] if len(kinds) > len(lowest) else [])


def _majority(summary: Summary) -> str:
    """What the majority answer alone would score, in ASCII where the answer is."""
    return majority_text(summary).replace("“", "'").replace("”", "'").replace("…", "...")


def _measured(summary: Summary) -> str:
    if summary.get("accuracy") is not None:
        return f"accuracy {share_or_reward(summary)}"
    if summary.get("reward") is not None:
        return f"{share_or_reward(summary)} (no reward term said right or wrong)"
    if not summary.get("tasks"):
        return "measured nothing (no held-out task could be played)"
    if summary.get("failed") and summary["failed"] == summary.get("episodes"):
        return f"measured nothing (all {summary['failed']} episodes failed)"
    return "measured nothing (no episode has a reward)"


class EvaluationBar:
    """Shows how many tasks are done; a plain line at most every ``quiet_s`` if there is no terminal."""

    def __init__(self, console: Console, quiet_s: float = QUIET_S) -> None:
        parts = (TextColumn("tasks"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.console, self.quiet_s = console, quiet_s
        self.progress = Progress(*parts, console=console, transient=True, disable=not console.is_terminal)
        self.bar = self.progress.add_task("tasks", total=None)
        self.heard = False
        self._last_line = 0.0

    def __enter__(self) -> "EvaluationBar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def tell(self, done: int, of: int) -> None:
        """So many tasks are done; those of the first call were done by an earlier evaluation."""
        now = time.monotonic()
        if not self.heard:
            self.heard, self._last_line = True, now
            if done:
                self._print(f"{done:,} of {of:,} tasks were done before")
        elif self.progress.disable and done < of and now - self._last_line >= self.quiet_s:
            self._last_line = now
            self._print(f"{done:,} of {of:,} tasks")
        self.progress.update(self.bar, completed=done, total=of)

    def _print(self, line: str) -> None:
        with suppress(OSError, ValueError):  # a console that cannot print ends no evaluation
            say(line, self.console)


class WorkBar:
    """What a command does before its result: a bar on a terminal, else a line for each kind of work and every ``quiet_s``.

    It is written to stderr, so that the result alone can be piped.
    """

    def __init__(self, quiet_s: float = QUIET_S, *, silent: bool = False) -> None:
        self.console, self.quiet_s = Terminal(stderr=True, quiet=silent), quiet_s
        parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*parts, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.bar = self.progress.add_task("", total=None)
        self._what, self._of, self._last_line = "", 0, 0.0

    def __enter__(self) -> "WorkBar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def begin(self, what: str, of: int = 0) -> None:
        """Something new is done, in so many parts (0: unknown)."""
        self._what, self._of, self._last_line = what, of, time.monotonic()
        self.progress.reset(self.bar, total=of or None, description=what)
        if self.progress.disable:
            self._print(f"{what} ...")

    def tell(self, done: int) -> None:
        """So many parts are done."""
        self.progress.update(self.bar, completed=done)
        if self.progress.disable and time.monotonic() - self._last_line >= self.quiet_s:
            self._last_line = time.monotonic()
            self._print(f"{self._what}: {done:,} of {self._of:,}")

    def _print(self, line: str) -> None:
        with suppress(OSError, ValueError):  # a console that cannot print ends nothing
            say(line, self.console)
