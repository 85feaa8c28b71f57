"""Comparing evaluations of the same tasks: of two models, of runs by their own evaluations, of groups of seeds.

A difference has two intervals, which answer different questions and are never mixed. The one *across tasks* pairs tasks
and says what other tasks would give with these very models. The one *across seeds* takes the run as its unit and says what
other seeds would give on these tasks; it needs two runs a side.

    runs/a runs/b              two runs, one seed each: an interval across tasks only
    'sweeps/x/lr=1e-4,*' 'sweeps/x/lr=3e-4,*'      two groups of seeds: both intervals
"""

import glob
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensorium.evaluation.folder import EvaluationFolder
from sensorium.evaluation.summary import (
    Sample,
    by_task,
    mean_at_k,
    mean_interval,
    outcome_from,
    paired_interval,
    sign_test,
    student_interval,
    welch_interval,
)
from sensorium.recipe.yaml import read_yaml, value_text
from sensorium.runs.durable import read_rows
from sensorium.runs.run_directory import RunDirectory, step_of
from sensorium.vocabulary.episode import Status
from sensorium.vocabulary.errors import CheckpointError, RecordError, TaskError
from sensorium.vocabulary.plain import counted, differences

Name = tuple[str, int]  # a task's id, and which of its occurrences in the list of tasks it is
Tasks = dict[Name, list[Sample]]
EXPERIMENT = "experiment.json"
SAMPLING = ("temperature", "samples", "max_new_tokens", "max_context_tokens", "blanked")
# What does not make two runs of different settings.
NO_SETTING = ("name", "run_dir", "seed", "threads", "logging", "checkpoint", "media", "health", "cluster")


@dataclass(frozen=True)
class Measured:
    """An evaluation of one model: a run's own after its last evaluated step, or a folder of ``sensorium eval``.

    ``sampling`` is how tasks were played, ``settings`` the run's recipe without its seed; ``at`` says of which step it is.
    ``categories`` are in the order of a published table, where ``columns`` names them as it does.
    """

    path: Path
    model: str
    samples: tuple[Sample, ...]
    sampling: Mapping[str, Any]
    seed: int | None = None
    settings: Mapping[str, Any] | None = None
    at: str = ""
    categories: tuple[str, ...] = ()
    columns: Mapping[str, str] | None = None

    @property
    def is_run(self) -> bool:
        return self.settings is not None

    @property
    def model_path(self) -> str:
        """What ``sensorium eval --model`` takes."""
        return str(self.path) if self.is_run else self.model

    def mean(self, measure: "Measure") -> float | None:
        """The mean over tasks."""
        return _mean([value for task in by_task(self.samples) if (value := measure(task)) is not None])


Measure = Callable[[Sequence[Sample]], float | None]  # of the samples of a task


@dataclass(frozen=True)
class Side:
    """Evaluations that are taken together: one, or a group of seeds."""

    name: str
    members: tuple[Measured, ...]

    def tasks(self) -> Tasks:
        together: Tasks = {}
        for member in self.members:
            for name, samples in _named(member.samples).items():
                together.setdefault(name, []).extend(samples)
        return together


def reward_of(samples: Sequence[Sample]) -> float | None:
    """The mean reward of a task's samples."""
    return _mean([sample.reward for sample in samples if sample.reward is not None])


def measured_run(path: Path) -> Measured:
    """The last evaluation that a run made of itself."""
    directory = RunDirectory(path)
    recipe, _ = read_yaml(directory.recipe.read_text(), str(directory.recipe))
    ancestor = directory.forked_at()
    forked = -1 if ancestor is None else ancestor[1]  # a fork's evaluations up to there are its ancestor's
    outcomes = [file for file in sorted(directory.outcomes.glob("step_*_eval.jsonl")) if step_of(file) > forked]
    if not outcomes:
        why = "" if ancestor is None else f"it was forked after step {forked} and not evaluated since (evaluation.every)"
        why = why or ("an older version evaluated it, which kept no outcome of each task" if directory.summaries() else "")
        why = why or "it was never evaluated while it trained (evaluation.every, or it ended before that)"
        raise CheckpointError(
            f"the run '{path}' has no evaluation of its own to compare: {why}. Evaluate its checkpoint, and compare the "
            f"folder: sensorium eval {path}"
        )
    try:
        samples = tuple(outcome_from(row) for row in read_rows(outcomes[-1]))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"'{outcomes[-1]}' is damaged: a line is no outcome ({error!r}). Evaluate the run.") from error
    played, own = recipe["rollout"], recipe["evaluation"]
    sampling = {key: own.get(key) or played.get(key) for key in SAMPLING[2:]}
    sampling = {"temperature": own["temperature"], "samples": own["samples"], **sampling}
    settings = {key: value for key, value in recipe.items() if key not in NO_SETTING}
    step = step_of(outcomes[-1])
    return Measured(path, f"{path}@{step}", samples, sampling, recipe["seed"], settings, f"after step {step}")


def measured_folder(path: Path) -> Measured:
    """A finished evaluation of ``sensorium eval``."""
    folder = EvaluationFolder(path)
    samples, claim = folder.read(), folder.claimed()
    played = claim.get("recipe", {}).get("rollout", {})
    sampling = {key: claim["settings"].get(key, played.get(key)) for key in SAMPLING}
    summary = folder.read_summary()
    seed, columns = claim["settings"].get("seed"), summary.get("columns")
    order = tuple(summary["categories"])
    return Measured(path, claim["model"], tuple(samples), sampling, seed, categories=order, columns=columns)


def side_of(given: str) -> Side:
    """The side that an argument names: a run, an evaluation's folder, or a quoted pattern of either."""
    place = Path(given)
    if place.exists():
        return Side(given, tuple(_measured([place], given)))
    found = sorted(map(Path, glob.glob(given)))
    kept = [path for path in found if is_side(path)]
    if not kept:
        many = f"; {counted(len(found), 'path')} match" if found else ""
        raise CheckpointError(
            f"'{given}' holds no evaluation and no run{many}; 'sensorium eval' makes an evaluation. Give a run "
            "(runs/shapes), the folder of an evaluation, or a quoted pattern of either ('sweeps/shapes/lr=1e-4,*')."
        )
    return Side(given, tuple(_measured(kept, given)))


def is_side(path: Path) -> bool:
    """Whether a path is a run, the folder of an evaluation, or an experiment."""
    return any((path / name).is_file() for name in ("recipe.yaml", "evaluation.json", EXPERIMENT))


def _measured(paths: Sequence[Path], given: str) -> Iterator[Measured]:
    runs = [
        run
        for path in paths
        for run in (sorted(file.parent for file in path.glob("*/recipe.yaml")) if (path / EXPERIMENT).is_file() else [path])
    ]
    if not runs:
        raise CheckpointError(f"'{given}' holds no run that has begun.")
    for path in runs:
        yield measured_run(path) if (path / "recipe.yaml").is_file() else measured_folder(path)


def by_setting(members: Sequence[Measured]) -> list[Side]:
    """Runs in groups whose recipes differ in the seed alone, named by what distinguishes them."""
    groups: dict[str, list[Measured]] = {}
    for member in members:
        if not member.is_run:
            raise CheckpointError(
                f"'{member.path}' is the folder of an evaluation, and only runs are grouped by setting. Name the sides: "
                "sensorium compare 'A*' 'B*'"
            )
        groups.setdefault(json.dumps(member.settings, sort_keys=True), []).append(member)
    found = list(groups.values())
    keys = distinguishing([group[0] for group in found])
    return [Side(_setting_name(group[0], keys) or str(group[0].path.parent), tuple(group)) for group in found]


def distinguishing(members: Sequence[Measured]) -> list[str]:
    """The keys of the recipe in which runs differ."""
    first, *others = members
    return list(dict.fromkeys(key for one in others for key, *_ in differences(first.settings, one.settings)))


def _setting_name(member: Measured, keys: Sequence[str]) -> str:
    parts = []
    for key in keys:
        value: Any = member.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        text = value_text(value)
        parts.append(f"{key}={text if len(text) <= 40 else text[:39] + '…'}")
    return " ".join(parts)


# One side's numbers ---------------------------------------------------------------------------------------------------


def numbers_of(side: Side) -> dict[str, Any]:
    """Accuracy and reward of a side: the mean of its runs, with its intervals across tasks and across seeds."""
    tasks = side.tasks()
    return {
        "name": side.name,
        "runs": [str(member.path) for member in side.members],
        "seeds": [member.seed for member in side.members],
        "tasks": len(tasks),
        "accuracy": _numbers(side, tasks, mean_at_k),
        "reward": _numbers(side, tasks, reward_of),
    }


def _numbers(side: Side, tasks: Tasks, measure: Measure) -> dict[str, Any] | None:
    by_run = [member.mean(measure) for member in side.members]
    known = [value for value in by_run if value is not None]
    if not known:
        return None
    values = [value for task in tasks.values() if (value := measure(task)) is not None]
    most = max(len(task) for task in tasks.values())
    bounded = all(0 <= value <= 1 for value in values)
    across_seeds = student_interval(known)
    if across_seeds is not None and bounded:
        across_seeds = max(0.0, across_seeds[0]), min(1.0, across_seeds[1])
    return {
        "mean": sum(known) / len(known),
        "across_tasks": mean_interval(values, most) if bounded else student_interval(values),
        "across_seeds": across_seeds,
        "by_run": by_run,
    }


def difference_of(a: Side, b: Side, measure: Measure) -> dict[str, Any] | None:
    """The difference b - a of the means, over the tasks that both have, with its interval across tasks and seeds."""
    tasks_a, tasks_b = a.tasks(), b.tasks()
    pairs = [(measure(tasks_a[name]), measure(tasks_b[name])) for name in tasks_b if name in tasks_a]
    changes = [after - before for before, after in pairs if before is not None and after is not None]
    if not changes:
        return None
    sides = [[value for member in side.members if (value := member.mean(measure)) is not None] for side in (a, b)]
    within = all(-1 <= change <= 1 for change in changes)
    return {
        "difference": sum(changes) / len(changes),
        "tasks": len(changes),
        "across_tasks": paired_interval(changes) if within else student_interval(changes),
        "across_seeds": welch_interval(*sides),
    }


def settings_of(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """The numbers of every side, and its differences from the first."""
    first, measures = sides[0], {"reward": reward_of, "accuracy": mean_at_k}
    return [
        numbers_of(side)
        | ({f"{name}_change": difference_of(first, side, measure) for name, measure in measures.items()} if i else {})
        for i, side in enumerate(sides)
    ]


# Two sides ------------------------------------------------------------------------------------------------------------


def compare_sides(a: Side, b: Side) -> dict[str, Any]:
    """Compare two sides; whatever differs beside the models is noted, or refused where it makes the numbers unequal."""
    if any(member.is_run for member in (*a.members, *b.members)):
        refuse_unequal([a, b])
    tasks_a, tasks_b = a.tasks(), b.tasks()
    runs = {side.name: [str(member.path) for member in side.members] for side in (a, b)}
    shown: dict[str, Any] = {}
    for letter, side in zip("ab", (a, b), strict=True):
        first, many = side.members[0], len(side.members) > 1
        model = counted(len(side.members), "model") if many else first.model
        shown[letter] = {"folder": side.name, "model": model, "settings": dict(first.sampling), "runs": runs[side.name]}
    by_reward = not any(sample.correct is not None for task in (*tasks_a.values(), *tasks_b.values()) for sample in task)
    found = {} if by_reward else compare_tasks(tasks_a, tasks_b)
    several = len(a.members) > 1 or len(b.members) > 1 or a.members[0].is_run
    extra: dict[str, Any] = {}
    if several or by_reward:
        measures = {} if by_reward else {"accuracy": difference_of(a, b, mean_at_k)}
        measures["reward"] = difference_of(a, b, reward_of)
        extra = {"groups": [numbers_of(a), numbers_of(b)], "differences": measures}
    notes = [*_notes(found, a, b), *(group_notes([a, b]) if several else ())]
    if found:
        last, known = b.members[-1], found["categories"]
        found["categories"] = {name: known[name] for name in last.categories or known if name in known}
        found |= {"columns": last.columns} if last.columns else {}
    return {**shown, **found, **extra, "notes": notes}


def compare(a: Sequence[Sample], b: Sequence[Sample]) -> dict[str, Any]:
    """Accuracies, paired difference and McNemar's counts over the tasks that both judged, all of them and by category."""
    return compare_tasks(_named(a), _named(b))


def compare_tasks(tasks_a: Tasks, tasks_b: Tasks) -> dict[str, Any]:
    """The same of samples by task."""
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
    changes = [after - before for before, after in pairs]
    only_a, only_b = sum(value < 0 for value in changes), sum(value > 0 for value in changes)
    return {
        "tasks": len(pairs),
        **sides,
        "difference": sum(changes) / len(changes),
        "interval": list(paired_interval(changes)),
        "only_a": only_a,
        "only_b": only_b,
        "p": sign_test(only_a, only_b),
    }


def _named(samples: Sequence[Sample]) -> Tasks:
    times: Counter[str] = Counter()
    tasks: Tasks = {}
    for task in by_task(samples):
        tasks[task[0].task, times[task[0].task]] = task
        times[task[0].task] += 1
    return tasks


def refuse_unequal(sides: Sequence[Side]) -> None:
    """Refuse runs whose own evaluations are of other tasks or were sampled otherwise, with how to make them equal."""
    members = [member for side in sides for member in side.members]
    first = members[0]
    asked = _questions(first)
    for other in members[1:]:
        found = [
            f"evaluation.{key} is {value} in '{first.path}' and {other.sampling.get(key)} in '{other.path}'"
            for key, value in first.sampling.items()
            if value != other.sampling.get(key)
        ]
        theirs = _questions(other)
        if asked != theirs:
            apart = sum(name not in theirs for name in asked), sum(name not in asked for name in theirs)
            changed = sum(
                bool(asked.get(name) and question and asked[name] != question) for name, question in theirs.items()
            )
            parts = [f"{apart[0]:,} of {len(asked):,} tasks are in the first only"] if apart[0] else []
            parts += [f"{apart[1]:,} of {len(theirs):,} tasks are in the second only"] if apart[1] else []
            parts += [f"{changed:,} tasks have other words or media"] if changed else []
            found += [", ".join(parts)] if parts else []
        if found:
            recipe, model = (first, other) if first.is_run else (other, first)
            raise TaskError(
                f"these were not evaluated alike, so their numbers compare more than models: {'; '.join(found)}. To make "
                f"them equal, evaluate all of them by one recipe into folders, and compare those: sensorium eval "
                f"{recipe.path} --out evaluations/a0; sensorium eval {recipe.path} --model {model.model_path} --out "
                "evaluations/b0 (the other seeds of a group into a1, b1, …); sensorium compare 'evaluations/a*' "
                "'evaluations/b*'"
            )


def _questions(member: Measured) -> dict[Name, str]:
    """The digests of a side's questions by task; empty of a task that could not be played."""
    return {
        name: next((one.question for one in task if one.status not in (Status.FAILED, Status.ABORTED)), "")
        for name, task in _named(member.samples).items()
    }


def group_notes(sides: Sequence[Side]) -> Iterator[str]:
    """What the intervals cover, and which runs are not alike."""
    least = min(len(side.members) for side in sides)
    if least < 2:
        who = "one run a side" if all(len(side.members) == 1 for side in sides) else "a side of one run"
        yield (
            f"With {who} the interval covers tasks only: what other tasks would give with these very models. How much "
            "another seed would change is unknown; train more seeds (sensorium sweep … seed=0..4)."
        )
    else:
        yield (
            "Across tasks: what other tasks would give with these models. Across seeds: what other seeds would give on "
            f"these tasks (Student's t, at least {least} runs a side). A claim about a setting needs both."
        )
    for side in sides:
        if len({member.at for member in side.members}) > 1 or side.members[0].at != sides[0].members[0].at:
            steps = ", ".join(dict.fromkeys(member.at for member in side.members))
            yield f"{side.name} was evaluated {steps}, {sides[0].name} {sides[0].members[0].at}."
        runs = [member for member in side.members if member.is_run]
        if len(runs) > 1 and (keys := distinguishing(runs)):
            yield f"ATTENTION: the runs of {side.name} differ in more than the seed: {', '.join(keys[:5])}."
    terms = {json.dumps(m.settings["rewards"], sort_keys=True) for side in sides for m in side.members if m.settings}
    if len(terms) > 1:
        yield "The runs have other rewards, which are not comparable; right and wrong is what the terms of each say."


def _notes(found: Mapping[str, Any], a: Side, b: Side) -> Iterator[str]:
    if found and (found["only_in_a"] or found["only_in_b"]):
        only = f"{found['only_in_a']:,} are in A only and {found['only_in_b']:,} in B only"
        yield f"Compared on the {found['all']['tasks'] + found['not_judged']:,} tasks that both have; {only}."
    if found and found["not_judged"]:
        yield f"{found['not_judged']:,} tasks that both have are left out: they were not judged in one or the other."
    if found and found["asked_otherwise"]:
        yield f"{found['asked_otherwise']:,} tasks were put to B in other words or with other media than to A."
    if a.members[0].is_run or b.members[0].is_run:
        return
    single = len(a.members) == len(b.members) == 1
    for name in ("temperature", "samples", "blanked", "seed")[: 4 if single else 3]:
        one, other = ({**side.members[0].sampling, "seed": side.members[0].seed}[name] for side in (a, b))
        if one != other and name == "blanked":
            kinds = (" and ".join(f"{kind}s" for kind in side or ()) or "nothing" for side in (one, other))
            yield "Shown blank were {} to A and {} to B.".format(*kinds)
        elif one != other:
            yield f"Not only the model differs: {name} is {one} for A and {other} for B."
    claims = [EvaluationFolder(side.members[0].path).claimed()["weights"] for side in (a, b)]
    if claims[0] == claims[1]:
        yield "A and B are the same model, weight by weight."


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
