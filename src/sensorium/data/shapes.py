"""Shapes: generated pictures of coloured shapes, and questions: which colour, which shape, how many, where, what is there.

A picture has four quarters, each empty or with one shape. An index always gives the same task, on every machine. Train and
test never share a scene: the shapes in the quarters decide the split, before any jitter. The right answers of a kind of
question are equally frequent, so that without the picture one in four is right.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import indexed_png
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import TaskError, nearest
from sensorium.vocabulary.task import Task

KINDS = ("colour", "shape", "count", "place")
LIST = "list"
COLOURS = {"red": (214, 48, 49), "green": (46, 160, 67), "blue": (52, 92, 210), "yellow": (240, 200, 40)}
SHAPES = ("circle", "square", "triangle", "cross")
COUNTS = ("1", "2", "3", "4")
PLACES = ("top left", "top right", "bottom left", "bottom right")
ANSWERS: dict[str, tuple[str, ...]] = {"colour": tuple(COLOURS), "shape": SHAPES, "count": COUNTS, "place": PLACES}
BACKGROUNDS = ((255, 255, 255), (236, 236, 240), (244, 240, 232))
PALETTE = (*BACKGROUNDS, *COLOURS.values())
TEST_SHARE = 5

Pictures = Literal["own", "blank", "swapped"]


@dataclass(frozen=True)
class Thing:
    """One shape of a scene, in one of its four quarters."""

    colour: str
    shape: str
    quarter: int


@dataclass(frozen=True)
class ShapesScene:
    """A question, its answer, and what the picture shows."""

    kind: str
    question: str
    answer: str
    things: tuple[Thing, ...]


class Shapes:
    """A source of shape tasks.

    ``picture``: "own", "blank" (nothing on it) or "swapped" (another task's), to see whether a model looks. ``guessed``
    names the kinds of question whose demonstration is a guess of the right form instead of the right answer.
    """

    def __init__(
        self,
        *,
        store: MediaStore,
        split: Literal["train", "test"] = "train",
        size: int = 8192,
        seed: int = 0,
        kinds: Sequence[str] = KINDS,
        picture_size: int = 56,
        picture: Pictures = "own",
        guessed: Sequence[str] = (),
    ) -> None:
        checked = [("kind of question", kind, [*KINDS, LIST]) for kind in (*kinds, *guessed)]
        checked += [("split", split, ["train", "test"]), ("picture", picture, ["own", "blank", "swapped"])]
        for option, given, known in checked:
            if given not in known:
                raise TaskError(f"shapes: there is no {option} '{given}'{nearest(given, known)}")
        if not kinds or size < 1 or not 16 <= picture_size <= 4096:
            raise TaskError("shapes: needs at least one kind of question, a size of 1 and a picture_size of 16 to 4096.")
        self.store, self.split, self.size, self.seed = store, split, size, seed
        self.kinds, self.guessed = tuple(kinds), frozenset(guessed)
        self.picture_size, self.picture = picture_size, picture

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(f"shapes: there is no task {index} among {self.size}")
        scene = self.scene(index)
        name = f"shapes/{self.split}/{self.seed}/{index}"
        media = self.store.put(self._drawing(index, scene), "picture", origin=name)
        demonstrated = scene.answer
        if scene.kind in self.guessed:
            demonstrated = self._random("guess", index).choice(ANSWERS[scene.kind])
        return Task(
            id=name if self.picture == "own" else f"{name}/{self.picture}",
            messages=(user(media, scene.question),),
            answer=scene.answer,
            demonstration=(f"<answer>{demonstrated}</answer>",),
            metadata={"category": scene.kind},
        )

    def scene(self, index: int) -> ShapesScene:
        """The scene of task ``index``, sampled until it belongs to this split."""
        random = self._random("scene", index)
        kind = self.kinds[index % len(self.kinds)]
        while True:
            scene = _draw_scene(kind, random)
            if is_test(scene.things) == (self.split == "test"):
                return scene

    def _drawing(self, index: int, scene: ShapesScene) -> bytes:
        if self.picture == "blank":
            scene = ShapesScene(scene.kind, scene.question, scene.answer, ())
        elif self.picture == "swapped":
            index = (index + self.size // 2 + 1) % self.size
            scene = self.scene(index)
        return indexed_png(paint(scene.things, self.picture_size, self._random("paint", index)), PALETTE)

    def _random(self, purpose: str, index: int) -> Random:
        return Random(f"shapes {self.seed} {self.split} {purpose} {index}")


def is_test(things: tuple[Thing, ...]) -> bool:
    """Whether a scene belongs to the test split: a fifth of all scenes, by content."""
    body = repr(sorted((thing.quarter, thing.colour, thing.shape) for thing in things)).encode()
    return hashlib.sha256(body).digest()[0] % TEST_SHARE == 0


def _draw_scene(kind: str, random: Random) -> ShapesScene:
    """A question with a uniformly sampled answer, and two to four things among which only that answer is right."""
    colour, shape = random.choice(list(COLOURS)), random.choice(SHAPES)
    quarters = random.sample(range(4), 4)
    if kind == LIST:
        things = [Thing(random.choice(list(COLOURS)), random.choice(SHAPES), quarter) for quarter in quarters]
        things = things[: random.randint(1, 4)]
        # The content of each quarter in reading order: a caption, which teaches a vision tower faster than questions do.
        words = {thing.quarter: f"{thing.colour} {thing.shape}" for thing in things}
        answer = ", ".join(words.get(quarter, "none") for quarter in range(4))
        return ShapesScene(LIST, "What is in the picture?", answer, tuple(things))
    answer = random.choice(ANSWERS[kind])
    by_shape = kind == "colour" or (kind == "place" and random.random() < 0.5)
    if kind == "colour":
        colour, question = answer, f"What colour is the {shape}?"
    elif kind == "shape":
        shape, question = answer, f"Which shape is {colour}?"
    elif kind == "count":
        question = f"How many are {colour}?"
    else:
        question = f"Where is the {shape}?" if by_shape else f"Where is {colour}?"
        quarters.remove(PLACES.index(answer))
        quarters.insert(0, PLACES.index(answer))
    asked = int(answer) if kind == "count" else 1
    total = random.randint(max(2, asked), 4)
    things = []
    for number, quarter in enumerate(quarters[:total]):
        if number < asked:
            things.append(Thing(colour, shape if kind != "count" else random.choice(SHAPES), quarter))
            continue
        other_colours = [c for c in COLOURS if by_shape or c != colour]
        other_shapes = [s for s in SHAPES if not by_shape or s != shape]
        things.append(Thing(random.choice(other_colours), random.choice(other_shapes), quarter))
    return ShapesScene(kind, question, answer, tuple(things))


def paint(things: Sequence[Thing], size: int, random: Random) -> np.ndarray:
    """The picture as palette indices: a plain ground, each thing somewhere in its quarter, at its own size."""
    indices_HW = np.full((size, size), random.randrange(len(BACKGROUNDS)), dtype=np.uint8)
    quarter = size // 2
    for thing in things:
        radius = random.randint(quarter * 2 // 7, quarter * 5 // 14)
        x, y = (quarter // 2 + random.randint(-(quarter // 14), quarter // 14) for _ in range(2))
        x, y = x + quarter * (thing.quarter % 2), y + quarter * (thing.quarter // 2)
        across_HW, down_HW = np.meshgrid(np.arange(size) - x, np.arange(size) - y)
        mask_HW = _mask(thing.shape, across_HW, down_HW, radius)
        indices_HW[mask_HW] = len(BACKGROUNDS) + list(COLOURS).index(thing.colour)
    return indices_HW


def _mask(shape: str, across_HW: np.ndarray, down_HW: np.ndarray, radius: int) -> np.ndarray:
    """Which pixels a shape covers, in whole numbers only, so that every machine agrees."""
    inside_HW = (abs(across_HW) <= radius) & (abs(down_HW) <= radius)
    if shape == "circle":
        return across_HW**2 + down_HW**2 <= radius * (radius + 1)
    if shape == "triangle":
        return inside_HW & (2 * abs(across_HW) <= down_HW + radius)
    if shape == "cross":
        return inside_HW & ((3 * abs(across_HW) <= radius) | (3 * abs(down_HW) <= radius))
    return inside_HW
