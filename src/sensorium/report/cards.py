"""Cards of the report: a task before and after training, a group with its attempts; and the first group as text."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby, islice
from typing import Literal, TypeVar

from sensorium.report.album import Album
from sensorium.report.terminal import visible
from sensorium.runs.durable import read_rows
from sensorium.runs.episodes import TRAINED, EpisodeCredit, read_credits_of, read_groups_of
from sensorium.runs.run_directory import RunDirectory, step_of
from sensorium.vocabulary.content import Message, Text
from sensorium.vocabulary.episode import Episode, Group, Score, Segment, Status, Turn, category_of
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
PROMPT, RESPONSE = 1200, 800  # characters of the first group's texts
CHARACTERS, TURNS = 4000, 24  # of a card
STRONGEST = 2.0  # an advantage of this size, or larger, has the full tint
CANDIDATE = re.compile(r"\[BEGIN CANDIDATE_(\d+) (\w+)\]\n(.*?)\n\[END CANDIDATE_\1 \2\]", re.DOTALL)
TAG = re.compile(r"&lt;/?[\w|]+&gt;")
Example = TypeVar("Example", "Comparison", Group)


@dataclass(frozen=True)
class Comparison:
    """One held-out task before and after training."""

    task: Task
    before: Episode
    after: Episode

    @property
    def kind(self) -> Kind:
        """What training changed: right and wrong if a term knows, else the reward."""
        if self.before.correct is not None and self.after.correct is not None:
            return KINDS[self.before.correct, self.after.correct]
        before, after = self.before.reward, self.after.reward
        if before is None or after is None:
            return "not judged"
        return "better paid" if after > before else "worse paid" if after < before else "equally paid"


@dataclass(frozen=True)
class Comparisons:
    """Two evaluations of the same tasks: their steps, the count of each kind, and a few to show. Compares first samples."""

    first: int
    last: int
    samples: int
    counts: dict[Kind, int]
    shown: tuple[Comparison, ...]


def compare_evaluations(directory: RunDirectory, limit: int, warm: int = 0) -> Comparisons | None:
    """The first (or that at the end of the warm start) and last logged evaluation, by task; None if there are not two."""
    logs: dict[str, list[int]] = {}
    for path in sorted(directory.eval.glob("step_*.jsonl")):
        logs.setdefault(path.stem.partition("_")[2].partition("_")[2], []).append(step_of(path))
    name, steps = max(logs.items(), key=lambda log: (len(log[1]), log[0] == "eval"), default=("", []))
    if warm in steps[1:-1]:
        steps = steps[steps.index(warm) :]
    if len(steps) < 2:
        return None

    def groups_of(step: int) -> dict[str, Group]:
        groups = read_groups_of(islice(read_rows(directory.eval_episodes_of(step, name)), ROWS))
        return {group.task.id: group for group in groups if group.episodes}

    before, after = groups_of(steps[0]), groups_of(steps[-1])
    common = [(before[task], group) for task, group in after.items() if task in before]
    pairs = [Comparison(group.task, old.episodes[0], group.episodes[0]) for old, group in common]
    samples = max((len(group.episodes) for group in after.values()), default=1)
    counts = dict(Counter(pair.kind for pair in pairs))
    return Comparisons(steps[0], steps[-1], samples, counts, tuple(choose(pairs, limit)))


def choose(pairs: Sequence[Comparison], limit: int) -> list[Comparison]:
    """Half learned (or with more reward), a quarter wrong at the end (or with less), a quarter the rest, by category."""
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
    """A group of a training step, and the credit of its episodes by id (empty in logs of older versions)."""

    step: int
    group: Group
    credits: Mapping[str, EpisodeCredit] = field(default_factory=dict)


def training_groups(directory: RunDirectory, each: int) -> list[LoggedGroup]:
    """A few groups of the first and of the last logged step; those with different rewards come first."""
    paths = sorted(directory.episodes.glob("step_*.jsonl"))
    chosen = []
    for path in dict.fromkeys([*paths[:1], *paths[-1:]]):
        rows = list(islice(read_rows(path), ROWS))
        groups = [group for group in read_groups_of(rows) if group.episodes]
        mixed = [group for group in groups if len({episode.reward for episode in group.episodes}) >= 2]
        plain = [group for group in groups if group not in mixed]
        for group in [*_by_turns(mixed), *_by_turns(plain)][:each]:
            own = [row for row in rows if row["episode"]["group_id"] == group.id]
            chosen.append(LoggedGroup(step_of(path), group, read_credits_of(own)))
    return chosen


def _by_turns(things: Sequence[Example]) -> list[Example]:  # one of each category after the other
    piles: dict[str, list[Example]] = {}
    for thing in things:
        episodes = thing.episodes if isinstance(thing, Group) else (thing.before, thing.after)
        piles.setdefault(category_of(thing.task, *episodes), []).append(thing)
    longest = max((len(pile) for pile in piles.values()), default=0)
    return [pile[i] for i in range(longest) for pile in piles.values() if i < len(pile)]


def first_group_lines(group: Group) -> Iterator[tuple[str, str]]:
    """Label and text of each line: the prompt with media named, the known answer, a response, its scores, the total."""
    yield "first task", group.task.id
    if not group.episodes:
        return
    episode = next((episode for episode in group.episodes if episode.turns), group.episodes[0])
    for message in group.task.messages or (*episode.head, *(episode.turns[0].observation if episode.turns else ())):
        parts = [block.text if isinstance(block, Text) else f"[{block.kind} {block.name}]" for block in message.content]
        yield message.role, _clip(visible(" ".join(part for part in parts if part.strip())), PROMPT)
    if group.task.answer is not None:
        yield "known answer", _clip(visible(str(group.task.answer)), PROMPT)
    for turn in episode.turns[:1]:
        more = f"  (turn 1 of {len(episode.turns)})" if len(episode.turns) > 1 else ""
        yield "response", _clip(visible(turn.response.text), RESPONSE) + more if turn.response.text else "(empty)"
    if episode.failure:
        yield episode.status.value, episode.failure
    for score in episode.scores:
        yield f"paid by {score.name}", _score_text(score)
    total = "none, so it is not trained on" if episode.reward is None else f"{episode.reward:g}"
    rewards = ["none" if one.reward is None else f"{one.reward:g}" for one in group.episodes]
    yield "total", f"{total}  (the {len(rewards)} attempts: {', '.join(rewards[:16])}{', …' if len(rewards) > 16 else ''})"


def _score_text(score: Score) -> str:
    if score.value is None:
        return f"missing: {score.reason or 'no reason given'}"
    where = "" if score.scope == "episode" else f" ({score.scope}{'' if score.turn is None else f' {score.turn + 1}'})"
    return f"{score.value:g}" + ("" if score.weight == 1 else f" × {score.weight:g}") + where


def tinted(response: Segment, advantages: Sequence[float], marked: Callable[[str], str], limit: int) -> str:
    """The text of a response with its tokens tinted by their advantages (above 0 green), cut at ``limit`` characters."""
    left, parts = limit, []
    for value, run in groupby(zip(response.token_texts(), advantages, strict=False), key=lambda token: token[1]):
        text = "".join(text for text, _ in run)
        if text and left > 0:
            parts.append(f"<span {_tint(value)}>{marked(text[:left])}</span>")
        left -= len(text)
    return "".join(parts) + (f"… ({-left:,} more characters)" if left < 0 else "")


def _tint(value: float) -> str:
    sign = "up" if value > 0 else "down" if value < 0 else "flat"
    return f'class="{sign}" style="--s:{min(1.0, abs(value) / STRONGEST):.2f}"'


def comparison_card(pair: Comparison, album: Album) -> str:
    """One held-out task before and after."""
    album.learn(pair.after)
    sides = "".join(
        f'<div class="side"><h4>{when}</h4>{_attempt(episode, album)}</div>'
        for when, episode in (("before", pair.before), ("after", pair.after))
    )
    return _card(pair.task, pair.after, album, f'<div class="sides">{sides}</div>', pair.kind)


def group_card(logged: LoggedGroup, album: Album) -> str:
    """One task and all its attempts with their advantages; equal attempts are shown once."""
    group, credits = logged.group, logged.credits
    for episode in group.episodes:
        album.learn(episode)
    if len(group.episodes[0].turns) > 1:
        ranked = sorted(group.episodes, key=lambda e: (e.reward is None, -(e.reward or 0.0)))
        ends = ranked if len(ranked) < 2 else [ranked[0], ranked[-1]]
        rows = "".join(f"<li>{_attempt(episode, album, credit=credits.get(episode.id))}</li>" for episode in ends)
        note = f"{len(group.episodes)} attempts; the best and the worst are shown" if len(ranked) > 2 else ""
    else:
        piles: dict[tuple[str, float | None, Status], list[Episode]] = {}
        for episode in group.episodes:
            piles.setdefault((episode.response, episode.reward, episode.status), []).append(episode)
        alike = sorted(piles.values(), key=lambda pile: (pile[0].reward is None, -(pile[0].reward or 0.0)))
        rows = "".join(f"<li>{_attempt(pile[0], album, len(pile), credits.get(pile[0].id))}</li>" for pile in alike)
        note = f"{len(group.episodes)} attempts"
    body = f'<p class="note">{note}</p><ul class="attempts">{rows}</ul>'
    return _card(group.task, group.episodes[0], album, body, f"step {logged.step}")


def demonstration_card(task: Task, episode: Episode, album: Album) -> str:
    """One recorded demonstration."""
    album.learn(episode)
    return _card(task, episode, album, _attempt(episode, album), "recorded")


def episode_card(task: Task, episode: Episode, album: Album, credit: EpisodeCredit | None, label: str) -> str:
    """One episode with all its turns."""
    album.learn(episode)
    return _card(task, episode, album, _attempt(episode, album, credit=credit, turns=len(episode.turns)), label)


def _card(task: Task, episode: Episode, album: Album, body: str, label: str) -> str:
    shown = task.messages or (*episode.head, *(episode.turns[0].observation if episode.turns else ()))
    multi = " long" if len(episode.turns) > 1 else ""
    answer = (
        f'<p class="truth">right answer: <b>{escape(_clip(str(task.answer)))}</b></p>' if task.answer is not None else ""
    )
    category = category_of(task, episode)
    head = f'<span class="label {label.split()[0]}">{escape(label)}</span>'
    head += f'<span class="category">{escape(category)}</span>' if category else ""
    head += f'<span class="id">{escape(_clip(task.id, 60))}</span>'
    prompt = _messages(episode.head if multi else shown, album)
    return (
        f'<article class="card{multi}"><header>{head}</header><div class="card-body">'
        f'<div class="prompt">{prompt}{answer}</div><div class="said">{body}</div></div></article>'
    )


def _attempt(
    episode: Episode, album: Album, times: int = 1, credit: EpisodeCredit | None = None, turns: int = TURNS
) -> str:
    if len(episode.turns) > 1:
        shown = "".join(_turn(episode, i, album, credit) for i in range(min(turns, len(episode.turns))))
        more = len(episode.turns) - turns
        said = f'<ol class="turns">{shown}</ol>' + (f'<p class="note">and {more} more turns</p>' if more > 0 else "")
    else:
        said = _response(episode.turns[0], credit) if episode.turns else f"<pre>{_marked('')}</pre>"
    fate = ""
    if credit is not None and credit.fate != TRAINED:
        fate = f'<div class="advantage">not trained on: {escape(credit.fate.partition(": ")[2] or credit.fate)}</div>'
    many = f'<span class="times" title="{times} attempts said this">×{times}</span>' if times > 1 else ""
    amount = "no total" if episode.reward is None else f"{episode.reward:.2f}"
    in_verdict = episode.correct is None and episode.reward is not None
    total = f'<span class="total">reward <b>{amount}</b></span>' if episode.scores and not in_verdict else ""
    verdict = f'<div class="verdict"><span>{_verdict(episode)}</span>{many}{total}</div>'
    whole = [score for score in episode.scores if score.scope == "episode" or len(episode.turns) < 2]
    scores = f'<div class="pay">{"".join(map(_chip, whole))}</div>' if whole else ""
    kind = {True: "right", False: "wrong", None: "open"}[episode.correct]
    return f'<div class="attempt {kind}">{verdict}{said}{fate}{scores}{_judges(episode, album)}</div>'


def _judges(episode: Episode, album: Album) -> str:
    rows = ""
    for asked in album.transcripts(episode.id):
        words = "\n".join(block.get("text", "") for message in asked["messages"] for block in message["content"])
        number = candidate_number(words, episode.turns[-1].response.text if episode.turns else "")
        which = f" (this attempt is candidate {number})" if number else ""
        rows += (
            f"<li><b>{escape(asked['prompt'])}</b> by {escape(asked['model'])}: <code>{escape(_clip(asked['answer'], 400))}"
            f"</code>{which}<details><summary>the question</summary><pre>{escape(_clip(words))}</pre></details></li>"
        )
    return f'<details class="judges"><summary>judges</summary><ul>{rows}</ul></details>' if rows else ""


def candidate_number(question: str, response: str) -> int:
    """Which of a question's numbered candidates a response, or a part of it, is; 0 if that is unclear."""

    def letters(text: str) -> str:
        return "".join(c for c in text if c.isalnum())

    found = {int(number): letters(text) for number, _, text in CANDIDATE.findall(question)}
    written = letters(response)
    same = [number for number, text in found.items() if text == written]
    within = [number for number, text in found.items() if text and text in written]
    return same[0] if len(same) == 1 else within[0] if len(within) == 1 and not same else 0


def _turn(episode: Episode, index: int, album: Album, credit: EpisodeCredit | None) -> str:
    turn = episode.turns[index]
    own = turn.parts or ({"": turn.reward} if turn.reward else {})
    chips = "".join(f'<span class="chip">{escape(name)} {value:+.2f}</span>' for name, value in own.items())
    for score in episode.scores:
        shown = turn.parts.get(score.name.rpartition("/")[2]) if turn.parts else turn.reward
        if score.turn == turn.index and (shown is None or score.value != shown):  # not the environment's own reward again
            chips += _chip(score)
    return f"<li>{_messages(turn.observation, album)}{_response(turn, credit)}{chips}</li>"


def _response(turn: Turn, credit: EpisodeCredit | None) -> str:
    advantages = credit.advantages[turn.index] if credit is not None and turn.index < len(credit.advantages) else ()
    differ = len(set(advantages)) > 1 and len(advantages) == len(turn.response.byte_ends)
    text = tinted(turn.response, advantages, _marked, CHARACTERS) if differ else _marked(turn.response.text)
    if not advantages:
        return f"<pre>{text}</pre>"
    low, high = f"{min(advantages):+.2f}", f"{max(advantages):+.2f}"
    tint = f"<i {_tint(sum(advantages) / len(advantages))}></i>"
    return f'<pre>{text}</pre><div class="advantage">{tint}advantage {low if low == high else f"{low} to {high}"}</div>'


def _messages(messages: Sequence[Message], album: Album) -> str:
    parts = []
    for message in messages:
        blocks = "".join(
            f"<p>{escape(_clip(block.text))}</p>" if isinstance(block, Text) else album.show(block)
            for block in message.content
        )
        parts.append(f'<div class="message {message.role}">{blocks}</div>')
    return "".join(parts)


def _verdict(episode: Episode) -> str:
    unknown = "not judged" if episode.reward is None else f"reward {episode.reward:.2f}"
    word = {True: "✓ right", False: "✗ wrong", None: unknown}[episode.correct]
    if episode.status != Status.FINISHED:
        why = f": {episode.failure}" if episode.failure else ""
        return f"{word} · {escape(episode.status.value + _clip(why, 200))}"
    return word


def _chip(score: Score) -> str:
    weight = "" if score.weight == 1 else f" × {score.weight:g}"
    if score.value is None:
        reason = f": {escape(_clip(score.reason, 240))}" if score.reason else ""
        return f'<span class="chip missing"><b>{escape(score.name)} missing</b>{reason}</span>'
    return f'<span class="chip">{escape(score.name)} <b>{score.value:.2f}</b>{weight}</span>'


def _marked(text: str) -> str:
    if not text:
        return '<i class="empty">nothing</i>'
    return TAG.sub(lambda tag: f'<span class="tag">{tag.group()}</span>', escape(_clip(text)))


def _clip(text: str, limit: int = CHARACTERS) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"
