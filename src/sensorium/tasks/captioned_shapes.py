"""Pictures of shapes to be described, with questions about them; and captions of such pictures to be read.

    a caption:    red circle top left, blue square bottom right
    a question:   What colour is top left?   A) green B) red C) blue D) yellow

``CaptionedShapes`` is for captioners. Its demonstrations are reticent: of each thing they tell at random colour and shape,
or leave either out, so that a model that learned from them can see and speak, but tells too little. ``CaptionReading`` is
for readers: a caption, also a wrong or a reticent one, and a question with shuffled options; the answer is a letter.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, Literal

from sensorium.media.store import MediaStore
from sensorium.tasks.shapes import COLOURS, LIST, PLACES, SHAPES, Pictures, Shapes, Thing
from sensorium.vocabulary.caption_questions import CaptionQuestion, draws
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.task import Task

ASKED = "What is in the picture?"
VAGUE_COLOUR, VAGUE_SHAPE = "a", "shape"


def caption(things: Sequence[Thing]) -> str:
    """All that can be told, in reading order."""
    told = sorted(things, key=lambda thing: thing.quarter)
    return ", ".join(f"{thing.colour} {thing.shape} {PLACES[thing.quarter]}" for thing in told)


def reticent(things: Sequence[Thing], telling: float, random: Random) -> str:
    """A caption in which each colour and each shape is told with a probability: "a circle top left, red shape …"."""
    vague = [
        Thing(
            thing.colour if random.random() < telling else VAGUE_COLOUR,
            thing.shape if random.random() < telling else VAGUE_SHAPE,
            thing.quarter,
        )
        for thing in things
    ]
    return caption(vague)


def questions_about(things: Sequence[Thing]) -> list[CaptionQuestion]:
    """Colour and shape of every thing."""
    found = []
    for thing in sorted(things, key=lambda thing: thing.quarter):
        place = PLACES[thing.quarter]
        found.append(CaptionQuestion(f"What colour is {place}?", tuple(COLOURS), list(COLOURS).index(thing.colour)))
        found.append(CaptionQuestion(f"What shape is {place}?", SHAPES, SHAPES.index(thing.shape)))
    return found


class CaptionedShapes:
    """Pictures to be described. ``picture`` is as in ``shapes``: "swapped" shows another one than is asked about.

    ``telling`` is how much of colours and shapes the demonstrations tell.
    """

    def __init__(
        self,
        *,
        store: MediaStore,
        split: Literal["train", "test"] = "train",
        size: int = 8192,
        seed: int = 0,
        picture_size: int = 64,
        picture: Pictures = "own",
        telling: float = 1.0,
    ) -> None:
        _refuse_share("captioned_shapes", telling)
        self._shapes = Shapes(
            store=store, split=split, size=size, seed=seed, kinds=[LIST], picture_size=picture_size, picture=picture
        )
        self.telling = telling

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Task:
        drawn = self._shapes[index]
        things = self._shapes.scene(index).things
        return Task(
            id=f"captioned_{drawn.id}",
            messages=(user(*drawn.messages[0].media, ASKED),),
            answer=caption(things),
            demonstration=(reticent(things, self.telling, Random(f"told {drawn.id}")),),
            metadata={"questions": [question.to_json() for question in questions_about(things)]},
        )


class CaptionReading:
    """Captions and questions as a reader is asked them; a seed gives other captions and other orders of options.

    ``telling`` is how much of colours and shapes the captions tell. What a caption does not tell cannot be answered.
    ``most`` things are in a caption: with one, a reader only has to find the option that the caption names.
    """

    def __init__(
        self,
        *,
        store: MediaStore,
        split: Literal["train", "test"] = "train",
        size: int = 65536,
        seed: int = 0,
        telling: float = 0.8,
        most: int = 4,
        prompt: str = "short",
    ) -> None:
        _refuse_share("caption_reading", telling)
        self._shapes = Shapes(store=store, split=split, size=size, seed=seed, kinds=[LIST])
        self.telling, self.most, self.prompt = telling, most, prompt

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(f"caption_reading: there is no task {index} among {len(self)}")
        name = f"caption_reading/{self._shapes.split}/{self._shapes.seed}/{index}"
        random = Random(name)
        things = self._shapes.scene(index).things[: self.most]
        text = reticent(things, self.telling, random)
        (asked,) = draws(questions_about(things), 1, random)
        told = asked.question.choices[asked.question.answer] in _part(text, asked.question.stem)
        letter = asked.letter if told else asked.letters[-1]
        return Task(
            id=name,
            messages=(user(asked.prompt(text, self.prompt)),),
            answer=letter,
            demonstration=(letter,),
            metadata={"category": "told" if told else "not told"},
        )


def _part(text: str, stem: str) -> Any:
    """What a caption tells of the place that is asked about."""
    return next((part for part in text.split(", ") if part.endswith(stem.rpartition(" is ")[2].rstrip("?"))), "")


def _refuse_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise TaskError(f"{name}: telling is {share}; it is a share, between 0 and 1.")
