"""Samples of an evaluation and their summary: means, best and majority of several, each with its interval.

A sample that was not judged (it failed, or its judge did) is left out; a task without judged samples has no number.
Accuracy is about right and wrong, reward about what terms gave; neither ever replaces the other. The unit of every interval
is the task: samples of one task are alike, so more of them make that task's number surer, but do not count as more tasks.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, sqrt
from typing import Any, TypeVar

from sensorium.runs.episodes import messages_to_json
from sensorium.vocabulary.episode import Episode, Status, by_name, category_of
from sensorium.vocabulary.metric_names import MOST_CATEGORIES, OTHER_CATEGORIES
from sensorium.vocabulary.task import Task

Z95 = 1.959963984540054


def wilson(successes: float, trials: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval of a share; sound near 0 and 1 and for few trials."""
    if trials <= 0:
        raise ValueError("an interval needs at least one trial")
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return low if successes > 0 else 0.0, high if successes < trials else 1.0  # where rounding leaves a trace


def mean_interval(values: Sequence[float], samples: int = 1, z: float = Z95) -> tuple[float, float]:
    """95 % interval of the mean of per-task shares, each of ``samples`` samples that may be alike.

    Wilson's, with the number of independent trials by the spread among tasks: one a task where its samples always agree, up
    to ``samples`` a task where tasks differ no more than by chance.
    """
    tasks, total = len(values), sum(values)
    if tasks == 1 or all(value in (0.0, 1.0) for value in values):
        return wilson(total, tasks, z)
    mean = total / tasks
    variance = sum((value - mean) ** 2 for value in values) / (tasks - 1)
    most = tasks * samples
    trials = min(most, tasks * mean * (1 - mean) / variance) if variance > 0 else most
    return wilson(mean * trials, trials, z)


# The 97.5 % quantile of Student's t by degrees of freedom; beyond, an expansion in 1/n is good to three digits.
T975 = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    if freedom <= len(T975):
        return T975[freedom - 1]
    z, n = Z95, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def student_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean by Student's t; None of fewer than two values."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    half = t_quantile(len(values) - 1) * sqrt(_variance(values) / len(values))
    return mean - half, mean + half


def welch_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the difference of two means, b - a, by Welch; None where a side has fewer than two values.

    The degrees of freedom are rounded down, so that the interval is never too narrow by that.
    """
    if len(a) < 2 or len(b) < 2:
        return None
    difference = sum(b) / len(b) - sum(a) / len(a)
    parts = [_variance(side) / len(side) for side in (a, b)]
    whole = sum(parts)
    if whole == 0:
        return difference, difference
    freedom = whole**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    half = t_quantile(max(1, int(freedom + 1e-9))) * sqrt(whole)
    return difference - half, difference + half


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def paired_interval(differences: Sequence[float], z: float = Z95) -> tuple[float, float]:
    """95 % interval of the mean of per-task differences, each within [-1, 1].

    By Bonett and Price (2012): one task won and one lost are added, then the normal interval is taken. So it is sound for
    few tasks, and has a width where no task changed.
    """
    if not differences:
        raise ValueError("an interval needs at least one task")
    count = len(differences) + 2
    mean = sum(differences) / count
    variance = (sum(value * value for value in differences) + 2) / count - mean * mean
    half = z * sqrt(variance / count)
    return max(-1.0, mean - half), min(1.0, mean + half)


def sign_test(one: int, other: int) -> float:
    """McNemar's exact two-sided p: how often chance alone divides ``one + other`` changed tasks as unevenly."""
    changed = one + other
    tail = sum(comb(changed, i) for i in range(min(one, other) + 1))
    return min(1.0, 2 * tail / 2**changed)


Row = dict[str, Any]
TERM = "reward/"


@dataclass(frozen=True)
class Sample:
    """``position`` is the task's place in the list of tasks, ``index`` the attempt's among those at this task.

    ``terms`` are the named parts of the reward before their ``weights``: the weighted parts sum up to ``reward``.
    ``votes``: a term can extract an answer, which is ``extracted``. ``question`` is a digest of the prompt.
    """

    task: str
    position: int
    index: int
    category: str
    status: Status
    correct: bool | None
    reward: float | None
    terms: Mapping[str, float | None] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    answer: Any = None
    extracted: str | None = None
    votes: bool = False
    length: int = 0
    turns: int = 0
    question: str = ""


def sample_of(task: Task, position: int, episode: Episode, extracted: str | None, votes: bool) -> Sample:
    """A scored episode as a sample."""
    return Sample(
        task=task.id,
        position=position,
        index=episode.index,
        category=category_of(task, episode) or "all",
        status=episode.status,
        correct=episode.correct,
        reward=episode.reward,
        terms=by_name(episode.scores),
        weights={score.name: score.weight for score in episode.scores},
        answer=task.answer,
        extracted=extracted,
        votes=votes,
        length=episode.sampled_tokens,
        turns=len(episode.turns),
        question=_question(messages_to_json(_shown(task, episode))),
    )


def row_of(sample: Sample, task: Task, episode: Episode, seed: int) -> Row:
    """The line of a sample: its numbers, then prompt and response; for an environment all turns in order."""
    reasons = {score.name: score.reason for score in episode.scores if score.missing}
    environment, played = task.environment, {}
    if environment is not None:
        played = {"conversation": messages_to_json(episode.conversation)}
    return {
        "task": sample.task,
        "position": sample.position,
        "sample": sample.index,
        "category": sample.category,
        "seed": seed,
        "status": sample.status.value,
        "correct": sample.correct,
        "reward": sample.reward,
        **{f"{TERM}{name}": value for name, value in sample.terms.items()},
        "weights": dict(sample.weights),
        "answer": sample.answer,
        **({"extracted": sample.extracted} if sample.votes else {}),
        "length": sample.length,
        "turns": sample.turns,
        **({"missing": reasons} if reasons else {}),
        **({"failure": episode.failure} if episode.failure else {}),
        **({"environment": {"name": environment.name, "seed": environment.seed}} if environment is not None else {}),
        "messages": messages_to_json(_shown(task, episode)),
        **played,
        "response": episode.response,
    }


def sample_from(row: Row) -> Sample:
    """The sample of a line."""
    same = ("task", "position", "category", "correct", "reward", "weights", "answer", "length", "turns")
    return Sample(
        **{name: row[name] for name in same},
        index=row["sample"],
        status=Status(row["status"]),
        terms={key.removeprefix(TERM): value for key, value in row.items() if key.startswith(TERM)},
        extracted=row.get("extracted"),
        votes="extracted" in row,
        question=_question(row["messages"]),
    )


ANSWER_SHOWN = 80
OUTCOME = ("task", "position", "category", "correct", "reward", "answer", "question")  # the same in row and sample


def outcome_of(sample: Sample) -> Row:
    """A sample in a short line without its texts; of a long answer a digest."""
    answer = sample.answer
    if len(text := json.dumps(answer, ensure_ascii=False, default=str)) > ANSWER_SHOWN:
        answer = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    row = {name: getattr(sample, name) for name in OUTCOME} | {"answer": answer}
    return {**row, "sample": sample.index, "status": sample.status.value}


def outcome_from(row: Row) -> Sample:
    """The sample of such a line."""
    return Sample(**{name: row[name] for name in OUTCOME}, index=row["sample"], status=Status(row["status"]))


def _shown(task: Task, episode: Episode) -> tuple[Any, ...]:
    """The prompt; for an environment its first observation."""
    return task.messages or (episode.turns[0].observation if episode.turns else ())


def _question(messages: Sequence[Row]) -> str:
    """A digest of a prompt, without the places of its files."""
    blocks = [[{k: v for k, v in block.items() if k != "origin"} for block in message["content"]] for message in messages]
    return hashlib.blake2b(json.dumps(blocks, sort_keys=True).encode(), digest_size=12).hexdigest()


def mean_at_k(samples: Sequence[Sample]) -> float | None:
    """The share of right samples."""
    verdicts = _verdicts(samples)
    return sum(verdicts) / len(verdicts) if verdicts else None


def best_at_k(samples: Sequence[Sample]) -> float | None:
    """1 if any sample is right (pass@k), else 0."""
    verdicts = _verdicts(samples)
    return float(any(verdicts)) if verdicts else None


def majority_at_k(samples: Sequence[Sample]) -> float | None:
    """1 if the answer most samples gave is right, else 0.

    Of answers given equally often the one that was given first wins. A sample without an answer does not vote; if none
    votes, the task is wrong. An answer is as right as the first sample that gave it.
    """
    judged = [sample for sample in samples if sample.correct is not None]
    if not judged:
        return None
    votes = Counter(sample.extracted for sample in judged if sample.extracted is not None)
    if not votes:
        return 0.0
    [(winner, _)] = votes.most_common(1)
    return float(next(sample.correct is True for sample in judged if sample.extracted == winner))


def _verdicts(samples: Sequence[Sample]) -> list[bool]:
    return [sample.correct for sample in samples if sample.correct is not None]


def by_task(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples gathered by task, in the order of the task list."""
    tasks: dict[int, list[Sample]] = {}
    for sample in samples:
        tasks.setdefault(sample.position, []).append(sample)
    return [sorted(tasks[position], key=lambda sample: sample.index) for position in sorted(tasks)]


Item = TypeVar("Item")


def by_category(items: Iterable[Item], category: Callable[[Item], str]) -> dict[str, list[Item]]:
    """Items by category. Beyond ``MOST_CATEGORIES`` those with the fewest items are one, ``other``."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(category(item), []).append(item)
    if len(found) <= MOST_CATEGORIES:
        return found
    by_size = sorted(found, key=lambda name: (-len(found[name]), name))
    rest = [item for name in by_size[MOST_CATEGORIES - 1 :] for item in found[name]]
    return {name: found[name] for name in by_size[: MOST_CATEGORIES - 1]} | {OTHER_CATEGORIES: rest}


def summarize_samples(samples: Sequence[Sample], name: str, columns: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The summary of an evaluation. What was not judged is counted, not zero.

    ``columns`` are the names of the categories in a published table; its order comes first.
    """
    tasks = by_task(samples)
    columns = columns or {}
    categories = by_category(tasks, _category)
    named = [category for category in columns if category in categories]
    order = [*named, *sorted(categories.keys() - set(named))]
    k = max((len(task) for task in tasks), default=1)
    whole = _part(tasks, k)
    truncated = sum(sample.status == Status.TRUNCATED for sample in samples)
    return {
        "name": name,
        "tasks": len(tasks),
        "judged": whole.pop("tasks"),
        "episodes": len(samples),
        "samples": k,
        **whole,
        "weights": dict(sorted({term: weight for sample in samples for term, weight in sample.weights.items()}.items())),
        "categories": {category: _part(categories[category], k) for category in order},
        **({"columns": {category: columns[category] for category in named}} if named else {}),
        "length_mean": _mean([float(sample.length) for sample in samples]),
        "turns_mean": _mean([float(sample.turns) for sample in samples]),
        "truncated": truncated,
        "truncated_share": truncated / len(samples) if samples else None,
        "failed": sum(sample.status in (Status.FAILED, Status.ABORTED) for sample in samples),
        "missing": sum(sample.reward is None for sample in samples),
    }


def summary_metrics(summary: dict[str, Any]) -> dict[str, float]:
    """An evaluation summary as ``eval/…`` metrics."""
    row = {f"eval/{key}": summary[key] for key in ("accuracy", "reward", "length_mean", "turns_mean", "failed", "missing")}
    terms = summary["terms"]
    row |= {f"eval/reward/{term}": value for term, value in terms.items()}
    for term in {name.partition("/")[0] for name in terms if "/" in name} - terms.keys():
        row[f"eval/reward/{term}"] = sum(value for name, value in terms.items() if name.startswith(f"{term}/"))
    row |= {f"eval/{name}": part["value"] for name, part in summary.items() if "@" in name}
    row |= {f"eval/accuracy/{name}": part["accuracy"] for name, part in summary["categories"].items()}
    return {key: float(value) for key, value in row.items() if value is not None}


def _category(task: Sequence[Sample]) -> str:
    """The category of a task's samples: one that failed may not have met the environment that names it."""
    return next((sample.category for sample in task if sample.status != Status.FAILED), task[0].category)


def _part(tasks: Sequence[Sequence[Sample]], k: int) -> dict[str, Any]:
    """The numbers of all tasks or of a category. ``tasks`` counts those that were judged."""
    accuracy = _over(tasks, mean_at_k, k)
    judged = [task for task in tasks if mean_at_k(task) is not None]
    part: dict[str, Any] = {
        "accuracy": accuracy["value"],
        "interval": accuracy["interval"],
        **({"majority": known} if (known := _most_frequent([_known(task[0].answer) for task in judged])) else {}),
        **(
            {"given": given} if (given := _most_frequent([[s.extracted] for t in judged for s in t if s.extracted])) else {}
        ),
        "tasks": len(judged),
    }
    if k > 1:
        part |= {f"mean@{k}": accuracy, f"best@{k}": _over(tasks, best_at_k)}
        if any(sample.votes for task in tasks for sample in task):
            part[f"majority@{k}"] = _over(tasks, majority_at_k)
    # Rewards are means over the samples whose reward is whole, so that the weighted terms sum up to it.
    rewarded = [sample for task in tasks for sample in task if sample.reward is not None]
    terms = {}
    for name in sorted({term for sample in rewarded for term in sample.terms}):
        if values := [value for sample in rewarded if (value := sample.terms.get(name)) is not None]:
            terms[name] = _mean(values)
    return part | {"reward": _mean([s.reward for s in rewarded if s.reward is not None]), "terms": terms}


def _known(answer: Any) -> list[str]:
    """The answers that count as right, as texts that are equal where they differ in case and spaces alone."""
    several = answer if isinstance(answer, list | tuple) else [answer]
    texts = [" ".join(str(one).split()).casefold() for one in several if isinstance(one, str | int | float)]
    return list(dict.fromkeys(text for text in texts if text))


def _most_frequent(answers: Sequence[Sequence[str | None]]) -> dict[str, Any] | None:
    """The most frequent of answers, its share of them, and how many differ; of known ones: chance, by always saying it."""
    counts = Counter(answer for several in answers for answer in several)
    if not counts:
        return None
    [(answer, count)] = counts.most_common(1)
    return {"answer": answer, "share": count / len(answers), "different": len(counts)}


def _over(
    tasks: Sequence[Sequence[Sample]], measure: Callable[[Sequence[Sample]], float | None], k: int = 1
) -> dict[str, Any]:
    values = [value for task in tasks if (value := measure(task)) is not None]
    return {"value": _mean(values), "interval": list(mean_interval(values, k)) if values else None}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
