"""What a model or an engine cannot take is refused before anything is spent on it."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from sensorium.engines.protocol import Engine
from sensorium.envs.protocol import Environment
from sensorium.models.policy import Policy
from sensorium.vocabulary.content import Media, Message
from sensorium.vocabulary.errors import ModelError
from sensorium.vocabulary.task import Task


def media_of(messages: Iterable[Message]) -> list[Media]:
    """All media of some messages, in order."""
    return [item for message in messages for item in message.media]


def refuse_strange_media(task: Task, messages: Sequence[Message], policy: Policy, engine: Engine) -> None:
    """Raise for the first medium of a kind that the model family or the engine lacks; names the task and the medium."""
    for item in media_of(messages):
        for who, able in ((f"family {policy.family}", policy.modalities), ("the engine", engine.modalities)):
            if item.kind not in able:
                raise ModelError(
                    f"task {task.id}: {who} takes {', '.join(sorted(able))} and not {item.kind}, which {item.name} is. "
                    "Use one that does (model.path, rollout.engine), or leave such tasks out."
                )


def refuse_strange_worlds(
    tasks: Sequence[Task], make_environment: Callable[[Task], Environment], policy: Policy, engine: Engine, seconds: float
) -> None:
    """Begin one world of each kind among the tasks, and refuse those that show what the model or the engine lacks.

    A world that fails here, or does not begin in time, is left to fail in play, where that is counted.
    """
    kinds = {repr((spec.name, spec.options)): task for task in tasks if (spec := task.environment) is not None}
    pool = ThreadPoolExecutor(1, thread_name_prefix="first look")
    try:
        for task in kinds.values():
            refuse_strange_media(task, _first_shown(task, make_environment(task), pool, seconds), policy, engine)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _first_shown(task: Task, world: Environment, pool: ThreadPoolExecutor, seconds: float) -> tuple[Message, ...]:
    assert task.environment is not None
    try:
        head, observation = pool.submit(world.reset, task.environment.seed).result(seconds)
        return (*head, *observation.messages)
    except Exception:  # not hidden: in play the same world fails its episodes, with the reason, and they are counted
        return ()
    finally:
        with suppress(Exception):
            world.close()
