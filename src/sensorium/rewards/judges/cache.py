"""Judgements on disk, by content, in one SQLite file that runs and processes may share."""

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
from sensorium.vocabulary.errors import RecordError


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
    return _is_zombie(pid)


def _is_zombie(pid: str) -> bool:
    """True if a process was killed and who started it has not asked after it yet (on Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False


def _machine() -> str:
    """Where process numbers mean the same: the host, and on Linux the namespace of processes (a container has its own)."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{platform.node()}/{space}".replace(" ", "_")


# Invariants: an answer is kept once and never replaced, so who asks again gets the same one. It is kept together with
# the row of the call that gave it, or neither is. A question is asked by one process at a time: who wants to ask claims
# it first, and others wait for the answer. The claim of a process that died is void: at once if it ran on this machine,
# else when nobody renewed it for as long as it holds, by the clock of who waits (clocks of machines differ). A kill at
# any moment leaves whole rows only (a write-ahead log). Reading never waits for a writer. Keys of endpoints are in none
# of the tables.


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
LOCKED_S = 120.0
"""How long another process may hold the file before that is an error."""
CLOCKS_DIFFER_S = 600.0
"""By how much clocks of machines may differ: a claim that ran out longer ago is void without watching it."""


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

    @property
    def values(self) -> tuple[Any, ...]:
        """As its row in the file."""
        counted = (self.input_tokens, self.output_tokens, round(self.seconds, 4))
        return (self.key, self.model, self.place, self.outcome, *counted)


@dataclass(frozen=True)
class WatchedClaim:
    """Somebody's claim, and since when this process has seen it unchanged."""

    owner: str
    until: float
    since: float


class AnswerCache:
    """The file of answers, claims and calls. Safe to use from several threads and processes.

    ``read_only``: nothing will be written, so a file where nothing can be written will do.
    """

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        self.path, self.read_only = path, read_only
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._watched: dict[str, WatchedClaim] = {}

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
        for holder, until in self._read("SELECT owner, until FROM claims WHERE key = ?", (key,)):
            if self._is_void(key, holder, until, seconds):
                void = (holder, until)
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

    def _is_void(self, key: str, owner: str, until: float, seconds: float) -> bool:
        """True if nobody asks under this claim any more."""
        if is_dead(owner) or until < time.time() - CLOCKS_DIFFER_S:
            return True
        seen, now = self._watched.get(key), time.monotonic()
        if seen is None or (seen.owner, seen.until) != (owner, until):
            self._watched[key] = seen = WatchedClaim(owner, until, now)
        return now - seen.since > seconds

    def renew(self, key: str, owner: str, seconds: float) -> None:
        """A claim holds for so long from now on."""
        self._write(("UPDATE claims SET until = ? WHERE key = ? AND owner = ?", (time.time() + seconds, key, owner)))

    def release(self, key: str, owner: str) -> None:
        """A claim ends."""
        self._write(("DELETE FROM claims WHERE key = ? AND owner = ?", (key, owner)))

    def log(self, row: CallRow) -> None:
        """Put a call that gave no answer on record."""
        self._write((CALL, row.values))

    def calls(self) -> list[CallRow]:
        """Every call that was made, in order."""
        rows = self._read("SELECT key, model, place, outcome, input_tokens, output_tokens, seconds FROM calls ORDER BY id")
        return [CallRow(*row) for row in rows]

    def keys(self) -> list[str]:
        """The keys of all answers."""
        return [key for (key,) in self._read("SELECT key FROM answers ORDER BY key")]

    def close(self) -> None:
        """Close the file."""
        with self._reading, self._writing:
            for opened in {self._reader, self._writer} - {None}:
                assert opened is not None
                opened.close()
            self._reader = self._writer = None

    def _read(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._guarded():
            if self.path is None:
                with self._writing:
                    return self._to_write().execute(statement, values).fetchall()
            with self._reading:
                if self._reader is None:
                    self._reader = self._opened()
                return self._reader.execute(statement, values).fetchall()

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """All of these, or none."""
        with self._guarded(), self._writing:
            db = self._to_write()
            db.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in statements:
                    db.execute(statement, values)
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    def _to_write(self) -> sqlite3.Connection:
        if self._writer is None:
            self._writer = self._opened()
        return self._writer

    def _opened(self) -> sqlite3.Connection:
        """The file, opened when it is first needed."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        name = ":memory:" if self.path is None else str(self.path)
        try:
            return self._made(name)
        except sqlite3.OperationalError:
            if not self.read_only or self.path is None or not self.path.is_file() or _unmerged(self.path):
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
                way_out = f"Another process has held it for {LOCKED_S:g} s: end that one, then go on with --resume."
            elif "readonly" in str(error) or "unable to open" in str(error):
                way_out = (
                    "Its folder must be writable, too, unless judges.offline is set: copy it to another place and name "
                    "that one (judges.cache)."
                )
            raise RecordError(f"the file of judgements '{self.path}' cannot be used: {error}. {way_out}") from error


def _unmerged(path: Path) -> bool:
    """True if rows of a file are still in its write-ahead log."""
    log = path.with_name(f"{path.name}-wal")
    return log.exists() and log.stat().st_size > 0
