"""Which questions about a picture or video are worth asking: those that can be answered with it and not without."""

import asyncio
import hashlib
from dataclasses import dataclass
from random import Random

from sensorium.judges.client import JudgeClient
from sensorium.judges.request import JudgeRequest
from sensorium.rewards.caption_qa import FirstLetter
from sensorium.vocabulary.caption_questions import CaptionQuestion, drawn
from sensorium.vocabulary.content import Media, Message, Text

VERSION = 1
ASKED = "Answer the question. Reply with the letter of one option and nothing else.\n\n"
BLIND = "You are not shown what the question is about. Answer as well as you can. "


@dataclass(frozen=True)
class Curation:
    """How a question is tried: by which model, how often, and which shares of right answers keep it."""

    model: str
    draws: int = 8
    seen_above: float = 0.75
    blind_below: float = 0.25
    temperature: float = 0.6
    max_tokens: int = 10
    seed: int = 0

    def keeps(self, seen: float, blind: float) -> bool:
        """Whether a question is worth asking."""
        return seen > self.seen_above and blind < self.blind_below

    def requests(self, question: CaptionQuestion, media: Media | None) -> list[tuple[JudgeRequest, str]]:
        """The question as often as it is tried, with shuffled options, and the right letters."""
        random = Random(hashlib.sha256(f"{self.seed} {question}".encode()).hexdigest())
        found = []
        for number in range(self.draws):
            draw = drawn(question, random)
            text = Text((BLIND if media is None else "") + ASKED + draw.text)
            message = Message("user", (text,) if media is None else (media, text))
            parameters = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": self.seed + number}
            request = JudgeRequest(self.model, (message,), f"curation/{VERSION}", FirstLetter(), parameters, number)
            found.append((request, draw.letter))
        return found


async def answered(client: JudgeClient, curation: Curation, question: CaptionQuestion, media: Media | None) -> float:
    """The share of right answers, with a medium or without. JudgeFailure if any try was not answered at all."""
    asked = curation.requests(question, media)
    answers = await asyncio.gather(*(client.ask(request) for request, _ in asked))
    return sum(answer.value == letter for answer, (_, letter) in zip(answers, asked, strict=True)) / len(asked)
