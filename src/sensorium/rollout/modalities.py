"""What a model or an engine cannot take is refused before anything is spent on it."""

from collections.abc import Sequence

from sensorium.engines.protocol import Engine
from sensorium.models.policy import Policy
from sensorium.vocabulary.errors import ModelError
from sensorium.vocabulary.task import Task


def refuse_strange_media(tasks: Sequence[Task], policy: Policy, engine: Engine) -> None:
    """Raise for the first medium of a kind that the model family or the engine lacks; names the task and the medium."""
    for task in tasks:
        for item in (item for message in task.messages for item in message.media):
            for who, able in ((f"family {policy.family}", policy.modalities), ("the engine", engine.modalities)):
                if item.kind not in able:
                    raise ModelError(
                        f"task {task.id}: {who} takes {', '.join(sorted(able))} and not {item.kind}, which {item.name} is. "
                        "Use one that does (model.path, rollout.engine), or leave such tasks out."
                    )
