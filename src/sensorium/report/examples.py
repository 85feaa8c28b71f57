"""Which episodes a report shows, chosen by rule and not by hand: what was learned, what was known, what is still wrong."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeVar

from sensorium.report.terminal import visible
from sensorium.runs.durable import read_rows
from sensorium.runs.episodes import EpisodeCredit, read_credits_of, read_groups_of
from sensorium.runs.run_directory import RunDirectory, step_of
from sensorium.vocabulary.content import Message, Text
from sensorium.vocabulary.episode import Episode, Group
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task

Kind = Literal[
    "learned", "kept", "still wrong", "lost", "better paid", "equally paid", "worse paid", "not judged"
]  # fmt: skip
KINDS: dict[tuple[bool, bool], Kind] = {
    (False, True): "learned",
    (True, True): "kept",
    (False, False): "still wrong",
    (True, False): "lost",
}
ROWS = 4096
T = TypeVar("T")


@dataclass(frozen=True)
class Comparison:
    """One held-out task before and after training."""

    task: Task
    before: Episode
    after: Episode

    @property
    def kind(self) -> Kind:
        """What training did to it: by right and wrong where a term knows, else by what was paid."""
        if self.before.correct is not None and self.after.correct is not None:
            return KINDS[self.before.correct, self.after.correct]
        before, after = self.before.reward, self.after.reward
        if before is None or after is None:
            return "not judged"
        return "better paid" if after > before else "worse paid" if after < before else "equally paid"


@dataclass(frozen=True)
class Comparisons:
    """Two evaluations of the same tasks: which steps, how many of each kind, and a few to show.

    Where a task was sampled several times (``samples``), its first sample is compared.
    """

    first: int
    last: int
    samples: int
    counts: dict[Kind, int]
    shown: tuple[Comparison, ...]


def compare_evaluations(directory: RunDirectory, limit: int, warm: int = 0) -> Comparisons | None:
    """The first and the last logged evaluation of one name, task by task; None if there are not two.

    After a warm start of so many steps the first is that at its end, where there is one: what follows is RL's own.
    """
    logs: dict[str, list[int]] = {}
    for path in sorted(directory.eval.glob("step_*.jsonl")):
        logs.setdefault(path.stem.partition("_")[2].partition("_")[2], []).append(step_of(path))
    name, steps = max(logs.items(), key=lambda log: (len(log[1]), log[0] == "eval"), default=("", []))
    if warm in steps[1:-1]:
        steps = steps[steps.index(warm) :]
    if len(steps) < 2:
        return None
    before, after = (_groups_of(directory, step, name) for step in (steps[0], steps[-1]))
    pairs = [
        Comparison(group.task, before[id].episodes[0], group.episodes[0]) for id, group in after.items() if id in before
    ]
    samples = max((len(group.episodes) for group in after.values()), default=1)
    counts: dict[Kind, int] = {}
    for pair in pairs:
        counts[pair.kind] = counts.get(pair.kind, 0) + 1
    return Comparisons(steps[0], steps[-1], samples, counts, tuple(choose(pairs, limit)))


def choose(pairs: Sequence[Comparison], limit: int) -> list[Comparison]:
    """Half learned, a quarter not right at the end, a quarter known before; of each, one category after the other.

    Where nothing is right or wrong: half better paid than before, a quarter worse, a quarter the same.
    """
    learned = _by_turns([pair for pair in pairs if pair.kind in ("learned", "better paid")])
    wrong = _by_turns([pair for pair in pairs if pair.kind in ("still wrong", "lost", "worse paid")])
    rest = _by_turns([pair for pair in pairs if pair.kind in ("kept", "equally paid", "not judged")])
    quarter = max(1, limit // 4)
    chosen = [*learned[: limit - 2 * quarter], *wrong[:quarter], *rest[:quarter]]
    for pair in (*learned, *rest, *wrong):
        if len(chosen) < limit and pair not in chosen:
            chosen.append(pair)
    return chosen[:limit]


@dataclass(frozen=True)
class LoggedGroup:
    """A group of a training step, and what training made of its episodes, by id (empty in logs of older versions)."""

    step: int
    group: Group
    credits: Mapping[str, EpisodeCredit] = field(default_factory=dict)


def training_groups(directory: RunDirectory, each: int) -> list[LoggedGroup]:
    """A few groups of the first and of the last logged step; those whose members were paid differently come first."""
    paths = sorted(directory.episodes.glob("step_*.jsonl"))
    chosen = []
    for path in dict.fromkeys([*paths[:1], *paths[-1:]]):
        rows = list(islice(read_rows(path), ROWS))
        groups = [group for group in read_groups_of(rows) if group.episodes]
        mixed = [group for group in groups if len({episode.reward for episode in group.episodes}) >= 2]
        plain = [group for group in groups if group not in mixed]
        for group in [*_spread(mixed), *_spread(plain)][:each]:
            own = [row for row in rows if row["episode"]["group_id"] == group.id]
            chosen.append(LoggedGroup(step_of(path), group, read_credits_of(own)))
    return chosen


def category_of(task: Task) -> str:
    """The category of a task, where it has one."""
    return str(task.metadata.get("category", ""))


def _groups_of(directory: RunDirectory, step: int, name: str) -> dict[str, Group]:
    """The logged attempts at each task of an evaluation, by task id."""
    groups = read_groups_of(islice(read_rows(directory.eval_episodes_of(step, name)), ROWS))
    return {group.task.id: group for group in groups if group.episodes}


def _by_turns(pairs: list[Comparison]) -> list[Comparison]:
    return _interleave([(category_of(pair.task), pair) for pair in pairs])


def _spread(groups: list[Group]) -> list[Group]:
    return _interleave([(category_of(group.task), group) for group in groups])


def _interleave(labelled: Iterable[tuple[str, T]]) -> list[T]:
    """One of each label after the other, in the order they come."""
    piles: dict[str, list[T]] = {}
    for label, thing in labelled:
        piles.setdefault(label, []).append(thing)
    longest = max((len(pile) for pile in piles.values()), default=0)
    return [pile[i] for i in range(longest) for pile in piles.values() if i < len(pile)]


PROMPT = 1200
RESPONSE = 800


def first_group_lines(group: Group) -> Iterator[tuple[str, str]]:
    """Label and words of each line: the prompt with media named, the known answer, a response, its scores, the total."""
    yield "first task", group.task.id
    if not group.episodes:
        return
    episode = _shown(group.episodes)
    for message in group.task.messages or (*episode.head, *(episode.turns[0].observation if episode.turns else ())):
        yield message.role, _clipped(message_text(message), PROMPT)
    if group.task.answer is not None:
        yield "known answer", _clipped(str(group.task.answer), PROMPT)
    for turn in episode.turns[:1]:
        more = f"  (turn 1 of {len(episode.turns)})" if len(episode.turns) > 1 else ""
        yield "response", _clipped(turn.response.text, RESPONSE) + more if turn.response.text else "(empty)"
    if episode.failure:
        yield episode.status.value, episode.failure
    for score in episode.scores:
        yield f"paid by {score.name}", score_text(score)
    total = "none, so it is not trained on" if episode.reward is None else f"{episode.reward:g}"
    rewards = ["none" if one.reward is None else f"{one.reward:g}" for one in group.episodes]
    yield "total", f"{total}  (the {len(rewards)} attempts: {', '.join(rewards[:16])}{', …' if len(rewards) > 16 else ''})"


def message_text(message: Message) -> str:
    """A message's words, its media named in their place."""
    parts = [block.text if isinstance(block, Text) else f"[{block.kind} {block.name}]" for block in message.content]
    return " ".join(part for part in parts if part.strip())


def score_text(score: Score) -> str:
    """A score's value with its weight, or that it is missing and why."""
    if score.value is None:
        return f"missing: {score.reason or 'no reason given'}"
    where = "" if score.scope == "episode" else f" ({score.scope}{'' if score.turn is None else f' {score.turn + 1}'})"
    return f"{score.value:g}" + ("" if score.weight == 1 else f" × {score.weight:g}") + where


def _shown(episodes: Sequence[Episode]) -> Episode:
    """An episode that was played, if any was: a failed one says little of what is paid."""
    return next((episode for episode in episodes if episode.turns), episodes[0])


def _clipped(text: str, limit: int) -> str:
    text = visible(text)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"
