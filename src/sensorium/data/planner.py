"""Planners: which task comes next, and what is in it, which may depend on the outcomes of earlier tasks.

    planner.draw(2)                     → PlannedTasks(tasks=(a, b))
    planner.observe([GroupOutcome("a", rewards=(1.0, 0.0), …), GroupOutcome("b", rewards=(1.0, 1.0), …)])
    planner.draw(2)                     → PlannedTasks(tasks=(a, c)): a was solved by some attempts only, so it comes again

Invariant: a draw is a function of how the planner was built and of the calls since (or of the loaded state and the calls
since), so that a resumed run draws what the uninterrupted one does.

The planner of memories is in ``causal_history.py``.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

from sensorium.data.lru import LRU
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import BoundedPlanner, SkippedRow, TaskSource, TaskStream, stable_hash
from sensorium.recipe.registry import build
from sensorium.recipe.schema import PlannerSection
from sensorium.vocabulary.errors import MediaError, RecipeError, SensoriumError, TaskError
from sensorium.vocabulary.plain import words
from sensorium.vocabulary.task import Task


@dataclass(frozen=True)
class PlannedTasks:
    """The tasks that come next, and rows that were skipped on the way."""

    tasks: tuple[Task, ...]
    skipped: tuple[SkippedRow, ...] = ()


@dataclass(frozen=True)
class GroupOutcome:
    """The outcome of one task in one step: an entry for every attempt, in the order of the group's members.

    ``rewards`` are None where a score is missing, ``correct`` where no term decides right or wrong. ``trained`` is False
    where the group was played to its end and left out of the update.
    """

    task_id: str
    rewards: tuple[float | None, ...]
    correct: tuple[bool | None, ...]
    responses: tuple[str, ...]
    trained: bool = True

    @property
    def success(self) -> float | None:
        """The share of right attempts; where no term decides right or wrong, the mean reward clipped to [0, 1]."""
        verdicts = [float(verdict) for verdict in self.correct if verdict is not None]
        values = verdicts or [min(1.0, max(0.0, reward)) for reward in self.rewards if reward is not None]
        return sum(values) / len(values) if values else None


class Planner(Protocol):
    """Decides which task comes next. Called from one thread at a time.

    ``observes``: True if a draw may depend on observations. The planner then gets the outcomes of every RL step before the
    next draw, and nothing is read ahead. False: it gets none, and the tasks and media of the next step are read while this
    one is trained on.

    A planner may also have ``row_by_row = True``: it draws every row once before any comes again, so that `epochs` have a
    meaning; ``turns()``: how many rows of each source of tasks.train it has drawn, repetitions included;
    ``whole_pass()``: the draws within which every task comes up; and ``metrics()``: numbers by name, asked after every step
    and written as ``planner/NAME``.
    """

    observes: bool

    def draw(self, count: int) -> PlannedTasks:
        """The next ``count`` tasks, exactly so many."""
        ...

    def observe(self, groups: Sequence[GroupOutcome]) -> None:
        """The outcomes of a step's groups, in the order in which their tasks were drawn."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that later draws depend on, as plain data (dicts, lists, texts, numbers); kept in the checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        ...


def make_planner(section: PlannerSection, stream: TaskStream, store: MediaStore) -> Planner:
    """The planner that a recipe names; RecipeError for an object that is no planner."""
    try:
        planner: Planner = build("planner", section.name, section.options, "tasks.planner", stream=stream, store=store)
    except SensoriumError:
        raise
    except Exception as error:  # a planner of the user's own may raise anything
        raise RecipeError(f"tasks.planner: '{section.name}' cannot be built: {words(error)}") from error
    for part in ("draw", "observe", "state_dict", "load_state_dict"):
        if not callable(getattr(planner, part, None)):
            raise RecipeError(
                f"tasks.planner: '{section.name}' has no {part}(); docs/guides/tasks.md says what a planner has."
            )
    return BoundedPlanner(planner, section.name) if ":" in section.name else planner


class MixturePlanner:
    """The recipe's mixture of sources in its order, whatever the outcomes."""

    observes = False
    row_by_row = True

    def __init__(self, stream: TaskStream) -> None:
        self.stream = stream
        self.position = 0

    def whole_pass(self) -> int:
        return self.stream.whole_pass()

    def turns(self) -> list[int]:
        return self.stream.turns(self.position)

    def draw(self, count: int) -> PlannedTasks:
        drawn = self.stream.draw(self.position, count)
        self.position = drawn.position
        return PlannedTasks(drawn.tasks, drawn.skipped)

    def observe(self, groups: Sequence[GroupOutcome]) -> None:
        """Ignore the outcomes."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class SuccessCurriculum(MixturePlanner):
    """Draws a share of its tasks from those whose last group succeeded in part, weighted by p · (1 - p).

    ``revisit`` is that share; the rest, and everything while no task is known to succeed in part, comes from the mixture
    in its order. Of the tasks that succeed in part the ``memory`` observed last are known. No task comes twice in a step
    by revisiting. Example with ``revisit: 0.5`` and groups of 4:

        step 1 draws a, b, c, d from the mixture; of 4 attempts each, 2, 1, 0 and 4 succeed
        step 2 draws, for every second task on average, a or b again, with weights 2·2 to 1·3; the others are e, f, …

    c and d come again when the mixture comes back to them.
    """

    row_by_row = False
    observes = True

    def __init__(self, stream: TaskStream, revisit: float = 0.5, memory: int = 4096) -> None:
        if not 0 <= revisit < 1:
            raise RecipeError(f"tasks.planner: revisit is {revisit:g}; it is a share of the draws, from 0 to below 1.")
        if memory < 1:
            raise RecipeError(f"tasks.planner: memory is {memory}; at least one task must be known to be drawn again.")
        super().__init__(stream)
        self.revisit, self.draws = revisit, 0
        # Tasks that succeed in part, by id: source, row and success; those observed last come last.
        self.known: LRU[str, tuple[int, int, float]] = LRU(memory)
        # Tasks drawn since the last observation, by id: source and row (bounded: a warm start observes nothing).
        self.open: LRU[str, tuple[int, int]] = LRU(memory)

    def draw(self, count: int) -> PlannedTasks:
        tasks: list[Task] = []
        skipped: list[SkippedRow] = []
        for _ in range(count):
            task = self._revisited(skipped) if self._chance("coin") < self.revisit else None
            if task is None:
                drawn = self.stream.draw(self.position, 1)
                self.position = drawn.position
                skipped += drawn.skipped
                (task,) = drawn.tasks
                self.open.put(task.id, self.stream.at(self.position - 1))
            tasks.append(task)
            self.draws += 1
        return PlannedTasks(tuple(tasks), tuple(skipped))

    def observe(self, groups: Sequence[GroupOutcome]) -> None:
        """Remember the tasks that succeeded in part, and forget those that did not or no longer do."""
        for outcome in groups:
            place, success = self.open.peek(outcome.task_id), outcome.success
            if place is None or success is None:
                continue
            self.known.pop(outcome.task_id)
            if 0 < success < 1:
                self.known.put(outcome.task_id, (*place, success))
        self.open.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "draws": self.draws,
            "known": [[id, *entry] for id, entry in self.known.items()],
            "open": [[id, *place] for id, place in self.open.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.draws = state["position"], state["draws"]
        self.known.clear()
        self.open.clear()
        for id, source, row, success in state["known"]:
            self.known.put(id, (source, row, success))
        for id, source, row in state["open"]:
            self.open.put(id, (source, row))

    def _revisited(self, skipped: list[SkippedRow]) -> Task | None:
        """A task that succeeds in part and was not drawn since the last observation; None if there is none."""
        candidates = [(id, entry) for id, entry in self.known.items() if id not in self.open]
        if not candidates:
            return None
        ends = list(accumulate(success * (1 - success) for _, (_, _, success) in candidates))
        chosen = min(bisect_right(ends, self._chance("task") * ends[-1]), len(ends) - 1)
        id, (source, row, _) = candidates[chosen]
        try:
            task = self.stream.sources[source][row]
        except (TaskError, MediaError) as error:
            if self.stream.on_bad_row == "refuse":
                raise
            skipped.append(SkippedRow(source, row, str(error)))
            self.known.pop(id)
            return None
        self.open.put(id, (source, row))
        return task

    def _chance(self, use: str) -> float:
        """A number from 0 to below 1, a function of the seed, the draw and the use alone."""
        return (stable_hash(f"{self.stream.seed}/{use}/{self.draws}") >> 11) / 2**53


class LevelRows:
    """The rows of one level of a source, as a source."""

    def __init__(self, source: TaskSource, rows: range) -> None:
        self.source, self.rows = source, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Task:
        return self.source[self.rows[index]]


class LevelCurriculum:
    """Draws tasks of one level at a time: of the next one where groups succeed, of the one before where they fail.

    The levels are the sources of tasks.train in order; a source with ``levels``, ranges of its rows, has several. After
    each step the mean success of the last ``groups`` groups that were played at the level decides: from ``rise`` on the
    level rises, below ``fall`` it falls, and counting begins again. Example with ``groups: 4, rise: 0.7, fall: 0.2``:

        level 1    success 0.5 0.75 | 0.75 1.0        mean 0.75: to level 2
        level 2    0 0.25 | 0.25 0                    mean 0.125: back to level 1
    """

    observes = True

    def __init__(self, stream: TaskStream, rise: float = 0.7, fall: float = 0.2, groups: int = 32) -> None:
        if not 0 <= fall < rise <= 1:
            raise RecipeError(f"tasks.planner: rise is {rise:g} and fall {fall:g}; 0 ≤ fall < rise ≤ 1 is needed.")
        if groups < 1:
            raise RecipeError(f"tasks.planner: groups is {groups}; the success of at least one group decides.")
        places = [(i, rows) for i, source in enumerate(stream.sources) for rows in _levels_of(source)]
        if len(places) < 2:
            raise RecipeError(
                "tasks.planner: level_curriculum needs two levels at least: give the source environments "
                "levels: [{size: 3}, {size: 4}], or list a source for each level in tasks.train."
            )
        self._places, self.rise, self.fall, self.groups = places, rise, fall, groups
        self._streams = [
            TaskStream(
                [LevelRows(stream.sources[i], rows)],
                [1],
                seed=stream.seed,
                shuffle=stream.shuffle,
                on_bad_row=stream.on_bad_row,
            )
            for i, rows in places
        ]
        self.level = 0
        self.positions = [0] * len(places)
        self.successes: list[float] = []  # of the last groups at this level
        self._measured: dict[str, float] = {}

    def draw(self, count: int) -> PlannedTasks:
        drawn = self._streams[self.level].draw(self.positions[self.level], count)
        self.positions[self.level] = drawn.position
        source, rows = self._places[self.level]
        return PlannedTasks(drawn.tasks, tuple(replace(s, source=source, row=rows[s.row]) for s in drawn.skipped))

    def observe(self, groups: Sequence[GroupOutcome]) -> None:
        """Count the groups' success, and change the level where it is high or low."""
        found = [outcome.success for outcome in groups]
        self.successes = [*self.successes, *(success for success in found if success is not None)][-self.groups :]
        self._measured = {"level": self.level + 1}
        if not self.successes:
            return
        mean = sum(self.successes) / len(self.successes)
        self._measured["success"] = mean
        step = 0 if len(self.successes) < self.groups else 1 if mean >= self.rise else -1 if mean < self.fall else 0
        if 0 <= self.level + step < len(self._places) and step:
            self.level += step
            self.successes = []

    def metrics(self) -> dict[str, float]:
        """The level that the last step was played at (the first is 1), and the success there."""
        return self._measured

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "positions": list(self.positions), "successes": list(self.successes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["positions"]) != len(self._places):
            raise RecipeError(
                f"tasks.planner: the checkpoint's level_curriculum has {len(state['positions'])} levels and tasks.train "
                f"has {len(self._places)}. Give it the levels that the run began with, or start a new run (model.path)."
            )
        self.level, self.positions = state["level"], list(state["positions"])
        self.successes = list(state["successes"])


def _levels_of(source: TaskSource) -> Sequence[range]:
    return getattr(source, "levels", ()) or (range(len(source)),)
