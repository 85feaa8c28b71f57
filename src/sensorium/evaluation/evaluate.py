"""Evaluation in chunks, which bound the media decoded at once and the work lost by a kill.

Invariant: chunks depend on the list of tasks alone, and the engine's caches are reset between them. So a chunk gives the
same samples whichever were played before it in this process.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sensorium.assembly.session import Session, model_session, sampling_of
from sensorium.cluster.event_loop import run_async
from sensorium.data.mixture import each_once, make_sources
from sensorium.engines.protocol import Sampling
from sensorium.evaluation.summary import sample_of, summarize_samples
from sensorium.recipe.plan import CLIPS_AT_ONCE
from sensorium.recipe.schema import Recipe, RolloutSection
from sensorium.rewards.scorer import GroupScoring, Scorer
from sensorium.rollout.play import Attempt, Rollout
from sensorium.vocabulary.episode import Episode, Group
from sensorium.vocabulary.task import Task


def cut(tasks: Sequence[Task], most: int = 0) -> list[range]:
    """Positions of each chunk's tasks: at most ``most`` tasks (0: any number), and ``CLIPS_AT_ONCE`` clips."""
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

    Groups come in the tasks' order. ``section`` has the limits of held-out tasks. ``progress`` gets the number of a chunk's
    episodes that are done.
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


Extract = Callable[[Task, Episode], str | None]


@dataclass(frozen=True)
class EvaluationResult:
    """A summary of plain numbers, and the scored groups behind it."""

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
    """Play every task ``samples`` times. The same seed and name use the same random numbers at every call.

    ``occasion`` distinguishes the ids of the episodes of different calls.
    """
    scorer, groups = session.scorer, list[Group]()
    section = recipe.held_out_rollout
    attempt, sampling = attempt_of(recipe.seed, name, occasion), sampling_of(section, temperature)
    async for scored in play_chunks(session.rollout, scorer, tasks, cut(tasks), samples, attempt, sampling, section):
        groups += scored
    return EvaluationResult(summarize(groups, name, scorer.extract if scorer.comparing else None), tuple(groups))


def nothing_scored(groups: Sequence[Group]) -> str:
    """Why an evaluation has no result, by its first episode; empty where any episode has a reward."""
    episodes = [episode for group in groups for episode in group.episodes]
    if not episodes or any(episode.reward is not None for episode in episodes):
        return ""
    missing = next((score.reason for score in episodes[0].scores if score.missing), "")
    why = episodes[0].failure or missing or "it has no score"
    return f"none of its {len(episodes)} episodes has a reward, the first because: {why}"


def attempt_of(seed: int, name: str, occasion: str = "") -> Attempt:
    """The attempt that determines an evaluation's random numbers and ids."""
    return Attempt(seed, 0, f"eval:{name}", occasion=occasion)


def summarize(
    groups: Sequence[Group], name: str, extract: Extract | None = None, columns: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The summary of scored groups, one a task; ``extract`` gives a sample's answer, for majority votes."""
    samples = [
        sample_of(group.task, position, episode, extract(group.task, episode) if extract else None, extract is not None)
        for position, group in enumerate(groups)
        for episode in group.episodes
    ]
    return summarize_samples(samples, name, columns)


@dataclass(frozen=True)
class Variant:
    """A way to evaluate the held-out tasks: a temperature (0: greedy) and changed options of their sources."""

    name: str
    temperature: float
    options: dict[str, Any] = field(default_factory=dict)


SAMPLED_AND_GREEDY = (Variant("sampled", 1.0), Variant("greedy", 0.0))


def measure(recipe: Recipe, model_path: str, variants: Sequence[Variant]) -> tuple[dict[str, Any], ...]:
    """Evaluate one checkpoint on the recipe's held-out tasks in every variant."""

    async def all_variants() -> tuple[dict[str, Any], ...]:
        summaries = []
        for variant in variants:
            sections = [s.model_copy(update={"options": {**s.options, **variant.options}}) for s in recipe.tasks.evaluate]
            sources = make_sources(sections, session.store, "tasks.evaluate")
            tasks, _ = each_once(sources, limit=recipe.evaluation.limit, on_bad_row=recipe.tasks.on_bad_row)
            found = await evaluate(session, recipe, tasks, name=variant.name, temperature=variant.temperature)
            summaries.append(found.summary)
        return tuple(summaries)

    with model_session(recipe, model_path) as session:
        return run_async(all_variants())
