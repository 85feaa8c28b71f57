"""The first group that was played, in words: what is asked, one response, and what each term paid for it."""

from collections.abc import Iterator, Sequence

from sensorium.report.terminal import visible
from sensorium.vocabulary.content import Message, Text
from sensorium.vocabulary.episode import Episode, Group
from sensorium.vocabulary.score import Score

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
