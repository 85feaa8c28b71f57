"""Compare two finished evaluations of the same tasks: both accuracies by category, and the difference with its interval.

Tasks are paired, which makes a small difference visible: those that both get right, or both get wrong, do not blur it.
"""

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sensorium.evaluation.folder import EvaluationFolder
from sensorium.evaluation.summary import Sample, by_task, mean_at_k, mean_interval, paired_interval, sign_test
from sensorium.report.tables import comparison_grid, markdown, print_grid
from sensorium.report.terminal import Terminal, say
from sensorium.runs.durable import write_whole
from sensorium.vocabulary.errors import TaskError

Name = tuple[str, int]  # a task's id, and which of its occurrences in the list of tasks it is


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="the folder of an evaluation: of the model before")
    parser.add_argument("b", type=Path, metavar="B", help="the folder of another: of the model after")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where comparison.md and comparison.json go; default: B")


def run(arguments: Namespace) -> int:
    console = Terminal()
    found = compare_folders(EvaluationFolder(arguments.a), EvaluationFolder(arguments.b))
    grid = comparison_grid(found)
    print_grid(grid, console)
    out = arguments.out or arguments.b
    write_whole(out / "comparison.json", json.dumps(found, indent=1) + "\n")
    write_whole(out / "comparison.md", markdown(grid))
    say(f"written to {out / 'comparison.md'} and comparison.json", console)
    return 0


def compare_folders(a: EvaluationFolder, b: EvaluationFolder) -> dict[str, Any]:
    """Compare two finished evaluations. Whatever differs beside the model is noted."""
    found = compare(a.read(), b.read())
    claims = [folder.claimed() for folder in (a, b)]
    summary = b.read_summary()
    order = [category for category in summary["categories"] if category in found["categories"]]
    sides = {
        side: {"folder": str(folder.path), "model": claim["model"], "settings": claim["settings"]}
        for side, folder, claim in zip("ab", (a, b), claims, strict=True)
    }
    return {
        **sides,
        **found,
        "categories": {category: found["categories"][category] for category in order},
        **({"columns": summary["columns"]} if "columns" in summary else {}),
        "notes": list(_notes(found, *claims)),
    }


def compare(a: Sequence[Sample], b: Sequence[Sample]) -> dict[str, Any]:
    """Accuracies, paired difference and McNemar's counts over the tasks that both judged, all of them and by category."""
    tasks_a, tasks_b = _named(a), _named(b)
    shared = [name for name in tasks_b if name in tasks_a]
    pairs: dict[str, list[tuple[float, float]]] = {}
    for name in shared:
        one, other = tasks_a[name], tasks_b[name]
        if one[0].answer != other[0].answer:
            raise TaskError(
                f"task {name[0]}: its answer is {one[0].answer!r:.60} in A and {other[0].answer!r:.60} in B, so these are "
                "different questions. Evaluate both models on the same data."
            )
        before, after = mean_at_k(one), mean_at_k(other)
        if before is not None and after is not None:
            pairs.setdefault(other[0].category, []).append((before, after))
    judged = [pair for category in pairs.values() for pair in category]
    if not judged:
        raise TaskError(
            f"A has {len(tasks_a)} tasks and B has {len(tasks_b)}, and no task was judged in both. Evaluate both models on "
            "the same data."
        )
    samples = max(len(task) for task in (*tasks_a.values(), *tasks_b.values()))
    return {
        "all": _part(judged, samples),
        "categories": {category: _part(pairs[category], samples) for category in sorted(pairs)},
        "only_in_a": len(tasks_a) - len(shared),
        "only_in_b": len(tasks_b) - len(shared),
        "not_judged": len(shared) - len(judged),
        "asked_otherwise": sum(tasks_a[name][0].question != tasks_b[name][0].question for name in shared),
    }


def _part(pairs: Sequence[tuple[float, float]], samples: int) -> dict[str, Any]:
    """The numbers of all tasks or of a category, from each task's shares of right samples.

    ``only_a`` counts tasks of which A gets more samples right: with one sample each, those that only A gets right.
    """
    sides = {
        side: {"accuracy": sum(values) / len(values), "interval": list(mean_interval(values, samples))}
        for side, values in zip("ab", zip(*pairs, strict=True), strict=True)
    }
    differences = [after - before for before, after in pairs]
    only_a, only_b = sum(value < 0 for value in differences), sum(value > 0 for value in differences)
    return {
        "tasks": len(pairs),
        **sides,
        "difference": sum(differences) / len(differences),
        "interval": list(paired_interval(differences)),
        "only_a": only_a,
        "only_b": only_b,
        "p": sign_test(only_a, only_b),
    }


def _named(samples: Sequence[Sample]) -> dict[Name, list[Sample]]:
    times: Counter[str] = Counter()
    tasks: dict[Name, list[Sample]] = {}
    for task in by_task(samples):
        tasks[task[0].task, times[task[0].task]] = task
        times[task[0].task] += 1
    return tasks


def _notes(found: Mapping[str, Any], a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    if found["only_in_a"] or found["only_in_b"]:
        only = f"{found['only_in_a']:,} are in A only and {found['only_in_b']:,} in B only"
        yield f"Compared on the {found['all']['tasks'] + found['not_judged']:,} tasks that both have; {only}."
    if found["not_judged"]:
        yield f"{found['not_judged']:,} tasks that both have are left out: they were not judged in one or the other."
    if found["asked_otherwise"]:
        yield f"{found['asked_otherwise']:,} tasks were put to B in other words or with other media than to A."
    for name in ("temperature", "samples", "seed"):
        one, other = a["settings"].get(name), b["settings"].get(name)
        if one != other:
            yield f"Not only the model differs: {name} is {one} for A and {other} for B."
    if a["weights"] == b["weights"]:
        yield "A and B are the same model, weight by weight."
