"""Captions to be read: what a reader is asked of captions of generated pictures and videos, and what it shall answer.

    "a red circle top left"       form letter:  the question with shuffled options, as a reward service asks it   → B
    What colour is it?            form open:    the question alone                                                → red
    A) blue
    B) red …                      form spelled: as letter, and the option is written out                          → B) red
                                  of what a caption does not tell, the answer is "can not answer"

``wording``: "plain" captions are those of ``captioned_shapes``. "free" ones tell the same in other words and orders,
and questions are put in other words: for a reader that takes no part in training and shall read captions all the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Literal

from sensorium.media.store import MediaStore
from sensorium.tasks.captioned_shapes import VAGUE, CaptionedScene, CaptionedScenes, Kind
from sensorium.tasks.shapes import PLACES
from sensorium.vocabulary.caption_questions import CANNOT, PROMPTS, CaptionQuestion, DrawnQuestion, drawn
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import TaskError, nearest
from sensorium.vocabulary.task import Task

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
    """Captions and questions for a reader. ``choices`` says among how many options a question asks: one is drawn.
    ``facts`` names what is asked about (colour, shape; second of a video); default: everything.

    ``caption``: "own"; or "blank" or "swapped" (another scene's), to see whether a reader answers from the caption alone:
    the answer is then what is true of the scene all the same.
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
        scene, parts, random = self.scene(index), self.told(index), self.random("draw", index)
        asked, name = self._question(scene, random)
        told = name in parts or self.caption != "own"
        prompt = asked.prompt(self._caption(index, random), self.prompt)
        letter = asked.letter if told else asked.letters[-1]
        said = asked.question.choices[asked.question.answer] if told else CANNOT
        if self.form == "open":
            prompt = prompt.removesuffix(asked.text) + asked.question.stem
        answer = {"letter": letter, "open": said, "spelled": f"{letter}) {said}"}[self.form]
        return Task(
            id=f"{self.name}/{self.kind}/{self.split}/{self.seed}/{index}",
            messages=(user(prompt),),
            answer=answer,
            demonstration=(answer,),
            metadata={"category": "told" if told else "not told"},
        )

    def _caption(self, index: int, random: Random) -> str:
        """What the reader is shown."""
        if self.caption == "blank":
            return ""
        other = (index + self.size // 2 + 1) % self.size if self.caption == "swapped" else index
        scene, parts = self.scene(other), self.told(other)
        return scene.caption(parts) if self.wording == "plain" else free_caption(scene, parts, random)

    def _question(self, scene: CaptionedScene, random: Random) -> tuple[DrawnQuestion, str]:
        """A question as it is asked, and which fact it is about."""
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
    """The parts told in an order and with words drawn at random; of the others something vague is said, or nothing."""
    told = {name: value if name in parts else VAGUE[name] for name, value in scene.facts.items()}
    stamp = told.pop("second", "")
    words = [word for word in told.values() if word and (word not in VAGUE.values() or random.random() < 0.5)]
    if random.random() < 0.7:
        words.append(PLACES[scene.thing.quarter])
    random.shuffle(words)
    said = " ".join(filter(None, (part for word in words for part in (random.choice(JOINERS), word))))
    stamps = random.choice(STAMPS).format(stamp) if stamp and (stamp != VAGUE["second"] or random.random() < 0.5) else ""
    return " ".join(filter(None, (stamps, said) if random.random() < 0.8 else (said, stamps))).replace(" ,", ",")
