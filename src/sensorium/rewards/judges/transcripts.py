"""The questions about each episode and the judges' answers, kept in the run directory for the report.

A row's key is episode, term and judgement, so a resumed run, which asks again or finds the answer in the cache, leaves the
same rows. Media are named by their hash: they are in the run's ``media/``. A reward service's own questions are kept here
as lines.
"""

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sensorium.rewards.judges.judgements import JudgeRequest
from sensorium.runs.durable import database_errors
from sensorium.vocabulary.content import Block, Text

SCHEMA = """
CREATE TABLE IF NOT EXISTS transcripts (episode TEXT, term TEXT, key TEXT, model TEXT, prompt TEXT, messages TEXT,
  answer TEXT, PRIMARY KEY (episode, term, key)) WITHOUT ROWID
"""
INSERT = "INSERT OR {} INTO transcripts VALUES (?, ?, ?, ?, ?, ?, ?)"
DELETE = "DELETE FROM transcripts WHERE episode = ? AND term = ?"


@dataclass(frozen=True)
class TranscriptLine:
    """One question that a reward service asked a model, and the answer."""

    model: str
    prompt: str
    question: str
    answer: str


class Transcripts:
    """Transcripts by episode, in a SQLite file; without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None

    def keep(self, about: tuple[str, ...], term: str, request: JudgeRequest, answer: str) -> None:
        """Keep a question about these episodes and its answer."""
        self._put("REPLACE", about, term, request, answer)

    def keep_failure(self, about: tuple[str, ...], term: str, request: JudgeRequest, why: str) -> None:
        """Keep a question and why it has no answer, unless there is one."""
        self._put("IGNORE", about, term, request, why)

    def replace(self, episodes: Sequence[str], term: str, lines: Sequence[TranscriptLine]) -> None:
        """Keep these lines of a term for each of these episodes, in their order, instead of what it had before."""
        if self.path is None:
            return
        rows = []
        for i, line in enumerate(lines):
            question = json.dumps([{"role": "user", "content": [{"text": line.question}]}])
            rows.append((f"{i:04d}", line.model, line.prompt, question, line.answer))
        with self._writing() as db, db:
            db.execute("BEGIN IMMEDIATE")
            for episode in episodes:
                db.execute(DELETE, (episode, term))
                db.executemany(INSERT.format("REPLACE"), [(episode, term, *row) for row in rows])

    def copy(self, source: str, episode: str, term: str) -> None:
        """Give an episode what a term has kept for another; where it has nothing, the episode's own rows stay."""
        if self.path is None or not self.path.exists():
            return
        asked = "SELECT ?, term, key, model, prompt, messages, answer FROM transcripts WHERE episode = ? AND term = ?"
        with self._writing() as db, db:
            db.execute("BEGIN IMMEDIATE")
            rows = db.execute(asked, (episode, source, term)).fetchall()
            if rows:
                db.execute(DELETE, (episode, term))
                db.executemany(INSERT.format("REPLACE"), rows)

    def _put(self, otherwise: str, about: tuple[str, ...], term: str, request: JudgeRequest, answer: str) -> None:
        if self.path is None or not about:
            return
        messages = json.dumps([{"role": m.role, "content": [_block(b) for b in m.content]} for m in request.messages])
        rows = [(episode, term, request.key, request.model, request.prompt, messages, answer) for episode in about]
        with self._writing() as db:
            db.executemany(INSERT.format(otherwise), rows)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """The open file, for one writer at a time."""
        assert self.path is not None, "without a path nothing is kept"
        with self._lock, database_errors(self.path, "the file of judges' transcripts", "Remove it."):
            if self._db is None:
                self._db = sqlite3.connect(self.path, timeout=30.0, check_same_thread=False, isolation_level=None)
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute(SCHEMA)
            yield self._db

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None


def _block(block: Block) -> dict[str, str]:
    if isinstance(block, Text):
        return {"text": block.text}
    changed = {} if block.augmentation is None else {"augmentation": block.augmentation.description}
    return {"media": block.kind, "hash": block.hash, **changed}
