"""Pictures and videos of a shape to describe, with questions about them.

    of a picture:   a red circle top left              What colour is it? What shape is it?
    of a video:     [00:02] a red circle top left      … and: When does it come? 1, 2, 3 or 4

In a video nothing is seen until the shape comes. ``CaptionedShapes`` trains captioners. Its demonstrations are incomplete:
each part is given with a probability, else something vague, so that a model that learned from them can see and speak but
says too little. ``CaptionReading`` trains readers: a caption and a question, whose answer is "can not answer" where the
caption lacks the fact. A scene's content decides its split.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import numpy as np

from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import indexed_png
from sensorium.data.shapes import COLOURS, PALETTE, PLACES, SHAPES, Pictures, Thing, paint
from sensorium.systems.caprl.caption_rows import CANNOT, PROMPTS, CaptionQuestion, DrawnQuestion, drawn
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import TaskError, nearest
from sensorium.vocabulary.task import Task

ASKED = {"picture": "What is in the picture?", "video": "What is in the video?"}
SECONDS = ("1", "2", "3", "4")
VAGUE = {"colour": "", "shape": "shape", "second": "0"}
FPS = 2
TEST_SHARE = 4
VARIANTS = 8  # drawings of one thing in one place in the train split; in the test split every task has its own
Kind = Literal["picture", "video"]


@dataclass(frozen=True)
class CaptionedScene:
    """A thing, and the second at which it comes (in a video)."""

    thing: Thing
    second: str = ""

    @property
    def facts(self) -> dict[str, str]:
        known = {"colour": self.thing.colour, "shape": self.thing.shape}
        return known | ({"second": self.second} if self.second else {})

    def caption(self, parts: Sequence[str] = ("colour", "shape", "second")) -> str:
        """A caption with these parts, and something vague for the others."""
        words = {name: value if name in parts else VAGUE[name] for name, value in self.facts.items()}
        stamp = f"[00:0{words['second']}] " if self.second else ""
        return stamp + " ".join(filter(None, ("a", words["colour"], words["shape"], PLACES[self.thing.quarter])))

    def questions(self) -> list[CaptionQuestion]:
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
        """The scene of task ``index``: drawn again until it belongs to this split."""
        if not 0 <= index < self.size:
            raise IndexError(f"{self.name}: there is no task {index} among {self.size}")
        random = self.random("scene", index)
        second = random.choice(SECONDS) if self.kind == "video" else ""
        while True:
            thing = Thing(random.choice(list(COLOURS)), random.choice(SHAPES), random.randrange(4))
            digest = hashlib.sha256(f"{thing.colour} {thing.shape} {thing.quarter}".encode()).digest()
            if (digest[0] % TEST_SHARE == 0) == (self.split == "test"):
                return CaptionedScene(thing, second)

    def parts(self, index: int) -> list[str]:
        """The parts that a caption has, each with the probability ``telling``."""
        random = self.random("told", index)
        return [name for name in self.scene(index).facts if random.random() < self.telling]

    def random(self, purpose: str, index: int) -> Random:
        return Random(f"{self.name} {self.kind} {self.seed} {self.split} {purpose} {index}")


class CaptionedShapes(CaptionedScenes):
    """Pictures or videos to describe. ``picture``: "own", "blank", or "swapped" (that of another task).

    ``telling`` is the probability of each part in demonstrations.
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
            demonstration=(scene.caption(self.parts(index)),),
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


FORMS = ("letter", "open", "spelled")
WORDINGS, CAPTIONS = ("plain", "free"), ("own", "blank", "swapped")
OTHER_STEMS = {
    "colour": ("Which colour?", "What is the colour?", "How is it coloured?"),
    "shape": ("Which shape?", "What is the shape?", "What is to be seen?"),
    "second": ("At which second?", "From when on?", "When is it seen?"),
}
JOINERS = ("", "", "", "a", "the", "in", "is", ",", "and")
STAMPS = ("[00:0{}]", "[00:0{}]", "[0:0{}]", "at {}", "second {}")


class CaptionReading(CaptionedScenes):
    """Captions and questions for a reader.

    ``form``: "letter" asks with shuffled options, as a reward service does (B); "open" asks without options (red);
    "spelled" wants letter and option (B) red). ``wording``: "plain" captions are those of ``captioned_shapes``; "free" ones
    and their questions vary words and order, for a reader that is not trained together with the captioner. ``choices`` are
    numbers of options, of which one is drawn. ``facts`` to ask about are colour, shape and, of a video, second; default:
    all. ``caption``: "own"; or "blank" or "swapped" (another scene's), to test whether a reader answers from the caption
    alone: the answer is then still the scene's.
    """

    def __init__(
        self,
        *,
        store: MediaStore,
        kind: Kind = "picture",
        split: Literal["train", "test"] = "train",
        size: int = 65536,
        seed: int = 0,
        telling: float = 0.8,
        prompt: str = "short",
        form: Literal["letter", "open", "spelled"] = "letter",
        wording: Literal["plain", "free"] = "plain",
        choices: Sequence[int] = (4,),
        facts: Sequence[str] = (),
        caption: Literal["own", "blank", "swapped"] = "own",
    ) -> None:
        super().__init__("caption_reading", kind, split, size, seed, telling)
        named = {"prompt": (prompt, PROMPTS), "form": (form, FORMS), "wording": (wording, WORDINGS)}
        for what, (given, known) in (named | {"caption": (caption, CAPTIONS)}).items():
            if given not in known:
                raise TaskError(f"caption_reading: there is no {what} '{given}'{nearest(str(given), list(known))}")
        if not choices or not all(2 <= number <= 4 for number in choices):
            raise TaskError(f"caption_reading: choices are numbers of options, each 2 to 4, not {choices!r:.60}.")
        known_facts = list(VAGUE) if kind == "video" else [name for name in VAGUE if name != "second"]
        for fact in facts:
            if fact not in known_facts:
                raise TaskError(f"caption_reading: there is no fact '{fact}' of a {kind}{nearest(str(fact), known_facts)}")
        self.prompt, self.form, self.wording, self.choices, self.caption = prompt, form, wording, tuple(choices), caption
        self.facts = tuple(fact for fact in known_facts if not facts or fact in facts)

    def __getitem__(self, index: int) -> Task:
        scene, parts, random = self.scene(index), self.parts(index), self.random("draw", index)
        asked, name = self._question(scene, random)
        known = name in parts or self.caption != "own"
        prompt = asked.prompt(self._caption(index, random), self.prompt)
        letter = asked.letter if known else asked.letters[-1]
        option = asked.question.choices[asked.question.answer] if known else CANNOT
        if self.form == "open":
            prompt = prompt.removesuffix(asked.text) + asked.question.stem
        answer = {"letter": letter, "open": option, "spelled": f"{letter}) {option}"}[self.form]
        return Task(
            id=f"{self.name}/{self.kind}/{self.split}/{self.seed}/{index}",
            messages=(user(prompt),),
            answer=answer,
            demonstration=(answer,),
            metadata={"category": "told" if known else "not told"},
        )

    def _caption(self, index: int, random: Random) -> str:
        if self.caption == "blank":
            return ""
        other = (index + self.size // 2 + 1) % self.size if self.caption == "swapped" else index
        scene, parts = self.scene(other), self.parts(other)
        return scene.caption(parts) if self.wording == "plain" else free_caption(scene, parts, random)

    def _question(self, scene: CaptionedScene, random: Random) -> tuple[DrawnQuestion, str]:
        """A drawn question, and the fact that it asks for."""
        name = self.facts[random.randrange(len(self.facts))]
        question = scene.questions()[list(scene.facts).index(name)]
        if self.wording == "free":
            question = replace(question, stem=random.choice((question.stem, *OTHER_STEMS[name])))
        number = random.choice(self.choices)
        if number < len(question.choices):
            right = question.choices[question.answer]
            others = random.sample([choice for choice in question.choices if choice != right], number - 1)
            question = CaptionQuestion(question.stem, (right, *others), 0)
        return drawn(question, random), name


def free_caption(scene: CaptionedScene, parts: Sequence[str], random: Random) -> str:
    """A caption with these parts, in random words and order, and something vague or nothing for the others."""
    known = {name: value if name in parts else VAGUE[name] for name, value in scene.facts.items()}
    stamp = known.pop("second", "")
    words = [word for word in known.values() if word and (word not in VAGUE.values() or random.random() < 0.5)]
    if random.random() < 0.7:
        words.append(PLACES[scene.thing.quarter])
    random.shuffle(words)
    text = " ".join(filter(None, (part for word in words for part in (random.choice(JOINERS), word))))
    stamps = random.choice(STAMPS).format(stamp) if stamp and (stamp != VAGUE["second"] or random.random() < 0.5) else ""
    return " ".join(filter(None, (stamps, text) if random.random() < 0.8 else (text, stamps))).replace(" ,", ",")
