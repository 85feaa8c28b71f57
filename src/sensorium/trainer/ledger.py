"""The ledger: what was planned, rolled out, scored and trained, and the judgements and deadlines a resumed run repeats.

One SQLite file in the run directory. Rows past a checkpoint are dropped when a run resumes from it; judgements and
deadlines are kept, because the open step is rolled out again and must meet the same ones.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.score import Score

State = Literal["planned", "rolled_out", "scored", "trained"]

SCHEMA = """
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, state TEXT NOT NULL, first INTEGER, next INTEGER);
CREATE TABLE IF NOT EXISTS episodes (step INTEGER, id TEXT PRIMARY KEY, group_id TEXT, task_id TEXT, status TEXT,
  reward REAL, fate TEXT);
CREATE TABLE IF NOT EXISTS judgements (key TEXT PRIMARY KEY, scores TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS deadlines (episode TEXT, turn INTEGER, reason TEXT, PRIMARY KEY (episode, turn));
"""


class Ledger:
    """Durable bookkeeping of one run. Safe to call from scoring threads."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(SCHEMA)

    def plan(self, step: int, first: int, following: int) -> None:
        """A step takes the tasks from stream position ``first`` up to ``following``."""
        self._write("INSERT OR REPLACE INTO steps VALUES (?, 'planned', ?, ?)", [(step, first, following)])

    def advance(self, step: int, state: State) -> None:
        """A step reached a state."""
        self._write("UPDATE steps SET state = ? WHERE step = ?", [(state, step)])

    def record(self, step: int, groups: Iterable[Group], fates: Mapping[str, str]) -> None:
        """What became of every episode: trained, or why it was dropped."""
        rows: list[tuple[object, ...]] = [
            (step, e.id, group.id, e.task_id, e.status.value, e.reward, fates.get(e.id, "trained"))
            for group in groups
            for e in group.episodes
        ]
        self._write("INSERT OR REPLACE INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def get(self, key: str) -> tuple[Score, ...] | None:
        """A judgement received earlier."""
        with self._lock:
            row = self._db.execute("SELECT scores FROM judgements WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        scores = [Score(**{**s, "span": tuple(s["span"]) if s["span"] else None}) for s in json.loads(row[0])]
        return tuple(scores)

    def put(self, key: str, scores: tuple[Score, ...]) -> None:
        """Keep a judgement; paid for once."""
        self._write("INSERT OR REPLACE INTO judgements VALUES (?, ?)", [(key, json.dumps([asdict(s) for s in scores]))])

    def deadlines(self) -> dict[tuple[str, int], str]:
        """Environment deadlines that fired, by (episode, turn)."""
        with self._lock:
            return {(e, t): reason for e, t, reason in self._db.execute("SELECT episode, turn, reason FROM deadlines")}

    def keep_deadlines(self, fired: Mapping[tuple[str, int], str]) -> None:
        """Remember deadlines that fired."""
        self._write("INSERT OR REPLACE INTO deadlines VALUES (?, ?, ?)", [(*at, reason) for at, reason in fired.items()])

    def states(self) -> dict[int, str]:
        """The state of every step."""
        with self._lock:
            return dict(self._db.execute("SELECT step, state FROM steps ORDER BY step").fetchall())

    def fates(self, step: int) -> dict[str, str]:
        """What became of a step's episodes."""
        with self._lock:
            return dict(self._db.execute("SELECT id, fate FROM episodes WHERE step = ?", (step,)).fetchall())

    def rewind(self, step: int) -> None:
        """Drop rows of steps at or past ``step``: they are rolled out again."""
        self._write("DELETE FROM steps WHERE step >= ?", [(step,)])
        self._write("DELETE FROM episodes WHERE step >= ?", [(step,)])

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _write(self, statement: str, rows: list[tuple[object, ...]]) -> None:
        with self._lock:
            self._db.execute("BEGIN")
            self._db.executemany(statement, rows)
            self._db.execute("COMMIT")
