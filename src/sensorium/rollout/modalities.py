"""What a model or an engine cannot take is refused before anything is spent on it."""

from collections.abc import Iterable, Sequence

from sensorium.engines.protocol import Engine
from sensorium.models.chat_processor import ChatProcessor
from sensorium.rollout.intake import checked_reset
from sensorium.rollout.live import MakeEnvironment
from sensorium.vocabulary.content import Media, Message
from sensorium.vocabulary.errors import EnvironmentFailure, ModelError, RecipeError
from sensorium.vocabulary.task import Task
from sensorium.workers.pool import WorkerFailure, WorkerPool


def media_of(messages: Iterable[Message]) -> list[Media]:
    """All media blocks of some messages, in order."""
    return [item for message in messages for item in message.media]


def refuse_strange_media(task: Task, messages: Sequence[Message], chat: ChatProcessor, engine: Engine) -> None:
    """Raise for the first medium of a kind that the model family or the engine lacks; names the task and the medium."""
    pairs = [(block, part) for block in media_of(messages) for part in block.parts]
    for block, item in pairs:
        for who, able in ((f"family {chat.family}", chat.modalities), ("the engine", engine.capabilities.modalities)):
            if item.kind not in able:
                what = "is" if item == block else "is heard with (use_audio_in_video)"
                raise ModelError(
                    f"task {task.id}: {who} takes {', '.join(sorted(able))} and not {item.kind}, which {item.name} {what}. "
                    "Use one that does (model.path, rollout.engine), or leave such tasks out."
                )


def refuse_strange_environments(
    tasks: Sequence[Task], make: MakeEnvironment, chat: ChatProcessor, engine: Engine, seconds: float
) -> None:
    """Begin one environment of each kind among the tasks, and refuse those that show what the model or the engine lacks.

    One that fails here, or does not begin in time, is left to fail in play, where that is counted; options that do not fit
    are refused now.
    """
    kinds = {repr((spec.name, spec.options)): task for task in tasks if (spec := task.environment) is not None}
    pool = WorkerPool("environment")
    try:
        for task in kinds.values():
            refuse_strange_media(task, _first_shown(task, make, pool, seconds), chat, engine)
    finally:
        pool.close()


def _first_shown(task: Task, make: MakeEnvironment, pool: WorkerPool, seconds: float) -> tuple[Message, ...]:
    assert task.environment is not None
    seed = task.environment.seed
    worker = pool.lease()
    try:
        made = pool.call_now(lambda: make(task), seconds, worker)
        if isinstance(made.error, RecipeError):
            raise made.error
        if made.error is not None:
            return ()
        begun = pool.call_now(lambda: made.value.reset(seed), seconds, worker)
        worker.submit(lambda: made.value.close(), seconds)
        head, observation = checked_reset(begun.value, "")
        return () if begun.error is not None else (*head, *observation.messages)
    except (WorkerFailure, EnvironmentFailure):  # not hidden: in play it fails its episodes, with the reason
        return ()
    finally:
        pool.give_back(worker)
