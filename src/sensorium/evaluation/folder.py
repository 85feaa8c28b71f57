"""The folder of an evaluation: its samples, its summary, and what it is an evaluation of.

Invariants: ``evaluation.json`` is written first and never changes; a folder of another model, recipe or setting is refused.
The samples of a chunk are appended at once and flushed to the disk. A kill leaves at most a part of a chunk, which is
removed and played again whole. ``summary.json`` exists only when every sample does.
"""

import fcntl
import json
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sensorium.evaluation.summary import Row, Sample, sample_from
from sensorium.recipe.schema import Recipe
from sensorium.runs.checkpoint_layout import checkpoint_of_run
from sensorium.runs.durable import flush, read_json, read_rows, to_line, write_all, write_whole, writing
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.errors import CheckpointError, RecordError
from sensorium.vocabulary.plain import differences


def evaluated_model(given: str | None, recipe: Recipe, source: Path | None) -> str:
    """The model to evaluate: a run's best or last checkpoint, else the path as it is."""
    place = Path(given) if given is not None else source
    if place is not None and place.is_dir() and not (place / "config.json").exists():
        return str(checkpoint_of_run(place))
    return given if given is not None else recipe.model.path


def default_folder(recipe: Recipe, model: str, blank: Collection[MediaKind] = ()) -> Path:
    """The default folder of an evaluation: in the run a checkpoint belongs to, else runs/eval_…"""
    section, path = recipe.evaluation, Path(model)
    drawn = "greedy" if section.temperature == 0 else f"t{section.temperature:g}"
    many = f"_x{section.samples}" if section.samples > 1 else ""
    limit = f"_first{section.limit}" if section.limit else ""
    hidden = "".join(f"_blank_{kind}" for kind in sorted(set(blank)))
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', path.name)}_{drawn}{many}{limit}{hidden}"
    run = RunDirectory(path.parent.parent)
    if path.parent.name == run.checkpoints.name and run.exists():
        return run.path / "evaluations" / name
    return Path("runs") / f"eval_{recipe.name}_{name}"


Claim = Mapping[str, Any]  # what an evaluation is of: model, weights, settings, recipe, tasks, surroundings
Key = tuple[str, int, int]  # which sample a line holds: task, position, sample
MAY_DIFFER = ("model", "surroundings")  # the same weights may lie elsewhere; another machine is only a warning
WAY_OUT = "Choose another folder (--out), or start over in this one (--fresh), which removes what it holds."


def add_costs(path: Path, row: Mapping[str, float]) -> None:
    """Add the judges' costs (``judge/MODEL/…``), if any, to the file."""
    if not row:
        return
    sums = read_json(path, "Remove it; costs are then counted from now on.") if path.exists() else {}
    for name, value in row.items():
        model, _, what = name.rpartition("/")
        if what == "latency_mean_s":
            before, now = sums.get(f"{model}/calls", 0) - row[f"{model}/calls"], row[f"{model}/calls"]
            sums[name] = (sums.get(name, 0.0) * before + value * now) / (before + now)
        elif what == "latency_max_s":
            sums[name] = max(sums.get(name, 0.0), value)
        else:
            sums[name] = sums.get(name, 0) + value
    write_whole(path, json.dumps(sums, indent=1) + "\n")


def costs_line(path: Path) -> str:
    """The judges' costs in one line, empty where no judge was asked."""
    if not path.exists():
        return ""
    sums = read_json(path, "Remove it.")
    lines = []
    for model in sorted({name.split("/")[1] for name in sums}):
        cost = {name.rpartition("/")[2]: value for name, value in sums.items() if name.split("/")[1] == model}
        answers = f"{cost['cache_hits']:,} answers from the cache, {cost['failures']:,} questions without one"
        tokens = f"{cost['input_tokens']:,} tokens read, {cost['output_tokens']:,} written"
        lines.append(f"{model} was called {cost['calls']:,} times ({answers}; {tokens}), cost {cost['cost']:g}")
    return "judges: " + "; ".join(lines)


class EvaluationFolder:
    """Paths and files of an evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.claim = self.path / "evaluation.json"
        self.samples = self.path / "samples.jsonl"
        self.summary = self.path / "summary.json"
        self.table = self.path / "table.md"
        self.costs = self.path / "judge_costs.json"

    def clear(self) -> None:
        """Remove an earlier evaluation; anything else in the folder stays."""
        if self.samples.exists():
            with self.journal():
                self.samples.unlink()
        self.reopen()
        self.costs.unlink(missing_ok=True)
        self.claim.unlink(missing_ok=True)

    def reopen(self) -> None:
        """Remove the summary, since samples are missing."""
        for file in (self.summary, self.table):
            file.unlink(missing_ok=True)

    def refuse_other(self, claim: Claim) -> None:
        """Refuse an evaluation of something else; a claim may have only some of its parts."""
        known = self.known()
        if known is None:
            if self.samples.exists():
                raise CheckpointError(f"'{self.samples}' is there, but {self.claim.name} is missing. {WAY_OUT}")
            return
        parts = [key for key in claim if key not in MAY_DIFFER]
        found = []
        for key, *values in differences({key: known.get(key) for key in parts}, {key: claim[key] for key in parts}):
            texts = (json.dumps(value, ensure_ascii=False) for value in values)
            there, here = (text if len(text) <= 60 else f"{text[:57]}…" for text in texts)
            found.append(f"{key} is {there} there and {here} here")
        if found:
            more = f", and {len(found) - 3} more" if len(found) > 3 else ""
            raise CheckpointError(f"'{self.path}' holds another evaluation: {'; '.join(found[:3])}{more}. {WAY_OUT}")

    def take(self, claim: Claim) -> dict[str, Any]:
        """Claim the folder for an evaluation, or continue it; returns the claim as it was first made."""
        self.refuse_other(claim)
        known = self.known()
        if known is None:
            write_whole(self.claim, json.dumps(claim, indent=1) + "\n")
        return dict(claim) if known is None else known

    def known(self) -> dict[str, Any] | None:
        """The claim of the evaluation here; None if there is none."""
        return read_json(self.claim, WAY_OUT) if self.claim.exists() else None

    @contextmanager
    def journal(self) -> Iterator["Journal"]:
        """The samples file, open for this process alone."""
        with writing(self.samples):
            descriptor = os.open(self.samples, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"another process is evaluating into '{self.path}'. Wait for it, or choose another folder (--out)."
                ) from error
            except OSError as error:
                warnings.warn(
                    f"'{self.path}' cannot be locked ({error.strerror}); see to it that no other process writes there.",
                    stacklevel=3,
                )
            flush(self.path)  # the file's name, too, must outlive a crash
            yield Journal(self.samples, descriptor)
        finally:
            os.close(descriptor)

    def read(self) -> list[Sample]:
        """All samples of a finished evaluation."""
        if not self.claim.exists():
            raise CheckpointError(f"'{self.path}' holds no evaluation; 'sensorium eval' makes one and prints its folder.")
        if not self.summary.exists():
            raise CheckpointError(f"the evaluation in '{self.path}' is not finished. Run its command again; it goes on.")
        samples, expected = self.read_so_far(), self.read_summary()["episodes"]
        if len(samples) != expected:
            raise RecordError(
                f"'{self.samples}' is damaged: it has {len(samples)} samples and '{self.summary.name}' counts "
                f"{expected}. Run its evaluation again, which plays what is missing."
            )
        return samples

    def claimed(self) -> dict[str, Any]:
        """The claim of the evaluation here, which must have all its parts."""
        return _having(self.known() or {}, ("model", "settings", "weights"), self.claim, WAY_OUT)

    def read_summary(self) -> dict[str, Any]:
        """The summary as it was written."""
        way_out = "Run its evaluation again; it goes on and writes the summary again."
        return _having(read_json(self.summary, way_out), ("categories", "episodes"), self.summary, way_out)

    def read_so_far(self) -> list[Sample]:
        """The samples written so far."""
        try:
            return [sample_from(row) for row in read_rows(self.samples)]
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"'{self.samples}' is damaged: a line is no sample ({error!r}). {WAY_OUT}") from error

    def finish(self, summary: Mapping[str, Any], table: str) -> None:
        write_whole(self.table, table)
        write_whole(self.summary, json.dumps(summary, indent=1) + "\n")


class Journal:
    """The samples so far. ``recover`` first, then ``append`` chunk by chunk."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def recover(self, chunks: Sequence[Sequence[Key]]) -> int:
        """How many chunks are whole, given the keys of their lines; everything after them is removed."""
        ends = self._ends(chunks)
        os.ftruncate(self._descriptor, ends[-1] if ends else 0)
        os.fsync(self._descriptor)
        return len(ends)

    def append(self, rows: Sequence[Row]) -> None:
        """Add the lines of a chunk; they are on the disk when this returns."""
        with writing(self._path):
            write_all(self._descriptor, "".join(to_line(row) for row in rows).encode())
            os.fsync(self._descriptor)

    def _ends(self, chunks: Sequence[Sequence[Key]]) -> list[int]:
        """Where each whole chunk ends, in bytes, up to the first line that is not the expected sample."""
        ends: list[int] = []
        place = 0
        with self._path.open("rb") as file:
            for chunk in chunks:
                for key in chunk:
                    line = file.readline()
                    if _key(line) != key:
                        return ends
                    place += len(line)
                ends.append(place)
        return ends


def _having(data: dict[str, Any], keys: Sequence[str], path: Path, way_out: str) -> dict[str, Any]:
    lacking = [key for key in keys if key not in data]
    if lacking:
        raise RecordError(f"'{path}' is damaged: it lacks '{lacking[0]}'. {way_out}")
    return data


def _key(line: bytes) -> Key | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
        return row["task"], row["position"], row["sample"]
    except (ValueError, KeyError, TypeError):
        return None
