"""QA from a caption: how many questions about a picture or video does a text model answer from its caption alone (CapRL)?

Questions are drawn, and their options shuffled, by a seed and the caption: equal captions of equal tasks are asked the
same, and who writes a caption cannot know which letter will be right. The caption is neutralised and quoted; what is longer
than a reader is shown is cut in the middle. A reader that does not answer gives no score.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from sensorium.judges.client import JudgeClient
from sensorium.judges.request import JudgeAnswer, JudgeRequest
from sensorium.judges.untrusted import neutral, shortened
from sensorium.rewards.answer import last_response
from sensorium.rewards.context import RewardContext
from sensorium.rewards.judge_parts import client_of, needed
from sensorium.vocabulary.caption_questions import (
    PROMPTS,
    CaptionQuestion,
    DrawnQuestion,
    draws,
    first_letter,
    question_of,
)
from sensorium.vocabulary.content import Message, Text
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import JudgeFailure, RecipeError, TaskError, nearest
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task

VERSION = 1
LONGEST = 20_000


@dataclass(frozen=True)
class FirstLetter:
    """The first letter of an answer, whatever else it says: so CapRL reads answers."""

    @property
    def identity(self) -> str:
        """As it is."""
        return "first letter"

    def parse(self, text: str) -> str:
        """The letter; ValueError if there is none."""
        return first_letter(text)

    def schema(self) -> None:
        """None: it is plain text."""


@dataclass(frozen=True)
class Reading:
    """How a caption is read: by whom, how many draws (0: every question once), and how the reader samples.

    ``prompt`` names one of ``caption_questions.PROMPTS``.
    """

    model: str
    draws: int = 8
    prompt: str = "plain"
    temperature: float = 0.6
    max_tokens: int = 10
    seed: int = 0
    longest: int = LONGEST

    def __post_init__(self) -> None:
        if self.prompt not in PROMPTS:
            raise RecipeError(f"caption_qa: there is no prompt '{self.prompt}'{nearest(self.prompt, list(PROMPTS))}")
        if self.draws < 0 or self.max_tokens < 1 or self.temperature < 0 or self.longest < 1:
            raise RecipeError("caption_qa: draws and temperature are 0 or more, max_tokens and longest 1 or more.")

    def requests(self, caption: str, questions: Sequence[CaptionQuestion]) -> list[tuple[JudgeRequest, str]]:
        """What a reader is asked about a caption, with the right letters."""
        return [(request, draw.letter) for request, draw in self.drawn_requests(caption, questions)]

    def drawn_requests(
        self, caption: str, questions: Sequence[CaptionQuestion]
    ) -> list[tuple[JudgeRequest, DrawnQuestion]]:
        """What a reader is asked about a caption, with the questions as they were drawn."""
        text = neutral(shortened(caption, self.longest))
        written = json.dumps([self.seed, text, [question.to_json() for question in questions]], ensure_ascii=False)
        random = Random(hashlib.sha256(written.encode("utf-8", "backslashreplace")).hexdigest())
        seen: Counter[str] = Counter()
        asked = []
        for draw in draws(questions, self.draws, random):
            prompt = draw.prompt(text, self.prompt)
            number, seen[prompt] = seen[prompt], seen[prompt] + 1
            parameters = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": self.seed + number}
            message = Message("user", (Text(prompt),))
            named = f"caption_qa/{self.prompt}/{VERSION}"
            asked.append((JudgeRequest(self.model, (message,), named, FirstLetter(), parameters, number), draw))
        return asked


@dataclass(frozen=True)
class ReaderAnswer:
    """A question as it was asked, and what the reader answered, or why it did not."""

    draw: DrawnQuestion
    request: JudgeRequest
    answer: JudgeAnswer | JudgeFailure

    @property
    def right(self) -> bool:
        """True where the reader chose the right option."""
        return isinstance(self.answer, JudgeAnswer) and bool(self.answer.value == self.draw.letter)


def share_right(answers: Sequence[ReaderAnswer]) -> float:
    """The share of questions that were answered rightly. JudgeFailure if any was not answered at all."""
    failures = [one.answer for one in answers if isinstance(one.answer, JudgeFailure)]
    if failures:
        raise JudgeFailure(f"{len(failures)} of {len(answers)} questions were not answered: {failures[0]}")
    return sum(one.right for one in answers) / len(answers)


async def read_caption(
    client: JudgeClient,
    reading: Reading,
    caption: str,
    questions: Sequence[CaptionQuestion],
    about: tuple[str, ...] = (),
    term: str = "",
) -> list[ReaderAnswer]:
    """What a reader answers from the caption, question by question, or why it does not."""
    if not questions:
        raise TaskError("there are no questions to be answered from the caption")
    asked = reading.drawn_requests(caption, questions)
    found = await asyncio.gather(
        *(client.ask(request, about=about, term=term) for request, _ in asked), return_exceptions=True
    )
    answers = list[JudgeAnswer | JudgeFailure]()
    for answer in found:
        if isinstance(answer, BaseException) and not isinstance(answer, JudgeFailure):
            raise answer
        answers.append(answer)
    return [ReaderAnswer(draw, request, answer) for answer, (request, draw) in zip(answers, asked, strict=True)]


def questions_of(task: Task) -> list[CaptionQuestion]:
    """The questions of a task: in its metadata under ``questions``, or its answer."""
    raw = task.metadata.get("questions", task.answer)
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise TaskError(f"task {task.id}: it has no questions; a caption task lists them in its metadata ('questions').")
    try:
        return [question_of(one) for one in raw]
    except ValueError as error:
        raise TaskError(f"task {task.id}: {error}") from error


class CaptionQA:
    """The term ``caption_qa``: asks the model ``model`` of the recipe's section ``judges``."""

    caches_answers = True

    def __init__(
        self,
        model: str,
        draws: int = 8,
        prompt: str = "plain",
        temperature: float = 0.6,
        max_tokens: int = 10,
        seed: int = 0,
        longest: int = LONGEST,
        name: str = "caption_qa",
        *,
        context: RewardContext | None = None,
    ) -> None:
        self.name = name
        self.version = VERSION
        self.reading = Reading(model, draws, prompt, temperature, max_tokens, seed, longest)
        self._client = client_of(context, name, model)

    async def score(self, task: Task, episode: Episode) -> Any:
        """The share of questions answered."""
        caption, questions = last_response(episode), questions_of(task)
        answers = await read_caption(
            needed(self._client, self.name), self.reading, caption, questions, (episode.id,), self.name
        )
        return Score(self.name, share_right(answers))
