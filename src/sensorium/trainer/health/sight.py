"""The sight check: does the model look and listen? Held-out tasks as they are, and with each kind of media blanked.

Invariant: the run does not notice. Tasks are played greedily, the engine is refreshed afterwards, and what is played goes
into no ledger step and no metrics but ``sight/…``.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sensorium.assembly.session import Session
from sensorium.data.mixture import permuted
from sensorium.evaluation.evaluate import evaluate
from sensorium.recipe.schema import Recipe
from sensorium.rollout.blanking import blanking
from sensorium.runs.metrics import SightResult
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.task import Task

BeginPlaying = Callable[[int], Callable[[int], None] | None]


async def check_sight(
    recipe: Recipe, session: Session, tasks: Sequence[Task], step: int = 0, begin: BeginPlaying = lambda of: None
) -> list[SightResult]:
    """Play some held-out tasks with and without each kind of media; empty where they show none.

    ``begin`` is called before each round with its episodes; what it returns gets how many are done.
    """
    few = spread(tasks, recipe.health.sight_tasks)
    if not any(task.environment or any(message.media for message in task.messages) for task in few):
        return []
    try:
        at = f"step_{step}"
        greedy: dict[str, Any] = {"name": "sight", "temperature": 0.0}
        shown = (await evaluate(session, recipe, few, **greedy, occasion=at, progress=begin(len(few)))).groups
        messages = [message for group in shown for message in group.task.messages]
        messages += [m for group in shown for e in group.episodes for turn in e.turns for m in turn.observation]
        results = []
        for kind in sorted({part.kind for message in messages for item in message.media for part in item.parts}):
            without = replace(session, rollout=blanking([kind], session.rollout))
            occasion = f"{at}_without_{kind}"
            blanked = await evaluate(without, recipe, few, **greedy, occasion=occasion, progress=begin(len(few)))
            results.append(_compared(kind, shown, blanked.groups))
        return results
    finally:
        session.forget_played()


def spread(tasks: Sequence[Task], most: int) -> list[Task]:
    """At most ``most`` tasks, drawn at random: every sixteenth task, say, may be of one kind where kinds take turns."""
    count = min(most, len(tasks))
    return [tasks[i] for i in sorted(permuted(place, len(tasks), "sight") for place in range(count))]


def _compared(kind: str, shown: Sequence[Group], blanked: Sequence[Group]) -> SightResult:
    answers = [[episode.response for group in groups for episode in group.episodes] for groups in (shown, blanked)]
    same = sum(a == b for a, b in zip(*answers, strict=True))
    judged = any(episode.correct is not None for group in (*shown, *blanked) for episode in group.episodes)

    def mean(groups: Sequence[Group]) -> float:
        found = [e.correct if judged else e.reward for group in groups for e in group.episodes]
        values = [float(value) for value in found if value is not None]
        return sum(values) / len(values) if values else 0.0

    return SightResult(kind, len(shown), mean(shown), mean(blanked), same, "accuracy" if judged else "mean reward")
