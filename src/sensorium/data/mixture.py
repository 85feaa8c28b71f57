"""A mixture of sources as one endless stream, addressed by position; a user's own source answers within a deadline.

Invariants: the row at a position is a function of (sources, weights, seed, position) and of nothing else, so resuming
needs only a position. Each source is passed through once per epoch of its own, in a permutation keyed by (seed, source,
epoch). Among the first p positions every source has its weight's share, give or take as many tasks as there are sources.
"""

import hashlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from sensorium.cluster.pool import Worker, WorkerFailure, WorkerPool
from sensorium.data.media_store import MediaStore
from sensorium.data.task_content import RemainingRows, id_of, read_bad_rows
from sensorium.recipe.load import check_recipe
from sensorium.recipe.registry import build, resolve
from sensorium.recipe.schema import Recipe, SourceSection, TasksSection
from sensorium.vocabulary.errors import MediaError, PromptTooLong, RecipeError, SensoriumError, TaskError
from sensorium.vocabulary.plain import words
from sensorium.vocabulary.task import Task

if TYPE_CHECKING:
    from sensorium.data.planner import GroupOutcome, PlannedTasks, Planner


class TaskSource(Protocol):
    """Random access to tasks. ``__getitem__`` raises TaskError or MediaError for a bad row (see ``on_bad_row``).

    ``table_columns`` {category: name}, if it has them, are the categories' names in a published table. A source of files
    has ``row_digests`` {file: digest of its content}: a resumed run reports a file that was rewritten. ``id_of(index)``, if
    it has it, gives the id of a task without reading its media.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


def table_columns(sources: Iterable[TaskSource]) -> dict[str, str]:
    """The published names of the sources' categories, in the published order."""
    return {category: name for source in sources for category, name in getattr(source, "table_columns", {}).items()}


ROW_DEADLINE_S = 300.0


class _BoundedCalls:
    """Calls of one object of the user's own, one at a time, each waited for at most ``deadline_s``.

    All run in one thread, so that files and connections stay in the thread that opened them. A late row is an error and
    never skipped as a bad row: the clock could decide otherwise in a resumed run.
    """

    def __init__(self, subject: str, advice: str, deadline_s: float) -> None:
        self._subject, self._advice, self._deadline_s = subject, advice, deadline_s
        self._pool = WorkerPool("source")
        self._worker: Worker | None = None
        self._lock = threading.Lock()

    def ask(self, what: str, call: Callable[[], Any]) -> Any:
        """The value that a call returns; its error is raised here."""
        with self._lock:
            try:
                self._worker = self._worker or self._pool.lease()
                ended = self._pool.call_now(call, self._deadline_s, self._worker)
            except WorkerFailure as error:
                if self._worker is not None:
                    self._pool.give_back(self._worker)
                    self._worker = None
                raise RecipeError(
                    f"{self._subject} was asked for {what} and {error}. See what it waits for; {self._advice}"
                ) from error
        if ended.error is not None:
            raise ended.error
        return ended.value


class BoundedSource:
    """A source whose rows, and their number, are waited for at most ``deadline_s``."""

    def __init__(self, source: TaskSource, name: str, where: str, deadline_s: float = ROW_DEADLINE_S) -> None:
        self._source, self._who = source, f"{where}: source '{name}'"
        advice = "rows that take long are better made before the run."
        self._calls = _BoundedCalls(self._who, advice, deadline_s)

    def __len__(self) -> int:
        found: int = self._calls.ask("its length", lambda: len(self._source))
        return found

    def __getitem__(self, index: int) -> Task:
        try:
            task: Task = self._calls.ask(f"row {index}", lambda: self._source[index])
        except SensoriumError:
            raise
        except Exception as error:  # a source of the user's own may raise anything; such a row is a mistake in its code
            file = getattr(sys.modules.get(type(self._source).__module__), "__file__", None)
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
            place = f" ({Path(str(file)).name}:{lines[-1]})" if lines else ""
            raise RecipeError(f"{self._who}, row {index}{place}: {words(error)}") from error
        return task

    def __getattr__(self, name: str) -> Any:
        """Further attributes of the source, such as ``table_columns``."""
        return getattr(self.__dict__["_source"], name)


class BoundedPlanner:
    """A planner whose every call is waited for at most ``deadline_s``."""

    def __init__(self, planner: "Planner", name: str, deadline_s: float = ROW_DEADLINE_S) -> None:
        self._planner = planner
        self.observes = bool(getattr(planner, "observes", True))
        self._calls = _BoundedCalls(f"tasks.planner: '{name}'", "a step cannot begin before it has its tasks.", deadline_s)
        if callable(measure := getattr(planner, "metrics", None)):
            self.metrics = lambda: self._calls.ask("metrics()", measure)

    def draw(self, count: int) -> "PlannedTasks":
        drawn: PlannedTasks = self._calls.ask(f"{count} tasks", lambda: self._planner.draw(count))
        return drawn

    def observe(self, groups: "Sequence[GroupOutcome]") -> None:
        self._calls.ask("observe()", lambda: self._planner.observe(groups))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._calls.ask("its state", self._planner.state_dict)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._calls.ask("load_state_dict()", lambda: self._planner.load_state_dict(state))


def bounded(source: TaskSource, name: str, where: str) -> TaskSource:
    """A user's own source behind a deadline; one of ours, which only read files, as it is."""
    return BoundedSource(source, name, where) if ":" in name else source


Treatment = Literal["refuse", "skip"]


@dataclass(frozen=True)
class SkippedRow:
    """A row that was skipped, and why."""

    source: int
    row: int
    reason: str
    long_prompt: bool = False


@dataclass(frozen=True)
class Draw:
    """Tasks drawn from a stream, the position to continue from, and the rows skipped on the way."""

    tasks: tuple[Task, ...]
    position: int
    skipped: tuple[SkippedRow, ...] = ()


class TaskStream:
    """Sources mixed by weight, without state: every call names the position it reads from.

    ``on_bad_row``: whether rows that cannot be read are refused or skipped.
    """

    def __init__(
        self,
        sources: Sequence[TaskSource],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool = True,
        on_bad_row: Treatment = "refuse",
    ) -> None:
        if len(sources) != len(weights) or not sources:
            raise TaskError(
                f"a mixture needs one weight per source; it has {len(sources)} sources, {len(weights)} weights."
            )
        for i, (source, weight) in enumerate(zip(sources, weights, strict=True)):
            if len(source) == 0:
                raise TaskError(f"source {i} of the mixture ({type(source).__name__}) has no tasks.")
            if not weight > 0:
                raise TaskError(f"source {i} of the mixture has weight {weight}; weights must be above 0.")
        self.sources, self.seed, self.shuffle = tuple(sources), seed, shuffle
        self.on_bad_row: Treatment = on_bad_row
        parts = [Fraction(weight).limit_denominator(10**6) or Fraction(1, 10**6) for weight in weights]
        self.shares = tuple(part / sum(parts) for part in parts)
        self._splits = tuple(part / sum(parts[i:]) for i, part in enumerate(parts))

    def at(self, position: int) -> tuple[int, int]:
        """(source, row) at one position."""
        # Source 0 takes the positions where round(p · share) grows; the rest are shared out among the others likewise.
        for source, split in enumerate(self._splits):
            before, after = _rounded(position * split), _rounded((position + 1) * split)
            if after > before:
                length = len(self.sources[source])
                epoch, place = divmod(before, length)
                return source, permuted(place, length, f"{self.seed}/{source}/{epoch}") if self.shuffle else place
            position -= before
        raise AssertionError("the last source takes every position that is left")

    def draw(self, position: int, count: int) -> Draw:
        """``count`` tasks from ``position`` on; bad rows are refused or skipped, as ``on_bad_row`` says."""
        tasks: list[Task] = []
        skipped: list[SkippedRow] = []
        in_a_row = 0
        while len(tasks) < count:
            source, row = self.at(position)
            try:
                task = self.sources[source][row]
            except (TaskError, MediaError) as error:
                if self.on_bad_row == "refuse":
                    raise with_way_out(error) from error
                skipped.append(SkippedRow(source, row, str(error)))
                in_a_row += 1
                if in_a_row >= self.whole_pass():
                    rows = sum(len(source) for source in self.sources)
                    raise none_left(f"every task of the mixture was skipped: {rows} rows", skipped[-in_a_row:]) from error
            else:
                tasks.append(task)
                in_a_row = 0
            position += 1
        return Draw(tuple(tasks), position, tuple(skipped))

    def turns(self, position: int) -> list[int]:
        """How many times each source had its turn before a position."""
        counts = []
        for split in self._splits:
            counts.append(_rounded(position * split))
            position -= counts[-1]
        return counts

    def whole_pass(self) -> int:
        """The number of positions, from any on, within which every row of every source comes up.

        A row may come first in one epoch and last in the next: nearly two epochs are needed.
        """
        slack = 2 * len(self.sources) if len(self.sources) > 1 else 0
        turns = [2 * len(source) - 1 if self.shuffle else len(source) for source in self.sources]
        return max(ceil((turn + slack) / share) for turn, share in zip(turns, self.shares, strict=True))


def each_once(
    sources: Sequence[TaskSource], *, limit: int = 0, on_bad_row: Treatment = "refuse"
) -> tuple[list[Task], list[SkippedRow]]:
    """Every task of every source once, in order (for evaluation).

    Under a limit the sources take turns, each with rows sampled from all of its own: a file may be sorted by answer. Which
    rows are sampled depends only on their number.
    """
    lengths = [len(source) for source in sources]
    places = [(i, row) for i, length in enumerate(lengths) for row in range(length)]
    if limit:
        turns = ((i, nth) for nth in range(max(lengths, default=0)) for i, length in enumerate(lengths) if nth < length)
        places = [(i, permuted(nth, lengths[i], f"held out/{i}")) for i, nth in turns]
    found: dict[tuple[int, int], Task] = {}
    skipped: list[SkippedRow] = []
    for i, row in places:
        if limit and len(found) == limit:
            break
        try:
            found[row, i] = sources[i][row]
        except (TaskError, MediaError) as error:
            if on_bad_row == "refuse":
                raise with_way_out(error) from error
            skipped.append(SkippedRow(i, row, str(error)))
    return [found[place] for place in (sorted(found) if limit else found)], skipped


def with_way_out(error: TaskError | MediaError) -> TaskError | MediaError:
    """The error of a bad row, or of a prompt that is too long, with the recipe's setting for it."""
    if isinstance(error, PromptTooLong):
        way_out = "Raise it, or set tasks.on_long_prompt: skip; media are never cut to make a prompt fit."
        return PromptTooLong(f"{error} {way_out}")
    kind = MediaError if isinstance(error, MediaError) else TaskError
    return kind(f"{error} To skip and count such rows: tasks.on_bad_row: skip.")


def none_left(found: str, skipped: Sequence[SkippedRow]) -> TaskError:
    """The error of a draw that skipped everything: ``found`` rows, the last reason, and the way out."""
    ways = []
    if any(not skip.long_prompt for skip in skipped):
        ways.append("Fix the rows that cannot be read, or name another source in tasks.train.")
    if any(skip.long_prompt for skip in skipped):
        ways.append(
            "Raise rollout.max_context_tokens, or shorten the prompts; media take fewer tokens where they are smaller."
        )
    return TaskError(f"{found}, and none can be played. The last: {skipped[-1].reason.rstrip('.')}. {' '.join(ways)}")


Side = Literal["train", "evaluate"]


def make_sources(tasks: TasksSection, side: Side, store: MediaStore) -> list[TaskSource]:
    """The sources of one side of a recipe, without the rows that ``tasks.exclude`` lists."""
    return [make_source(tasks, side, number, store) for number in range(len(getattr(tasks, side)))]


def make_source(tasks: TasksSection, side: Side, number: int, store: MediaStore) -> TaskSource:
    """One source of a recipe, without the rows that ``tasks.exclude`` lists."""
    section: SourceSection = getattr(tasks, side)[number]
    where = f"tasks.{side}.{number}"
    source = bounded(build("source", section.source, section.options, where, store=store), section.source, where)
    if tasks.exclude is None:
        return source
    known = {f"tasks.{one}.{i}" for one in get_args(Side) for i in range(len(getattr(tasks, one)))}
    excluded = read_bad_rows(tasks.exclude, known)
    listed = [row for row in excluded if row.source == where]
    return RemainingRows(source, listed, tasks.exclude) if listed else source


def find_row(sources: Sequence[TaskSource], wanted: str) -> tuple[int, int] | None:
    """(source, row) of a task: by its number, counted from 0 over all sources, or by its id."""
    lengths = [len(source) for source in sources]
    if wanted.isdecimal() and int(wanted) < sum(lengths):
        row = int(wanted)
        for number, length in enumerate(lengths):
            if row < length:
                return number, row
            row -= length
    places = ((number, row) for number, length in enumerate(lengths) for row in range(length))
    return next((place for place in places if id_of(sources[place[0]], place[1]) == wanted), None)


def a_few(sources: Sequence[TaskSource], each: int = 8, *, on_bad_row: Treatment = "skip") -> list[Task]:
    """Up to ``each`` tasks of every source, evenly spread over its rows, without bad rows, or refusing them."""
    tasks: list[Task] = []
    for source in sources:
        count, bad = min(each, len(source)), list[TaskError | MediaError]()
        for i in range(count):
            try:
                tasks.append(source[i * (len(source) - 1) // max(1, count - 1)])
            except (TaskError, MediaError) as error:
                bad.append(error)
        if bad and on_bad_row == "refuse":
            raise with_way_out(bad[0]) if len(bad) < count else all_bad(bad)
    return tasks


def all_bad(bad: Sequence[TaskError | MediaError]) -> TaskError:
    """The error of a source of which no row that was looked at can be read: its options hardly fit it."""
    rows = f"none of {len(bad)} rows that were looked at can be read" if len(bad) > 1 else ""
    return TaskError(f"{rows}; do the source's options fit its rows? The first: {bad[0]}" if rows else str(bad[0]))


def permuted(index: int, length: int, key: str) -> int:
    """The image of ``index`` under a keyed permutation of range(length): a Feistel cipher, repeated until inside.

    Needs no memory and no library's random stream, so a run's order survives updates of either.
    """
    assert 0 <= index < length, "the cipher returns only from inside"
    half = max(2, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            left, right = right, left ^ (stable_hash(f"{key}/{turn}/{right}") & mask)
        index = left << half | right
        if index < length:
            return index


def stable_hash(text: str) -> int:
    """A 64-bit hash that is the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _rounded(value: Fraction) -> int:
    return int(value + Fraction(1, 2))


def resolve_epochs(recipe: Recipe) -> Recipe:
    """The recipe with the number of steps that its epochs are, or its own where that is lower. Opens tasks.train.

        epochs: 3, 20,000 rows, batch.prompts_per_step: 128     → 60,000 rows in batches of 128: 468 steps
        the same with steps: 400                                → 400 steps: the earlier end counts
        epochs: 1, 100 rows, batch.prompts_per_step: 128        → refused: one step needs more rows than the epoch has

    An epoch is as many draws as the sources of tasks.train have rows together. Batches run on from one epoch into the next,
    and rows that fill no batch at the very end are left out. (verl drops them at the end of every epoch: there 3 epochs of
    100 rows in batches of 64 are 3 steps, here 4.) Tasks that ``selection.oversample`` adds count; those that
    ``selection.dynamic`` draws in further rounds do not, since their number is not known.
    """
    if not recipe.epochs:
        return recipe
    name = recipe.tasks.planner.name
    if not getattr(resolve("planner", name, "tasks.planner"), "row_by_row", False):
        raise RecipeError(
            f"epochs: the planner '{name}' (tasks.planner) chooses which rows come again, so that a pass over them has "
            "no end. Give steps instead, or use the planner mixture."
        )
    rows = count_rows(recipe)
    played = recipe.selection.played(recipe.batch.prompts_per_step)
    steps = int(Fraction(recipe.epochs).limit_denominator(10**6) * rows / played)
    if steps < 1:
        raise RecipeError(
            f"epochs: {recipe.epochs:g} epochs of the {rows:,} rows in tasks.train are fewer tasks than one step plays "
            f"({played:,}; batch.prompts_per_step, selection.oversample). Lower that, raise epochs, or give steps with "
            "epochs=0: rows then repeat as often as needed."
        )
    data = recipe.model_dump(mode="json") | {"steps": min(steps, recipe.steps)}
    return check_recipe(data, f"recipe '{recipe.name}', with {recipe.epochs:g} epochs of {rows:,} rows")


def count_rows(recipe: Recipe) -> int:
    """Rows of all training sources together."""
    total = 0
    for i, source in enumerate(make_sources(recipe.tasks, "train", MediaStore())):
        try:
            total += len(source)
        except TypeError as error:
            raise RecipeError(
                f"epochs: source '{recipe.tasks.train[i].source}' (tasks.train.{i}) has no length, so that "
                "the end of a pass over it is unknown. Give it __len__, or give steps instead of epochs."
            ) from error
    return total
