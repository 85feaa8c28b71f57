"""Which tasks a run saw when it began, by content: a few of each training source, and those held out.

A resumed run looks at the same rows again. What has changed meanwhile, a picture that was replaced by another one for
example, would otherwise go unnoticed: the file of rows is as it was.
"""

import json
from collections.abc import Sequence

from sensorium.record.durable import read_json, write_whole
from sensorium.record.run_directory import RunDirectory
from sensorium.rewards.judgements import task_digest
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import CheckpointError
from sensorium.vocabulary.task import Task


def remember_tasks(directory: RunDirectory, tasks: Sequence[Task]) -> None:
    """Write down what the tasks are."""
    seen: dict[str, list[str]] = {}
    for task in tasks:  # two sources may have tasks of the same id
        seen.setdefault(task.id, []).append(task_digest(task))
    write_whole(directory.tasks, json.dumps(seen, indent=0) + "\n")


def changed_tasks(directory: RunDirectory, tasks: Sequence[Task]) -> list[str]:
    """What to say if tasks are no longer what they were; nothing if the run was begun by a version that kept no digests."""
    if not directory.tasks.exists():
        return []
    then = read_json(directory.tasks, "Remove it: then nothing says whether the tasks are still those the run began with.")
    changed = [task.id for task in tasks if task.id in then and task_digest(task) not in then[task.id]]
    strange = [task.id for task in tasks if task.id not in then]
    if not changed and not strange:
        return []
    what = f"{len(changed)} have changed, '{changed[0]}' among them" if changed else f"'{strange[0]}' was not there"
    return [
        f"ATTENTION: of {len(tasks)} tasks that were looked at when the run began, {what}: rows, pictures, clips or sounds "
        "were replaced since. The run goes on with what is there now, and is not the run that was begun; put the data "
        "back, or start a new run."
    ]


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
