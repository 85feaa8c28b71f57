"""Evaluation in chunks: a bound on what is decoded at once, and on what a kill costs.

Invariant: where chunks are cut depends on the list of tasks alone, and nothing that an earlier chunk left in the engine
reaches a later one. So a chunk gives the same samples whichever were played before it in this process.
"""

from collections.abc import AsyncIterator, Callable, Sequence

from sensorium.engines.protocol import Sampling
from sensorium.recipe.plan import CLIPS_AT_ONCE
from sensorium.recipe.schema import RolloutSection
from sensorium.rewards.scorer import Scorer
from sensorium.rewards.scoring import GroupScoring
from sensorium.rollout.play import Attempt, Rollout
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.task import Task


def cut(tasks: Sequence[Task], most: int = 0) -> list[range]:
    """Positions of the tasks of each chunk: ``most`` tasks (0: any number), and not more clips than may be held at once."""
    chunks: list[range] = []
    start, held = 0, set[str]()
    for position, task in enumerate(tasks):
        clips = {item.key for message in task.messages for item in message.media if item.kind != "picture"}
        full = bool(most) and position - start >= most
        if position > start and (full or len(held | clips) > CLIPS_AT_ONCE):
            chunks.append(range(start, position))
            start, held = position, set()
        held |= clips
    return [*chunks, range(start, len(tasks))] if tasks else []


async def play_chunks(
    rollout: Rollout,
    scorer: Scorer,
    tasks: Sequence[Task],
    chunks: Sequence[range],
    samples: int,
    attempt: Attempt,
    sampling: Sampling,
    section: RolloutSection,
    progress: Callable[[int], None] | None = None,
) -> AsyncIterator[list[Group]]:
    """Play and score some chunks of a list of tasks; ids and random numbers are those of the whole list played at once.

    Groups are scored as they are complete, and come in the tasks' order. ``section`` has the limits of held-out tasks.
    ``progress`` hears how many episodes of a chunk are done.
    """
    for i, chunk in enumerate(chunks):
        if i:
            rollout.engine.reset_cache()
        before, these = tasks[: chunk.start], tasks[chunk.start : chunk.stop]
        async with GroupScoring(scorer) as scoring:
            playing = rollout.stream(these, samples, attempt, sampling, progress=progress, before=before, section=section)
            async with playing as stream:
                order = {}
                async for place, group in stream:
                    scoring.begin(group)
                    order[place] = group.id
            scored = await scoring.finish()
        yield [scored[order[place]] for place in sorted(order)]
