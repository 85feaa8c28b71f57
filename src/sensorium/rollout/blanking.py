"""Play with media blanked, to see whether they matter: grey pictures, grey frames, silence.

A blank takes as many tokens as the medium itself. Rewards and judges see the task's own media; only what the model is shown
changes.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeGuard

from sensorium.data.made_media import blank, muted
from sensorium.envs.protocol import Environment, Observation, StepResult, WatchedEnvironment
from sensorium.rollout.play import Rollout
from sensorium.vocabulary.content import Media, MediaKind, Message
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.task import Task


def blanking(kinds: Collection[MediaKind], seeing: Rollout) -> Rollout:
    """A copy of a rollout in which media of these kinds are blanked. The sound of a video is a sound."""
    rollout, chat, blanks = copy.copy(seeing), seeing.chat, dict[Media, Media]()

    def hidden(media: Media) -> Media:
        if media not in blanks:
            shown = chat.shown(media)
            if "sound" in kinds and shown.sound is not None:
                shown = muted(shown, chat.decoder, chat.store)
            blanks[media] = blank(shown, chat.decoder, chat.store) if media.kind in kinds else shown
        return blanks[media]

    def hide(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(
            replace(message, content=tuple(hidden(part) if holds(part, kinds) else part for part in message.content))
            for message in messages
        )

    rollout.make_environment = lambda task: blanked(seeing.make_environment(task), hide)
    return rollout


def holds(part: object, kinds: Collection[MediaKind]) -> TypeGuard[Media]:
    """Whether a block is a medium of one of these kinds, or a video with a sound of that kind."""
    return isinstance(part, Media) and any(one.kind in kinds for one in part.parts)


def refuse_unseen(kinds: Collection[MediaKind], tasks: Sequence[Task]) -> None:
    """Refuse to blank what no task shows. What environments show is known only when they are played."""
    shown = {part.kind for task in tasks for message in task.messages for item in message.media for part in item.parts}
    unseen = [kind for kind in kinds if kind not in shown]
    if unseen and not any(task.environment for task in tasks):
        only = " and ".join(sorted(shown)) or "text"
        raise TaskError(f"there is no {unseen[0]} to blank: the {len(tasks)} held-out tasks show {only} alone.")


def blanked(inner: Environment, hide: Callable[[Sequence[Message]], tuple[Message, ...]]) -> WatchedEnvironment:
    """An environment whose observations are changed by ``hide``."""

    def first(begun: tuple[tuple[Message, ...], Observation]) -> tuple[tuple[Message, ...], Observation]:
        head, observation = begun
        return hide(head), replace(observation, messages=hide(observation.messages))

    def following(result: StepResult) -> StepResult:
        if not isinstance(result, StepResult) or result.observation is None:
            return result
        return replace(result, observation=replace(result.observation, messages=hide(result.observation.messages)))

    return WatchedEnvironment(inner, first, following)
