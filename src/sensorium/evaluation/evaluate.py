"""Evaluation: play held-out tasks greedily or sampled, score them, and say how sure we can be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sensorium.assembly.session import Session, sampling_of
from sensorium.evaluation.chunks import cut, play_chunks
from sensorium.evaluation.sample import sample_of
from sensorium.evaluation.summary import summarize_samples
from sensorium.recipe.schema import Recipe
from sensorium.rollout.play import Attempt
from sensorium.vocabulary.episode import Episode, Group
from sensorium.vocabulary.task import Task

Extract = Callable[[Task, Episode], str | None]


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation found: a summary of plain numbers, and the scored groups behind it."""

    summary: dict[str, Any]
    groups: tuple[Group, ...]


async def evaluate(
    session: Session,
    recipe: Recipe,
    tasks: Sequence[Task],
    *,
    name: str,
    temperature: float,
    samples: int = 1,
    occasion: str = "",
) -> EvaluationResult:
    """Play every task ``samples`` times. The same seed and name draw the same random numbers at every call.

    ``occasion`` tells the episodes of one call from those of another, and what judges said of them.
    """
    scorer, groups = session.scorer, list[Group]()
    section = recipe.held_out_rollout
    attempt, sampling = attempt_of(recipe.seed, name, occasion), sampling_of(section, temperature)
    async for scored in play_chunks(session.rollout, scorer, tasks, cut(tasks), samples, attempt, sampling, section):
        groups += scored
    return EvaluationResult(summarize(groups, name, scorer.extract if scorer.comparing else None), tuple(groups))


def nothing_scored(groups: Sequence[Group]) -> str:
    """Why an evaluation has no result: what the first episode failed of; empty where any episode has a reward."""
    episodes = [episode for group in groups for episode in group.episodes]
    if not episodes or any(episode.reward is not None for episode in episodes):
        return ""
    missing = next((score.reason for score in episodes[0].scores if score.missing), "")
    why = episodes[0].failure or missing or "it has no score"
    return f"none of its {len(episodes)} episodes has a reward, the first because: {why}"


def attempt_of(seed: int, name: str, occasion: str = "") -> Attempt:
    """What decides the random numbers of an evaluation, and the ids of its episodes."""
    return Attempt(seed, 0, f"eval:{name}", occasion=occasion)


def summarize(
    groups: Sequence[Group], name: str, extract: Extract | None = None, columns: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The summary of scored groups, one a task; ``extract`` says what a sample answered, for votes of the majority."""
    samples = [
        sample_of(group.task, position, episode, extract(group.task, episode) if extract else None, extract is not None)
        for position, group in enumerate(groups)
        for episode in group.episodes
    ]
    return summarize_samples(samples, name, columns)
