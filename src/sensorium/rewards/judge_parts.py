"""What judge terms have in common: the client, the question as a judge sees it, and what the task shows."""

from collections.abc import Sequence

from sensorium.judges.client import JudgeClient
from sensorium.rewards.context import RewardContext
from sensorium.vocabulary.content import Media, Message
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import JudgeRefusal
from sensorium.vocabulary.task import Task

NO_CLIENT = "there is no client of judges here"
"""Why a judge's term gives no score where judges are not asked, as in ``sensorium validate``."""


def client_of(context: RewardContext | None, name: str, *models: str) -> JudgeClient | None:
    """The run's client of judges, once every model a term asks is known to it, with its keys."""
    if context is None or context.judges is None:
        return None
    for model in models:
        if model:
            context.judges.refuse_unknown(model)
            context.judges.refuse_without_keys(model)
    return context.judges


def needed(client: JudgeClient | None, name: str) -> JudgeClient:
    """The client; without one a term cannot judge."""
    if client is None:
        raise JudgeRefusal(f"reward term '{name}' asks a judge, and {NO_CLIENT}")
    return client


def shown_messages(task: Task, episode: Episode) -> Sequence[Message]:
    """What the policy was asked: the task's messages, or what its environment showed first."""
    return task.messages or (*episode.head, *(episode.turns[0].observation if episode.turns else ()))


def question_text(task: Task, episode: Episode) -> str:
    """The words of the question."""
    return "\n".join(message.text for message in shown_messages(task, episode))


def question_media(task: Task, episode: Episode) -> tuple[Media, ...]:
    """The pictures, videos and sounds of the question."""
    return tuple(media for message in shown_messages(task, episode) for media in message.media)
