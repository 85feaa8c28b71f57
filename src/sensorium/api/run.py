"""A run as Python code sees it: its metrics, episodes, evaluations, checkpoints and report, read from its directory."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any, overload

from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.report.page import render_episode, write_report
from sensorium.report.watcher import conversation
from sensorium.rewards.reward_term import question_messages
from sensorium.runs.durable import read_rows, write_whole
from sensorium.runs.episodes import EpisodeCredit, credit_from_json, episode_from_json, task_from_json
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.viewer import View
from sensorium.vocabulary.episode import Episode, by_name, category_of
from sensorium.vocabulary.errors import CheckpointError, SensoriumError, nearest

SHOWN_ROWS = 20
REPR_COLUMNS = (
    "step", "episode", "reward", "correct", "reward/mean", "accuracy", "eval/accuracy", "policy/loss",
)  # fmt: skip


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

    def to_arrow(self) -> Any:
        """A pyarrow Table; values that Arrow has no common type for are texts."""
        try:
            import pyarrow
        except ImportError as error:
            raise SensoriumError(
                "to_arrow needs the package pyarrow, which is not installed: pip install pyarrow."
            ) from error
        columns = {}
        for name in self.columns:
            values = [row.get(name) for row in self.rows]
            try:
                columns[name] = pyarrow.array(values)
            except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
                columns[name] = pyarrow.array([None if value is None else str(value) for value in values])
        return pyarrow.table(columns)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """The table for whatever reads Arrow: ``polars.DataFrame(table)``, DuckDB."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        shown: list[str] = [name for name in REPR_COLUMNS if name in self.columns]
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
            raise CheckpointError(self._record.absence())
        self._logs: dict[Path, tuple[tuple[int, int], list[dict[str, Any]]]] = {}

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
    def episodes(self) -> Table:
        """One row a stored episode, those of training first; ``evaluation`` names that of a held-out one.

        A score that is missing is None, and ``missing`` says why.
        """
        logs = sorted(self._record.episodes.glob("step_*.jsonl")) + sorted(self._record.eval.glob("step_*.jsonl"))
        for path in logs:
            with suppress(FileNotFoundError):  # removed meanwhile (logging.episodes_gib)
                state = path.stat()
                stamp = (state.st_mtime_ns, state.st_size)
                if path not in self._logs or self._logs[path][0] != stamp:
                    of = path.stem.split("_", 2)[2] if path.parent == self._record.eval else ""
                    self._logs[path] = (stamp, [episode_facts(row, of) for row in read_rows(path)])
        return Table([row for path in logs if path in self._logs for row in self._logs[path][1]])

    def show(self, episode: Any) -> "ShownEpisode":
        """An episode by its id or its row of ``episodes``; a notebook shows turns, media, scores and advantages."""
        name = episode if isinstance(episode, str) else str(episode["episode"])
        found = next((row for row in self.episodes if row["episode"] == name), None)
        if found is None:
            near = nearest(name, [row["episode"] for row in self.episodes])
            raise SensoriumError(f"'{self.directory}' has no stored episode '{name}'{near}")
        of, step = found["evaluation"], found["step"]
        path = self._record.eval_episodes_of(step, of) if of else self._record.episodes_of(step)
        row = next((row for row in read_rows(path) if row["episode"]["id"] == name), None)
        if row is None:
            raise SensoriumError(f"'{path}' no longer has episode '{name}': older logs are thinned (logging.full_steps).")
        return ShownEpisode(render_episode(self._record, row), episode_from_json(row["episode"]))

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


def episode_facts(row: Mapping[str, Any], evaluation: str) -> dict[str, Any]:
    """The row of ``Run.episodes`` for a row of a log; ``entropy`` and ``mismatch`` (its size) are means over tokens."""
    task, episode = task_from_json(row["task"]), episode_from_json(row["episode"])
    credit = credit_from_json(row, episode)
    credit = credit or EpisodeCredit("")
    advantages, entropies, mismatches = (
        [value for turn in turns for value in turn] for turns in (credit.advantages, credit.entropies, credit.mismatches)
    )
    kinds = Counter(part.kind for message in episode.conversation for item in message.media for part in item.parts)
    return {
        "step": row["step"],
        "evaluation": evaluation,
        "episode": episode.id,
        "group": episode.group_id,
        "place": episode.index,
        "task": task.id,
        "category": category_of(task, episode),
        "status": episode.status.value,
        "failure": episode.failure,
        "fate": credit.fate,
        "reward": episode.reward,
        "correct": episode.correct,
        "advantage": sum(advantages) / len(advantages) if advantages else None,
        "entropy": sum(entropies) / len(entropies) if entropies else None,
        "mismatch": sum(map(abs, mismatches)) / len(mismatches) if mismatches else None,
        "turns": len(episode.turns),
        "tokens": episode.sampled_tokens,
        "pictures": kinds["picture"],
        "videos": kinds["video"],
        "sounds": kinds["sound"],
        "prompt": "\n".join(message.text for message in question_messages(task, episode)),
        "response": episode.response,
        "missing": "; ".join(f"{score.name}: {score.reason}" for score in episode.scores if score.missing),
        **{f"reward/{name}": value for name, value in by_name(episode.scores).items()},
    }


class ShownEpisode:
    """A page of one episode, with everything in it; Jupyter and marimo show it. ``save`` writes it as a file."""

    def __init__(self, page: str, episode: Episode) -> None:
        self.page, self.episode = page, episode

    def save(self, path: str | Path) -> Path:
        """Write the page, which a browser opens without anything else."""
        write_whole(Path(path), self.page)
        return Path(path)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, in which nothing runs: what a model wrote is text."""
        return (
            f'<iframe srcdoc="{escape(self.page, quote=True)}" sandbox="" '
            'style="width:100%;height:640px;border:1px solid #ccc;resize:vertical"></iframe>'
        )

    def __repr__(self) -> str:
        scores = ", ".join(f"{score.name} {_short(score.value) or 'missing'}" for score in self.episode.scores)
        return f"{conversation(self.episode)}\n\nreward: {_short(self.episode.reward) or 'none'} ({scores})"


class Report(PathType):  # type: ignore[misc, valid-type]
    """The path of a report. Jupyter shows the page."""

    def _repr_html_(self) -> str:
        page = escape(self.read_text(), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:720px;border:1px solid #ccc"></iframe>'


def view(*runs: Run | str | Path, port: int = 0, show: bool = True, device: str = "auto") -> View:
    """Serve the live page of these runs, or folders of runs (by default ``runs``), until it is closed or Python ends.

    ``show``: open this machine's browser. ``device``: of models that are asked what if. The result has the ``address``, and
    ``close()``.
    """
    served = View([run.directory if isinstance(run, Run) else run for run in runs] or ["runs"], port, device)
    if show:
        served.open()
    return served
