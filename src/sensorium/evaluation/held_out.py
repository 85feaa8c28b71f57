"""Evaluate a checkpoint into a folder, chunk by chunk, so that a killed evaluation continues where it was."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sensorium.assembly.determinism import surroundings, warn_if_changed
from sensorium.assembly.session import Session, model_session, sampling_of
from sensorium.cluster.event_loop import lasting_objects, run_async
from sensorium.data.mixture import each_once, make_sources, table_columns, with_way_out
from sensorium.evaluation.evaluate import attempt_of, cut, play_chunks
from sensorium.evaluation.folder import EvaluationFolder, Journal, add_costs
from sensorium.evaluation.summary import Row, row_of, sample_of, summarize_samples
from sensorium.models.checkpoint_path import identity
from sensorium.recipe.schema import Recipe
from sensorium.report.tables import markdown, summary_grid
from sensorium.rewards.scorer import Scorer
from sensorium.runs.durable import read_rows
from sensorium.runs.episodes import task_to_json
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.errors import PromptTooLong, TaskError
from sensorium.vocabulary.task import Task

TRAINING_ONLY = {"temperature", "top_p", "top_k", "mask_truncated"}
Progress = Callable[[int, int], None]  # gets how many tasks are done, of how many


def evaluate_into(
    path: Path, recipe: Recipe, model: str, *, chunk: int = 128, fresh: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Evaluate a model on the recipe's held-out tasks by its section ``evaluation``; returns the summary that is written.

    An evaluation that was begun in the folder continues; one of something else is refused. ``fresh`` removes it.
    """
    folder = EvaluationFolder(path)
    section = recipe.evaluation
    claim = _claim(recipe, chunk)
    if not fresh:
        folder.refuse_other(claim)  # before the model is loaded
    with model_session(recipe, model, folder.path) as session:
        sources = make_sources(recipe.tasks.evaluate, session.store, "tasks.evaluate")
        tasks, skipped = each_once(sources, limit=section.limit, on_bad_row=recipe.tasks.on_bad_row)
        if not tasks:
            raise TaskError("tasks.evaluate: its sources have no tasks, so there is nothing to evaluate on.")
        session.rollout.refuse_strange(tasks)
        claim |= {
            "model": model,
            "weights": identity(session.policy),
            "tasks": {"count": len(tasks), "digest": _digest(tasks), "skipped": len(skipped)},
            "surroundings": surroundings(),
        }
        if fresh:
            folder.clear()
        warn_if_changed(folder.take(claim)["surroundings"])
        with folder.journal() as journal, lasting_objects():
            run_async(_play(folder, journal, session, recipe, tasks, chunk, progress or (lambda done, of: None)))
            summary = summarize_samples(folder.read_so_far(), _name(recipe), table_columns(sources))
            summary |= {"skipped": len(skipped), "model": model, "temperature": section.temperature, "seed": recipe.seed}
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
    keys = [[(tasks[place].id, place, index) for place in places for index in range(samples)] for places in chunks]
    left = chunks[journal.recover(keys) :]
    if left:
        folder.reopen()
    done = left[0].start if left else len(tasks)
    progress(done, len(tasks))
    playing = play_chunks(
        session.rollout,
        session.scorer,
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
        journal.append(_rows(groups, places, session.scorer, recipe.seed))
        add_costs(folder.costs, session.judges.take_metrics())
        done = places.stop


def _rows(groups: Sequence[Group], places: range, scorer: Scorer, seed: int) -> list[Row]:
    rows = []
    votes = scorer.comparing is not None
    for group, place in zip(groups, places, strict=True):
        for episode in group.episodes:
            sample = sample_of(group.task, place, episode, scorer.extract(group.task, episode), votes)
            rows.append(row_of(sample, group.task, episode, seed))
    return rows


def _name(recipe: Recipe) -> str:
    """An evaluation's name, by which its random numbers are keyed: a study and the command use the same."""
    return "greedy" if recipe.evaluation.temperature == 0 else "sampled"


def _claim(recipe: Recipe, chunk: int) -> dict[str, Any]:
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
        },
        "recipe": {
            "family": recipe.model.family,
            "dtype": recipe.model.dtype,
            "tasks": {key: data["tasks"][key] for key in ("evaluate", "on_bad_row")},
            "rollout": {key: value for key, value in played.items() if key not in TRAINING_ONLY and key not in unset},
            "rewards": data["rewards"],
        },
    }


def _digest(tasks: Sequence[Task]) -> str:
    body = "\n".join(json.dumps(task_to_json(task), sort_keys=True, default=str) for task in tasks)
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
