"""Episodes, tasks and groups as JSON, and back without loss; the transcripts of judges; and which episodes stay on disk.

Example: of two turns, the first with the same advantage at all its tokens, a row has ``"fate": "trained"`` and
``"advantages": [0.5, [0.25, 0.25, -1.0]]``, and in the same form ``entropies`` and ``mismatches``. Rows of older versions
and of evaluations have none of these.

An episode's segments are written once, in a table; threads and turns refer to them by place, so that shared history comes
back shared. ``info``, ``metadata`` and ``answer`` must be JSON values (a tuple comes back as a list).
"""

import json
import math
import sqlite3
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from sensorium.runs.durable import database_errors, read_rows, rewrite_rows, write_rows
from sensorium.runs.run_directory import RunDirectory, step_of
from sensorium.vocabulary.content import USUAL, Block, Media, Message, Text
from sensorium.vocabulary.decoding import Augmentation, parameters_from, parameters_to_data
from sensorium.vocabulary.episode import (
    Episode,
    Group,
    MediaSpan,
    Routes,
    Score,
    Segment,
    Status,
    Thread,
    Turn,
    VersionSpan,
)
from sensorium.vocabulary.errors import RecordError
from sensorium.vocabulary.task import EnvironmentSpec, Task

Json = dict[str, Any]
TRAINED = "trained"
TRANSCRIPTS = "judge_transcripts.sqlite"
GIB = 1 << 30
EVALUATIONS_WHOLE = 20
GROUPS_OF_A_STEP, GROUPS_OF_AN_EVALUATION = 1, 8

TurnNumbers = tuple[tuple[float, ...], ...]  # a number for each token, by turn


@dataclass(frozen=True)
class EpisodeCredit:
    """An episode's fate; and where it was trained on, what the learner knew of its tokens, by turn.

    ``entropies`` are of the policy, in nats; ``mismatches`` the learner's log-prob minus the engine's, NaN where the engine
    gave none. Both are with the weights that the step began with; they may be absent.
    """

    fate: str = TRAINED
    advantages: TurnNumbers = ()
    entropies: TurnNumbers = ()
    mismatches: TurnNumbers = ()


def credits_of(
    groups: Iterable[Group],
    fates: Mapping[str, str],
    advantages: Mapping[str, Sequence[Sequence[float]]],
    measures: Mapping[str, tuple[TurnNumbers, TurnNumbers]] | None = None,
) -> dict[str, EpisodeCredit]:
    """The credit of every episode by id; ``fates`` are of those not trained on, the others of those that were.

    ``measures`` are entropies and mismatches of those that are to be logged.
    """
    known = measures or {}
    return {
        e.id: EpisodeCredit(
            fates.get(e.id, TRAINED), tuple(tuple(turn) for turn in advantages.get(e.id, ())), *known.get(e.id, ())
        )
        for group in groups
        for e in group.episodes
    }


def credit_to_json(credit: EpisodeCredit) -> Json:
    """The fields of a log row; one number for a turn whose numbers are all alike. Nine digits preserve a float32."""
    if not credit.advantages:
        return {"fate": credit.fate}
    turns = [turn[:1] if turn and turn.count(turn[0]) == len(turn) else turn for turn in credit.advantages]
    short = [[float(f"{value:.9g}") for value in turn] for turn in turns]
    return {"fate": credit.fate, "advantages": [turn[0] if len(set(turn)) == 1 else turn for turn in short]} | _sparse(
        entropies=[_short(turn) for turn in credit.entropies],
        mismatches=[_short(turn) for turn in credit.mismatches],
    )


def _short(turn: Sequence[float]) -> float | Sequence[float | None]:
    """A turn's numbers: one where all are alike, None for one that is not finite."""
    if not math.isfinite(sum(turn)):
        return [value if math.isfinite(value) else None for value in turn]
    return turn[0] if turn and turn.count(turn[0]) == len(turn) else turn


def credit_from_json(row: Mapping[str, Any], episode: Episode) -> EpisodeCredit | None:
    """The credit in a log row; None where it has none."""
    if "fate" not in row:
        return None
    names = ("advantages", "entropies", "mismatches")
    return EpisodeCredit(row["fate"], *(_turn_numbers(row.get(name, ()), episode) for name in names))


def _turn_numbers(given: Sequence[Any], episode: Episode) -> TurnNumbers:
    return tuple(
        tuple(math.nan if value is None else value for value in one)
        if isinstance(one, list)
        else (float(one),) * len(turn.response.tokens)
        for one, turn in zip(given, episode.turns, strict=False)
    )


def write_episodes(
    path: Path,
    step: int,
    groups: Iterable[Group],
    limit: int = 0,
    credits: Mapping[str, EpisodeCredit] | None = None,
    *,
    routes: bool = False,
) -> None:
    """Write a step's episodes, one row each with its task and credit (by episode id); ``limit`` at most (0: all).

    ``routes``: also the experts that the engine recorded, to train on them again.
    """
    members = ((group.task, episode) for group in groups for episode in group.episodes)
    known = credits or {}
    shown = islice(members, limit or None)
    write_rows(path, (episode_row(step, task, e, known.get(e.id), routes=routes) for task, e in shown))


def episode_row(
    step: int, task: Task, episode: Episode, credit: EpisodeCredit | None = None, *, routes: bool = False
) -> Json:
    """The log row of one episode, with short and often used fields first, for people and for jq."""
    missing = {
        score.name if score.turn is None else f"{score.name}, turn {score.turn}": score.reason
        for score in episode.scores
        if score.missing
    }
    return {
        "step": step,
        "reward": _number(episode.reward),
        "correct": episode.correct,
        **_sparse(missing=missing),
        **({} if credit is None else credit_to_json(credit)),
        "task": task_to_json(task),
        "episode": episode_to_json(episode, routes=routes),
    }


def read_episodes(path: Path) -> Iterator[tuple[int, Task, Episode]]:
    """The episodes of a log: step, task, episode."""
    for row in read_rows(path):
        yield row["step"], task_from_json(row["task"]), episode_from_json(row["episode"])


def read_groups(path: Path) -> list[Group]:
    """The episodes of a log, gathered by group, in the order they were written."""
    return read_groups_of(read_rows(path))


def read_groups_of(rows: Iterable[Json]) -> list[Group]:
    """The groups of some rows of a log."""
    tasks: dict[str, Task] = {}
    members: dict[str, list[Episode]] = {}
    for row in rows:
        episode = episode_from_json(row["episode"])
        tasks[episode.group_id] = task_from_json(row["task"])
        members.setdefault(episode.group_id, []).append(episode)
    return [Group(id, tasks[id], tuple(members[id])) for id in members]


def read_credits_of(rows: Iterable[Json]) -> dict[str, EpisodeCredit]:
    """The credit of the episodes of some rows, by episode id; rows without it are left out."""
    found = {}
    for row in rows:
        if (credit := credit_from_json(row, episode_from_json(row["episode"]))) is not None:
            found[row["episode"]["id"]] = credit
    return found


def task_to_json(task: Task) -> Json:
    spec = task.environment
    answer = {} if task.answer is None else {"answer": task.answer}
    return {"id": task.id, **answer} | _sparse(
        messages=messages_to_json(task.messages),
        environment=spec and {"name": spec.name, "options": dict(spec.options), "seed": spec.seed},
        demonstration=list(task.demonstration),
        metadata=dict(task.metadata),
    )


def task_from_json(data: Json) -> Task:
    spec = data.get("environment")
    return Task(
        id=data["id"],
        messages=_messages_from_json(data.get("messages", [])),
        answer=data.get("answer"),
        environment=EnvironmentSpec(**spec) if spec else None,
        demonstration=tuple(data.get("demonstration", ())),
        metadata=data.get("metadata", {}),
    )


def episode_to_json(episode: Episode, *, routes: bool = False) -> Json:
    """An episode, its segments once."""
    table: list[Segment] = []
    places: dict[Segment, int] = {}
    seen: dict[int, int] = {}  # by identity: the hash of a segment is that of all its tokens

    def place(segment: Segment) -> int:
        if id(segment) not in seen:
            found = seen[id(segment)] = places.setdefault(segment, len(table))
            if found == len(table):
                table.append(segment)
        return seen[id(segment)]

    threads = [{"segments": [place(s) for s in thread.segments], "home": list(thread.home)} for thread in episode.threads]
    turns = [
        _sparse(
            index=turn.index,
            observation=messages_to_json(turn.observation),
            response=place(turn.response),
            thread=turn.thread,
            segment=turn.segment,
            reward=_number(turn.reward),
            info=turn.info,
            parts={name: _number(value) for name, value in turn.parts.items()},
            cut=turn.cut or None,
            after=turn.after,
        )
        for turn in episode.turns
    ]
    names = {"id": episode.id, "task_id": episode.task_id, "group_id": episode.group_id, "index": episode.index}
    return names | _sparse(
        status=episode.status.value,
        failure=episode.failure,
        scores=[score_to_json(score) for score in episode.scores],
        info=episode.info,
        head=messages_to_json(episode.head),
        turns=turns,
        threads=threads,
        segments=[
            _segment_to_json(segment) | _sparse(routes=_routes_to_json(segment.routes) if routes else None)
            for segment in table
        ],
    )


def episode_from_json(data: Json) -> Episode:
    table = [_segment_from_json(segment) for segment in data.get("segments", [])]
    turns = tuple(
        Turn(
            index=turn["index"],
            observation=_messages_from_json(turn.get("observation", [])),
            response=table[turn["response"]],
            thread=turn["thread"],
            segment=turn["segment"],
            reward=_float(turn.get("reward")),
            info=turn.get("info", {}),
            parts={name: float(value) for name, value in turn.get("parts", {}).items()},
            cut=turn.get("cut", False),
            after=turn.get("after"),
        )
        for turn in data.get("turns", [])
    )
    return Episode(
        id=data["id"],
        task_id=data["task_id"],
        group_id=data["group_id"],
        index=data["index"],
        threads=tuple(
            Thread(tuple(table[place] for place in thread["segments"]), tuple(thread["home"]))
            for thread in data.get("threads", [])
        ),
        turns=turns,
        status=Status(data["status"]),
        failure=data.get("failure", ""),
        scores=tuple(_score_from_json(score) for score in data.get("scores", [])),
        info=data.get("info", {}),
        head=_messages_from_json(data.get("head", [])),
    )


def score_to_json(score: Score) -> Json:
    """A score without the fields that are as usual."""
    return {"name": score.name} | _sparse(
        value=_number(score.value),
        weight=score.weight,
        scope=score.scope if score.scope != "episode" else None,
        turn=score.turn,
        span=list(score.span) if score.span else None,
        correct=score.correct,
        reason=score.reason,
    )


def _score_from_json(data: Json) -> Score:
    span = data.get("span")
    return Score(
        name=data["name"],
        value=_float(data.get("value")),
        weight=data.get("weight", 1.0),
        scope=data.get("scope", "episode"),
        turn=data.get("turn"),
        span=(span[0], span[1]) if span else None,
        correct=data.get("correct"),
        reason=data.get("reason", ""),
    )


def _segment_to_json(segment: Segment) -> Json:
    return _sparse(
        author=segment.author,
        name=segment.name,
        text=segment.text,
        tokens=list(segment.tokens),
        media=[{"index": span.index, **_media_to_json(span.media)} for span in segment.media],
        logprobs=_numbers(segment.logprobs),
        sampled_logprobs=_numbers(segment.sampled_logprobs),
        byte_ends=list(segment.byte_ends),
        policy_version=segment.policy_version,
        versions=[[span.version, span.start, span.end] for span in segment.versions],
    )


def _segment_from_json(data: Json) -> Segment:
    return Segment(
        author=data["author"],
        tokens=tuple(data.get("tokens", ())),
        media=tuple(MediaSpan(span["index"], _media_from_json(span)) for span in data.get("media", [])),
        text=data.get("text", ""),
        logprobs=_floats(data.get("logprobs", ())),
        sampled_logprobs=_floats(data.get("sampled_logprobs", ())),
        byte_ends=tuple(data.get("byte_ends", ())),
        policy_version=data["policy_version"],
        name=data.get("name", ""),
        versions=tuple(VersionSpan(*span) for span in data.get("versions", ())),
        routes=_routes_from_json(data.get("routes")),
    )


def _routes_to_json(routes: Routes | None) -> Json | None:
    if routes is None:
        return None
    return vars(routes) | {"context": b64encode(routes.context).decode(), "own": b64encode(routes.own).decode()}


def _routes_from_json(data: Json | None) -> Routes | None:
    if data is None:
        return None
    return Routes(**{**data, "context": b64decode(data["context"]), "own": b64decode(data["own"])})


def messages_to_json(messages: Sequence[Message]) -> list[Json]:
    """Messages; a medium is a reference: kind, hash, origin, and the decoding parameters that are not the usual ones."""
    return [
        {
            "role": message.role,
            "content": [{"text": b.text} if isinstance(b, Text) else _media_to_json(b) for b in message.content],
        }
        | _sparse(tools=message.tools)
        for message in messages
    ]


def _messages_from_json(data: list[Json]) -> tuple[Message, ...]:
    found = []
    for message in data:
        blocks = tuple(Text(block["text"]) if "text" in block else _media_from_json(block) for block in message["content"])
        found.append(Message(message["role"], blocks, message.get("tools", "")))
    return tuple(found)


def _media_to_json(media: Media) -> Json:
    asked = None if media.parameters is None else parameters_to_data(media.parameters)
    changed = None if media.augmentation is None else parameters_to_data(media.augmentation)
    return {"kind": media.kind, "hash": media.hash} | _sparse(origin=media.origin, parameters=asked, augmentation=changed)


def _media_from_json(data: Json) -> Media:
    kind = USUAL.get(data["kind"])
    asked = None if kind is None else parameters_from(kind, data.get("parameters", {}), logged=True)
    changed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.get("augmentation", {}).items()}
    augmentation = Augmentation(**changed) if changed else None
    return Media(data["kind"], data["hash"], data.get("origin", ""), asked, augmentation)


def _sparse(**fields: Any) -> Json:
    """The fields without None, empty strings and empty collections."""
    return {name: value for name, value in fields.items() if value is not None and value not in ("", [], {}, ())}


def _number(value: float | None) -> float | str | None:
    """A JSON number; one that is not finite as its name, which ``float`` reads back."""
    return value if value is None or math.isfinite(value) else str(value)


def _float(value: float | str | None) -> float | None:
    return float(value) if isinstance(value, str) else value


def _numbers(values: Sequence[float]) -> list[float | str | None]:
    if all(map(math.isfinite, values)):  # the usual case, for two numbers per token
        return list(values)
    return [_number(value) for value in values]


def _floats(values: Sequence[float | str]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


TRANSCRIPTS_SCHEMA = """
CREATE TABLE IF NOT EXISTS transcripts (episode TEXT, term TEXT, key TEXT, model TEXT, prompt TEXT, messages TEXT,
  answer TEXT, PRIMARY KEY (episode, term, key)) WITHOUT ROWID
"""
INSERT_TRANSCRIPT = "INSERT OR {} INTO transcripts VALUES (?, ?, ?, ?, ?, ?, ?)"
DELETE_TRANSCRIPTS = "DELETE FROM transcripts WHERE episode = ? AND term = ?"


class JudgeQuestion(Protocol):
    """A question to a judge, as far as its transcript has it (``rewards/judges/judgements.py``)."""

    @property
    def key(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def messages(self) -> tuple[Message, ...]: ...


@dataclass(frozen=True)
class TranscriptLine:
    """One question that a reward service asked a model, and the answer."""

    model: str
    prompt: str
    question: str
    answer: str


class Transcripts:
    """The questions about each episode and the judges' answers, in a SQLite file; without a path nothing is kept.

    A row's key is episode, term and judgement, so a resumed run, which asks again or finds the answer in the cache, leaves
    the same rows. Media are named by their hash. A reward service's own questions are kept here as lines.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None

    def keep(self, about: tuple[str, ...], term: str, request: JudgeQuestion, answer: str) -> None:
        """Keep a question about these episodes and its answer."""
        self._put("REPLACE", about, term, request, answer)

    def keep_failure(self, about: tuple[str, ...], term: str, request: JudgeQuestion, why: str) -> None:
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
                db.execute(DELETE_TRANSCRIPTS, (episode, term))
                db.executemany(INSERT_TRANSCRIPT.format("REPLACE"), [(episode, term, *row) for row in rows])

    def copy(self, source: str, episode: str, term: str) -> None:
        """Give an episode what a term has kept for another; where it has nothing, the episode's own rows stay."""
        if self.path is None or not self.path.exists():
            return
        asked = "SELECT ?, term, key, model, prompt, messages, answer FROM transcripts WHERE episode = ? AND term = ?"
        with self._writing() as db, db:
            db.execute("BEGIN IMMEDIATE")
            rows = db.execute(asked, (episode, source, term)).fetchall()
            if rows:
                db.execute(DELETE_TRANSCRIPTS, (episode, term))
                db.executemany(INSERT_TRANSCRIPT.format("REPLACE"), rows)

    def _put(self, otherwise: str, about: tuple[str, ...], term: str, request: JudgeQuestion, answer: str) -> None:
        if self.path is None or not about:
            return
        messages = json.dumps(
            [{"role": m.role, "content": [_transcript_block(b) for b in m.content]} for m in request.messages]
        )
        rows = [(episode, term, request.key, request.model, request.prompt, messages, answer) for episode in about]
        with self._writing() as db:
            db.executemany(INSERT_TRANSCRIPT.format(otherwise), rows)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """The open file, for one writer at a time."""
        assert self.path is not None, "without a path nothing is kept"
        with self._lock, database_errors(self.path, "the file of judges' transcripts", "Remove it."):
            if self._db is None:
                self._db = sqlite3.connect(self.path, timeout=30.0, check_same_thread=False, isolation_level=None)
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute(TRANSCRIPTS_SCHEMA)
            yield self._db

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None


def _transcript_block(block: Block) -> dict[str, str]:
    if isinstance(block, Text):
        return {"text": block.text}
    changed = {} if block.augmentation is None else {"augmentation": block.augmentation.description}
    return {"media": block.kind, "hash": block.hash, **changed}


def read_transcripts(path: Path, episode: str) -> list[dict[str, Any]]:
    """Questions to judges about an episode and their answers, by term; the reason in their place if the file is damaged."""
    if not path.exists():
        return []
    names = ("term", "model", "prompt", "messages", "answer")
    try:
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30.0)
        try:
            asked = "SELECT term, model, prompt, messages, answer FROM transcripts WHERE episode = ? ORDER BY term, key"
            rows = db.execute(asked, (episode,)).fetchall()
        finally:
            db.close()
    except sqlite3.Error as error:
        reason = f"'{path.name}' cannot be read: {error}"
        return [{"term": "", "model": "nobody", "prompt": "transcripts", "messages": [], "answer": reason}]
    return [{**dict(zip(names, row, strict=True)), "messages": json.loads(row[3])} for row in rows]


@dataclass
class Retention:
    """Keeps the episode logs of a run within their bounds. ``full_steps`` 0: every step stays whole.

    Example, full_steps 200 and sampled_steps 1000, at step 5,200: steps 5,001 to 5,200 and the first logged step are whole.
    Of 5,000 older ones at most 1,000 may stay, so of those that 8 divides (625) the first group stays, and the others go.
    Above ``episodes_gib`` the oldest files after the first go until the rest fits. The result is a function of the step and
    of the files' sizes: a run that was killed and resumed ends with the same files. Nothing that a resume reads is touched.
    """

    directory: RunDirectory
    full_steps: int
    sampled_steps: int
    budget: int
    _sizes: dict[Path, int] = field(default_factory=dict)
    _thinned: set[Path] = field(default_factory=set)
    _notes: list[str] = field(default_factory=list)
    _noted: bool = False

    def apply(self, step: int) -> list[str]:
        """Thin and remove logs as due at ``step``; returns notes."""
        self._notes = []
        if not self._sizes:
            for folder in (self.directory.episodes, self.directory.eval):
                self._sizes |= {path: path.stat().st_size for path in folder.glob("step_*.jsonl") if path.exists()}
        for path in (self.directory.episodes_of(step), *self.directory.eval.glob(f"step_{step:06d}_*.jsonl")):
            if path.exists():
                self._sizes[path] = path.stat().st_size
        if self.full_steps:
            self._thin_steps(step)
            for path in self._logs(self.directory.eval)[1:-EVALUATIONS_WHOLE]:
                self._thin(path, GROUPS_OF_AN_EVALUATION)
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
        if gone and not self._noted:
            self._noted = True
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
