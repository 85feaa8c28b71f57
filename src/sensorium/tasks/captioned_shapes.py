"""Pictures and videos of a shape to be described, with questions about them.

    of a picture:   a red circle top left              What colour is it? What shape is it?
    of a video:     [00:02] a red circle top left      … and: When does it come? 1, 2, 3 or 4

In a video nothing is seen until the shape comes. ``CaptionedShapes`` is for captioners (``caption_reading`` has tasks for
readers). Its demonstrations are reticent: each part is told with a probability, else something vague stands there, so that
a model that learned from them can see and speak, but tells too little. Which things belong to the test split is decided by
what they are.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np

from sensorium.media.making import encode_clip
from sensorium.media.store import MediaStore
from sensorium.tasks.png import indexed_png
from sensorium.tasks.shapes import COLOURS, PALETTE, PLACES, SHAPES, Pictures, Thing, paint
from sensorium.vocabulary.caption_questions import CaptionQuestion
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import TaskError, nearest
from sensorium.vocabulary.task import Task

ASKED = {"picture": "What is in the picture?", "video": "What is in the video?"}
SECONDS = ("1", "2", "3", "4")
VAGUE = {"colour": "", "shape": "shape", "second": "0"}
FPS = 2
TEST_SHARE = 4
VARIANTS = 8
"""Drawings of one thing in one place that training shows: videos are made once each. Of the test split each is its own."""

Kind = Literal["picture", "video"]


@dataclass(frozen=True)
class CaptionedScene:
    """A thing, and the second at which it comes (of a video)."""

    thing: Thing
    second: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """What can be asked about."""
        known = {"colour": self.thing.colour, "shape": self.thing.shape}
        return known | ({"second": self.second} if self.second else {})

    def caption(self, told: Sequence[str] = ("colour", "shape", "second")) -> str:
        """What is seen; of what is not to be told something vague is said."""
        words = {name: value if name in told else VAGUE[name] for name, value in self.facts.items()}
        stamp = f"[00:0{words['second']}] " if self.second else ""
        return stamp + " ".join(filter(None, ("a", words["colour"], words["shape"], PLACES[self.thing.quarter])))

    def questions(self) -> list[CaptionQuestion]:
        """A question about each fact."""
        options = {"colour": tuple(COLOURS), "shape": SHAPES, "second": SECONDS}
        stems = {"colour": "What colour is it?", "shape": "What shape is it?", "second": "When does it come?"}
        return [CaptionQuestion(stems[name], options[name], options[name].index(fact)) for name, fact in self.facts.items()]


class CaptionedScenes:
    """The scenes of a source, by index."""

    def __init__(self, name: str, kind: Kind, split: str, size: int, seed: int, telling: float) -> None:
        for given, known, what in ((kind, ("picture", "video"), "kind"), (split, ("train", "test"), "split")):
            if given not in known:
                raise TaskError(f"{name}: there is no {what} '{given}'{nearest(str(given), list(known))}")
        if size < 1 or not 0 <= telling <= 1:
            raise TaskError(f"{name}: size is {size} and telling {telling}; at least 1, and a share between 0 and 1.")
        self.name, self.kind, self.split, self.size, self.seed, self.telling = name, kind, split, size, seed, telling

    def __len__(self) -> int:
        return self.size

    def scene(self, index: int) -> CaptionedScene:
        """What task ``index`` is about; drawn again until it belongs to this split."""
        if not 0 <= index < self.size:
            raise IndexError(f"{self.name}: there is no task {index} among {self.size}")
        random = self.random("scene", index)
        second = random.choice(SECONDS) if self.kind == "video" else ""
        while True:
            thing = Thing(random.choice(list(COLOURS)), random.choice(SHAPES), random.randrange(4))
            if _is_test(thing) == (self.split == "test"):
                return CaptionedScene(thing, second)

    def told(self, index: int) -> list[str]:
        """The parts that a caption tells: each with the probability ``telling``."""
        random = self.random("told", index)
        return [name for name in self.scene(index).facts if random.random() < self.telling]

    def random(self, purpose: str, index: int) -> Random:
        """Random numbers for one purpose."""
        return Random(f"{self.name} {self.kind} {self.seed} {self.split} {purpose} {index}")


class CaptionedShapes(CaptionedScenes):
    """Pictures or videos to be described. ``picture``: "own", "blank", or "swapped" (another one than is asked about).

    ``telling`` is how much the demonstrations tell.
    """

    def __init__(
        self,
        *,
        store: MediaStore,
        kind: Kind = "picture",
        split: Literal["train", "test"] = "train",
        size: int = 8192,
        seed: int = 0,
        picture_size: int = 64,
        picture: Pictures = "own",
        telling: float = 1.0,
    ) -> None:
        super().__init__("captioned_shapes", kind, split, size, seed, telling)
        if picture not in ("own", "blank", "swapped") or not 32 <= picture_size <= 1024:
            raise TaskError("captioned_shapes: picture is own, blank or swapped, and picture_size 32 to 1024.")
        self.store, self.picture_size, self.picture = store, picture_size, picture
        self._made: dict[tuple[CaptionedScene | None, int], Media] = {}

    def __getitem__(self, index: int) -> Task:
        scene = self.scene(index)
        name = f"{self.name}/{self.kind}/{self.split}/{self.seed}/{index}"
        return Task(
            id=name if self.picture == "own" else f"{name}/{self.picture}",
            messages=(user(self._shown(index), ASKED[self.kind]),),
            answer=scene.caption(),
            demonstration=(scene.caption(self.told(index)),),
            metadata={"questions": [question.to_json() for question in scene.questions()]},
        )

    def _shown(self, index: int) -> Media:
        other = (index + self.size // 2 + 1) % self.size if self.picture == "swapped" else index
        scene = None if self.picture == "blank" else self.scene(other)
        variant = other if self.split == "test" else self.random("variant", other).randrange(VARIANTS)
        if (scene, variant) not in self._made:
            self._made[scene, variant] = self._drawn(scene, variant)
        return self._made[scene, variant]

    def _drawn(self, scene: CaptionedScene | None, variant: int) -> Media:
        origin = f"{self.name}, {scene.caption() if scene else 'blank'} {variant}"
        full_HW, empty_HW = (
            paint(things, self.picture_size, Random(f"{self.split} {origin}"))
            for things in ([scene.thing] if scene else [], [])
        )
        if self.kind == "picture":
            return self.store.put(indexed_png(full_HW, PALETTE), "picture", origin)
        comes = int(scene.second) if scene else len(SECONDS) + 1
        colours_P3 = np.array(PALETTE, np.uint8)
        frames = [colours_P3[full_HW if place >= comes * FPS else empty_HW] for place in range((len(SECONDS) + 1) * FPS)]
        asked = VideoParameters(fps=FPS, sampling="official", min_pixels_per_frame=0)  # as small as a picture, not enlarged
        return self.store.put(encode_clip(np.stack(frames), FPS), "video", origin, asked)


def _is_test(thing: Thing) -> bool:
    """Whether a thing in its place belongs to the test split: a quarter of all, by content."""
    body = f"{thing.colour} {thing.shape} {thing.quarter}".encode()
    return hashlib.sha256(body).digest()[0] % TEST_SHARE == 0
