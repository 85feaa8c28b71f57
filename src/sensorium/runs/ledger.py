"""The ledger: steps planned, rolled out, scored and trained, and the judgements and deadlines a resumed run repeats.

One SQLite file in the run directory. Rows past a checkpoint are dropped when a run resumes from it; judgements and
deadlines stay, because the open step is rolled out again and must get the same ones. The file stays small: of old steps
only the number of episodes by fate is kept, and judgements go when no checkpoint can need them again.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from sensorium.runs.durable import database_errors
from sensorium.vocabulary.episode import Group, Score

State = Literal["planned", "rolled_out", "scored", "trained"]

SCHEMA = """
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, state TEXT NOT NULL, first INTEGER, next INTEGER);
CREATE TABLE IF NOT EXISTS episodes (step INTEGER, id TEXT PRIMARY KEY, group_id TEXT, task_id TEXT, status TEXT,
  reward REAL, fate TEXT);
CREATE INDEX IF NOT EXISTS episodes_by_step ON episodes (step);
CREATE TABLE IF NOT EXISTS old_fates (step INTEGER, fate TEXT, episodes INTEGER, PRIMARY KEY (step, fate)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS draws (number INTEGER PRIMARY KEY, task_id TEXT, drawn_at INTEGER, settled_at INTEGER,
  fate TEXT);
CREATE TABLE IF NOT EXISTS judgements (key TEXT PRIMARY KEY, scores TEXT NOT NULL, step INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS deadlines (episode TEXT, turn INTEGER, reason TEXT, step INTEGER DEFAULT 0,
  PRIMARY KEY (episode, turn));
"""


class Ledger:
    """Durable bookkeeping of one run. Safe to call from scoring threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._step = 0
        with self._guarded():
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            (answer,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if answer != "ok":
                raise sqlite3.DatabaseError(answer)
            self._db.executescript(SCHEMA)
            for table in ("judgements", "deadlines"):  # files of an earlier version do not say of which step a row is
                if "step" not in [column[1] for column in self._db.execute(f"PRAGMA table_info({table})")]:
                    self._db.execute(f"ALTER TABLE {table} ADD COLUMN step INTEGER DEFAULT 0")

    def plan(self, step: int, first: int, following: int) -> None:
        """A step takes the rows drawn from number ``first`` up to ``following``, counted from the run's beginning."""
        self._step = step
        self._write("INSERT OR REPLACE INTO steps VALUES (?, 'planned', ?, ?)", [(step, first, following)])

    def advance(self, step: int, state: State) -> None:
        """A step reached a state."""
        self._write("UPDATE steps SET state = ? WHERE step = ?", [(state, step)])

    def record(self, step: int, groups: Iterable[Group], fates: Mapping[str, str]) -> None:
        """The fate of every episode: trained, or why it was dropped."""
        rows: list[tuple[object, ...]] = [
            (step, e.id, group.id, e.task_id, e.status.value, e.reward, fates.get(e.id, "trained"))
            for group in groups
            for e in group.episodes
        ]
        self._write("INSERT OR REPLACE INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def draw(self, number: int, step: int, task_id: str) -> None:
        """A row was drawn, ``number`` since the run began, when ``step`` was the last that was collected."""
        self._write("INSERT OR REPLACE INTO draws VALUES (?, ?, ?, NULL, NULL)", [(number, task_id, step)])

    def settle_draw(self, number: int, step: int, fate: str) -> None:
        """The fate of a row that was drawn: trained in a step, or why not."""
        self._write("UPDATE draws SET settled_at = ?, fate = ? WHERE number = ?", [(step, fate, number)])

    def draws(self) -> dict[int, tuple[str, int | None, str | None]]:
        """Every row on record that was drawn: its task, the step it was settled in, and its fate; None while it is open."""
        rows = self._read("SELECT number, task_id, settled_at, fate FROM draws ORDER BY number")
        return {number: (task, step, fate) for number, task, step, fate in rows}

    def get(self, key: str) -> tuple[Score, ...] | None:
        """A judgement received earlier."""
        row = self._read("SELECT scores, step FROM judgements WHERE key = ?", (key,))
        if not row:
            return None
        if row[0][1] < self._step:  # a run that resumes at this step needs it again
            self._write("UPDATE judgements SET step = ? WHERE key = ?", [(self._step, key)])
        scores = [Score(**{**s, "span": tuple(s["span"]) if s["span"] else None}) for s in json.loads(row[0][0])]
        return tuple(scores)

    def put(self, key: str, scores: tuple[Score, ...]) -> None:
        """Keep a judgement, so that it is asked for once."""
        data = json.dumps([asdict(s) for s in scores])
        self._write("INSERT OR REPLACE INTO judgements (key, scores, step) VALUES (?, ?, ?)", [(key, data, self._step)])

    def deadlines(self) -> dict[tuple[str, int], str]:
        """Environment deadlines that fired, by (episode, turn)."""
        return {(e, t): reason for e, t, reason in self._read("SELECT episode, turn, reason FROM deadlines")}

    def keep_deadlines(self, fired: Mapping[tuple[str, int], str]) -> None:
        """Remember deadlines that fired."""
        self._write(
            "INSERT OR REPLACE INTO deadlines (episode, turn, reason, step) VALUES (?, ?, ?, ?)",
            [(*at, reason, self._step) for at, reason in fired.items()],
        )

    def states(self) -> dict[int, str]:
        """The state of every step."""
        return dict(self._read("SELECT step, state FROM steps ORDER BY step"))

    def fates(self, step: int) -> dict[str, str]:
        """The fates of a step's episodes; an old step has only ``old_fates``."""
        return dict(self._read("SELECT id, fate FROM episodes WHERE step = ?", (step,)))

    def old_fates(self, step: int) -> dict[str, int]:
        """Of an old step: how many of its episodes had each fate."""
        return dict(self._read("SELECT fate, episodes FROM old_fates WHERE step = ?", (step,)))

    def rewind(self, step: int) -> None:
        """Drop rows of steps at or past ``step``: they are rolled out again."""
        for table in ("steps", "episodes", "old_fates"):
            self._write(f"DELETE FROM {table} WHERE step >= ?", [(step,)])
        self._write("DELETE FROM draws WHERE drawn_at >= ?", [(step,)])
        self._write("UPDATE draws SET settled_at = NULL, fate = NULL WHERE settled_at >= ?", [(step,)])

    def compact(self, step: int) -> None:
        """Of steps up to ``step`` keep how many episodes had each fate, and no row for each."""
        with self._lock, self._guarded():
            self._db.execute("BEGIN")
            counts = "SELECT step, fate, COUNT(*) FROM episodes WHERE step <= ? GROUP BY step, fate"
            self._db.execute(f"INSERT OR REPLACE INTO old_fates {counts}", (step,))
            self._db.execute("DELETE FROM episodes WHERE step <= ?", (step,))
            self._db.execute("COMMIT")

    def forget_judgements(self, step: int) -> None:
        """Drop judgements and deadlines of steps up to ``step``: no run resumes before its oldest checkpoint."""
        for table in ("judgements", "deadlines"):
            self._write(f"DELETE FROM {table} WHERE step <= ?", [(step,)])

    def close(self) -> None:
        self._db.close()

    def _read(self, statement: str, values: tuple[object, ...] = ()) -> list[Any]:
        with self._lock, self._guarded():
            return self._db.execute(statement, values).fetchall()

    def _write(self, statement: str, rows: list[tuple[object, ...]]) -> None:
        with self._lock, self._guarded(), self._db:  # commits, or rolls back
            self._db.execute("BEGIN")
            self._db.executemany(statement, rows)

    def _guarded(self) -> AbstractContextManager[None]:
        return database_errors(
            self._path,
            "the ledger",
            "If it is damaged, move it away (with its -wal and -shm) and go on with --resume: judgements of the open step "
            "are then asked for again.",
        )
