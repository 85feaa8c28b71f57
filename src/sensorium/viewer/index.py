"""An index over the episodes of a run: SQLite, with full-text search, made from the logs that the run has written.

Example: ``episodes/step_000012.jsonl`` is written, so the next ``update`` reads it once and keeps of each row where it lies
(file, first byte, length), what lists show and sort by, and its words. An episode itself is read from its log.

Invariants: the logs are the truth, and the run never reads the index. A log that was rewritten (thinned, resumed) is
indexed again, and the rows of one that is gone go. A damaged index is made again. Of several processes, one indexes a log.
Memory holds one row at a time. The index lies in the run, or in a cache folder where that cannot be written.
"""

import hashlib
import os
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from statistics import pstdev
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from pydantic import BaseModel, Field
from pydantic_core import from_json

from sensorium.runs.durable import database_errors
from sensorium.runs.episodes import TRAINED, TRANSCRIPTS
from sensorium.runs.run_directory import RunDirectory, step_of
from sensorium.vocabulary.errors import RecordError, SensoriumError

NAME = "view.sqlite"
VERSION = 3
BATCH = 100  # rows of a transaction
LONGEST, PREVIEW = 100_000, 240  # characters that are searched of a text, and shown in lists
MOST_WORDS = 12  # of a search
FEW = 2000  # episodes that are sorted for a page
TRAINING = "train"

SCHEMA = """
CREATE TABLE files (id INTEGER PRIMARY KEY, name TEXT UNIQUE, log TEXT, step INTEGER, inode INTEGER, changed INTEGER,
  size INTEGER, read INTEGER, whole INTEGER, problem TEXT);
CREATE TABLE episodes (id INTEGER PRIMARY KEY, file INTEGER, start INTEGER, length INTEGER, log TEXT, step INTEGER,
  name TEXT, task TEXT, attempts TEXT, place INTEGER, category TEXT, reward REAL, correct INTEGER, status TEXT, fate TEXT,
  failed INTEGER, turns INTEGER, tokens INTEGER, advantage REAL, surprise REAL, disagreement REAL, prompt INTEGER);
CREATE TABLE previews (id INTEGER PRIMARY KEY, prompt TEXT, response TEXT, failure TEXT, medium TEXT, hash TEXT,
  media TEXT);
CREATE TABLE terms (episode INTEGER, name TEXT, value REAL, PRIMARY KEY (episode, name)) WITHOUT ROWID;
CREATE TABLE counts (part TEXT, name TEXT, file INTEGER, n INTEGER, PRIMARY KEY (part, name, file)) WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5 (response, seen, judge, failure, prefix='1 2');
CREATE VIRTUAL TABLE prompts USING fts5 (prompt, prefix='1 2');
CREATE INDEX by_file ON episodes (file, attempts);
CREATE INDEX by_name ON episodes (name);
CREATE INDEX by_task ON episodes (task, step);
CREATE INDEX by_step ON episodes (step);
CREATE INDEX by_reward ON episodes (reward);
CREATE INDEX by_advantage ON episodes (advantage);
CREATE INDEX by_surprise ON episodes (surprise);
CREATE INDEX by_disagreement ON episodes (disagreement);
CREATE INDEX by_tokens ON episodes (tokens);
CREATE INDEX by_turns ON episodes (turns);
CREATE INDEX by_prompt ON episodes (prompt);
CREATE INDEX by_term ON terms (name, value);
CREATE INDEX counts_by_file ON counts (file);
"""
COUNTED = ("log", "category", "status", "fate")  # columns whose values filters offer
FIELDS = ("response", "seen", "judge", "failure")
DAMAGED = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)
"""What rows raise that are not as they are written."""
WORD = re.compile(r'(?:(\w+):)?(?:"([^"]*)"?|(\S+))')
Sort = Literal["step", "reward", "advantage", "surprise", "disagreement", "tokens", "turns", "term"]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # as SQLite stores it
MAKING = threading.Lock()
Json = dict[str, Any]
Facets = list[tuple[str, str]]
Found = TypeVar("Found")
FRESH_S = 2.0  # a folder that changed less long ago may change again without another time of change


class Search(BaseModel, frozen=True, extra="forbid"):
    """Which episodes, in which order. Empty and None stand for any; bounds are included.

    ``text`` are words that all must occur, ``"a phrase"``, ``begin*``, or ``prompt:``, ``response:``, ``seen:`` (later
    observations), ``judge:`` or ``failure:`` before one of them. ``low`` and ``high`` bound the term ``term``, or else the
    reward. ``medium`` is a kind of media that the episode began with.
    """

    text: str = Field("", max_length=1000)
    log: str = ""
    first: Whole | None = None
    last: Whole | None = None
    task: str = ""
    category: str = ""
    status: str = ""
    fate: str = ""
    correct: bool | None = None
    failed: bool | None = None
    medium: Literal["", "picture", "video", "sound"] = ""
    term: str = ""
    low: float | None = None
    high: float | None = None
    least_tokens: Whole | None = None
    most_tokens: Whole | None = None
    least_turns: Whole | None = None
    most_turns: Whole | None = None
    sort: Sort = "step"
    ascending: bool = False
    offset: int = Field(0, ge=0, le=10**9)
    limit: int = Field(50, ge=1, le=200)


class EpisodeIndex:
    """The index of one run. Threads may share it: reading opens a connection each, and one thread at a time updates."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.path = index_path(run)
        self.busy = False
        self.problem = ""
        self._lock = threading.Lock()
        self._removed = 0
        self._seen: tuple[tuple[int, int], ...] = ()

    def update(self, until: Callable[[], bool] = lambda: False, only: str = "") -> bool:
        """Read what the run has written since; True if anything changed. Returns at once where another thread does it.

        ``until``: stops between batches once it is true. ``only``: reads no log but this one.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            logs, removed = self._logs(), self._removed
            if logs == self._seen and self.path.exists():
                return False
            self.busy, self.problem = True, ""
            changed, whole = self._repaired(lambda db: self._update(db, until, only))
            settled = whole and all(time.time_ns() - at > FRESH_S * 1e9 for _, at in logs)
            self._seen = logs if settled and not only and removed == self._removed else ()
            return changed
        finally:
            self.busy = False
            self._lock.release()

    @property
    def behind(self) -> bool:
        """Whether there may be logs that are not indexed."""
        return self._logs() != self._seen

    def search(self, asked: Search) -> Json:
        """A page of the episodes asked for, and how many there are."""
        by_term = asked.sort == "term"
        table, id, key = ("terms", "episode", "value") if by_term else ("episodes", "id", asked.sort)
        direction = "ASC" if asked.ascending else "DESC"
        nulls = " NULLS LAST" if asked.ascending else ""
        page = f"ORDER BY r.{key} {direction}{nulls}, r.{id} {direction} LIMIT ? OFFSET ?"
        wanted, values = ("r.name = ?", [asked.term]) if by_term else ("1", [])

        def read(db: sqlite3.Connection) -> Json:
            count = _find(db, asked)
            if count is None:
                count, some = _all(db), f"{table} r WHERE {wanted}"
            elif count < FEW:  # these are sorted; of many, the order's index is followed until the page is full
                some = f"hits h CROSS JOIN {table} r ON r.{id} = h.id WHERE {wanted}"
            else:
                some = f"{table} r WHERE {wanted} AND +r.{id} IN hits"  # the plus: not sorted
            bound = [*values, asked.limit, asked.offset]
            ids = [row[0] for row in db.execute(f"SELECT r.{id} FROM {some} {page}", bound)]
            return {"count": count, "episodes": _rows(db, ids)}

        return self._ask(read)

    def indexed(self) -> int:
        """How many bytes of the logs are indexed."""
        return int(self._ask(lambda db: db.execute("SELECT TOTAL(read) FROM files").fetchone())[0])

    def facets(self) -> Json:
        """What can be asked for: logs, categories, statuses, fates, terms, and the range of steps; and how much is read.

        Counted while indexing, so no episode is visited.
        """

        def read(db: sqlite3.Connection) -> Json:
            def counted(part: str) -> list[Json]:
                asked = "SELECT name, SUM(n) total FROM counts WHERE part = ? GROUP BY name ORDER BY total DESC LIMIT 100"
                return [{"name": name, "count": count} for name, count in db.execute(asked, (part,))]

            steps = db.execute("SELECT (SELECT MIN(step) FROM episodes), (SELECT MAX(step) FROM episodes)").fetchone()
            names = db.execute("SELECT DISTINCT name FROM counts WHERE part = 'term' ORDER BY name LIMIT 200").fetchall()
            problems = db.execute("SELECT name, problem FROM files WHERE problem != '' LIMIT 20").fetchall()
            return {part: counted(part) for part in COUNTED} | {
                "terms": [name for (name,) in names],
                "steps": [*steps],
                "count": _all(db),
                "problems": [f"{name}: {problem}" for name, problem in problems],
            }

        return self._ask(read)

    def row(self, log: str, name: str) -> Json | None:
        """The log row of an episode, read from its log; None where there is none (any more)."""
        for _ in range(2):
            found = self._one("f.name, e.start, e.length", log, name)
            if found is None:
                if not self.behind or not self.update(only=log):
                    return None
                continue
            with suppress(OSError, ValueError, KeyError, TypeError):
                with (self.run.path / found[0]).open("rb") as file:
                    file.seek(found[1])
                    row: Json = from_json(file.read(found[2]))
                if row["episode"]["id"] == name:
                    return row
            self._seen = ()  # the log was rewritten meanwhile
            self.update(only=log)
        return None

    def picture(self, log: str, name: str) -> str:
        """The hash of the first picture that an episode showed; empty if none."""
        found = self._one("(SELECT hash FROM previews p WHERE p.id = e.id AND medium = 'picture')", log, name)
        return str(found[0] or "") if found else ""

    def related(self, log: str, name: str, limit: int = 100) -> tuple[list[Json], list[Json]]:
        """The attempts of an episode's group, itself included; and one attempt at its task of each other log and step."""
        mine = self._one("e.file, e.attempts, e.task", log, name)
        if mine is None:
            return [], []
        file, group, task = mine

        def read(db: sqlite3.Connection) -> tuple[list[Json], list[Json]]:
            asked = "SELECT id FROM episodes WHERE file = ? AND attempts = ? ORDER BY place LIMIT ?"
            attempts = [row[0] for row in db.execute(asked, (file, group, limit))]
            asked = "SELECT MIN(id) FROM episodes WHERE task = ? AND file != ? GROUP BY file ORDER BY step LIMIT ?"
            others = [row[0] for row in db.execute(asked, (task, file, limit))]
            return _rows(db, attempts), _rows(db, others)

        return self._ask(read)

    def logs_of(self, names: Sequence[str]) -> dict[tuple[str, int], str]:
        """The logs of these episodes by name and step; of those that are in no log (any more) none."""
        marks = ", ".join("?" * len(names))
        asked = f"SELECT e.name, e.step, f.name FROM episodes e JOIN files f ON f.id = e.file WHERE e.name IN ({marks})"
        return self._ask(lambda db: {(name, step): log for name, step, log in db.execute(asked, list(names))})

    def _one(self, columns: str, log: str, name: str) -> Any:
        asked = f"SELECT {columns} FROM episodes e JOIN files f ON f.id = e.file WHERE e.name = ? AND f.name = ?"
        return self._ask(lambda db: db.execute(asked, (name, log)).fetchone())

    def _ask(self, question: Callable[[sqlite3.Connection], Found]) -> Found:
        """Read from the index. A damaged one is replaced by an empty one, which the next ``update`` fills."""
        with database_errors(self.path, "the index of episodes", "It is made again from the logs: ask again."):
            for attempt in range(2):
                self._refuse_others()
                try:
                    if not self.path.exists():
                        self._make()
                    db = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=30.0)
                    with closing(db):
                        if db.execute("PRAGMA user_version").fetchone() != (VERSION,):  # another thread just makes it
                            self._make()
                        return question(db)
                except sqlite3.DatabaseError as error:
                    if attempt or not _is_damage(error):
                        raise
                    self._remove()
        raise AssertionError("the second attempt returns or raises")

    def _logs(self) -> tuple[tuple[int, int], ...]:
        """What changes when a log does: logs are written whole, so the folders change with them."""
        found = []
        for folder in (self.run.episodes, self.run.eval):
            with suppress(OSError):
                found.append((folder.stat().st_ino, folder.stat().st_mtime_ns))
        return tuple(found)

    def _repaired(self, work: Callable[[sqlite3.Connection], Found]) -> Found:
        """Do this with the open index; a damaged one, or one of another version, is made again."""
        with database_errors(self.path, "the index of episodes", "Remove it: it is made again from the logs."):
            for attempt in range(2):
                self._refuse_others()
                try:
                    with _opened(self.path) as db:
                        return work(db)
                except sqlite3.DatabaseError as error:
                    if attempt or not _is_damage(error):
                        raise
                    self._remove()
        raise AssertionError("the second attempt returns or raises")

    def _refuse_others(self) -> None:
        """Make no index where the run is gone, and none through a link that came with it."""
        if not self.run.path.is_dir():
            raise RecordError(f"the run '{self.run.path}' is gone.")
        if self.path.is_symlink():
            self._remove()

    def _make(self) -> None:
        """Make an empty index, which the next ``update`` fills."""
        with _opened(self.path):
            self._seen = ()
            self._removed += 1

    def _remove(self) -> None:
        for end in ("", "-wal", "-shm"):
            Path(f"{self.path}{end}").unlink(missing_ok=True)
        self._seen = ()
        self._removed += 1

    def _update(self, db: sqlite3.Connection, until: Callable[[], bool], only: str) -> tuple[bool, bool]:
        """Index what changed. Returns whether anything did, and whether the index is whole now."""
        known = {row[1]: row for row in db.execute("SELECT id, name, inode, changed, size, whole FROM files")}
        there: dict[str, Path] = {}
        for folder in (self.run.episodes, self.run.eval):
            logs = (path for path in folder.glob("step_*.jsonl") if path.is_file())  # a pipe would never end
            there |= {f"{folder.name}/{path.name}": path for path in logs}
        if only:
            known = {name: row for name, row in known.items() if name == only}
            there = {name: path for name, path in there.items() if name == only}
        changed, whole = False, True
        for name in known.keys() - there.keys():
            self._drop(db, known[name][0])
            changed = True
        # The newest first: whoever watches a run wants to see what it does now.
        for name, path in sorted(there.items(), key=lambda item: (-step_of(item[1]), item[0])):
            with suppress(FileNotFoundError), path.open("rb") as file, _Transcripts(self.run) as transcripts:
                state = _state(file)
                row = known.get(name)
                if row is not None and row[2:] == (*state, 1):
                    continue
                if until():
                    return changed, False
                if row is not None and row[2:5] != state:
                    self._drop(db, row[0])
                whole &= self._read(db, name, path, file, transcripts, until)
                changed = True
        return changed, whole

    def _drop(self, db: sqlite3.Connection, file: int) -> None:
        with _writing(db):
            mine = "(SELECT id FROM episodes WHERE file = ?)"
            for table, column in (("words", "rowid"), ("prompts", "rowid"), ("previews", "id"), ("terms", "episode")):
                db.execute(f"DELETE FROM {table} WHERE {column} IN {mine}", (file,))
            db.execute("DELETE FROM episodes WHERE file = ?", (file,))
            db.execute("DELETE FROM counts WHERE file = ?", (file,))
            db.execute("DELETE FROM files WHERE id = ?", (file,))

    def _read(
        self,
        db: sqlite3.Connection,
        name: str,
        path: Path,
        file: BinaryIO,
        transcripts: "_Transcripts",
        until: Callable[[], bool],
    ) -> bool:
        """Index the rows of a log that are not yet, a batch at a time; False if another process does, or it was stopped."""
        state, log = _state(file), path.stem.split("_", 2)[2] if path.parent == self.run.eval else TRAINING
        known = "SELECT id, read, problem FROM files WHERE name = ? AND inode = ? AND changed = ? AND size = ?"
        with _writing(db):
            values = (name, log, step_of(path), *state)
            db.execute("INSERT OR IGNORE INTO files VALUES (NULL, ?, ?, ?, ?, ?, ?, 0, 0, '')", values)
            found = db.execute(known, (name, *state)).fetchone()
        if found is None:
            return False
        id, place, problem = found
        file.seek(place)
        ended = False
        while not ended:
            if until():
                return False
            with _writing(db):
                if db.execute(known, (name, *state)).fetchone() != (id, place, problem):
                    return False  # another process has read on
                counts: Counter[tuple[str, str]] = Counter()
                for _ in range(BATCH):
                    line = file.readline()
                    if not line.endswith(b"\n"):  # the end, or a row that is just being written
                        ended = True
                        _set_disagreement(db, id)
                        break
                    try:
                        counts.update(_insert(db, id, log, place, line, transcripts))
                    except DAMAGED as error:
                        damage = f"the row at byte {place:,} cannot be read ({type(error).__name__}: {error})"
                        problem = problem or f"{damage[:300]}; it and other damaged rows are left out"
                    place += len(line)
                add = "INSERT INTO counts VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"
                db.executemany(add, [(*key, id, n) for key, n in counts.items()])
                now = (place, ended, problem, id)
                db.execute("UPDATE files SET read = ?, whole = ?, problem = ? WHERE id = ?", now)
        return True


def index_path(run: RunDirectory) -> Path:
    """Where the index of a run lies: in its folder, or in the user's cache where that cannot be written."""
    if os.access(run.path, os.W_OK):
        return run.path / NAME
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = hashlib.sha256(os.fsencode(os.path.realpath(run.path))).hexdigest()[:24]
    return Path(base) / "sensorium" / "view" / f"{place}.sqlite"


def _state(file: BinaryIO) -> tuple[int, int, int]:
    """What tells a log from the one that was in its place before."""
    state = os.fstat(file.fileno())
    return state.st_ino, state.st_mtime_ns, state.st_size


class _Transcripts:
    """What judges answered about episodes, from a run's file of transcripts, if there is one."""

    def __init__(self, run: RunDirectory) -> None:
        self.path = run.path / TRANSCRIPTS
        self._db: sqlite3.Connection | None = None

    def __enter__(self) -> "_Transcripts":
        if self.path.exists():
            with suppress(sqlite3.Error):
                self._db = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=5.0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._db is not None:
            self._db.close()

    def of(self, episode: str) -> str:
        """The answers about an episode; nothing where they cannot be read, which its page says."""
        if self._db is None:
            return ""
        with suppress(sqlite3.Error):
            rows = self._db.execute("SELECT answer FROM transcripts WHERE episode = ? ORDER BY term, key", (episode,))
            return "\n".join(str(answer) for (answer,) in rows)
        return ""


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The index, opened for writing; an empty one is given its tables."""
    if path.name != NAME:  # in the cache; a run that is gone is not made again
        path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=30.0, isolation_level=None)
    try:
        with MAKING:  # two that switch to WAL at once do not wait for each other
            db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        with _writing(db):
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master WHERE type = 'table'").fetchone()
            if not version and not tables:
                for statement in SCHEMA.split(";\n"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise sqlite3.DatabaseError(f"no such version: {version}")
        yield db
    finally:
        db.close()


@contextmanager
def _writing(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether an error says that the file is no index of ours, and not that it is locked or the disk full."""
    return type(error) is sqlite3.DatabaseError or "no such" in str(error) or "malformed" in str(error)


def _insert(db: sqlite3.Connection, file: int, log: str, start: int, line: bytes, transcripts: _Transcripts) -> Facets:
    """Index one row of a log; returns what it counts for in ``counts``."""
    row = from_json(line)
    episode, task = row["episode"], row["task"]
    table, turns, scores = episode.get("segments", []), episode.get("turns", []), episode.get("scores", [])
    responses = [table[turn["response"]] for turn in turns]
    logprobs = [float(value) for segment in responses for value in segment.get("logprobs", ()) if value is not None]
    tokens = [len(segment.get("tokens", ())) for segment in responses]
    info, metadata = episode.get("info") or {}, task.get("metadata") or {}
    category = str(info.get("category") or metadata.get("category") or "")
    first = [*task.get("messages", ())] or [*episode.get("head", ()), *(turns[0].get("observation", ()) if turns else ())]
    later = [message for turn in turns[1:] for message in turn.get("observation", ())]
    group = str(episode["group_id"])
    failure = str(episode.get("failure", ""))
    reasons = "\n".join([failure, *(str(score["reason"]) for score in scores if score.get("reason"))])
    asked = "SELECT prompt FROM episodes WHERE file = ? AND attempts = ? LIMIT 1"
    shared = db.execute(asked, (file, group)).fetchone()
    fate = str(row.get("fate", ""))
    values = {
        "file": file,
        "start": start,
        "length": len(line),
        "log": log,
        "step": _whole(row["step"]),
        "name": str(episode["id"]),
        "task": str(task["id"]),
        "attempts": group,
        "place": _whole(episode["index"]),
        "category": category,
        "reward": _number(row.get("reward")),
        "correct": None if row.get("correct") is None else _whole(row["correct"]),
        "status": str(episode["status"]),
        "fate": fate if fate in ("", TRAINED) else fate.partition(":")[0],
        "failed": bool(failure) or any(score.get("value") is None for score in scores),
        "turns": len(turns),
        "tokens": sum(tokens),
        "advantage": _mean_advantage(row.get("advantages", ()), tokens),
        "surprise": -sum(logprobs) / len(logprobs) if logprobs else None,
        "prompt": shared[0] if shared else None,
    }
    prompt, response = _text_of(first), "\n".join(str(segment.get("text", "")) for segment in responses)
    answer = "" if task.get("answer") is None else str(task["answer"])
    texts = (response, _text_of(later), transcripts.of(str(episode["id"])), reasons)
    media = [block for message in first for block in message["content"] if "hash" in block]
    shown = next((block for block in media if block["kind"] == "picture"), media[0] if media else {})
    terms = term_values(scores)
    names = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    id = db.execute(f"INSERT INTO episodes ({names}) VALUES ({marks})", values).lastrowid
    if not shared:
        db.execute("UPDATE episodes SET prompt = id WHERE id = ?", (id,))
        db.execute("INSERT INTO prompts (rowid, prompt) VALUES (?, ?)", (id, f"{prompt}\n{answer}"[:LONGEST]))
    db.execute(
        "INSERT INTO words (rowid, response, seen, judge, failure) VALUES (?, ?, ?, ?, ?)",
        (id, *(text[:LONGEST] for text in texts)),
    )
    db.execute(
        "INSERT INTO previews VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            id,
            prompt[:PREVIEW],
            response[:PREVIEW],
            failure[:PREVIEW],
            str(shown.get("kind", "")),
            str(shown.get("hash", "")),
            " ".join(sorted({str(block["kind"]) for block in media})),
        ),
    )
    db.executemany("INSERT INTO terms VALUES (?, ?, ?)", [(id, name, value) for name, value in terms.items()])
    return [*((part, str(values[part])) for part in COUNTED if values[part]), *(("term", name) for name in terms)]


def term_values(scores: list[Json]) -> dict[str, float | None]:
    """Each term's value, summed over turns; None where one is missing."""
    sums: dict[str, float | None] = {}
    for score in scores:
        value, before = _number(score.get("value")), sums.get(str(score["name"]), 0.0)
        sums[str(score["name"])] = None if value is None or before is None else before + value
    return sums


def _mean_advantage(advantages: list[Any], tokens: list[int]) -> float | None:
    """The mean over tokens; a turn has a number for all of its tokens, or one for each."""
    total, count = 0.0, 0
    for given, length in zip(advantages, tokens, strict=False):
        count += length
        total += sum(map(float, given)) if isinstance(given, list) else float(given) * length
    return total / count if count else None


def _set_disagreement(db: sqlite3.Connection, file: int) -> None:
    """The standard deviation of the rewards of each group of a log."""
    rewards: dict[str, list[float]] = {}
    for group, reward in db.execute("SELECT attempts, reward FROM episodes WHERE file = ? AND reward IS NOT NULL", (file,)):
        rewards.setdefault(group, []).append(reward)
    found = [(pstdev(values), file, group) for group, values in rewards.items() if len(values) > 1]
    db.executemany("UPDATE episodes SET disagreement = ? WHERE file = ? AND attempts = ?", found)


def _whole(value: Any) -> int:
    """A whole number that SQLite can store."""
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{str(number)[:20]}… is too large a number")
    return number


def _number(value: Any) -> float | None:
    """A finite number as SQLite orders it; one that is not finite is none."""
    number = None if value is None else float(value)
    return number if number is not None and abs(number) < float("inf") else None


def _text_of(messages: list[Json]) -> str:
    return "\n".join(block["text"] for message in messages for block in message["content"] if block.get("text"))


def _all(db: sqlite3.Connection) -> int:
    """How many episodes there are."""
    return int(db.execute("SELECT TOTAL(n) FROM counts WHERE part = 'log'").fetchone()[0])


def _count_word(db: sqlite3.Connection, match: str) -> int:
    return int(db.execute("SELECT COUNT(*) FROM words WHERE words MATCH ?", (match,)).fetchone()[0])


def _find(db: sqlite3.Connection, asked: Search) -> int | None:
    """Fill the temporary table ``hits`` with the episodes that are searched for; returns their count, or None for all.

    Each text is looked up once, into a table of its own. Then count and page need no second search.
    """
    parts, values = _conditions(asked)
    whole = _all(db)
    db.execute("PRAGMA temp_store = MEMORY")
    found: list[tuple[int, str]] = []
    for number, (field, spelled) in enumerate(_words(asked.text)):
        table, count, match = f"word{number}", 0, f"{field} : {spelled}" if field else spelled
        if field != "prompt" and " " not in spelled and _count_word(db, match) == whole:
            continue  # a word that all hold restricts nothing, and to count it is cheap
        db.execute(f"CREATE TEMP TABLE {table} (id INTEGER PRIMARY KEY)")
        if field != "prompt":
            count = db.execute(f"INSERT INTO {table} SELECT rowid FROM words WHERE words MATCH ?", (match,)).rowcount
        if field in ("", "prompt") and count < whole:
            inside = "SELECT rowid FROM prompts WHERE prompts MATCH ?"
            add = f"INSERT OR IGNORE INTO {table} SELECT id FROM episodes INDEXED BY by_prompt WHERE prompt IN ({inside})"
            count += db.execute(add, (spelled,)).rowcount
        if count < whole:
            found.append((count, table))
    tables = [table for _, table in sorted(found)]
    if not tables and not parts:
        return None
    if len(tables) == 1 and not parts:
        db.execute(f"ALTER TABLE temp.{tables[0]} RENAME TO hits")
        return int(db.execute("SELECT COUNT(*) FROM hits").fetchone()[0])
    db.execute("CREATE TEMP TABLE hits (id INTEGER PRIMARY KEY)")
    some = f"{tables[0]} h CROSS JOIN episodes e ON e.id = h.id" if tables and parts else f"{[*tables, 'episodes'][0]} e"
    parts += [f"e.id IN {table}" for table in tables[1:]]
    return db.execute(f"INSERT INTO hits SELECT e.id FROM {some} WHERE {' AND '.join(parts)}", values).rowcount


def _conditions(asked: Search) -> tuple[list[str], list[Any]]:
    """The conditions of a search besides its texts in SQL, with their values."""
    parts: list[str] = []
    values: list[Any] = []

    def add(part: str, *found: Any) -> None:
        parts.append(part)
        values.extend(found)

    for column in ("log", "task", "category", "status", "fate"):
        if value := getattr(asked, column):
            add(f"e.{column} = ?", value)
    if asked.medium:
        add("(SELECT instr(media, ?) FROM previews p WHERE p.id = e.id)", asked.medium)
    for column, truth in (("correct", asked.correct), ("failed", asked.failed)):
        if truth is not None:
            add(f"e.{column} = ?", int(truth))
    bounds: list[tuple[str, str, float | None]] = [("step", ">=", asked.first), ("step", "<=", asked.last)]
    bounds += [("tokens", ">=", asked.least_tokens), ("tokens", "<=", asked.most_tokens)]
    bounds += [("turns", ">=", asked.least_turns), ("turns", "<=", asked.most_turns)]
    if not asked.term:
        bounds += [("reward", ">=", asked.low), ("reward", "<=", asked.high)]
    for column, sign, bound in bounds:
        if bound is not None:
            add(f"e.{column} {sign} ?", bound)
    if asked.term and not (asked.low is None and asked.high is None):
        low, high = (-1e300 if asked.low is None else asked.low), (1e300 if asked.high is None else asked.high)
        add("e.id IN (SELECT episode FROM terms WHERE name = ? AND value BETWEEN ? AND ?)", asked.term, low, high)
    elif asked.term or asked.sort == "term":
        add("e.id IN (SELECT episode FROM terms WHERE name = ?)", asked.term)
    return parts, values


def _words(text: str) -> list[tuple[str, str]]:
    """The words of a search with the field of each (or none), quoted, so that no sign of them means anything."""
    found = []
    for match in WORD.finditer(text):
        field, phrase, word = match[1] or "", match[2], match[3] or ""
        if field and field not in (*FIELDS, "prompt"):
            field, phrase, word = "", None, match[0]
        begins = phrase is None and word.endswith("*")
        plain = re.sub(r'["\0]', " ", phrase if phrase is not None else word.rstrip("*"))
        if any(character.isalnum() for character in plain):
            found.append((field, f'"{plain}"{"*" if begins else ""}'))
    if len(found) > MOST_WORDS:
        raise SensoriumError(f"a search has at most {MOST_WORDS} words or phrases, and this one has {len(found)}.")
    return found


def _rows(db: sqlite3.Connection, ids: list[int]) -> list[Json]:
    """What lists show of these episodes, in this order."""
    marks = ", ".join("?" * len(ids))
    columns = (
        "log", "step", "name", "task", "attempts", "place", "category", "reward", "correct", "status", "fate", "failed",
        "turns", "tokens", "advantage", "surprise", "disagreement",
    )  # fmt: skip
    shown = ("prompt", "response", "failure", "medium", "media")
    asked = (
        f"SELECT e.id, f.name, {', '.join(f'e.{name}' for name in columns)}, {', '.join(f'p.{name}' for name in shown)} "
        f"FROM episodes e JOIN previews p ON p.id = e.id JOIN files f ON f.id = e.file WHERE e.id IN ({marks})"
    )
    found: dict[int, Json] = {}
    for id, file, *rest in db.execute(asked, ids):
        found[id] = {"file": file, **dict(zip((*columns, *shown), rest, strict=True)), "terms": {}}
    for id, name, value in db.execute(f"SELECT episode, name, value FROM terms WHERE episode IN ({marks})", ids):
        if id in found:
            found[id]["terms"][name] = value
    return [found[id] for id in ids if id in found]
