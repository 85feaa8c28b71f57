"""The advantages of a response's tokens as HTML: a tint behind the text where they differ, and a line of numbers."""

import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby

from sensorium.report.album import Album
from sensorium.report.examples import Comparison, LoggedGroup, category_of
from sensorium.runs.episodes import TRAINED, EpisodeCredit
from sensorium.vocabulary.content import Message, Text
from sensorium.vocabulary.episode import Episode, Segment, Status, Turn
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task

STRONGEST = 2.0
"""An advantage of this size, or larger, has the full tint."""


def tinted(response: Segment, advantages: Sequence[float], marked: Callable[[str], str], limit: int) -> str:
    """The text of a response with its tokens tinted, green where they were made likelier and red where less.

    Tokens in a row with the same advantage are one run. Past ``limit`` characters the text is cut.
    """
    data, start, left, parts = response.text.encode(), 0, limit, []
    decoder = getincrementaldecoder("utf-8")(errors="replace")  # a character of several tokens is shown with its last
    for value, run in groupby(zip(response.byte_ends, advantages, strict=False), key=lambda token: token[1]):
        end = [stop for stop, _ in run][-1]
        text = decoder.decode(data[start:end])
        start = end
        if text and left > 0:
            parts.append(
                f'<span class="{_sign_class(value)}" style="--s:{_strength(value):.2f}">{marked(text[:left])}</span>'
            )
        left -= len(text)
    return "".join(parts) + (f"… ({-left:,} more characters)" if left < 0 else "")


def advantage_line(advantages: Sequence[float]) -> str:
    """How large the advantages of a response are; nothing where there are none."""
    if not advantages:
        return ""
    low, high = min(advantages), max(advantages)
    words = f"{low:+.2f}" if f"{low:+.2f}" == f"{high:+.2f}" else f"{low:+.2f} to {high:+.2f}"
    mean = sum(advantages) / len(advantages)
    tint = f'<i class="{_sign_class(mean)}" style="--s:{_strength(mean):.2f}"></i>'
    return f'<div class="advantage">{tint}advantage {words}</div>'


def untrained(fate: str) -> str:
    """Why an attempt was not trained on."""
    return f'<div class="advantage">not trained on: {escape(fate.partition(": ")[2] or fate)}</div>'


def _sign_class(value: float) -> str:
    return "up" if value > 0 else "down" if value < 0 else "flat"


def _strength(value: float) -> float:
    return min(1.0, abs(value) / STRONGEST)


CHARACTERS = 4000
TURNS = 24
CANDIDATE = re.compile(r"\[BEGIN CANDIDATE_(\d+) (\w+)\]\n(.*?)\n\[END CANDIDATE_\1 \2\]", re.DOTALL)
TAG = re.compile(r"&lt;/?[\w|]+&gt;")


def comparison_card(pair: Comparison, album: Album) -> str:
    """One held-out task before and after."""
    album.learn(pair.after)
    sides = "".join(
        f'<div class="side"><h4>{when}</h4>{_attempt(episode, album)}</div>'
        for when, episode in (("before", pair.before), ("after", pair.after))
    )
    return _card(pair.task, pair.after, album, f'<div class="sides">{sides}</div>', pair.kind)


def group_card(logged: LoggedGroup, album: Album) -> str:
    """A group: one task and all its attempts, those alike shown once, with the advantages they were trained with."""
    group, credits = logged.group, logged.credits
    for episode in group.episodes:
        album.learn(episode)
    if len(group.episodes[0].turns) > 1:
        ranked = sorted(group.episodes, key=lambda e: (e.reward is None, -(e.reward or 0.0)))
        ends = ranked if len(ranked) < 2 else [ranked[0], ranked[-1]]
        rows = "".join(f"<li>{_attempt(episode, album, credit=credits.get(episode.id))}</li>" for episode in ends)
        note = f"{len(group.episodes)} attempts; the best and the worst are shown" if len(ranked) > 2 else ""
    else:
        rows = "".join(_alike(episodes, album, credits.get(episodes[0].id)) for episodes in _by_answer(group.episodes))
        note = f"{len(group.episodes)} attempts"
    body = f'<p class="note">{note}</p><ul class="attempts">{rows}</ul>'
    return _card(group.task, group.episodes[0], album, body, f"step {logged.step}")


def _card(task: Task, episode: Episode, album: Album, body: str, label: str) -> str:
    shown = task.messages or (*episode.head, *(episode.turns[0].observation if episode.turns else ()))
    multi = " long" if len(episode.turns) > 1 else ""
    answer = (
        f'<p class="truth">right answer: <b>{escape(_clip(str(task.answer)))}</b></p>' if task.answer is not None else ""
    )
    category = category_of(task)
    head = f'<span class="label {label.split()[0]}">{escape(label)}</span>'
    head += f'<span class="category">{escape(category)}</span>' if category else ""
    head += f'<span class="id">{escape(_clip(task.id, 60))}</span>'
    prompt = _messages(episode.head if multi else shown, album)
    return (
        f'<article class="card{multi}"><header>{head}</header><div class="card-body">'
        f'<div class="prompt">{prompt}{answer}</div><div class="said">{body}</div></div></article>'
    )


def _attempt(episode: Episode, album: Album, times: int = 1, credit: EpisodeCredit | None = None) -> str:
    """What the model said in one attempt, what it was paid, and what training made of it."""
    if len(episode.turns) > 1:
        turns = "".join(_turn(episode, i, album, credit) for i in range(min(TURNS, len(episode.turns))))
        more = len(episode.turns) - TURNS
        said = f'<ol class="turns">{turns}</ol>' + (f'<p class="note">and {more} more turns</p>' if more > 0 else "")
    else:
        said = _response(episode.turns[0], credit) if episode.turns else f"<pre>{_marked('')}</pre>"
    fate = untrained(credit.fate) if credit is not None and credit.fate != TRAINED else ""
    many = f'<span class="times" title="{times} attempts said this">×{times}</span>' if times > 1 else ""
    amount = "no total" if episode.reward is None else f"{episode.reward:.2f}"
    told = episode.correct is None and episode.reward is not None  # the verdict tells it
    total = f'<span class="total">paid <b>{amount}</b></span>' if episode.scores and not told else ""
    verdict = f'<div class="verdict"><span>{_verdict(episode)}</span>{many}{total}</div>'
    judges = _judges(episode, album)
    return f'<div class="attempt {_class(episode)}">{verdict}{said}{fate}{_pay(episode)}{judges}</div>'


def _judges(episode: Episode, album: Album) -> str:
    """What judges were asked about an attempt and what they said, folded away."""
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
    """Which of a question's numbered candidates a response, or a part of it, is; 0 where that cannot be told."""
    found = {int(number): _letters(text) for number, _, text in CANDIDATE.findall(question)}
    said = _letters(response)
    same = [number for number, text in found.items() if text == said]
    within = [number for number, text in found.items() if text and text in said]
    return same[0] if len(same) == 1 else within[0] if len(within) == 1 and not same else 0


def _letters(text: str) -> str:
    return "".join(c for c in text if c.isalnum())


def _turn(episode: Episode, index: int, album: Album, credit: EpisodeCredit | None) -> str:
    turn = episode.turns[index]
    own = turn.parts or ({"": turn.reward} if turn.reward else {})
    paid = "".join(f'<span class="chip">{escape(name)} {value:+.2f}</span>' for name, value in own.items())
    paid += "".join(_chip(s) for s in episode.scores if s.turn == turn.index and not _environments_own(s, turn))
    return f"<li>{_messages(turn.observation, album)}{_response(turn, credit)}{paid}</li>"


def _environments_own(score: Score, turn: Turn) -> bool:
    """True for a score that repeats what the environment paid at a turn, which is shown already."""
    paid = turn.parts.get(score.name.rpartition("/")[2]) if turn.parts else turn.reward
    return paid is not None and score.value == paid


def _response(turn: Turn, credit: EpisodeCredit | None) -> str:
    """What the model said in a turn; its tokens tinted where their advantages differ."""
    advantages = credit.advantages[turn.index] if credit is not None and turn.index < len(credit.advantages) else ()
    differ = len(set(advantages)) > 1 and len(advantages) == len(turn.response.byte_ends)
    text = tinted(turn.response, advantages, _marked, CHARACTERS) if differ else _marked(turn.response.text)
    return f"<pre>{text}</pre>{advantage_line(advantages)}"


def _messages(messages: Sequence[Message], album: Album) -> str:
    parts = []
    for message in messages:
        blocks = "".join(
            f"<p>{escape(_clip(block.text))}</p>" if isinstance(block, Text) else album.show(block)
            for block in message.content
        )
        parts.append(f'<div class="message {message.role}">{blocks}</div>')
    return "".join(parts)


def _alike(episodes: list[Episode], album: Album, credit: EpisodeCredit | None) -> str:
    return f"<li>{_attempt(episodes[0], album, len(episodes), credit)}</li>"


def _by_answer(episodes: Iterable[Episode]) -> list[list[Episode]]:
    """Attempts that said and earned the same together, the best paid first."""
    piles: dict[tuple[str, float | None, Status], list[Episode]] = {}
    for episode in episodes:
        piles.setdefault((episode.response, episode.reward, episode.status), []).append(episode)
    return sorted(piles.values(), key=lambda pile: (pile[0].reward is None, -(pile[0].reward or 0.0)))


def _class(episode: Episode) -> str:
    return {True: "right", False: "wrong", None: "open"}[episode.correct]


def _verdict(episode: Episode) -> str:
    """Right or wrong where a term knows; else the reward; "not judged" where scores are missing."""
    unknown = "not judged" if episode.reward is None else f"reward {episode.reward:.2f}"
    word = {True: "✓ right", False: "✗ wrong", None: unknown}[episode.correct]
    if episode.status != Status.FINISHED:
        why = f": {episode.failure}" if episode.failure else ""
        return f"{word} · {escape(episode.status.value + _clip(why, 200))}"
    return word


def _pay(episode: Episode) -> str:
    shown = [score for score in episode.scores if score.scope == "episode" or len(episode.turns) < 2]
    chips = "".join(map(_chip, shown))
    return f'<div class="pay">{chips}</div>' if chips else ""


def _chip(score: Score) -> str:
    weight = "" if score.weight == 1 else f" × {score.weight:g}"
    if score.value is None:
        reason = f": {escape(_clip(score.reason, 240))}" if score.reason else ""
        return f'<span class="chip missing"><b>{escape(score.name)} missing</b>{reason}</span>'
    return f'<span class="chip">{escape(score.name)} <b>{score.value:.2f}</b>{weight}</span>'


def _marked(text: str) -> str:
    """What the model said; its tags stand back."""
    if not text:
        return '<i class="empty">nothing</i>'
    return TAG.sub(lambda tag: f'<span class="tag">{tag.group()}</span>', escape(_clip(text)))


def _clip(text: str, limit: int = CHARACTERS) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"
