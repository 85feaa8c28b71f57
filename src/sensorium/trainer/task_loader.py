"""Load the tasks of a run: draw them, skip those that cannot be played, and look ahead to the next step's.

Rows are read, and their media decoded and preprocessed, in threads, so that the event loop stays free. While a step is
trained on, the tasks of the next are drawn and their media decoded ahead, unless the planner waits for this step's
outcomes. Invariant: a checkpoint has the state after the last draw that was delivered, whatever was drawn ahead since.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from sensorium.data.augmentation import augmented_task
from sensorium.data.demonstrations import DemonstrationRows, RecordedStream
from sensorium.data.media_files import open_regular
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import SkippedRow, TaskSource, none_left, with_way_out
from sensorium.data.planner import GroupOutcome, MixturePlanner, PlannedTasks, Planner
from sensorium.data.row_format import placeholder_notes
from sensorium.learner.saved_state import not_plain
from sensorium.recipe.schema import PlannerSection, Recipe, RolloutSection, TasksSection
from sensorium.rewards.reward_term import Term, refuse_unreadable
from sensorium.rewards.scorer import task_digest
from sensorium.rollout.live import media_of
from sensorium.rollout.play import Rollout
from sensorium.runs.durable import append_row, read_json, read_rows, write_whole
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.errors import CheckpointError, MediaError, PromptTooLong, RecordError, SensoriumError, TaskError
from sensorium.vocabulary.plain import counted, number_of, words
from sensorium.vocabulary.task import Task

MOST_NAMED = 3  # skipped tasks of a kind
READ_TO_COMPARE = 1 << 30  # bytes of media files that a resumed run reads because their time of change differs
SKIPPED_AT_ONCE = 10_000  # tasks in a row that a draw skips at most, where the planner has no ``whole_pass``
T = TypeVar("T")


class SkipNotes:
    """Notes the first few skipped tasks of each kind by name and reason, and once that others are only counted.

    rows.jsonl:2 cannot be read         → "a task is skipped, because it cannot be read: rows.jsonl:2 …"
    the same in the next epoch          → nothing
    a fourth that cannot be read        → "further tasks that cannot be read are skipped without a note; …", once
    """

    def __init__(self, noted: Callable[[str], None]) -> None:
        self._noted = noted
        self._reasons: dict[bool, set[str]] = {False: set(), True: set()}  # by whether the prompt is too long

    def note(self, skipped: Sequence[SkippedRow]) -> None:
        """Name those that are new, as long as few were named."""
        for skip in skipped:
            known = self._reasons[skip.long_prompt]
            if len(known) > MOST_NAMED or skip.reason in known:
                continue
            known.add(skip.reason)
            if len(known) <= MOST_NAMED:
                why = "its prompt is too long" if skip.long_prompt else "it cannot be read"
                self._noted(f"a task is skipped, because {why}: {' '.join(skip.reason.split())}")
            else:
                many, metric = ("long prompts", "long") if skip.long_prompt else ("tasks that cannot be read", "bad")
                self._noted(f"further {many} are skipped without a note; the metric tasks/skipped_{metric} counts them")


def remember_tasks(directory: RunDirectory, tasks: Sequence[Task], sources: Sequence[TaskSource]) -> None:
    """Write down digests of the tasks and of the sources' files, which a resumed run compares with its own."""
    seen: dict[str, list[str]] = {}
    for task in tasks:  # two sources may have tasks of the same id
        seen.setdefault(task.id, []).append(task_digest(task))
    write_whole(directory.tasks, json.dumps({"tasks": seen, "files": _row_files(sources)}, indent=0) + "\n")
    directory.media_files.unlink(missing_ok=True)


def remember_media(directory: RunDirectory, store: MediaStore) -> None:
    """Write down the files that media were read from since the last checkpoint."""
    if store.files_read is not None and (files := store.files_read.take()):
        append_row(directory.media_files, {"files": files})


def media_files(directory: RunDirectory) -> dict[str, tuple[int, int, str]]:
    """The files that a run has read media from, by path: size, time of change and hash of the content then."""
    try:
        files = [file for row in read_rows(directory.media_files) for file in row["files"]]
        return {str(path): (int(size), int(time), str(digest)) for path, size, time, digest in files}
    except (LookupError, TypeError, ValueError) as error:
        raise RecordError(
            f"'{directory.media_files}' is damaged ({words(error)}). Remove it: then nothing says whether the media are "
            "still those that the run has read."
        ) from error


def changed_tasks(directory: RunDirectory, tasks: Sequence[Task], sources: Sequence[TaskSource]) -> list[str]:
    """A note on whether files or tasks have changed since the run began, as far as digests of them were kept."""
    if not directory.tasks.exists():
        return []
    then = read_json(directory.tasks, "Remove it: then nothing says whether the tasks are still those the run began with.")
    if not isinstance(then.get("tasks"), dict):  # written by an earlier version: digests by the tasks' ids
        then = {"tasks": then, "files": {}}
    known, files = then["tasks"], then["files"]
    changed = [task.id for task in tasks if task.id in known and task_digest(task) not in known[task.id]]
    strange = [task.id for task in tasks if task.id not in known]
    rows = {file: digests for file, digests in _row_files(sources).items() if file in files}
    found = [f"the content of '{file}' has changed" for file, digests in rows.items() if files[file] != digests]
    if changed or strange:
        what = f"{len(changed)} have changed, '{changed[0]}' among them" if changed else f"'{strange[0]}' was not there"
        found.append(f"of {len(tasks)} tasks that were looked at when the run began, {what}")
    media = _compare_media(media_files(directory))
    if media.changed:
        read = f"of {counted(media.compared, 'media file')} that the run has read and that could be compared"
        found.append(f"{read}, {len(media.changed)} changed, '{media.changed[0]}' among them")
    compared = [f"{len(tasks)} of {counted(sum(map(len, sources)), 'task')}"]
    compared += [counted(len(rows), "file of rows", "files of rows")] if rows else []
    if media.known:
        compared.append(f"{media.compared} of the {counted(media.known, 'media file')} that the run has read")
    scope = f"Compared were {', '.join(compared)}."
    if not found:
        return [f"the data are those the run began with, as far as they were compared. {scope}"]
    return [
        f"ATTENTION: the data are not those the run began with: {'; '.join(found)}. Rows, pictures, clips or sounds were "
        "replaced since. Tasks drawn from here on may differ, so the run no longer repeats what it would have been without "
        f"the interruption. Put the data back and resume, or start a new run. {scope}"
    ]


@dataclass(frozen=True)
class _MediaComparison:
    """How many media files a run has read, how many of them were compared now, and the paths of those that changed."""

    known: int
    compared: int
    changed: list[str]


def _compare_media(files: Mapping[str, tuple[int, int, str]]) -> _MediaComparison:
    """Compare media files by size and time of change; only where the time alone differs they are read, up to a bound.

    A file that is gone counts as not compared: the data may have been moved, and a row that needs it reports it.
    """
    changed, compared, to_read = [], 0, READ_TO_COMPARE
    for path, (size, time, digest) in files.items():
        try:
            now = os.stat(path)
            if now.st_size == size and now.st_mtime_ns != time:
                if size > to_read:
                    continue
                to_read -= size
                with open_regular(Path(path)) as file:
                    differs = hashlib.file_digest(file, "sha256").hexdigest() != digest
            else:
                differs = now.st_size != size
        except OSError:
            continue
        compared += 1
        if differs:
            changed.append(path)
    return _MediaComparison(len(files), compared, changed)


def _row_files(sources: Sequence[TaskSource]) -> dict[str, list[str]]:
    """The digests of the files that hold the sources' rows, for sources that name any."""
    files: dict[str, list[str]] = {}
    for source in sources:  # two may use a file, each up to a limit of its own
        for file, digest in getattr(source, "row_digests", {}).items():
            files.setdefault(file, []).append(digest)
    return files


def refuse_other_frames(directory: RunDirectory, then: str, now: str, tasks: Sequence[Task]) -> None:
    """Refuse to resume where videos without a sampling rule would show other frames ``now`` than ``then``.

    Versions that did not write the rule down (``then`` is empty) took frames at the middles of intervals.
    """
    if now == (then or "middle"):
        return
    videos = [(task, i.parameters) for task in tasks for i in media_of(task.messages)]
    open_ones = [task for task, asked in videos if isinstance(asked, VideoParameters) and asked.sampling is None]
    if open_ones:
        rule = f"by '{then}'" if then else "by 'middle', for an earlier version began it,"
        raise CheckpointError(
            f"'{directory.path}' took the frames of videos {rule} where a task names no rule (task '{open_ones[0].id}' "
            f"does not), and this version takes them by '{now}': the run would go on with other frames. To go on as it "
            f"was, write 'sampling: {then or 'middle'}' into the options of its videos (tasks, options, video) in "
            f"'{directory.recipe}'; or start a new run."
        )


@dataclass(frozen=True)
class _DrawAhead:
    """A draw made ahead: how many tasks, the planner's state before it, and its result."""

    count: int
    before: dict[str, Any]
    reading: "Future[PlannedTasks]"


@dataclass(frozen=True)
class SingleDraw:
    """A draw of one task; ``task`` is None if it cannot be played. ``before`` is the loader's state that it repeats from.

    Rows are numbered from ``before["drawn"]`` on: those skipped first, then the task's.
    """

    before: dict[str, Any]
    task: Task | None
    skipped: tuple[SkippedRow, ...]


class TaskLoader:
    """Draws tasks that can be played: media and answers are readable, and the prompt leaves room for a response."""

    def __init__(
        self,
        section: TasksSection,
        planner: Planner,
        rollout: Rollout,
        noted: Callable[[str], None] = lambda text: None,
        terms: Sequence[tuple[Term, float]] = (),
        seed: int = 0,
        names: Sequence[str] = (),
    ) -> None:
        self._terms, self._seed = terms, seed
        self._names = names or [f"tasks.train.{i} ({source.source})" for i, source in enumerate(section.train)]
        self.section, self.planner, self.rollout = section, planner, rollout
        self.drawn = 0  # rows since the run began, skipped ones included
        self._notes = SkipNotes(noted)
        self._observes = bool(getattr(planner, "observes", True))
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")  # planner and sources are used by one thread
        self._ahead: _DrawAhead | None = None
        whole_pass = getattr(planner, "whole_pass", None)
        self._most_skipped = min(SKIPPED_AT_ONCE, whole_pass()) if callable(whole_pass) else SKIPPED_AT_ONCE
        self._noted, self._turns = noted, self._planner_turns()
        self._literal: set[str] = set()  # placeholders without a medium that were noted
        self._planner_state()  # one that cannot be saved is refused now, not at the first checkpoint

    @property
    def waits_for_outcomes(self) -> bool:
        """True if the planner decides by the outcomes of earlier tasks."""
        return self._observes

    async def draw(self, count: int) -> PlannedTasks:
        """The next ``count`` tasks that can be played; raises as soon as every task was tried and none can be."""
        tasks: list[Task] = []
        skipped: list[SkippedRow] = []
        in_a_row: list[SkippedRow] = []
        while len(tasks) < count:
            drawn = await asyncio.wrap_future(self._reading(count - len(tasks)))
            self.drawn += len(drawn.tasks) + len(drawn.skipped)
            self._note_passed_rows()
            fitting, unfit = await self.fitting(drawn.tasks)
            self._note_placeholders(fitting)
            tasks += fitting
            passed_over = [*drawn.skipped, *unfit]
            self._notes.note(passed_over)
            skipped += passed_over
            in_a_row = [] if fitting else in_a_row + passed_over
            self._refuse_none_left(in_a_row)
        return PlannedTasks(tuple(tasks), tuple(skipped))

    async def draw_each(self, count: int) -> list[SingleDraw]:
        """``count`` draws of one task each, whose media are prepared together; more of them if no task can be played."""
        found: list[SingleDraw] = []
        while not any(draw.task for draw in found):
            planned = await asyncio.wrap_future(self._reader.submit(self._plan_each, count, self.drawn))
            fitting, unfit = await self.fitting([task for _, drawn in planned for task in drawn.tasks])
            fits, reasons = {id(task) for task in fitting}, iter(unfit)
            for before, drawn in planned:
                (task,) = drawn.tasks
                found.append(
                    SingleDraw(before | {"drawn": self.drawn}, task, drawn.skipped)
                    if id(task) in fits
                    else SingleDraw(before | {"drawn": self.drawn}, None, (*drawn.skipped, next(reasons)))
                )
                self.drawn += 1 + len(drawn.skipped)
            self._note_passed_rows()
            self._note_placeholders(fitting)
            passed_over = [skip for draw in found for skip in draw.skipped]
            self._notes.note(passed_over)
            if not fitting:
                self._refuse_none_left(passed_over)
        return found

    def _refuse_none_left(self, in_a_row: Sequence[SkippedRow]) -> None:
        if len(in_a_row) >= self._most_skipped:
            different = len({skip.reason for skip in in_a_row})
            raise none_left(f"{different} different tasks were looked at", in_a_row)

    def look_ahead(self, count: int) -> None:
        """Begin to read the next tasks and to decode their media, unless the planner waits for outcomes.

        Errors in them are raised when they are drawn.
        """
        if self._observes:
            return
        before = deepcopy(self._planner_state())
        reading = self._reader.submit(self._plan, count, self.drawn)
        reading.add_done_callback(self._request)
        self._ahead = _DrawAhead(count, before, reading)

    async def observe(self, groups: Sequence[Group], trained: Collection[str]) -> None:
        """Give the planner the outcomes of a step's groups, if it wants them; ``trained`` are the ids in the update."""
        if self._observes:
            outcomes = [outcome_of(group, group.id in trained) for group in groups]
            await asyncio.wrap_future(self._reader.submit(self._asked, "observe", self.planner.observe, outcomes))

    def planner_metrics(self) -> dict[str, float]:
        """What the planner measured of the last step, as ``planner/…``; nothing from one without ``metrics()``."""
        measure = getattr(self.planner, "metrics", None)
        if not callable(measure):
            return {}
        return self._asked("metrics", lambda: {f"planner/{name}": number_of(value) for name, value in measure().items()})

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue drawing exactly: the planner's name and state, and how many rows were drawn."""
        state = self._planner_state() if self._ahead is None else self._ahead.before
        return {"planner": self.section.planner.name, "drawn": self.drawn, "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue drawing from a checkpoint's state."""
        name = self.section.planner.name
        if state["planner"] != name:
            raise CheckpointError(
                f"the checkpoint's tasks were drawn by the planner '{state['planner']}' and the recipe names '{name}' "
                "(tasks.planner), which cannot go on from there. Name the planner that the run began with, or start a new "
                "run from the checkpoint's weights (model.path)."
            )
        try:
            self.planner.load_state_dict(state["state"])
        except SensoriumError:
            raise
        except Exception as error:  # a planner of the user's own may raise anything
            raise CheckpointError(
                f"the planner '{name}' cannot go on from the state in the checkpoint: {words(error)}. Use the version of "
                "it that the run began with, or start a new run from the checkpoint's weights (model.path)."
            ) from error
        self.drawn = state["drawn"]
        self._turns = self._planner_turns()

    async def fitting(
        self, tasks: Sequence[Task], section: RolloutSection | None = None
    ) -> tuple[list[Task], list[SkippedRow]]:
        """Tasks that can be played, and those that cannot; media are preprocessed together.

        ``section`` has the limits of held-out tasks.
        """
        errors = await asyncio.to_thread(self.rollout.prepare, tasks)
        fitting, unfit = [], []
        for task in tasks:
            try:
                for item in media_of(task.messages):
                    if item in errors:
                        raise errors[item]
                refuse_unreadable(self._terms, task)
                self.rollout.check_prompt(task, section)
                fitting.append(task)
            except (TaskError, MediaError) as error:
                long = isinstance(error, PromptTooLong)
                if (self.section.on_long_prompt if long else self.section.on_bad_row) == "refuse":
                    raise with_way_out(error) from error
                reason = str(error) if task.id in str(error) else f"task {task.id}: {error}"
                unfit.append(SkippedRow(0, 0, reason, long_prompt=long))
        return fitting, unfit

    def without_long_prompts(self, groups: Sequence[Group]) -> tuple[list[Group], int]:
        """Groups whose prompt did fit (an environment shows its own only when played), and how many did not."""
        fit = []
        for group in groups:
            failure = prompt_too_long(group)
            if failure and self.section.on_long_prompt == "refuse":
                raise with_way_out(PromptTooLong(failure))
            if failure:
                self._notes.note([SkippedRow(0, 0, failure, long_prompt=True)])
            else:
                fit.append(group)
        return fit, len(groups) - len(fit)

    def close(self) -> None:
        """Give the reader's thread back."""
        self._reader.shutdown(cancel_futures=True)

    def _planner_turns(self) -> list[int]:
        """How many rows of each source were drawn, if the planner counts them."""
        turns = getattr(self.planner, "turns", None)
        return list(turns()) if callable(turns) else []

    def _note_passed_rows(self) -> None:
        """Note, once for each source, that its rows are drawn a second time."""
        before, self._turns = self._turns, self._planner_turns()
        sources = getattr(getattr(self.planner, "stream", None), "sources", ())
        for name, source, was, now in zip(self._names, sources, before, self._turns, strict=False):
            if was <= len(source) < now:
                order = "in another order" if self.section.shuffle else "in the same order"
                self._noted(
                    f"all {len(source):,} rows of {name} have been drawn once; from here on they come again, {order}"
                )

    def _note_placeholders(self, tasks: Sequence[Task]) -> None:
        """Note, once for each placeholder, that the model sees it as text."""
        for tag, ids, advice in placeholder_notes(tasks):
            if tag not in self._literal:
                self._literal.add(tag)
                self._noted(f"tasks.train: {len(ids)} of {len(tasks)} tasks of a draw, the first {ids[0]}: {advice}.")

    def _reading(self, count: int) -> "Future[PlannedTasks]":
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.count == count:
            return ahead.reading
        return self._reader.submit(self._plan, count, self.drawn, None if ahead is None else ahead.before)

    def _plan_each(self, count: int, row: int) -> list[tuple[dict[str, Any], PlannedTasks]]:
        """Draws of one task each, with the loader's state before each."""
        found = []
        for _ in range(count):
            found.append((deepcopy(self.state_dict()), self._plan(1, row)))
            row += 1 + len(found[-1][1].skipped)
        return found

    def _plan(self, count: int, row: int, before: dict[str, Any] | None = None) -> PlannedTasks:
        """The planner's draw, from the state ``before`` if given: ``count`` tasks, numbered from ``row`` on."""
        if before is not None:  # as if nothing had been drawn ahead
            self._asked("load_state_dict", self.planner.load_state_dict, before)
        drawn = self._asked("draw", self.planner.draw, count)
        name = self.section.planner.name
        if not isinstance(drawn, PlannedTasks) or not all(isinstance(task, Task) for task in drawn.tasks):
            raise TaskError(
                f"planner '{name}': draw({count}) returned {drawn!r:.80}; return PlannedTasks of {count} Tasks."
            )
        if len(drawn.tasks) != count:
            raise TaskError(f"planner '{name}': draw({count}) returned {len(drawn.tasks)} tasks; return as many as asked.")
        section = self.section.augment
        if section is None:
            return drawn
        tasks = (augmented_task(task, section, self._seed, row + i) for i, task in enumerate(drawn.tasks))
        return replace(drawn, tasks=tuple(tasks))

    def _asked(self, what: str, call: Callable[..., T], *arguments: Any) -> T:
        """Call the planner; whatever it raises becomes one paragraph."""
        try:
            return call(*arguments)
        except SensoriumError:
            raise
        except Exception as error:
            raise TaskError(f"planner '{self.section.planner.name}': {what}() failed: {words(error)}") from error

    def _planner_state(self) -> dict[str, Any]:
        state = self._asked("state_dict", self.planner.state_dict)
        if problem := not_plain(state, "state_dict()"):
            raise TaskError(
                f"planner '{self.section.planner.name}': {problem}, and a checkpoint keeps plain data only (dicts, lists, "
                "texts, numbers)."
            )
        return state

    def _request(self, reading: "Future[PlannedTasks]") -> None:
        if reading.cancelled() or reading.exception() is not None:
            return
        self.rollout.chat.request(media_of(message for task in reading.result().tasks for message in task.messages))


def recorded_loader(recipe: Recipe, rows: DemonstrationRows, rollout: Rollout, noted: Callable[[str], None]) -> TaskLoader:
    """A loader that draws recorded demonstrations, in their order."""
    stream = RecordedStream(
        [rows], [1.0], seed=recipe.seed, shuffle=recipe.tasks.shuffle, on_bad_row=recipe.tasks.on_bad_row
    )
    section = recipe.tasks.model_copy(update={"planner": PlannerSection()})
    return TaskLoader(section, MixturePlanner(stream), rollout, noted, (), recipe.seed, ["warm_start.demonstrations"])


def drawn_by_position(position: int) -> dict[str, Any]:
    """The state of a checkpoint from before there were planners: the mixture, at a position."""
    return {"planner": "mixture", "drawn": position, "state": {"position": position}}


def prompt_too_long(group: Group) -> str:
    """The failure of the first episode whose prompt left no room for a response; empty if there is none."""
    return next((e.failure for e in group.episodes if e.info.get("prompt_too_long")), "")


def skip_metrics(skipped: Sequence[SkippedRow], long: int) -> dict[str, float]:
    """How many tasks were left out by policy; ``long`` more for a prompt that an environment showed when played."""
    too_long = sum(skip.long_prompt for skip in skipped)
    return {"tasks/skipped_bad": len(skipped) - too_long, "tasks/skipped_long": too_long + long}


def outcome_of(group: Group, trained: bool) -> GroupOutcome:
    """What a planner learns of a group."""
    return GroupOutcome(
        task_id=group.task.id,
        rewards=tuple(episode.reward for episode in group.episodes),
        correct=tuple(episode.correct for episode in group.episodes),
        responses=tuple(episode.response for episode in group.episodes),
        trained=trained,
    )
