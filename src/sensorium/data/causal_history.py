"""The planner ``causal_history``: a row's task has the memories that the policy wrote of earlier clips of its video.

It reads memories from responses (``parse_memory``, ``parse_facts``) and takes tasks from sources that know the clip of each
row (``CausalSource``).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from sensorium.data.mixture import SkippedRow, TaskSource, TaskStream, stable_hash, with_way_out
from sensorium.data.planner import GroupOutcome, PlannedTasks
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError
from sensorium.vocabulary.task import Task

END_OF_THOUGHT = "</think>"
FENCE = "`jsonJSON"  # the characters of a fence: three backticks and "json", or a part of them


def parse_memory(text: str) -> str | None:
    """The memory of a response: exactly one ``</think>``, then JSON with the one key ``description``, not empty.

    The JSON may be in a fence of three backticks, as models like to write it, or in a part of one, as TaskMem reads it.
    """
    description = _description(text)
    return description if _is_usable(description) else None


def parse_facts(text: str) -> tuple[str, ...] | None:
    """A semantic memory in the same form: its ``description`` is a list of facts, or one of them as a text."""
    description = _description(text)
    facts = description if isinstance(description, list) else [description]
    return tuple(facts) if facts and all(map(_is_usable, facts)) else None


def _description(text: str) -> Any:
    _, end, rest = text.partition(END_OF_THOUGHT)
    if not end or END_OF_THOUGHT in rest:
        return None
    try:
        found = json.loads(rest.strip().strip(FENCE))
    except (ValueError, RecursionError):
        return None
    return found["description"] if isinstance(found, dict) and list(found) == ["description"] else None


def _is_usable(description: Any) -> bool:
    if not isinstance(description, str) or not description.strip():
        return False
    try:
        description.encode()
    except UnicodeEncodeError:  # a lone surrogate (an escape such as \ud800): no later prompt could hold it
        return False
    return True


Choice = Literal["first", "best", "sampled"]
Memory = str | list[str]  # a description of a clip, or the facts of a semantic memory
LOOK_AHEAD = 2  # passes over the rows that one draw may look through


@dataclass(frozen=True)
class ClipPlace:
    """Which clip of which video a row is about, and the clips whose memories it needs. ``facts``: it writes a list."""

    video: str
    clip: int
    needs: tuple[int, ...] = ()
    facts: bool = False


@runtime_checkable
class CausalSource(Protocol):
    """A source whose tasks contain the memories written of earlier clips."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...

    def place_of(self, index: int) -> ClipPlace:
        """The clip of a row; cheap, no media are read."""
        ...

    def with_history(self, index: int, memories: Mapping[int, Memory]) -> Task:
        """The task with these memories, by clip number; other clips have none."""
        ...


def without_history(source: TaskSource, row: int, planner: str) -> Task:
    """A row as it can be looked at before a run: with an empty history where the planner is causal_history."""
    if planner == "causal_history" and isinstance(source, CausalSource):
        return source.with_history(row, {})
    return source[row]


def gaps(source: CausalSource) -> dict[int, str]:
    """The rows that need the memory of a clip that no row writes, each with an error message."""
    places = [source.place_of(row) for row in range(len(source))]
    written = {(place.video, place.clip) for place in places}
    found = {}
    for row, place in enumerate(places):
        lost = [clip for clip in place.needs if (place.video, clip) not in written]
        if lost:
            found[row] = (
                f"row {row + 1} of the clips (clip {place.clip} of video '{place.video}') needs the memory of "
                f"clip {lost[0]}, and no row writes it. Add the row, or begin the video at an earlier clip."
            )
    return found


class CausalHistory:
    """Draws rows in order, each once the memories it needs are settled, and keeps the memories that were written.

        rows in order     a0 b0 a1 b1 a2 …    (video and clip; a1 needs the memory of a0, a2 those of a0 and a1)
        draw(2)           a0 b0               a1 and b1 wait: nothing has been written yet
        observe           a0 → "a red square", b0 → (no attempt could be parsed, so there is no memory)
        draw(2)           a1 with the history "a red square", b1 with an empty one

    The history is the planner's state and so in the checkpoint: a resumed run has exactly the memories written up to it.
    A row that has to wait is passed over and comes as soon as it can. A second pass over the rows writes its own memories.

    ``choice``: which attempt's memory is kept, the ``first`` that can be parsed, the ``best`` rewarded of them, or one
    ``sampled`` among them. ``attempts``: how often a row is played until one can be parsed; after that its successors get
    no memory of it.
    """

    observes = True
    row_by_row = True

    def __init__(self, stream: TaskStream, choice: Choice = "first", attempts: int = 1) -> None:
        if choice not in ("first", "best", "sampled"):
            raise RecipeError(f"tasks.planner: choice is '{choice}'; it is first, best or sampled.")
        if attempts < 1:
            raise RecipeError(f"tasks.planner: attempts is {attempts}; a row is played at least once.")
        if len(stream.sources) != 1 or not isinstance(stream.sources[0], CausalSource):
            raise RecipeError(
                "tasks.planner: causal_history takes one source of clips with place_of() and with_history(), such as "
                "taskmem; tasks.train has another."
            )
        if stream.shuffle:
            raise RecipeError("tasks.shuffle: causal_history takes rows in their order; set tasks.shuffle: false.")
        self.stream, self.choice, self.attempts = stream, choice, attempts
        self.source: CausalSource = stream.sources[0]
        self._places = [self.source.place_of(row) for row in range(len(self.source))]
        self._gaps = gaps(self.source)
        if self._gaps and stream.on_bad_row == "refuse":
            raise with_way_out(TaskError(next(iter(self._gaps.values()))))
        self.first = 0  # the first position that is not settled; positions count on from pass to pass
        self.settled: set[int] = set()
        self.open: dict[str, int] = {}  # positions drawn since the last observation, by task id
        self.tries: dict[int, int] = {}
        self.history: dict[tuple[int, str], dict[int, Memory | None]] = {}  # memories by clip, by (pass, video)

    def turns(self) -> list[int]:
        return [max([self.first, *(position + 1 for position in (*self.settled, *self.open.values()))])]

    def draw(self, count: int) -> PlannedTasks:
        tasks: list[Task] = []
        skipped: list[SkippedRow] = []
        taken = set(self.open.values())
        rows = len(self._places)
        for position in range(self.first, self.first + LOOK_AHEAD * rows):
            if len(tasks) == count:
                break
            turn, row = divmod(position, rows)
            needs, known = self._places[row].needs, self.history.get((turn, self._places[row].video), {})
            ready = row in self._gaps or all(clip in known for clip in needs)
            if position in self.settled or position in taken or not ready:
                continue
            try:
                if row in self._gaps:
                    raise TaskError(self._gaps[row])
                memories = {clip: memory for clip in needs if (memory := known[clip]) is not None}
                task = self.source.with_history(row, memories)
            except (TaskError, MediaError) as error:
                if self.stream.on_bad_row == "refuse":
                    raise with_way_out(error) from error
                skipped.append(SkippedRow(0, row, str(error)))
                self._settle(position, None)
                continue
            if task.id in self.open:  # the same row in the next pass: the first must be observed before
                continue
            tasks.append(task)
            self.open[task.id] = position
        if len(tasks) < count:
            videos = len({place.video for place in self._places})
            raise TaskError(
                f"causal_history: of {count} tasks only {len(tasks)} can be drawn, because the others wait for their "
                f"memories. The data has {videos} videos, and of each one clip can be played at a time: set "
                "batch.prompts_per_step to at most that."
            )
        return PlannedTasks(tuple(tasks), tuple(skipped))

    def observe(self, groups: Sequence[GroupOutcome]) -> None:
        """Keep one memory of each group; a row that was drawn and not played to its end counts as a failed attempt."""
        for outcome in groups:
            position = self.open.pop(outcome.task_id, None)
            if position is not None:
                self._conclude(position, self._chosen(outcome, position))
        for position in [*self.open.values()]:
            self._conclude(position, None)
        self.open.clear()
        while self.first in self.settled:
            self.settled.discard(self.first)
            self.first += 1
        oldest = self.first // len(self._places) - 1  # memories of the last complete pass stay readable
        self.history = {key: memories for key, memories in self.history.items() if key[0] >= oldest}

    def state_dict(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "settled": sorted(self.settled),
            "open": [[id, position] for id, position in self.open.items()],
            "tries": [[position, tries] for position, tries in sorted(self.tries.items())],
            "history": [
                [turn, video, [[clip, memory] for clip, memory in sorted(memories.items())]]
                for (turn, video), memories in sorted(self.history.items())
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.settled = state["first"], set(state["settled"])
        self.open = dict(state["open"])
        self.tries = dict(state["tries"])
        self.history = {(turn, video): dict(memories) for turn, video, memories in state["history"]}

    def _chosen(self, outcome: GroupOutcome, position: int) -> Memory | None:
        """The memory of a group that is kept."""
        parse: Callable[[str], Any] = parse_memory
        if self._places[position % len(self._places)].facts:
            parse = parse_facts
        parsed = [(i, memory) for i, text in enumerate(outcome.responses) if (memory := parse(text)) is not None]
        if not parsed:
            return None
        if self.choice == "best":
            rewarded = [(reward, -i, memory) for i, memory in parsed if (reward := outcome.rewards[i]) is not None]
            chosen = max(rewarded)[2] if rewarded else parsed[0][1]
        else:
            first = self.choice == "first"
            chosen = parsed[0 if first else stable_hash(f"{self.stream.seed}/memory/{position}") % len(parsed)][1]
        return list(chosen) if isinstance(chosen, tuple) else chosen

    def _conclude(self, position: int, memory: Memory | None) -> None:
        """Settle a row, or let it be drawn again if it has no memory and attempts are left."""
        tries = self.tries.pop(position, 0) + 1
        if memory is None and tries < self.attempts:
            self.tries[position] = tries
        else:
            self._settle(position, memory)

    def _settle(self, position: int, memory: Memory | None) -> None:
        turn, row = divmod(position, len(self._places))
        place = self._places[row]
        self.history.setdefault((turn, place.video), {})[place.clip] = memory
        self.settled.add(position)
