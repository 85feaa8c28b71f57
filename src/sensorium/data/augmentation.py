"""Augmentation: random changes of the media in a training task's messages, drawn for each row that is drawn.

What was drawn is part of a medium's identity (``Media.augmentation``), so caches, the engine, the learner, judges and the
report all refer to the same changed medium, and nothing changed is stored:

    row 17 of a run with seed 0, crop: [0.8, 1]    Media("picture", hash, augmentation=Augmentation(crop=(0.03, 0.1, 0.87)))
    the same row after a resume                    the same
"""

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import Augmentation
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import OBSERVED, RECORDED, Task

if TYPE_CHECKING:
    from sensorium.recipe.schema import AugmentSection

DIGITS = 4  # of the numbers drawn: they are shown to people


def augmented_task(task: Task, section: "AugmentSection", seed: int, row: int) -> Task:
    """A task with augmented media, a function of the run's seed and the number of the row within the run.

    What an environment showed stays as it is, also in a recording: a crop would falsify the places of clicks.
    """
    spec = task.environment
    if spec is not None and spec.name == RECORDED and spec.options[OBSERVED]:
        return task

    def changed(media: Media) -> Media:
        chance = Random(f"{seed} {row} {task.id} {media.key}")  # by content, so equal media of a task stay equal
        return replace(media, augmentation=_drawn(media.kind, section, chance))

    messages = tuple(
        replace(message, content=tuple(changed(part) if isinstance(part, Media) else part for part in message.content))
        for message in task.messages
    )
    return replace(task, messages=messages)


def _drawn(kind: str, section: "AugmentSection", chance: Random) -> Augmentation | None:
    def number(limits: Any) -> float:
        return round(chance.uniform(*limits), DIGITS)

    drawn: dict[str, Any] = {}
    if kind == "picture" and (picture := section.picture) is not None:
        if picture.crop is not None and (side := number(picture.crop)) < 1:
            drawn["crop"] = (number((0, 1 - side)), number((0, 1 - side)), side)
        scales = {"brightness": picture.brightness, "contrast": picture.contrast, "saturation": picture.saturation}
        drawn |= {name: number(limits) for name, limits in scales.items() if limits is not None}
        drawn |= {} if picture.blur is None else {"blur": number(picture.blur)}
    elif kind == "sound" and (sound := section.sound) is not None:
        limited = {"speed": sound.speed, "gain": sound.gain, "noise": sound.noise}
        drawn = {name: number(limits) for name, limits in limited.items() if limits is not None}
    elif kind == "video" and section.video is not None and section.video.jitter is not None:
        drawn = {"jitter": number(section.video.jitter)}
    if drawn.keys() & {"noise", "jitter"}:
        drawn["seed"] = chance.getrandbits(32)
    found = Augmentation(**drawn)
    return None if replace(found, seed=0) == Augmentation() else found


def augmentation_notes(section: "AugmentSection | None", tasks: Iterable[Task]) -> list[str]:
    """Kinds of media that the recipe augments and none of some training tasks has; RecipeError if no task has any of them.

    Only media in messages are augmented: what an environment shows is its own.
    """
    if section is None:
        return []
    kinds = ("picture", "sound", "video")
    asked = [kind for kind in kinds if getattr(section, kind) is not None]
    if not asked:
        return ["tasks.augment names no kind of media, so nothing is augmented"]
    tasks = list(tasks)
    media = [item for task in tasks for message in task.messages for item in message.media]
    lacking = [kind for kind in asked if not any(item.kind == kind for item in media)]
    played = sum(task.environment is not None and not task.messages for task in tasks)
    cause = f"; {played} of them are played in environments, whose observations are never augmented" if played else ""
    if len(lacking) == len(asked):
        raise RecipeError(
            f"tasks.augment changes {' and '.join(asked)}, and none of the {len(tasks)} training tasks that "
            f"were looked at has any in its messages{cause}. Take tasks.augment out, or vary them in the environment."
        )
    notes = [
        f"tasks.augment.{kind}: none of {len(tasks)} training tasks has a {kind} in its messages{cause}" for kind in lacking
    ]
    if section.sound is not None and any(item.sound is not None for item in media):
        notes.append("tasks.augment.sound: sounds that are interleaved with a video (use_audio_in_video) stay as they are")
    return notes


def changed_picture(picture: Image.Image, asked: Augmentation) -> Image.Image:
    """A picture as it is shown: of the same size, so that it takes the same number of tokens."""
    width, height = picture.size
    if asked.crop is not None:
        left, top, side = asked.crop
        box = (left * width, top * height, min(width, (left + side) * width), min(height, (top + side) * height))
        picture = picture.resize((width, height), Image.Resampling.BICUBIC, box=box)
    enhancers = (
        (ImageEnhance.Brightness, asked.brightness),
        (ImageEnhance.Contrast, asked.contrast),
        (ImageEnhance.Color, asked.saturation),
    )
    for enhancer, factor in enhancers:
        if factor != 1:
            picture = enhancer(picture).enhance(factor)
    return picture.filter(ImageFilter.GaussianBlur(asked.blur)) if asked.blur else picture


def changed_samples(samples: np.ndarray, asked: Augmentation) -> np.ndarray:
    """Samples with gain and noise, cut at full scale; speed is changed where they are resampled (data/sound.py)."""
    changed = samples * np.float32(10 ** (asked.gain / 20))
    if asked.noise is not None and (power := float(np.mean(np.square(changed, dtype=np.float64)))) > 0:
        noise = np.random.Generator(np.random.PCG64(asked.seed)).standard_normal(len(changed), np.float32)
        changed = changed + noise * np.float32((power / 10 ** (asked.noise / 10)) ** 0.5)
    return np.clip(changed, -1.0, 1.0).astype(np.float32)


def jitters(count: int, asked: Augmentation | None) -> np.ndarray | None:
    """How far each of some frames moves, as shares of the gap between frames in [-0.5, 0.5); None: not at all."""
    if asked is None or not asked.jitter:
        return None
    return (np.random.Generator(np.random.PCG64(asked.seed)).random(count) - 0.5) * asked.jitter
