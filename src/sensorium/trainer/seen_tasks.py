"""Which data a run saw when it began, by content: the files of rows, a few tasks of each source, and those held out.

A resumed run looks at the same again. Rows that were rewritten meanwhile, or a picture that was replaced by another one,
would otherwise go unnoticed.
"""

import json
from collections.abc import Sequence

from sensorium.record.durable import read_json, write_whole
from sensorium.record.run_directory import RunDirectory
from sensorium.rewards.judgements import task_digest
from sensorium.tasks.source import TaskSource
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import CheckpointError
from sensorium.vocabulary.task import Task


def remember_tasks(directory: RunDirectory, tasks: Sequence[Task], sources: Sequence[TaskSource]) -> None:
    """Write down what the tasks and the sources' files are."""
    seen: dict[str, list[str]] = {}
    for task in tasks:  # two sources may have tasks of the same id
        seen.setdefault(task.id, []).append(task_digest(task))
    write_whole(directory.tasks, json.dumps({"tasks": seen, "files": _row_files(sources)}, indent=0) + "\n")


def changed_tasks(directory: RunDirectory, tasks: Sequence[Task], sources: Sequence[TaskSource]) -> list[str]:
    """What to say if files or tasks are no longer what they were; nothing of what an earlier version kept no digests of."""
    if not directory.tasks.exists():
        return []
    then = read_json(directory.tasks, "Remove it: then nothing says whether the tasks are still those the run began with.")
    if not isinstance(then.get("tasks"), dict):  # written by an earlier version: digests by the tasks' ids
        then = {"tasks": then, "files": {}}
    known, files = then["tasks"], then["files"]
    changed = [task.id for task in tasks if task.id in known and task_digest(task) not in known[task.id]]
    strange = [task.id for task in tasks if task.id not in known]
    found = [
        f"the content of '{file}' has changed"
        for file, digests in _row_files(sources).items()
        if files.get(file, digests) != digests
    ]
    if changed or strange:
        what = f"{len(changed)} have changed, '{changed[0]}' among them" if changed else f"'{strange[0]}' was not there"
        found.append(f"of {len(tasks)} tasks that were looked at when the run began, {what}")
    if not found:
        return []
    return [
        f"ATTENTION: the data are not those the run began with: {'; '.join(found)}. Rows, pictures, clips or sounds were "
        "replaced since. Tasks drawn from here on may differ, so the run no longer repeats what it would have been without "
        "the interruption. Put the data back and resume, or start a new run."
    ]


def _row_files(sources: Sequence[TaskSource]) -> dict[str, list[str]]:
    """The digests of the files that hold the sources' rows; a source that names none is known by its tasks alone."""
    files: dict[str, list[str]] = {}
    for source in sources:  # two may use a file, each up to a limit of its own
        for file, digest in getattr(source, "row_digests", {}).items():
            files.setdefault(file, []).append(digest)
    return files


def refuse_other_frames(directory: RunDirectory, then: str, now: str, tasks: Sequence[Task]) -> None:
    """Refuse to go on where videos that name no rule of sampling would show other frames ``now`` than ``then``.

    Versions that did not write the rule down (then it is empty) took frames at the middles of intervals.
    """
    if now == (then or "middle"):
        return
    open_ones = [task for task in tasks for message in task.messages for item in message.media if _leaves_open(item)]
    if open_ones:
        told = f"by '{then}'" if then else "by 'middle', for an earlier version began it,"
        raise CheckpointError(
            f"'{directory.path}' took the frames of videos {told} where a task says nothing (task '{open_ones[0].id}' does "
            f"not), and this version takes them by '{now}': the run would go on with other frames. To go on as it was, "
            f"write 'sampling: {then or 'middle'}' into the options of its videos (tasks, options, video) in "
            f"'{directory.recipe}'; or start a new run."
        )


def _leaves_open(item: Media) -> bool:
    return isinstance(item.parameters, VideoParameters) and item.parameters.sampling is None
