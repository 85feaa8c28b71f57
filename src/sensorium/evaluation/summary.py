"""The summary of an evaluation: plain numbers, each with what it was measured on.

Accuracy is about right and wrong, reward about what was paid; neither is ever told for the other. Every interval takes the
task as its unit: samples of one task are alike, so that more of them make a task's own number surer, not the tasks more.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sensorium.evaluation.intervals import mean_interval
from sensorium.evaluation.samples import Sample, best_at_k, majority_at_k, mean_at_k
from sensorium.vocabulary.episode import Status

Tasks = Sequence[Sequence[Sample]]
"""The samples of every task."""


def by_task(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples gathered by task, in the order of the task list."""
    tasks: dict[int, list[Sample]] = {}
    for sample in samples:
        tasks.setdefault(sample.position, []).append(sample)
    return [sorted(tasks[position], key=lambda sample: sample.index) for position in sorted(tasks)]


def summarize_samples(samples: Sequence[Sample], name: str, columns: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything that is told of an evaluation. What was not judged is counted, not zero.

    ``columns`` are the names by which a published table knows the categories; its order comes first.
    """
    tasks = by_task(samples)
    columns = columns or {}
    categories: dict[str, list[Sequence[Sample]]] = {}
    for task in tasks:
        categories.setdefault(task[0].category, []).append(task)
    named = [category for category in columns if category in categories]
    order = [*named, *sorted(categories.keys() - set(named))]
    k = max((len(task) for task in tasks), default=1)
    whole = _part(tasks, k)
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
        "truncated": _count(samples, Status.TRUNCATED),
        "truncated_share": _count(samples, Status.TRUNCATED) / len(samples) if samples else None,
        "failed": _count(samples, Status.FAILED) + _count(samples, Status.ABORTED),
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


def _part(tasks: Tasks, k: int) -> dict[str, Any]:
    """What is told of all tasks and of each category alike. ``tasks`` counts those that were judged."""
    accuracy = _over(tasks, mean_at_k, k)
    part: dict[str, Any] = {
        "accuracy": accuracy["value"],
        "interval": accuracy["interval"],
        "tasks": sum(mean_at_k(task) is not None for task in tasks),
    }
    if k > 1:
        part |= {f"mean@{k}": accuracy, f"best@{k}": _over(tasks, best_at_k)}
        if any(sample.votes for task in tasks for sample in task):
            part[f"majority@{k}"] = _over(tasks, majority_at_k)
    return part | _rewards([sample for task in tasks for sample in task])


def _over(tasks: Tasks, measure: Callable[[Sequence[Sample]], float | None], k: int = 1) -> dict[str, Any]:
    """The mean of a measure over the tasks that have one, with its interval."""
    values = [value for task in tasks if (value := measure(task)) is not None]
    return {"value": _mean(values), "interval": list(mean_interval(values, k)) if values else None}


def _rewards(samples: Sequence[Sample]) -> dict[str, Any]:
    """Mean reward and mean of each term, over the samples whose reward is whole: so the weighted terms sum up to it."""
    paid = [sample for sample in samples if sample.reward is not None]
    names = sorted({term for sample in paid for term in sample.terms})
    values = {name: [value for sample in paid if (value := sample.terms.get(name)) is not None] for name in names}
    return {
        "reward": _mean([sample.reward for sample in paid if sample.reward is not None]),
        "terms": {name: _mean(found) for name, found in values.items() if found},
    }


def _count(samples: Sequence[Sample], status: Status) -> int:
    return sum(sample.status == status for sample in samples)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
