"""Judgements on disk, by content, in one SQLite file that runs and processes may share; and the log of calls.

Invariants: an answer is kept once and never replaced, so who asks again gets the same one. A question is asked by one
process at a time: who wants to ask claims it first, and others wait for the answer. The claim of a process that died is
void: at once if it ran on this machine, else when it runs out, because only the living renew theirs. A kill at any moment
leaves whole rows only (a write-ahead log). Keys of endpoints are in none of the tables.
"""

import os
import platform
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensorium.record.durable import cannot_write, full_disk_error
from sensorium.vocabulary.errors import RecordError

SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, model TEXT NOT NULL, prompt TEXT NOT NULL, text TEXT NOT NULL,
  input_tokens INTEGER, output_tokens INTEGER);
CREATE TABLE IF NOT EXISTS claims (key TEXT PRIMARY KEY, owner TEXT NOT NULL, until REAL NOT NULL);
CREATE TABLE IF NOT EXISTS calls (id INTEGER PRIMARY KEY, key TEXT NOT NULL, model TEXT NOT NULL, place TEXT NOT NULL,
  outcome TEXT NOT NULL, input_tokens INTEGER, output_tokens INTEGER, seconds REAL);
"""


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as it came, and what it took."""

    text: str
    model: str
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class CallRow:
    """One call of an endpoint. ``outcome``: answered, malformed, refused, or why there was no answer."""

    key: str
    model: str
    place: str
    outcome: str
    input_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


def owner_name(of: str) -> str:
    """What claims are made under: this machine, this process, and ``of``, which of its clients."""
    return f"{_machine()} {os.getpid()} {of}"


def is_dead(owner: str) -> bool:
    """True if the owner of a claim was a process of this machine, and there is no such process any more."""
    machine, _, rest = owner.partition(" ")
    pid = rest.partition(" ")[0]
    if machine != _machine() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # there is one, of another user
    return False


def _machine() -> str:
    """Where process numbers mean the same: the host, and on Linux the namespace of processes (a container has its own)."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{platform.node()}/{space}".replace(" ", "_")


class AnswerCache:
    """The file of answers, claims and calls. Safe to use from several threads and processes."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._open: sqlite3.Connection | None = None

    def get(self, key: str) -> StoredAnswer | None:
        """The answer to a question, if it was ever given."""
        rows = self._do("SELECT text, model, input_tokens, output_tokens FROM answers WHERE key = ?", (key,))
        return StoredAnswer(*rows[0]) if rows else None

    def put(self, key: str, prompt: str, answer: StoredAnswer) -> StoredAnswer:
        """Keep an answer, unless there is one already; returns the one that is kept."""
        row = (key, answer.model, prompt, answer.text, answer.input_tokens, answer.output_tokens)
        self._do("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?)", row)
        return self.get(key) or answer

    def claim(self, key: str, owner: str, seconds: float) -> bool:
        """True if ``owner`` may ask this question now: nobody else is asking, or its claim ran out or it is dead."""
        now = time.time()
        held = self._do("SELECT owner FROM claims WHERE key = ?", (key,))
        dead = held[0][0] if held and is_dead(held[0][0]) else owner
        self._do(
            "INSERT INTO claims VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, "
            "until = excluded.until WHERE claims.until < ? OR claims.owner IN (excluded.owner, ?)",
            (key, owner, now + seconds, now, dead),
        )
        return [(owner,)] == self._do("SELECT owner FROM claims WHERE key = ?", (key,))

    def renew(self, key: str, owner: str, seconds: float) -> None:
        """A claim holds for so long from now on."""
        self._do("UPDATE claims SET until = ? WHERE key = ? AND owner = ?", (time.time() + seconds, key, owner))

    def release(self, key: str, owner: str) -> None:
        """A claim ends."""
        self._do("DELETE FROM claims WHERE key = ? AND owner = ?", (key, owner))

    def log(self, row: CallRow) -> None:
        """Put a call on record."""
        self._do(
            "INSERT INTO calls (key, model, place, outcome, input_tokens, output_tokens, seconds) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (row.key, row.model, row.place, row.outcome, row.input_tokens, row.output_tokens, round(row.seconds, 4)),
        )

    def calls(self) -> list[CallRow]:
        """Every call that was made, in order."""
        rows = self._do("SELECT key, model, place, outcome, input_tokens, output_tokens, seconds FROM calls ORDER BY id")
        return [CallRow(*row) for row in rows]

    def keys(self) -> list[str]:
        """The keys of all answers."""
        return [key for (key,) in self._do("SELECT key FROM answers ORDER BY key")]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None

    def _do(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._lock, self._guarded():
            return self._db().execute(statement, values).fetchall()

    def _db(self) -> sqlite3.Connection:
        """The file, opened when it is first needed."""
        if self._open is None:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            name = ":memory:" if self.path is None else str(self.path)
            opened = sqlite3.connect(name, timeout=30.0, check_same_thread=False, isolation_level=None)
            opened.execute("PRAGMA journal_mode=WAL")
            opened.execute("PRAGMA synchronous=NORMAL")
            opened.executescript(SCHEMA)
            self._open = opened
        return self._open

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            full = full_disk_error(error, self.path)
            if full is not None:
                raise cannot_write(self.path, full) from error
            raise RecordError(
                f"the file of judgements '{self.path}' cannot be used: {error}. If it is damaged, move it away (with its "
                "-wal and -shm): judgements are then asked for again. judges.cache names another file."
            ) from error
