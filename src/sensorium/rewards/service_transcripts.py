"""What the model of a reward service was asked about a caption and answered: in its replies, and kept by ``remote``.

    {"score": 0.5, …, "transcript": [
        {"asked": "Which colour?\\nA) red\\nB) blue\\nC) can not answer", "answer": "A", "right": "B) blue", "paid": 0.0,
         "model": "reader", "prompt": "caption_qa/plain/1"}, …], "transcript_left_out": 0}

Texts and their number are bounded on both sides; what is cut or left out is said. ``remote`` keeps the transcripts of a
judgement for its episodes, and once more under the content by which the judgement is cached: whoever gets the scores from
the cache later gets the transcripts from there.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from sensorium.judges.request import JudgeAnswer
from sensorium.judges.transcripts import TranscriptLine, Transcripts
from sensorium.rewards.caption_judge import CaptionJudgement, judge_instructions
from sensorium.rewards.caption_qa import ReaderAnswer
from sensorium.rewards.judgements import Scores, judgement_keys
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecordError
from sensorium.vocabulary.task import Task

MOST_ANSWERS = 64
"""Questions of one caption that are told."""

MOST_TEXT, MOST_OPTION, MOST_NAME = 2000, 200, 100
"""Characters of a question or answer, of the right option, and of the names of model and prompt."""

MOST_REPLY_TEXT = 4_000_000
"""Characters of all transcripts of a reply, in equal shares for its items: clients bound what they read."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class ServiceAnswer:
    """One question to a service's model. ``right`` is the right option, where there is one; ``paid`` what it was worth."""

    asked: str
    answer: str
    right: str
    paid: float
    model: str
    prompt: str

    def line(self) -> TranscriptLine:
        """As it is kept. What was paid and right stands first: no answer can push it out of sight."""
        right = f"; right: {self.right}" if self.right else ""
        return TranscriptLine(self.model, self.prompt, self.asked, f"paid {self.paid:.3g}{right}; answered: {self.answer}")


def reading_transcript(answers: Sequence[ReaderAnswer]) -> tuple[ServiceAnswer, ...]:
    """What a reader was asked, with its options, and answered. The caption is the episode's, and not repeated.

    A question without an answer is not told: it was paid nothing, which is no 0.
    """
    return tuple(
        ServiceAnswer(
            one.draw.text,
            one.answer.text,
            f"{one.draw.letter}) {one.draw.question.choices[one.draw.question.answer]}",
            float(one.right),
            one.answer.model,
            one.request.prompt,
        )
        for one in answers
        if isinstance(one.answer, JudgeAnswer)
    )


def judgement_transcript(found: CaptionJudgement, kind: str) -> tuple[ServiceAnswer, ...]:
    """What a judge that sees was asked, and its words."""
    asked = judge_instructions(kind).replace("{caption}", "(the caption)")
    return (ServiceAnswer(asked, found.answer.text, "", found.total, found.answer.model, found.request.prompt),)


def transcript_json(transcript: Sequence[ServiceAnswer], items: int) -> dict[str, Any]:
    """A transcript as the fields of a result, of bounded length; ``items`` share the room of the reply."""
    room, told = MOST_REPLY_TEXT // items, []
    for one in transcript[:MOST_ANSWERS]:
        fields = asdict(_bounded(one))
        room -= sum(len(text) for text in fields.values() if isinstance(text, str))
        if room < 0:
            break
        told.append(fields)
    return {"transcript": told, "transcript_left_out": len(transcript) - len(told)}


def lines_of(result: Mapping[str, Any]) -> list[TranscriptLine]:
    """The lines of a result's transcript; none where the server sent none; where it cannot be read, a line says so."""
    if "transcript" not in result:
        return []
    raw, left_out = result["transcript"], result.get("transcript_left_out", 0)
    try:
        lines = [_answer(one).line() for one in raw[:MOST_ANSWERS]]
        left_out = min(int(left_out), 10**9) + len(raw) - len(lines)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        return [TranscriptLine("the server", "transcript", "", _text(f"(it cannot be read: {error!r})", MOST_OPTION))]
    if left_out > 0:
        lines.append(TranscriptLine("the server", "transcript", "", f"({left_out} more questions are not shown)"))
    return lines


class KeptTranscripts:
    """The transcripts of a ``remote`` term; ``identity`` tells its judgements from another term's."""

    def __init__(self, term: str, identity: str, transcripts: Transcripts | None) -> None:
        self.term, self.identity, self.transcripts = term, identity, transcripts
        self._told = False

    @property
    def wanted(self) -> bool:
        """True where there is a file to keep them in."""
        return self.transcripts is not None and self.transcripts.path is not None

    def keep(self, task: Task, episodes: Sequence[Episode], results: Sequence[Mapping[str, Any]]) -> None:
        """Keep what a server told of these episodes. That it cannot be written costs no score, and is said once."""
        if self.transcripts is None or not self.wanted or not any("transcript" in result for result in results):
            return
        try:
            for episode, source, result in zip(episodes, self._sources(task, episodes), results, strict=True):
                judged = result.get("score") is not None  # else a later judgement of the same content is the one to recall
                places = (episode.id, source) if judged else (episode.id,)
                self.transcripts.replace(places, self.term, lines_of(result))
        except RecordError as error:
            if not self._told:
                self._told = True
                print(f"reward term '{self.term}': transcripts are not kept: {error}", file=sys.stderr, flush=True)

    def recall(self, task: Task, episodes: Sequence[Episode], scores: Sequence[Scores]) -> None:
        """Give each episode that has its scores from the cache the transcript of these."""
        if self.transcripts is None or not self.wanted:
            return
        for episode, source, given in zip(episodes, self._sources(task, episodes), scores, strict=True):
            if not any(score.missing for score in given):
                self.transcripts.copy(source, episode.id, self.term)

    def _sources(self, task: Task, episodes: Sequence[Episode]) -> list[str]:
        """Under what the transcripts of a judgement are kept beside its episodes."""
        return [f"judgement {key}" for key in judgement_keys(self.identity, task, episodes).content]


def _answer(raw: Any) -> ServiceAnswer:
    """An entry of a reply. It is a server's word: anything may be in it."""
    paid = float(raw["paid"])
    if not isfinite(paid):
        raise ValueError("paid is no number")
    texts = {name: raw[name] for name in ("asked", "answer", "right", "model", "prompt")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("an entry holds what is no text")
    return _bounded(ServiceAnswer(paid=paid, **texts))


def _bounded(one: ServiceAnswer) -> ServiceAnswer:
    return ServiceAnswer(
        _text(one.asked, MOST_TEXT),
        _text(one.answer, MOST_TEXT),
        _text(one.right, MOST_OPTION),
        one.paid,
        _text(one.model, MOST_NAME),
        _text(one.prompt, MOST_NAME),
    )


def _text(text: str, most: int) -> str:
    """A text that can be written and shown: control characters by their codes; cut where it is long, which is said."""
    cut = text if len(text) <= most else f"{text[: most - 40]}… ({len(text) - most + 40} more characters)"
    shown = CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", cut)
    return shown.encode("utf-8", "backslashreplace").decode()
