"""Evaluation in chunks, which bound the media decoded at once and the work lost by a kill; also into a folder, in which a
killed evaluation continues where it was.

Invariant: chunks depend on the list of tasks alone, and the engine's caches are reset between them. So a chunk gives the
same samples whichever were played before it in this process.
"""

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sensorium.assembly.determinism import surroundings, warn_if_changed
from sensorium.assembly.playing import sampling_of
from sensorium.assembly.session import Session, model_session
from sensorium.cluster.event_loop import lasting_objects, run_async
from sensorium.data.mixture import each_once, make_sources, permuted, table_columns, with_way_out
from sensorium.engines.protocol import Sampling
from sensorium.evaluation.folder import EvaluationFolder, Journal, add_costs
from sensorium.evaluation.summary import Row, Sample, row_of, sample_of, summarize_samples
from sensorium.models.checkpoint_path import identity
from sensorium.recipe.memory_estimate import CLIPS_AT_ONCE
from sensorium.recipe.schema import Recipe, RolloutSection
from sensorium.report.tables import markdown, summary_grid
from sensorium.rewards.scorer import GroupScoring, Scorer
from sensorium.rollout.blanking import blanking, refuse_unseen
from sensorium.rollout.play import Attempt, Rollout
from sensorium.runs.durable import read_rows
from sensorium.runs.episodes import task_to_json
from sensorium.runs.metrics import SightResult
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.episode import Episode, Group
from sensorium.vocabulary.errors import PromptTooLong, TaskError
from sensorium.vocabulary.task import Task

TRAINING_ONLY = {"temperature", "top_p", "top_k", "mask_truncated"}
Progress = Callable[[int, int], None]  # gets how many tasks are done, of how many


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
    """A summary of plain numbers, and the samples and scored groups behind it."""

    summary: dict[str, Any]
    samples: tuple[Sample, ...]
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
    progress: Callable[[int], None] | None = None,
) -> EvaluationResult:
    """Play every task ``samples`` times. The same seed and name use the same random numbers at every call.

    ``occasion`` distinguishes the ids of the episodes of different calls; ``progress`` gets how many are done.
    """
    scorer, groups = session.scorer, list[Group]()
    section = recipe.held_out_rollout
    attempt, sampling = attempt_of(recipe.seed, name, occasion), sampling_of(section, temperature)

    def count(done: int) -> None:
        if progress is not None:
            progress(len(groups) * samples + done)

    playing = play_chunks(session.rollout, scorer, tasks, cut(tasks), samples, attempt, sampling, section, count)
    async for scored in playing:
        groups += scored
    made = samples_of(groups, scorer.extract if scorer.comparing else None)
    return EvaluationResult(summarize_samples(made, name), tuple(made), tuple(groups))


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
    return summarize_samples(samples_of(groups, extract), name, columns)


def samples_of(groups: Sequence[Group], extract: Extract | None = None) -> list[Sample]:
    """The samples of scored groups, one a task."""
    return [
        sample_of(group.task, position, episode, extract(group.task, episode) if extract else None, extract is not None)
        for position, group in enumerate(groups)
        for episode in group.episodes
    ]


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
            changed = recipe.tasks.model_copy(update={"evaluate": tuple(sections)})
            sources = make_sources(changed, "evaluate", session.store)
            tasks, _ = each_once(sources, limit=recipe.evaluation.limit, on_bad_row=recipe.tasks.on_bad_row)
            found = await evaluate(session, recipe, tasks, name=variant.name, temperature=variant.temperature)
            summaries.append(found.summary)
        return tuple(summaries)

    with model_session(recipe, model_path) as session:
        return run_async(all_variants())


def evaluate_into(
    path: Path,
    recipe: Recipe,
    model: str,
    *,
    blank: Collection[MediaKind] = (),
    chunk: int = 128,
    fresh: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate a model on the recipe's held-out tasks by its section ``evaluation``; returns the summary that is written.

    An evaluation that was begun in the folder continues; one of something else is refused. ``fresh`` removes it. Media of
    the kinds in ``blank`` are shown blank.
    """
    folder = EvaluationFolder(path)
    section = recipe.evaluation
    blanked = sorted(set(blank))
    claim = _claim(recipe, chunk, blanked)
    if not fresh:
        folder.refuse_other(claim)  # before the model is loaded
    with model_session(recipe, model, folder.path) as session:
        sources = make_sources(recipe.tasks, "evaluate", session.store)
        tasks, skipped = each_once(sources, limit=section.limit, on_bad_row=recipe.tasks.on_bad_row)
        if not tasks:
            raise TaskError("tasks.evaluate: its sources have no tasks, so there is nothing to evaluate on.")
        session.rollout.refuse_strange(tasks)
        refuse_unseen(blanked, tasks)
        digested = "\n".join(json.dumps(task_to_json(task), sort_keys=True, default=str) for task in tasks)
        digest = hashlib.blake2b(digested.encode(), digest_size=16).hexdigest()
        claim |= {
            "model": model,
            "weights": identity(session.policy),
            "tasks": {"count": len(tasks), "digest": digest, "skipped": len(skipped)},
            "surroundings": surroundings(),
        }
        if fresh:
            folder.clear()
        warn_if_changed(folder.take(claim)["surroundings"])
        with folder.journal() as journal, lasting_objects():
            playing = replace(session, rollout=blanking(blanked, session.rollout)) if blanked else session
            run_async(_play(folder, journal, playing, recipe, tasks, chunk, progress or (lambda done, of: None)))
            summary = summarize_samples(folder.read_so_far(), _name(recipe), table_columns(sources))
            summary |= {"skipped": len(skipped), "model": model, "temperature": section.temperature, "seed": recipe.seed}
            summary |= {"blanked": blanked} if blanked else {}
            folder.finish(summary, markdown(summary_grid(summary)))
    if summary["missing"] == summary["episodes"]:
        first = next((row["failure"] for row in read_rows(folder.samples) if row.get("failure")), "no term gave a score")
        raise TaskError(
            f"nothing was evaluated: none of the {summary['episodes']} samples in '{folder.path}' has a reward, the first "
            f"because: {first} Where prompts are too long, raise evaluation.max_context_tokens or take fewer frames."
        )
    return summary


async def _play(
    folder: EvaluationFolder,
    journal: Journal,
    session: Session,
    recipe: Recipe,
    tasks: Sequence[Task],
    chunk: int,
    progress: Progress,
) -> None:
    """Play the missing chunks, and write each as soon as it is judged."""
    samples, chunks = recipe.evaluation.samples, cut(tasks, chunk)
    scorer, votes = session.scorer, session.scorer.comparing is not None
    keys = [[(tasks[place].id, place, index) for place in places for index in range(samples)] for places in chunks]
    left = chunks[journal.recover(keys) :]
    if left:
        folder.reopen()
    done = left[0].start if left else len(tasks)
    progress(done, len(tasks))
    playing = play_chunks(
        session.rollout,
        scorer,
        tasks,
        left,
        samples,
        attempt_of(recipe.seed, _name(recipe)),
        sampling_of(recipe.held_out_rollout, recipe.evaluation.temperature),
        recipe.held_out_rollout,
        lambda episodes: progress(done + episodes // samples, len(tasks)),
    )
    for places in left:
        groups = await anext(playing)
        failures = [e.failure for group in groups for e in group.episodes if e.info.get("prompt_too_long")]
        if failures and recipe.tasks.on_long_prompt == "refuse":  # lengths are known only now, with decoded media
            raise with_way_out(PromptTooLong(failures[0]))
        rows: list[Row] = []
        for group, place in zip(groups, places, strict=True):
            for episode in group.episodes:
                sample = sample_of(group.task, place, episode, scorer.extract(group.task, episode), votes)
                rows.append(row_of(sample, group.task, episode, recipe.seed))
        journal.append(rows)
        add_costs(folder.costs, session.judges.take_metrics())
        done = places.stop


def _name(recipe: Recipe) -> str:
    """An evaluation's name, by which its random numbers are keyed: a study and the command use the same."""
    return "greedy" if recipe.evaluation.temperature == 0 else "sampled"


def _claim(recipe: Recipe, chunk: int, blanked: list[MediaKind]) -> dict[str, Any]:
    """The parts of recipe and settings that determine the samples."""
    section = recipe.evaluation
    data, played = recipe.model_dump(mode="json"), recipe.held_out_rollout.model_dump(mode="json")
    unset = () if recipe.rollout.count_observations else ("count_observations",)  # folders from before it was there go on
    return {
        "settings": {
            "temperature": section.temperature,
            "samples": section.samples,
            "limit": section.limit,
            "seed": recipe.seed,
            "chunk": chunk,
            **({"blanked": blanked} if blanked else {}),
        },
        "recipe": {
            "family": recipe.model.family,
            "dtype": recipe.model.dtype,
            "tasks": {key: data["tasks"][key] for key in ("evaluate", "on_bad_row")},
            "rollout": {key: value for key, value in played.items() if key not in TRAINING_ONLY and key not in unset},
            "rewards": data["rewards"],
        },
    }


BeginPlaying = Callable[[int], Callable[[int], None] | None]


async def check_sight(
    recipe: Recipe, session: Session, tasks: Sequence[Task], step: int = 0, begin: BeginPlaying = lambda of: None
) -> list[SightResult]:
    """The sight check: does the model look and listen? Play some held-out tasks with and without each kind of media.

    Empty where they show none. The run does not notice: tasks are played greedily, the engine is refreshed afterwards, and
    what is played goes into no ledger step and no metrics but ``sight/…``. ``begin`` is called before each round with its
    episodes; what it returns gets how many are done.
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
            results.append(sight_result(kind, shown, blanked.groups))
        return results
    finally:
        session.forget_played()


def spread(tasks: Sequence[Task], most: int) -> list[Task]:
    """At most ``most`` tasks, drawn at random: every sixteenth task, say, may be of one kind where kinds take turns."""
    count = min(most, len(tasks))
    return [tasks[i] for i in sorted(permuted(place, len(tasks), "sight") for place in range(count))]


def sight_result(kind: str, shown: Sequence[Group], blanked: Sequence[Group]) -> SightResult:
    """What blanking a kind of media changed."""
    answers = [[episode.response for group in groups for episode in group.episodes] for groups in (shown, blanked)]
    same = sum(a == b for a, b in zip(*answers, strict=True))
    judged = any(episode.correct is not None for group in (*shown, *blanked) for episode in group.episodes)

    def mean(groups: Sequence[Group]) -> float:
        found = [e.correct if judged else e.reward for group in groups for e in group.episodes]
        values = [float(value) for value in found if value is not None]
        return sum(values) / len(values) if values else 0.0

    return SightResult(kind, len(shown), mean(shown), mean(blanked), same, "accuracy" if judged else "mean reward")
