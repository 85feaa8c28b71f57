"""Score the stored episodes of a run again, by other terms, weights or judges; the run itself is never written to.

A run gave four attempts at a task the rewards 1, 1, 0, 0, so the advantages of ``grpo`` were 0.9, 0.9, -0.9, -0.9. With a
term more, which pays for brevity, they would have been 1.1, 0.2, 0.6, 0: now 1.3, -0.6, 0.3, -1.0. The second and third
attempts change sign: training would have pushed them the other way.

Scores are those of the recipe's own scorer, selection and advantages those of the trainer. What cannot be repeated without
training (which tasks were drawn, what the policy wrote, a critic, a KL in the reward) stays as it was, and the notes of a
result say so.
"""

import heapq
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sensorium.assembly.playing import make_scorer, stored_media
from sensorium.cluster.event_loop import run_async
from sensorium.data.media_store import StoredMedia
from sensorium.evaluation.folder import add_costs
from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.load import apply_override, check_recipe, read_recipe
from sensorium.recipe.schema import Recipe
from sensorium.recipe.yaml import write_yaml
from sensorium.report.tables import markdown, rescoring_grids
from sensorium.rewards.judges.client import CACHE, JudgeClient
from sensorium.rewards.judges.judgements import AnswerCache
from sensorium.rewards.scorer import Scorer, score_groups
from sensorium.rewards.terms import EnvironmentReward
from sensorium.rollout.play import CANCELLED
from sensorium.runs.durable import drafted, read_rows, to_line, write_whole
from sensorium.runs.episodes import read_groups_of, score_to_json
from sensorium.runs.run_directory import RunDirectory, step_of
from sensorium.trainer.collect import BASELINE
from sensorium.trainer.credit import credit_by_rewards
from sensorium.trainer.selection import Selection, select, zero_variance
from sensorium.vocabulary.episode import Episode, Group, by_name, unusable
from sensorium.vocabulary.errors import RecipeError, RecordError
from sensorium.vocabulary.plain import counted

Json = dict[str, Any]
Progress = Callable[[int, int], None]  # gets how many logs are done, of how many
SECTIONS = ("rewards", "judges")
MOST_CHANGED, REASONS = 50, 3
EPSILON = 1e-9  # advantages below it are 0


@dataclass(frozen=True)
class RescoringOrder:
    """What to score again: steps from ``first`` to ``last`` (0: to the end), ``limit`` groups at most (0: all).

    ``evaluations``: the held-out episodes of the run's evaluations instead of those it was trained on.
    """

    first: int = 0
    last: int = 0
    limit: int = 0
    evaluations: bool = False

    @property
    def suffix(self) -> str:
        """What names its folder beside the rewards."""
        steps = f"_steps_{self.first}-{self.last or 'end'}" if self.first or self.last else ""
        return ("_evaluations" if self.evaluations else "") + steps + (f"_first{self.limit}" if self.limit else "")


def steps_of(text: str) -> tuple[int, int]:
    """First and last step of ``A..B``, ``A..``, ``..B`` or ``A``; 0 for an open end."""
    found = re.fullmatch(r"(\d*)(\.\.)?(\d*)", text.strip())
    if not found or not any(found.groups()) or text.strip() == "..":
        raise RecipeError(f"--steps is '{text}'; write A..B, A.., ..B or one step.")
    first, dots, last = int(found[1] or 0), found[2], int(found[3] or 0)
    if not dots:
        return first, first
    if last and last < first:
        raise RecipeError(f"--steps is '{text}', which ends before it begins.")
    return first, last


def rescoring_recipe(run: Path, rewards: Path | str | None, overrides: Sequence[str] = ()) -> Recipe:
    """The run's recipe with the sections ``rewards`` and ``judges`` of a file, and with overrides of these.

    The file is a recipe, or has one or both of the two sections alone. Keys that a section does not name stay the run's.
    """
    data, origins = read_recipe(run)
    if rewards is not None:
        given, places = read_recipe(rewards)
        whole = "model" in given or "tasks" in given
        if strange := [key for key in given if key not in SECTIONS and not whole]:
            raise RecipeError(
                f"{rewards}: '{strange[0]}' is no section that changes scores; give {' and '.join(SECTIONS)}, or a recipe."
            )
        if not any(section in given for section in SECTIONS):
            raise RecipeError(f"{rewards}: it has no section 'rewards', by which the episodes could be scored.")
        for section in SECTIONS:
            changed, before = given.get(section, {}), data.get(section)
            for key in changed if isinstance(changed, dict) else ():
                origins = {place: where for place, where in origins.items() if place[:2] != (section, key)}
            if isinstance(changed, dict) and isinstance(before, dict):
                data[section] = {**before, **changed}
            elif changed:
                data[section] = changed
        origins |= {place: where for place, where in places.items() if place[0] in SECTIONS}
    for override in overrides:
        if override.partition(".")[0].strip() not in SECTIONS:
            raise RecipeError(
                f"override '{override}': scores depend on the sections {' and '.join(SECTIONS)} alone; other keys decide "
                "what is played and how it is trained, which is not done again."
            )
        apply_override(override, data, origins)
    return check_recipe(data, str(run if rewards is None else rewards), origins, SECTIONS)


def rescoring_folder(run: Path, named: str, order: RescoringOrder) -> Path:
    """The default folder, beside the run: ``runs/NAME_rescored_by_FILE``."""
    path = run.absolute()
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", named).strip("_")[:80] or "again"
    return run.parent / f"{path.name}_rescored_{label}{order.suffix}"


def rescore(
    run: Path, recipe: Recipe, out: Path, order: RescoringOrder | None = None, progress: Progress | None = None
) -> Json:
    """Score episodes of a run again by a recipe's rewards and write the result to ``out``; returns its summary.

    ``out`` gets rescoring.json (the summary), rescoring.md, episodes.jsonl (a row for each episode: rewards, scores and
    advantages, old and new) and judge_transcripts.sqlite. Answers of judges stay there, too, if it is interrupted.
    """
    order, directory = order or RescoringOrder(), RunDirectory(run)
    logs = _logs(directory, order)
    _refuse_place(directory, out)
    data, _ = read_recipe(run)
    before = str((data.get("rewards") or {}).get("on_missing", recipe.rewards.on_missing))
    with ExitStack() as opened:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "rewards.yaml", write_yaml({"run": str(run), **_plain_sections(recipe)}))
        store = stored_media(recipe, directory.media)
        judges = _judges(recipe, directory, store, out)
        opened.callback(judges.close)
        scorer = make_scorer(recipe.rewards, None, store, judges)
        opened.callback(scorer.close)
        said: list[str] = []
        scorer.noted = said.append
        tally = Tally()
        with drafted(out / "episodes.jsonl") as draft, draft.open("w") as file:
            for done, (path, most) in enumerate(logs):
                if progress is not None:
                    progress(done, len(logs))
                for row in _rescored(path, most, scorer, recipe, before, tally, order):
                    file.write(to_line(row))
            if not tally.episodes:
                left = f"; {counted(tally.cancelled, 'group')} were cancelled" if tally.cancelled else ""
                raise RecordError(f"'{run}' has no episodes that could be scored in the steps asked for{left}.")
        add_costs(out / "judge_costs.json", judges.take_metrics())
        notes = [*_coverage(tally, order), *_not_redone(recipe, scorer, tally, order), *said]
    summary = {"run": str(run), "out": str(out), "evaluations": order.evaluations} | tally.summary() | {"notes": notes}
    write_whole(out / "rescoring.json", json.dumps(summary, indent=1) + "\n")
    write_whole(out / "rescoring.md", "\n".join(map(markdown, rescoring_grids(summary))))
    return summary


def _logs(directory: RunDirectory, order: RescoringOrder) -> list[tuple[Path, int]]:
    """The logs to read, each with how many groups of it at most (0: all); a limit is spread evenly over the steps."""
    folder = directory.eval if order.evaluations else directory.episodes
    found = sorted(folder.glob("step_*.jsonl"))
    kept = [path for path in found if order.first <= step_of(path) <= (order.last or step_of(path))]
    if not kept:
        there = f"it has those of steps {step_of(found[0])} to {step_of(found[-1])}" if found else "it has none"
        what = "evaluations" if order.evaluations else "steps"
        raise RecordError(f"'{directory.path}' has no stored episodes of the {what} asked for: {there}.")
    if not order.limit:
        return [(path, 0) for path in kept]
    count = min(order.limit, len(kept))
    chosen = [kept[i * len(kept) // count] for i in range(count)]
    return [(path, order.limit * (i + 1) // count - order.limit * i // count) for i, path in enumerate(chosen)]


def _refuse_place(directory: RunDirectory, out: Path) -> None:
    """Refuse a folder in the run, or one that holds something else."""
    place, run = out.resolve(), directory.path.resolve()
    if place == run or run in place.parents:
        raise RecordError(f"'{out}' is in the run '{directory.path}', which is not changed. Name another folder (--out).")
    if place.is_dir() and any(place.iterdir()) and not (place / "rewards.yaml").exists():
        raise RecordError(f"'{out}' holds something that is no rescoring. Name another folder (--out).")


def _plain_sections(recipe: Recipe) -> Json:
    return {section: getattr(recipe, section).model_dump(mode="json") for section in SECTIONS}


def _judges(recipe: Recipe, directory: RunDirectory, store: StoredMedia, out: Path) -> JudgeClient:
    """The client of judges, with the run's answers in a file of its own: an equal question is not asked again."""
    section = recipe.judges
    own = section.cache or directory.path / CACHE
    inside = directory.path.resolve() in own.resolve().parents
    if section.cache is not None and not inside:
        return JudgeClient(section, store, out)
    if section.limits is not None and directory.path.resolve() in section.limits.resolve().parents:
        section = section.model_copy(update={"limits": None})
    client = JudgeClient(section.model_copy(update={"cache": None}), store, out)
    if own.exists():
        filled = AnswerCache(out / CACHE)  # the client's own is read only where judges are offline
        filled.take(own)
        filled.close()
    return client


def _rescored(
    path: Path, most: int, scorer: Scorer, recipe: Recipe, on_missing: str, tally: "Tally", order: RescoringOrder
) -> Iterator[Json]:
    """Score the groups of a log again; returns a row for each of their episodes."""
    rows = list(read_rows(path))
    if not rows:
        return
    step = rows[0]["step"]
    fates = {row["episode"]["id"]: row.get("fate", "") for row in rows}
    played = read_groups_of(rows)
    cancelled = [group for group in played if any(fates[e.id] == CANCELLED for e in group.episodes)]
    baselines = [group for group in played if any(fates[e.id] == BASELINE for e in group.episodes)]
    aside = {group.id for group in (*cancelled, *baselines)}
    old = list(islice((group for group in played if group.id not in aside), most or None))
    tasks = Counter(group.task.id for group in old)
    baselines = [group for group in baselines if tasks[group.task.id]]
    new, greedy = run_async(_scored(scorer, old, baselines))
    tally.count(step, cancelled, most)
    if order.evaluations:
        signs: tuple[Signs, Signs] = ({}, {})
    else:
        smallest = 2 if estimator_traits(recipe.algorithm.advantage.name).compares else 1
        signs = (
            _signs(select(old, on_missing, smallest=smallest), recipe, baselines),
            _signs(select(new, recipe.rewards.on_missing, smallest=smallest), recipe, greedy),
        )
    for was, now in zip(old, new, strict=True):
        tally.add(step, was, now, signs)
        for a, b in zip(was.episodes, now.episodes, strict=True):
            yield {
                "step": step,
                "task": a.task_id,
                "group": a.group_id,
                "episode": a.id,
                "reward": [a.reward, b.reward],
                "correct": [a.correct, b.correct],
                "advantages": [side.get(a.id) for side in signs],
                "scores": [[score_to_json(score) for score in side.scores] for side in (a, b)],
            }


async def _scored(scorer: Scorer, *several: Sequence[Group]) -> list[list[Group]]:
    found = iter(await score_groups(scorer, [group for groups in several for group in groups]))
    return [[next(found) for _ in groups] for groups in several]


Signs = dict[str, list[float]]  # by episode id, the mean advantage of each turn


def _signs(selection: Selection, recipe: Recipe, baselines: Sequence[Group]) -> Signs:
    """The advantages that the recipe's estimator gives, as means of turns. ``baselines`` are tasks played greedily."""
    groups, greedy = selection.groups, None
    if estimator_traits(recipe.algorithm.advantage.name).greedy:
        rewards: dict[str, list[float]] = {}
        for baseline in baselines:
            reward = baseline.episodes[0].reward
            if reward is not None and not unusable(reward):
                rewards.setdefault(baseline.task.id, []).append(reward)
        greedy = {group.id: rewards[group.task.id].pop(0) for group in groups if rewards.get(group.task.id)}
        groups = tuple(group for group in groups if group.id in greedy)
    masked = recipe.rollout.mask_truncated
    samples = credit_by_rewards(groups, recipe.algorithm, mask_truncated=masked, greedy=greedy)
    return {
        sample.episode.id: [float(turn.mean()) if len(turn) else 0.0 for turn in sample.advantages]
        for members in samples
        for sample in members
    }


@dataclass
class TermTally:
    """A term, old and new: its weights, and sum and number of its scores."""

    weights: list[float | None] = field(default_factory=lambda: [None, None])
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    counts: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, side: int, value: float | None, weight: float | None) -> None:
        if weight is not None and not self.weights[side]:
            self.weights[side] = weight
        if value is not None:
            self.sums[side] += value
            self.counts[side] += 1

    @property
    def summary(self) -> Json:
        means = [total / count if count else None for total, count in zip(self.sums, self.counts, strict=True)]
        return {"weight": self.weights, "mean": means, "n": self.counts}


class Tally:
    """What changed, over all groups so far."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.groups = self.episodes = self.cancelled = 0
        self.limited = False
        self.environment_rewards = 0
        self.several_turns = False
        self._terms: dict[str, TermTally] = {}
        self._reward, self._right = TermTally(), TermTally()
        self._pairs: list[tuple[float, float]] = []
        self._centred: list[tuple[float, float]] = []
        self._comparable, self._learning = [0, 0], [0, 0]
        self._signs = Counter[str]()
        self._changed: list[tuple[float, int, Json]] = []
        self._order = 0
        self._missing: dict[str, Counter[str]] = {}

    def count(self, step: int, cancelled: Sequence[Group], most: int) -> None:
        """A log is read; ``cancelled`` groups of it are left out."""
        self.steps.append(step)
        self.cancelled += len(cancelled)
        self.limited |= bool(most)

    def add(self, step: int, was: Group, now: Group, signs: tuple[Signs, Signs]) -> None:
        """A group, as it was scored and as it is now."""
        self.groups += 1
        self.episodes += len(was.episodes)
        both = []
        for a, b in zip(was.episodes, now.episodes, strict=True):
            self._add_scores(a, b)
            self.environment_rewards += any(turn.reward is not None or turn.parts for turn in a.turns)
            self.several_turns |= len(a.turns) > 1
            if a.reward is not None and b.reward is not None and not (unusable(a.reward) or unusable(b.reward)):
                both.append((a.reward, b.reward))
                self._add_change(step, a, b, b.reward - a.reward)
        self._pairs += both
        if len(both) > 1:
            means = [sum(side) / len(both) for side in zip(*both, strict=True)]
            self._centred += [(x - means[0], y - means[1]) for x, y in both]
        for side, group in enumerate((was, now)):
            scored = select([group], "drop_episode", smallest=2).groups
            self._comparable[side] += len(scored)
            self._learning[side] += len(scored) - zero_variance(scored)
        self._add_signs([a.id for a in was.episodes], signs)

    def _add_scores(self, a: Episode, b: Episode) -> None:
        for side, episode in enumerate((a, b)):
            weights: dict[str, float] = {}
            for score in episode.scores:
                weights[score.name] = score.weight or weights.get(score.name, 0.0)
            for name, value in by_name(episode.scores).items():
                self._terms.setdefault(name, TermTally()).add(side, value, weights[name])
            self._reward.add(side, episode.reward, None)
            self._right.add(side, None if episode.correct is None else float(episode.correct), None)
        for score in b.scores:
            if score.missing:
                self._missing.setdefault(score.name, Counter())[score.reason[:200]] += 1

    def _add_change(self, step: int, a: Episode, b: Episode, change: float) -> None:
        parts: dict[str, float] = {}
        for sign, episode in ((-1, a), (1, b)):
            for score in episode.scores:
                parts[score.name] = parts.get(score.name, 0.0) + sign * score.weight * (score.value or 0.0)
        most = max(parts, key=lambda name: abs(parts[name]), default="")
        row = {"step": step, "task": a.task_id, "episode": a.id, "reward": [a.reward, b.reward], "term": most}
        if change:
            self._order -= 1  # of equal changes the first stay
            heapq.heappush(self._changed, (abs(change), self._order, row))
            if len(self._changed) > MOST_CHANGED:
                heapq.heappop(self._changed)

    def _add_signs(self, ids: Iterable[str], signs: tuple[Signs, Signs]) -> None:
        compared = turned = 0
        for id in ids:
            if id not in signs[0] or id not in signs[1]:
                continue
            compared += 1
            turns = list(zip(signs[0][id], signs[1][id], strict=True))
            opposite = sum(min(abs(x), abs(y)) > EPSILON and x * y < 0 for x, y in turns)
            self._signs["turns"] += opposite
            self._signs["all_turns"] += len(turns)
            turned += bool(opposite)
        if compared:
            self._signs.update(compared=1, all_episodes=compared, episodes=turned, groups=bool(turned))

    def summary(self) -> Json:
        """All of it as plain data; pairs are old and new."""
        shares = [n / of if of else None for n, of in zip(self._learning, self._comparable, strict=True)]
        changed = [row for _, _, row in sorted(self._changed, key=lambda one: one[:2], reverse=True)]
        names = ("groups", "compared", "episodes", "all_episodes", "turns", "all_turns")
        return {
            "steps": sorted(set(self.steps)),
            "groups": self.groups,
            "episodes": self.episodes,
            "reward": self._reward.summary,
            "accuracy": self._right.summary,
            "learning": {"share": shares, "groups": self._comparable},
            "terms": {name: term.summary for name, term in sorted(self._terms.items())},
            "signs": {name: self._signs[name] for name in names} if self._signs["compared"] else None,
            "correlation": correlations(self._pairs, self._centred),
            "changed": changed,
            "missing": {name: dict(reasons.most_common(REASONS)) for name, reasons in sorted(self._missing.items())},
        }


def correlations(pairs: Sequence[tuple[float, float]], centred: Sequence[tuple[float, float]] = ()) -> Json:
    """Pearson's correlation, that of ranks, and that within groups (rewards less their group's mean); None if undefined."""
    sides = np.asarray(pairs, dtype=np.float64).reshape(-1, 2).T
    return {
        "n": len(pairs),
        "pearson": _pearson(*sides),
        "rank": _pearson(*map(_ranks, sides)),
        "within_groups": _pearson(*np.asarray(centred, dtype=np.float64).reshape(-1, 2).T),
    }


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[places])


def _pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    """None where one side does not vary beyond rounding."""
    if len(a) < 2 or any(np.ptp(side) <= EPSILON * np.abs(side).max() for side in (a, b)):
        return None
    return float(np.clip(np.corrcoef(a, b)[0, 1], -1, 1))


def _coverage(tally: Tally, order: RescoringOrder) -> Iterator[str]:
    """Notes on which episodes were there to be scored."""
    steps = tally.steps
    if not order.evaluations and steps and len(set(steps)) < max(steps) - min(steps) + 1 and not tally.limited:
        yield (
            f"{len(set(steps))} of the {max(steps) - min(steps) + 1} steps from {min(steps)} to {max(steps)} have stored "
            "episodes: older logs are thinned and removed (logging.full_steps, logging.episodes_gib)."
        )
    if tally.cancelled:
        yield f"{counted(tally.cancelled, 'group')} were cancelled before they were complete, and are left out."


def _not_redone(recipe: Recipe, scorer: Scorer, tally: Tally, order: RescoringOrder) -> Iterator[str]:
    """Notes on what is not repeated."""
    if tally.environment_rewards and any(isinstance(term, EnvironmentReward) for term, _ in scorer.terms):
        yield (
            "environments are not played again: their rewards are taken as stored, in "
            f"{counted(tally.environment_rewards, 'episode')}."
        )
    if order.evaluations:
        return
    yield "the policy is not trained again: with these rewards it would have come to write other episodes."
    planner, section, algorithm = recipe.tasks.planner.name, recipe.selection, recipe.algorithm
    if planner != "mixture":
        carried = " and what its memories hand on to later tasks" if planner == "causal_history" else ""
        yield f"tasks are those that the run drew: the planner {planner} follows rewards, and its draws{carried} stay."
    if section.dynamic or section.oversample > 1 or section.variance_share < 1:
        yield "all groups that were played count: which of them a step would have trained on (selection) is not redone."
    if estimator_traits(algorithm.advantage.name).critic:
        yield (
            f"advantages of {algorithm.advantage.name} need the critic, which is not asked: signs are those of rewards "
            "less their group's mean."
        )
    if algorithm.kl.place == "reward" and algorithm.kl.coef:
        yield "advantages are without the KL in the reward, old and new: it needs the weights of that step."
    if not algorithm.masked:
        yield "advantages are those of what the model wrote; observations, which the recipe trains on too, are left out."
