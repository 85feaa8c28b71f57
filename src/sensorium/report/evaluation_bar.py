"""How far an evaluation is: a bar on a terminal, and now and then a plain line where there is none."""

import time
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sensorium.report.console import QUIET_S


class EvaluationBar:
    """Hears how many tasks are done (``tell``), between entering and leaving; ``quiet_s`` lies between two lines."""

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
        """So many tasks are done; what was done before the first call, an earlier evaluation did."""
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
        with suppress(OSError, ValueError):  # a console that is closed, full or of few letters ends no evaluation
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
