"""Judgements on disk, by content, in one SQLite file that runs and processes may share.

Invariants: an answer is kept once and never replaced. It is kept together with the row of the call that gave it, or
neither is. A question is asked by one process at a time, which claims it first; others wait for the answer. The claim of a
process that died is void: at once on the same machine, else when it was not renewed for as long as it holds, by the
waiting process's clock. A kill leaves whole rows only (a write-ahead log). Reading never waits for a writer. Keys of
endpoints are in none of the tables.
"""

import errno
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

from sensorium.runs.durable import cannot_write, full_disk_error
from sensorium.runs.process_table import alive
from sensorium.vocabulary.errors import RecordError


def owner_name(client: str) -> str:
    """The owner of claims: this machine, this process, and which of its clients."""
    return f"{_machine()} {os.getpid()} {client}"


def is_dead(owner: str) -> bool:
    """True if the owner of a claim was a process of this machine that no longer exists."""
    machine, _, rest = owner.partition(" ")
    pid = rest.partition(" ")[0]
    return machine == _machine() and pid.isdigit() and not alive(int(pid))


def _machine() -> str:
    """The scope of process ids: the host, and on Linux the PID namespace (a container has its own)."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{platform.node()}/{space}".replace(" ", "_")


VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, model TEXT NOT NULL, prompt TEXT NOT NULL, text TEXT NOT NULL,
  input_tokens INTEGER, output_tokens INTEGER);
CREATE TABLE IF NOT EXISTS claims (key TEXT PRIMARY KEY, owner TEXT NOT NULL, until REAL NOT NULL);
CREATE TABLE IF NOT EXISTS calls (id INTEGER PRIMARY KEY, key TEXT NOT NULL, model TEXT NOT NULL, place TEXT NOT NULL,
  outcome TEXT NOT NULL, input_tokens INTEGER, output_tokens INTEGER, seconds REAL);
"""
CALL = "INSERT INTO calls (key, model, place, outcome, input_tokens, output_tokens, seconds) VALUES (?, ?, ?, ?, ?, ?, ?)"
ANSWER = "INSERT OR IGNORE INTO answers (key, model, prompt, text, input_tokens, output_tokens) VALUES (?, ?, ?, ?, ?, ?)"
LOCKED_S = 120.0  # how long another process may hold the file before that is an error
CLOCKS_DIFFER_S = 600.0  # between machines: a claim that ran out longer ago is void without watching it


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as it came, and its tokens."""

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

    @property
    def values(self) -> tuple[Any, ...]:
        counted = (self.input_tokens, self.output_tokens, round(self.seconds, 4))
        return (self.key, self.model, self.place, self.outcome, *counted)


class AnswerCache:
    """The file of answers, claims and calls. Safe to use from several threads and processes.

    ``read_only``: nothing will be written, so a file where nothing can be written will do.
    """

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        self.path, self.read_only = path, read_only
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._watched: dict[str, tuple[tuple[str, float], float]] = {}  # key: (owner, until), first seen at

    def get(self, key: str) -> StoredAnswer | None:
        """The answer to a question, if it was ever given."""
        rows = self._read("SELECT text, model, input_tokens, output_tokens FROM answers WHERE key = ?", (key,))
        return StoredAnswer(*rows[0]) if rows else None

    def put(self, key: str, prompt: str, answer: StoredAnswer, call: CallRow) -> StoredAnswer:
        """Keep an answer, unless there is one already, and its call; ends the claim. Returns the answer that is kept."""
        row = (key, answer.model, prompt, answer.text, answer.input_tokens, answer.output_tokens)
        self._write((CALL, call.values), (ANSWER, row), ("DELETE FROM claims WHERE key = ?", (key,)))
        return self.get(key) or answer

    def claim(self, key: str, owner: str, seconds: float) -> bool:
        """True if ``owner`` may ask this question now: nobody else is asking, or its claim is void."""
        void: tuple[str, float] = (owner, 0.0)
        for claim in self._read("SELECT owner, until FROM claims WHERE key = ?", (key,)):
            now = time.monotonic()
            if key not in self._watched or self._watched[key][0] != claim:
                self._watched[key] = (claim, now)
            lapsed = claim[1] < time.time() - CLOCKS_DIFFER_S or now - self._watched[key][1] > seconds
            if lapsed or is_dead(claim[0]):
                void = claim
        self._write(
            (
                "INSERT INTO claims VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, "
                "until = excluded.until WHERE claims.owner = excluded.owner OR (claims.owner = ? AND claims.until = ?)",
                (key, owner, time.time() + seconds, *void),
            )
        )
        mine = [(owner,)] == self._read("SELECT owner FROM claims WHERE key = ?", (key,))
        if mine:
            self._watched.pop(key, None)
        return mine

    def renew(self, key: str, owner: str, seconds: float) -> None:
        self._write(("UPDATE claims SET until = ? WHERE key = ? AND owner = ?", (time.time() + seconds, key, owner)))

    def release(self, key: str, owner: str) -> None:
        self._write(("DELETE FROM claims WHERE key = ? AND owner = ?", (key, owner)))

    def log(self, row: CallRow) -> None:
        self._write((CALL, row.values))

    def calls(self) -> list[CallRow]:
        """Every call that was made, in order."""
        rows = self._read("SELECT key, model, place, outcome, input_tokens, output_tokens, seconds FROM calls ORDER BY id")
        return [CallRow(*row) for row in rows]

    def keys(self) -> list[str]:
        return [key for (key,) in self._read("SELECT key FROM answers ORDER BY key")]

    def close(self) -> None:
        with self._reading, self._writing:
            for opened in {self._reader, self._writer} - {None}:
                assert opened is not None
                opened.close()
            self._reader = self._writer = None

    def _read(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._guarded():
            if self.path is None:  # a database in memory has one connection
                with self._writing:
                    self._writer = self._writer or self._opened()
                    return self._writer.execute(statement, values).fetchall()
            with self._reading:
                self._reader = self._reader or self._opened()
                return self._reader.execute(statement, values).fetchall()

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """All of these, or none."""
        with self._guarded(), self._writing:
            db = self._writer = self._writer or self._opened()
            with db:  # commits, or rolls back
                db.execute("BEGIN IMMEDIATE")
                for statement, values in statements:
                    db.execute(statement, values)

    def _opened(self) -> sqlite3.Connection:
        """The file; one that is only read may lie where nothing can be written, unless its log has rows."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        name = ":memory:" if self.path is None else str(self.path)
        try:
            return self._made(name)
        except sqlite3.OperationalError:
            if not self.read_only or self.path is None or not self.path.is_file():
                raise
            log = self.path.with_name(f"{self.path.name}-wal")
            if log.exists() and log.stat().st_size > 0:
                raise
            return self._made(f"{self.path.absolute().as_uri()}?immutable=1")

    def _made(self, name: str) -> sqlite3.Connection:
        fixed = name.endswith("?immutable=1")
        opened = sqlite3.connect(name, timeout=LOCKED_S, check_same_thread=False, isolation_level=None, uri=fixed)
        try:
            found = opened.execute("PRAGMA user_version").fetchone()[0]
            if found > VERSION:
                raise RecordError(
                    f"the file of judgements '{self.path}' has form {found}, and this version of Sensorium knows form "
                    f"{VERSION}: a newer one wrote it. Use that, or name another file (judges.cache)."
                )
            if not fixed:
                opened.execute("PRAGMA journal_mode=WAL")
                opened.execute("PRAGMA synchronous=NORMAL")
                opened.executescript(SCHEMA)
                if found < VERSION:
                    opened.execute(f"PRAGMA user_version={VERSION}")
        except BaseException:
            opened.close()
            raise
        return opened

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            full = full_disk_error(error, self.path)
            if full is not None or "disk I/O error" in str(error):
                raise cannot_write(self.path, full or OSError(errno.EIO, str(error))) from error
            way_out = (
                "If it is damaged, move it away (with its -wal and -shm): judgements are then asked for again. "
                "judges.cache names another file."
            )
            if "locked" in str(error):
                way_out = f"Another process has held it for {LOCKED_S:g} s: end that one, then continue with --resume."
            elif "readonly" in str(error) or "unable to open" in str(error):
                way_out = (
                    "Its folder must be writable, too, unless judges.offline is set: copy it to another place and name "
                    "that one (judges.cache)."
                )
            raise RecordError(f"the file of judgements '{self.path}' cannot be used: {error}. {way_out}") from error
