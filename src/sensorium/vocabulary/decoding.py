"""What is asked of a video or a sound when it is decoded: which part, how many frames, how large, at which rate.

These are part of a medium's identity: the same file at 8 and at 32 frames is two things.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, TypeVar

from sensorium.vocabulary.errors import nearest

USUAL_FPS = 2.0
SAMPLING: dict[str, dict[str, int]] = {
    "official": {"min_frames": 4},
    "middle": {
        "min_frames": 1,
        "max_pixels_per_frame": 768 * 28 * 28,
        "max_pixels_per_clip": 24576 * 28 * 28,
        "min_pixels_per_frame": 0,
    },
}
"""The rules of sampling, and what holds by each where nothing is said; sizes of the first are the family's."""


@dataclass(frozen=True)
class FrameBudget:
    """How large a family's frames are: sides that are multiples of ``multiple``, pixels of a frame and of a clip."""

    multiple: int = 28
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    clip_pixels: float = 128000 * 28 * 28 * 0.9


@dataclass(frozen=True)
class VideoParameters:
    """Frames evenly sampled from ``start`` to ``end`` (seconds; None: to the end): ``frames`` of them, or ``fps`` a second.

    By ``fps`` the number is bounded by ``min_frames`` and ``max_frames``; without either it is 2 a second. ``sampling`` is
    the rule: ``official`` (media/official_sampling.py; sizes not said are the family's, ``budget``) or ``middle``
    (media/video.py), by which frames are made smaller, never cropped, until each fits ``max_pixels_per_frame`` and all fit
    ``max_pixels_per_clip``, and enlarged to ``min_pixels_per_frame`` as far as these allow.
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
    sampling: str = "middle"
    budget: FrameBudget = FrameBudget()

    def __post_init__(self) -> None:
        if self.frames is not None and self.fps is not None:
            raise ValueError(f"frames {self.frames} and fps {self.fps} are both given; keep one.")
        if self.frames is None and self.fps is None:
            _set(self, "fps", USUAL_FPS)
        if self.sampling not in SAMPLING:
            raise ValueError(f"there is no sampling '{self.sampling}'{nearest(str(self.sampling), list(SAMPLING))}")
        for name, usual in SAMPLING[self.sampling].items():
            if getattr(self, name) is None:
                _set(self, name, usual)
        _whole(self, "frames", "min_frames", "max_frames", "max_pixels_per_frame", "max_pixels_per_clip")
        _whole(self, "min_pixels_per_frame", least=0)
        if self.fps is not None:
            _set(self, "fps", _number("fps", self.fps))
            if self.fps <= 0:
                raise ValueError(f"fps must be above 0, not {self.fps:g}.")
        assert self.min_frames is not None
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames {self.min_frames} is above max_frames {self.max_frames}.")
        least, most = self.min_pixels_per_frame, self.max_pixels_per_frame
        if self.sampling == "official" and least is not None and most is not None and least > most:
            raise ValueError(f"min_pixels_per_frame {least} is above max_pixels_per_frame {most}.")
        _trim(self)

    def within(self, budget: FrameBudget) -> "VideoParameters":
        """The same for a family's sizes; the rule ``middle`` has none."""
        return replace(self, budget=budget) if self.sampling == "official" else self


@dataclass(frozen=True)
class AudioParameters:
    """One channel at ``sample_rate``, from ``start`` to ``end`` (seconds; None: to the end)."""

    sample_rate: int = 16000
    start: float = 0.0
    end: float | None = None

    def __post_init__(self) -> None:
        _whole(self, "sample_rate")
        _trim(self)


Parameters = VideoParameters | AudioParameters
Some = TypeVar("Some", bound=VideoParameters | AudioParameters)


def parameters_from(kind: type[Some], given: Mapping[str, Any]) -> Some:
    """Parameters from plain data (a recipe's option, a row, a log); what is unknown or unfit is a ValueError."""
    known = [field.name for field in fields(kind) if field.name != "budget"]
    for name in given:
        if name not in known:
            raise ValueError(f"there is no parameter '{name}'{nearest(str(name), known)}")
    return kind(**given)


def parameters_to_data(parameters: Parameters) -> dict[str, Any]:
    """Parameters as plain data: what differs from the defaults."""
    usual: Parameters = AudioParameters()
    if isinstance(parameters, VideoParameters):
        usual = VideoParameters(sampling=parameters.sampling)
    names = [field.name for field in fields(parameters) if field.name != "budget"]
    given = {name: getattr(parameters, name) for name in names if getattr(parameters, name) != getattr(usual, name)}
    if given.get("frames") is not None:
        given.pop("fps", None)
    if isinstance(usual, VideoParameters) and usual.sampling != VideoParameters().sampling:
        given["sampling"] = usual.sampling
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
        if value is None:  # only where nothing has to be said
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r:.40}.")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{name} must be a number, not {value!r:.40}.")
    return float(value)


def _set(parameters: Parameters, name: str, value: float) -> None:
    object.__setattr__(parameters, name, value)  # 3 and 3.0 are the same moment, and must have the same key
