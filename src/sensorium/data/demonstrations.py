"""Recorded demonstrations: a folder of whole episodes, which a warm start reads instead of playing the environment.

    rows.jsonl       {"place": 0, "sample": 0, "id": "maze:7", "reward": 1.0, "head": 1, "turns": [1, 1], "messages": [
                      {"role": "system", …}, {"role": "user", …}, {"role": "assistant", …}, {"role": "user", …}, …], …}
    media/HASH.png   what messages show, by {"type": "image", "path": "media/HASH.png"}
    left_out.jsonl   episodes that were not kept, and why
    recording.json   what was asked for

``head`` counts the environment's messages before its first observation, ``turns`` the messages of each observation; after
each of them comes the response, a message of the assistant; ``after``, of episodes with several conversations, the turn
that each observation follows. Invariants: a row is appended whole, after its media; rows of
a whole recording are in the order in which a warm start draws their tasks (``place``), however they were played.
"""

import json
import mimetypes
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from sensorium.data.media_files import mime_type
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import TaskStream, permuted
from sensorium.data.row_format import Place, messages_of
from sensorium.data.rows import JsonlRows
from sensorium.recipe.schema import Recipe
from sensorium.runs.durable import append_row, drafted, read_json, read_rows, write_rows, write_whole, writing
from sensorium.runs.run_directory import NAME as LOCK
from sensorium.vocabulary.content import Block, Media, Message, Text, assistant
from sensorium.vocabulary.decoding import VideoParameters, parameters_to_data
from sensorium.vocabulary.episode import Episode, Score, Segment, Status, Turn
from sensorium.vocabulary.errors import MediaError, RecordError, TaskError
from sensorium.vocabulary.plain import counted, number_of
from sensorium.vocabulary.task import OBSERVED, RECORDED, EnvironmentSpec, Task

NAMED = re.compile(r"media/([0-9a-f]{64})\.\w+")  # a medium's file
TYPES = {"picture": "image", "video": "video", "sound": "audio"}  # of blocks
Json = dict[str, Any]


@dataclass(frozen=True)
class RecordedEnd:
    """What a recorded environment named: how its episode ended, and the kind of its task."""

    truncated: bool = False
    success: bool | None = None
    category: str = ""


@dataclass(frozen=True)
class RecordingClaim:
    """What a recording was asked for. A folder with another claim is refused; ``tasks`` alone may grow."""

    recipe: str
    by: str
    tasks: int
    samples: int
    min_reward: float | None
    seed: int
    content: Json


class Recording:
    """The folder of a recording."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows, self.left_out = path / "rows.jsonl", path / "left_out.jsonl"
        self.claim, self.media = path / "recording.json", path / "media"
        self.answers = path / "answers"  # of a served model, by question

    def exists(self) -> bool:
        return self.claim.is_file()

    def read_claim(self) -> RecordingClaim:
        """What was asked for; an error names the command that records."""
        if not self.exists():
            raise TaskError(
                f"'{self.path}' holds no recorded demonstrations: it has no {self.claim.name}. Record them with "
                f"sensorium record RECIPE --to {self.path}."
            )
        try:
            claim = RecordingClaim(**read_json(self.claim, "Record the demonstrations again, into another folder."))
            if not isinstance(claim.tasks, int) or not isinstance(claim.samples, int):
                raise TypeError(f"tasks is {claim.tasks!r}, samples {claim.samples!r}")
        except TypeError as error:
            raise RecordError(f"'{self.claim}' is damaged: {error}. Record into another folder.") from error
        return claim

    def take(self, claim: RecordingClaim) -> None:
        """Begin, or go on with what was begun; a recording of something else is refused."""
        if self.exists():
            begun = asdict(self.read_claim())
            now = json.loads(json.dumps(asdict(claim)))
            other = [key for key in now if key != "tasks" and begun.get(key) != now[key]]
            if other or now["tasks"] < begun["tasks"]:
                key = (other or ["tasks"])[0]
                values = "" if key == "content" else f" ({begun.get(key)} there, {now[key]} now)"
                what = "tasks, rollout or rewards of the recipe" if key == "content" else key
                raise RecordError(
                    f"'{self.path}' holds demonstrations that were recorded with other {what}{values}. Record into another "
                    "folder (--to), or remove this one."
                )
        elif any(entry.name not in (LOCK, self.answers.name) for entry in self.path.iterdir()):
            raise RecordError(f"'{self.path}' is not empty and holds no recording. Record into another folder (--to).")
        write_whole(self.claim, json.dumps(asdict(claim), indent=1) + "\n")

    def decided(self) -> set[tuple[int, int]]:
        """(place, sample) of the episodes that were kept or left out."""
        return {(row["place"], row["sample"]) for path in (self.rows, self.left_out) for row in self.read(path)}

    def read(self, path: Path) -> Iterator[Json]:
        """The rows of one of its files; one without place and sample is an error."""
        for number, row in enumerate(read_rows(path), start=1):
            for key, kind in (("place", int), ("sample", int), ("reward", (int, float, type(None)))):
                if not isinstance(row.get(key), kind):
                    raise RecordError(
                        f"{path}, line {number}: '{key}' is {row.get(key)!r:.40}. Restore the file, or remove that line: "
                        "the command that recorded plays its episode again."
                    )
            yield row

    def keep(self, row: Json, media: Sequence[Media], store: MediaStore) -> None:
        """Append an episode, after the media that it shows."""
        for medium in media:
            self._copy(medium, store)
        append_row(self.rows, row)

    def leave_out(self, place: int, sample: int, task_id: str, reward: float | None, why: str) -> None:
        """Append an episode that is not kept."""
        append_row(self.left_out, {"place": place, "sample": sample, "id": task_id, "reward": reward, "why": why})

    def sort(self) -> None:
        """Put the rows into the order of their places, which they have not if episodes were played side by side."""
        rows = list(self.read(self.rows))
        ordered = sorted(rows, key=lambda row: (row["place"], row["sample"]))
        if rows != ordered:
            write_rows(self.rows, ordered)

    def _copy(self, medium: Media, store: MediaStore) -> None:
        place, source = self.path / file_of(medium, store), store.source_of(medium)
        if place.exists():
            return
        if isinstance(source, bytes):
            return write_whole(place, source)
        with writing(place):
            self.media.mkdir(parents=True, exist_ok=True)
            with drafted(place) as draft:
                try:
                    os.link(source, draft)
                except OSError:  # another file system
                    shutil.copyfile(source, draft)


@dataclass(frozen=True)
class RecordingSummary:
    """A recording in numbers: episodes that were kept, left out by reason, and those that are missing."""

    claim: RecordingClaim
    kept: int
    left_out: Mapping[str, int]
    missing: int
    rewards: tuple[float, ...]

    @property
    def lines(self) -> Iterator[str]:
        """The facts, one a line."""
        unwanted = "".join(f"; {count:,} left out: {why}" for why, count in self.left_out.items())
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else 0.0
        reward = f", reward {mean:.3g} ({min(self.rewards):g} to {max(self.rewards):g})" if self.rewards else ""
        yield f"{counted(self.kept, 'episode')} recorded by {self.claim.by}{reward}{unwanted}"
        if self.missing:
            asked = counted(self.claim.tasks * self.claim.samples, "episode")
            yield f"{self.missing:,} of {asked} asked for are missing: they failed, or the recording was interrupted"
        if self.claim.min_reward is None and (low := sum(reward <= 0 for reward in self.rewards)):
            yield f"{low:,} of them have no reward above 0; record with --min-reward to leave such out"


def summary_of(recording: Recording) -> RecordingSummary:
    """A recording's summary."""
    claim, rows = recording.read_claim(), list(recording.read(recording.rows))
    left_out = Counter(str(row.get("why")) for row in recording.read(recording.left_out))
    missing = claim.tasks * claim.samples - len(rows) - left_out.total()
    rewards = tuple(row["reward"] for row in rows if row.get("reward") is not None)
    return RecordingSummary(claim, len(rows), left_out, max(0, missing), rewards)


def file_of(medium: Media, store: MediaStore) -> str:
    """The path of a medium in a recording's folder."""
    mime = mime_type(store.head_of(medium, 64), medium.kind)
    return f"media/{medium.hash}{mimetypes.guess_extension(mime) or '.' + mime.rpartition('/')[2]}"


def row_of(place: int, task: Task, episode: Episode, store: MediaStore) -> tuple[Json, list[Media]]:
    """An episode as a row, and the media that it shows."""
    if task.environment is None:
        head = task.messages[: len(task.messages) - len(episode.turns[0].observation)]
    else:
        head = episode.head
    turns = [(*turn.observation, assistant(turn.response.text)) for turn in episode.turns]
    messages = [*head, *(message for turn in turns for message in turn)]
    media = list(dict.fromkeys(medium for message in messages for medium in message.media))
    end = RecordedEnd(
        truncated=episode.status is Status.TRUNCATED,
        success=episode.info.get("success"),
        category=str(episode.info.get("category") or ""),
    )
    spec = task.environment
    row = {
        "place": place,
        "sample": episode.index,
        "id": task.id,
        "reward": episode.reward,
        "scores": {score.name: score.value for score in episode.scores if score.turn is None and score.value is not None},
        "answer": task.answer,
        "metadata": dict(task.metadata),
        "environment": spec and {"name": spec.name, "seed": spec.seed, "options": dict(spec.options)},
        "end": asdict(end),
        "rewards": [turn.parts or turn.reward for turn in episode.turns],
        "head": len(head),
        "turns": [len(turn.observation) for turn in episode.turns],
        "after": [turn.after for turn in episode.turns],
        "messages": [_message_row(message, store) for message in messages],
    }
    return row, media


def _message_row(message: Message, store: MediaStore) -> Json:
    content: Any = [_block_row(block, store) for block in message.content]
    if len(content) == 1 and "text" in content[0]:
        content = content[0]["text"]
    return {"role": message.role, "content": content} | ({"tools": message.tools} if message.tools else {})


def _block_row(block: Block, store: MediaStore) -> Json:
    if isinstance(block, Text):
        return {"type": "text", "text": block.text}
    asked = {} if block.parameters is None else parameters_to_data(block.parameters)
    if isinstance(block.parameters, VideoParameters) and block.parameters.sound_from:
        raise MediaError(f"{block.name}: a video that is heard with the sound of another file cannot be recorded.")
    return {"type": TYPES[block.kind], "path": file_of(block, store), **asked}


class DemonstrationRows(JsonlRows):
    """The tasks of a recording: each is its episode again, with all that was shown and answered."""

    def __init__(self, path: str | Path, store: MediaStore) -> None:
        self.recording = Recording(Path(path))
        self.summary = summary_of(self.recording)
        if not self.summary.kept:
            raise TaskError(f"'{path}' holds no episode to learn from: {'; '.join(self.summary.lines)}.")
        super().__init__(str(self.recording.rows), store)
        self._length = self.summary.kept  # a torn last row is none

    def row(self, index: int) -> Mapping[str, Any]:
        """A row as it was written."""
        return self._read(index)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = self._place(index)
        try:
            return task_of(self._read(index), place)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise place.error(f"no recorded demonstration: {type(error).__name__}: {error}.") from error


def task_of(row: Mapping[str, Any], place: Place) -> Task:
    """The task that plays a row's episode again."""
    raw = [dict(message) for message in row["messages"]]
    tools = [str(message.pop("tools", "")) for message in raw]
    parsed = messages_of(raw, place)
    messages = [Message(one.role, one.content, offered) for one, offered in zip(parsed, tools, strict=True)]
    _refuse_exchanged(raw, messages, place)
    left = iter(messages)
    shown, responses = list(islice(left, row["head"])), list[Message]()
    for count in row["turns"]:
        shown += islice(left, count)
        responses += islice(left, 1)
    ends = len(shown) + len(responses) == len(messages) and len(responses) == len(row["turns"]) > 0
    if not ends or any(one.role != "assistant" for one in responses):
        raise place.error("its messages are not those that head and turns count.")
    rewards = [_reward(reward) for reward in row["rewards"]]
    if len(rewards) != len(responses):
        raise place.error(f"it has {counted(len(responses), 'response')} and {counted(len(rewards), 'reward')}.")
    end = asdict(RecordedEnd(**row["end"]))
    after = row.get("after") or [None] * len(responses)
    if len(after) != len(responses) or not all(one is None or -1 <= one < turn for turn, one in enumerate(after)):
        raise place.error(f"'after' must name an earlier turn, -1 or null for each of its {len(responses)} turns.")
    options = {"head": row["head"], "turns": row["turns"], "after": after, "rewards": rewards, "end": end}
    options[OBSERVED] = row.get("environment") is not None
    return Task(
        id=str(row["id"]),
        messages=tuple(shown),
        answer=row.get("answer"),
        environment=EnvironmentSpec(RECORDED, options),
        demonstration=tuple(response.text for response in responses),
        metadata=dict(row.get("metadata") or {}),
    )


def _refuse_exchanged(raw: Sequence[Mapping[str, Any]], messages: Sequence[Message], place: Place) -> None:
    """Refuse a file of the recording whose content is no longer the one that it is named by."""
    for given, message in zip(raw, messages, strict=True):
        blocks = () if isinstance(given["content"], str) else zip(given["content"], message.content, strict=True)
        for block, shown in blocks:
            named = NAMED.fullmatch(str(block.get("path"))) if isinstance(shown, Media) else None
            if named and isinstance(shown, Media) and named[1] != shown.hash:
                raise MediaError(
                    f"{place.where}: '{named[0]}' is not what was recorded: files there are named by their content. "
                    "Restore it, or record into another folder."
                )


def episodes_of(rows: DemonstrationRows, count: int) -> Iterator[tuple[Task, Episode]]:
    """The first episodes of a recording as texts and media, without tokens, and their tasks."""
    for index in range(min(count, len(rows))):
        row, task = rows.row(index), rows[index]
        assert task.environment is not None
        messages, turns, start = task.messages, [], task.environment.options["head"]
        for number, (size, text) in enumerate(zip(row["turns"], task.demonstration, strict=True)):
            reward = task.environment.options["rewards"][number]
            parts = dict(reward) if isinstance(reward, Mapping) else {}
            total = sum(parts.values()) if parts else reward
            shown = messages[start : start + size]
            turns.append(Turn(number, shown, Segment("model", (), text=text), 0, 0, total, parts=parts))
            start += size
        end = RecordedEnd(**task.environment.options["end"])
        status = Status.TRUNCATED if end.truncated else Status.FINISHED
        scores = () if row.get("reward") is None else (Score("reward", number_of(row["reward"]), correct=end.success),)
        head = messages[: task.environment.options["head"]]
        shown_task = replace(task, messages=(), environment=None)
        yield shown_task, Episode(task.id, task.id, task.id, 0, (), tuple(turns), status, scores=scores, head=head)


def _reward(reward: Any) -> Any:
    if isinstance(reward, Mapping):
        return {str(name): number_of(value) for name, value in reward.items()}
    return None if reward is None else number_of(reward)


class RecordedStream(TaskStream):
    """A recording's rows in their order, and in another order in each later epoch."""

    def at(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(position, length := len(self.sources[0]))
        return 0, permuted(place, length, f"{self.seed}/0/{epoch}") if epoch and self.shuffle else place


def demonstrations_of(recipe: Recipe, store: MediaStore) -> DemonstrationRows | None:
    """The recorded demonstrations that a recipe's warm start learns; None where it plays its tasks."""
    section = recipe.warm_start
    if section.demonstrations is None or not section.steps:
        return None
    return DemonstrationRows(section.demonstrations.expanduser(), store)
