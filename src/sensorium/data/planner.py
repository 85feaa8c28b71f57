"""Planners: which task comes next, and what is in it. This may depend on what became of earlier tasks.

    planner.draw(2)                     → PlannedTasks(tasks=(a, b))
    planner.observe([GroupOutcome("a", rewards=(1.0, 0.0), …), GroupOutcome("b", rewards=(1.0, 1.0), …)])
    planner.draw(2)                     → PlannedTasks(tasks=(a, c)): a was solved by some attempts only, so it comes again

Invariant: what a planner draws is a function of how it was built and of the calls since (or of the state that was loaded
and the calls since), so that a resumed run draws what the uninterrupted one does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import BoundedPlanner, SkippedRow, TaskStream
from sensorium.recipe.names import build
from sensorium.recipe.schema import PlannerSection
from sensorium.vocabulary.errors import RecipeError, SensoriumError
from sensorium.vocabulary.plain import words
from sensorium.vocabulary.task import Task


@dataclass(frozen=True)
class PlannedTasks:
    """The tasks that come next, and rows that were left out on the way."""

    tasks: tuple[Task, ...]
    skipped: tuple[SkippedRow, ...] = ()


@dataclass(frozen=True)
class GroupOutcome:
    """What became of one task in one step: an entry for every attempt, in the order of the group's members.

    ``rewards`` are None where a score is missing, ``correct`` where no term tells right from wrong. ``trained`` is False
    where the group was played to its end and left out of the update.
    """

    task_id: str
    rewards: tuple[float | None, ...]
    correct: tuple[bool | None, ...]
    responses: tuple[str, ...]
    trained: bool = True

    @property
    def success(self) -> float | None:
        """The share of right attempts; where nothing tells right from wrong, the mean reward held between 0 and 1."""
        verdicts = [float(verdict) for verdict in self.correct if verdict is not None]
        paid = verdicts or [min(1.0, max(0.0, reward)) for reward in self.rewards if reward is not None]
        return sum(paid) / len(paid) if paid else None


class Planner(Protocol):
    """Decides which task comes next. Called from one thread at a time.

    ``observes``: True if a draw may depend on what was observed. The planner is then told the outcomes of every step of
    RL before the next draw, and nothing is read ahead, because nothing is decided ahead. False: it is told nothing, and
    the tasks and media of the next step are read while this one is trained on.

    A planner may also have ``row_by_row = True``: it draws every row once before any comes again, so that `epochs` have a
    meaning; and ``turns()``: how many rows of each source of tasks.train it has drawn, repetitions included.
    """

    observes: bool

    def draw(self, count: int) -> PlannedTasks:
        """The next ``count`` tasks: exactly so many."""
        ...

    def observe(self, groups: Sequence[GroupOutcome]) -> None:
        """What became of a step's groups, in the order in which their tasks were drawn."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that later draws depend on, as plain data (dicts, lists, texts, numbers); kept in the checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        ...


def make_planner(section: PlannerSection, stream: TaskStream, store: MediaStore) -> Planner:
    """The planner that a recipe names; what is no planner is refused."""
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
    """The recipe's mixture of sources from its beginning to ever later positions, whatever the outcomes."""

    observes = False
    row_by_row = True

    def __init__(self, stream: TaskStream) -> None:
        self.stream = stream
        self.position = 0

    def whole_pass(self) -> int:
        """Draws within which every task comes up."""
        return self.stream.whole_pass()

    def turns(self) -> list[int]:
        """How many rows of each source were drawn."""
        return self.stream.turns(self.position)

    def draw(self, count: int) -> PlannedTasks:
        """The tasks at the next positions of the mixture."""
        drawn = self.stream.draw(self.position, count)
        self.position = drawn.position
        return PlannedTasks(drawn.tasks, drawn.skipped)

    def observe(self, groups: Sequence[GroupOutcome]) -> None:
        """Nothing: the order of a mixture does not depend on outcomes."""

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.position = state["position"]
