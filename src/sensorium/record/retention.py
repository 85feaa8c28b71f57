"""Which episodes of a run stay on disk: all of recent steps, a sample of older ones, within a number of bytes.

Example, full_steps 200 and sampled_steps 1000, at step 5,200: steps 5,001 to 5,200 and the first logged step are whole. Of
5,000 older ones at most 1,000 may stay, so of those that 8 divides (625 of them) the first group stays, and the others go.
Under ``episodes_gib`` the oldest files after the first go until the rest fits.

What stays is a function of the step and of the files' sizes, and what is gone is never needed again: a run that was killed
and resumed ends with the same files. Nothing that a resumed run reads is touched.
"""

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from sensorium.record.durable import read_rows, rewrite_rows
from sensorium.record.run_directory import RunDirectory, step_of
from sensorium.vocabulary.errors import RecordError

GIB = 1 << 30
EVALUATIONS_WHOLE = 20
GROUPS_OF_A_STEP, GROUPS_OF_AN_EVALUATION = 1, 8


@dataclass
class Retention:
    """Keeps the episode logs of a run within their bounds. ``full_steps`` 0: every step stays whole."""

    directory: RunDirectory
    full_steps: int
    sampled_steps: int
    budget: int
    _sizes: dict[Path, int] = field(default_factory=dict)
    _thinned: set[Path] = field(default_factory=set)
    _notes: list[str] = field(default_factory=list)
    _told: bool = False

    def apply(self, step: int) -> list[str]:
        """Bring the logs to what they are to be at ``step``; returns what is worth a line."""
        self._notes = []
        if not self._sizes:
            for folder in (self.directory.episodes, self.directory.eval):
                self._sizes |= {path: path.stat().st_size for path in folder.glob("step_*.jsonl") if path.exists()}
        for path in (self.directory.episodes_of(step), *self.directory.eval.glob(f"step_{step:06d}_*.jsonl")):
            if path.exists():
                self._sizes[path] = path.stat().st_size
        if self.full_steps:
            self._thin_steps(step)
            self._thin_evaluations()
        self._within_budget()
        return self._notes

    def _thin_steps(self, step: int) -> None:
        last_old = step - self.full_steps
        stride = 1
        while last_old > stride * max(1, self.sampled_steps):
            stride *= 2
        for path in self._logs(self.directory.episodes)[1:]:
            if step_of(path) > last_old:
                break
            if step_of(path) % stride or not self.sampled_steps:
                self._remove(path)
            else:
                self._thin(path, GROUPS_OF_A_STEP)

    def _thin_evaluations(self) -> None:
        for path in self._logs(self.directory.eval)[1:-EVALUATIONS_WHOLE]:
            self._thin(path, GROUPS_OF_AN_EVALUATION)

    def _within_budget(self) -> None:
        total, gone = sum(self._sizes.values()), 0
        if total <= self.budget:
            return
        first = [logs[0] for folder in (self.directory.episodes, self.directory.eval) if (logs := self._logs(folder))]
        for path in sorted(self._sizes, key=lambda path: (step_of(path), path.name))[:-1]:
            if total <= self.budget:
                break
            if path not in first:
                total -= self._sizes[path]
                self._remove(path)
                gone += 1
        if gone and not self._told:
            self._told = True
            self._notes.append(
                f"the episode logs have reached logging.episodes_gib: from here on the oldest are removed ({gone} now)."
            )

    def _logs(self, folder: Path) -> list[Path]:
        return sorted((path for path in self._sizes if path.parent == folder), key=lambda path: (step_of(path), path.name))

    def _thin(self, path: Path, groups: int) -> None:
        """Keep the first groups of a log."""
        if path in self._thinned:
            return
        self._thinned.add(path)
        try:
            order = dict.fromkeys(row["episode"]["group_id"] for row in read_rows(path))
            kept = set(islice(order, groups))
            rewrite_rows(path, lambda row: row["episode"]["group_id"] in kept)
        except (RecordError, KeyError, TypeError) as error:
            self._notes.append(f"'{path}' is damaged and stays as it is, whole: {error}")
        self._sizes[path] = path.stat().st_size

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        del self._sizes[path]
