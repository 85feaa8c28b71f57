"""How a video or a sound is decoded: which part, how many frames, how large, at which rate.

Parameters are part of a medium's identity: the same file at 8 and at 32 frames is two media.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, TypeVar

from sensorium.vocabulary.errors import nearest

USUAL_FPS = 2.0
SAMPLING = ("official", "middle", "nemo_rl")
# Defaults of the rule ``middle``; those of the others are the family's.
MIDDLE = {
    "min_frames": 1,
    "max_pixels_per_frame": 768 * 28 * 28,
    "max_pixels_per_clip": 24576 * 28 * 28,
    "min_pixels_per_frame": 0,
}

OFFICIAL_MIN_FRAMES = 4
SET_BY_PROGRAM = ("multiple", "sound_from")


@dataclass(frozen=True)
class FrameRule:
    """A family's defaults for videos: the sampling rule, the multiple of a frame's sides, pixels of a frame and a clip."""

    sampling: str = "official"
    multiple: int = 28
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    clip_pixels: int = 115200 * 28 * 28


@dataclass(frozen=True)
class VideoParameters:
    """Frames evenly sampled from ``start`` to ``end`` (seconds; None: to the end): ``frames`` of them, or ``fps`` a second.

    ``fps`` (default 2) is bounded by ``min_frames`` and ``max_frames``. ``sampling`` (default: the family's) is one of the
    rules of data/video.py; by ``middle`` frames are made smaller, never cropped, until each fits ``max_pixels_per_frame``
    and all fit ``max_pixels_per_clip``, and enlarged to ``min_pixels_per_frame`` as far as these allow. ``multiple`` is set
    by the family. With ``use_audio_in_video`` the sound of the file, or of the one with hash ``sound_from``, is heard too.
    """

    frames: int | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int = 768
    start: float = 0.0
    end: float | None = None
    max_pixels_per_frame: int | None = None
    max_pixels_per_clip: int | None = None
    min_pixels_per_frame: int | None = None
    sampling: str | None = None
    multiple: int | None = None
    use_audio_in_video: bool = False
    sound_from: str | None = None

    def __post_init__(self) -> None:
        if self.frames is not None and self.fps is not None:
            raise ValueError(f"frames {self.frames} and fps {self.fps} are both given; keep one.")
        if self.frames is None and self.fps is None:
            _set(self, "fps", USUAL_FPS)
        if self.sampling is not None and self.sampling not in SAMPLING:
            raise ValueError(f"there is no sampling '{self.sampling}'{nearest(str(self.sampling), list(SAMPLING))}")
        for name, usual in MIDDLE.items() if self.sampling == "middle" else ():
            if getattr(self, name) is None:
                _set(self, name, usual)
        if not isinstance(self.use_audio_in_video, bool):
            raise ValueError(f"use_audio_in_video must be true or false, not {self.use_audio_in_video!r:.40}.")
        _whole(self, "frames", "min_frames", "max_frames", "max_pixels_per_frame", "max_pixels_per_clip", "multiple")
        _whole(self, "min_pixels_per_frame", least=0)
        if self.fps is not None:
            _set(self, "fps", _number("fps", self.fps))
            if self.fps <= 0:
                raise ValueError(f"fps must be above 0, not {self.fps:g}.")
        if self.min_frames is not None and self.min_frames > self.max_frames:
            raise ValueError(f"min_frames {self.min_frames} is above max_frames {self.max_frames}.")
        least, most = self.min_pixels_per_frame, self.max_pixels_per_frame
        if self.sampling != "middle" and least is not None and most is not None and least > most:
            raise ValueError(f"min_pixels_per_frame {least} is above max_pixels_per_frame {most}.")
        _trim(self)

    def resolved(self, rule: FrameRule) -> "VideoParameters":
        """The same with the family's defaults for everything left open; resolved parameters are unchanged."""
        if self.multiple is not None:
            return self
        sampling = self.sampling or rule.sampling
        if sampling == "middle":
            return replace(self, sampling=sampling)
        least, most = self.min_pixels_per_frame, self.max_pixels_per_frame
        if least is None:
            least = rule.min_pixels
            if most is not None and most < least:  # smaller frames are asked for
                least = min(most, 4 * rule.multiple**2)
        allowed = max(rule.max_pixels, int(least * 1.05))
        return replace(
            self,
            sampling=sampling,
            multiple=rule.multiple,
            min_frames=self.min_frames or min(OFFICIAL_MIN_FRAMES, self.max_frames),
            min_pixels_per_frame=least,
            max_pixels_per_frame=allowed if most is None else min(most, allowed),
            max_pixels_per_clip=self.max_pixels_per_clip or rule.clip_pixels,
        )


@dataclass(frozen=True)
class AudioParameters:
    """One channel at ``sample_rate``, from ``start`` to ``end`` (seconds; None: to the end)."""

    sample_rate: int = 16000
    start: float = 0.0
    end: float | None = None

    def __post_init__(self) -> None:
        _whole(self, "sample_rate")
        _trim(self)


@dataclass(frozen=True)
class Augmentation:
    """What is changed of one medium after it is decoded (``tasks.augment``); part of its identity, as parameters are.

    ``crop`` is (left, top, side), shares of width and height; ``gain`` and ``noise`` (signal to noise) are decibels;
    ``jitter`` is the share of the gap between two frames by which each may move. ``seed``: of noise and jitter.
    """

    crop: tuple[float, float, float] | None = None
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    blur: float = 0.0
    speed: float = 1.0
    gain: float = 0.0
    noise: float | None = None
    jitter: float = 0.0
    seed: int = 0

    @property
    def description(self) -> str:
        """What is changed, for people: ``crop 0.05 0.1 0.9, blur 0.4``."""
        changed = parameters_to_data(self)
        changed.pop("seed", None)
        return ", ".join(f"{k} {' '.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in changed.items())


Parameters = VideoParameters | AudioParameters
Number = TypeVar("Number", int, float)
Some = TypeVar("Some", bound=VideoParameters | AudioParameters)


def resolved_value(value: Number | None) -> Number:
    """A parameter that ``VideoParameters.resolved`` has set."""
    assert value is not None
    return value


def parameters_from(kind: type[Some], given: Mapping[str, Any], *, logged: bool = False) -> Some:
    """Parameters from plain data (a recipe's option, a row; ``logged``: also those that only the program sets)."""
    known = [field.name for field in fields(kind) if logged or field.name not in SET_BY_PROGRAM]
    for name in given:
        if name not in known:
            raise ValueError(f"there is no parameter '{name}'{nearest(str(name), known)}")
    return kind(**given)


def parameters_to_data(parameters: Parameters | Augmentation) -> dict[str, Any]:
    """Parameters that differ from the defaults, as plain data."""
    usual = type(parameters)()
    names = [field.name for field in fields(parameters)]
    given = {name: getattr(parameters, name) for name in names if getattr(parameters, name) != getattr(usual, name)}
    if given.get("frames") is not None:
        given.pop("fps", None)
    return given


def _trim(parameters: Parameters) -> None:
    start, end = parameters.start, parameters.end
    _set(parameters, "start", _number("start", start))
    if start < 0:
        raise ValueError(f"start must be 0 or later, not {start:g}.")
    if end is not None:
        _set(parameters, "end", _number("end", end))
        if end <= start:
            raise ValueError(f"end {end:g} must come after start {start:g}.")


def _whole(parameters: Parameters, *names: str, least: int = 1) -> None:
    for name in names:
        value = getattr(parameters, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r:.40}.")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{name} must be a number, not {value!r:.40}.")
    return float(value)


def _set(parameters: Parameters, name: str, value: float) -> None:
    object.__setattr__(parameters, name, value)  # 3 and 3.0 are the same moment, and must have the same key
