"""Video: frames evenly sampled from a file, with their times, within pixel budgets."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, reduce
from math import ceil, floor, sqrt
from operator import or_
from typing import Any

import numpy as np
from PIL import Image

from sensorium.data.container import BadClip, Source, check_whole, library, opened, stated_end, track, trimmed, zero
from sensorium.data.media_files import MediaLimits
from sensorium.vocabulary.decoding import FrameRule, VideoParameters

# Worked example: 300 frames at 30 a second, 2 asked for a second: 20 frames, an even number of at least four, from the
# first to the last: 0, 16, 31, 47 … 283, 299. At 1080 x 1920 and 28 pixels a token each becomes 560 x 1008: 768 tokens
# at most. NeMo-RL samples by a rule of its own, to which its published numbers belong: 8 of 300 frames are 0, 37, 74 …
# 222, 259, because the step is cut to a whole number; and two frames count as one second, however long the clip is.


LEAST_FRAMES = 2
NEMO_RL_SECONDS_PER_FRAME = 0.5
LARGEST_RATIO = 200


def official_range(parameters: VideoParameters, total: int, fps: float) -> tuple[int, int]:
    """The first and last frame of the part asked for, of ``total`` frames."""
    length = total / fps
    first = ceil(min(parameters.start, length) * fps)
    last = total - 1 if parameters.end is None else min(floor(min(parameters.end, length) * fps), total - 1)
    if parameters.start > 0 or parameters.end is not None:
        _need(first < last, f"the part asked for holds no two frames of the video's {total}")
    return first, last


def official_count(parameters: VideoParameters, total: int, fps: float) -> int:
    """How many of ``total`` frames are taken: always an even number. A ValueError says why it cannot be."""
    if parameters.frames is not None:
        count = round(parameters.frames / 2) * 2
        _need(count <= total, f"{count} frames are asked for and it has {total}")
    else:
        assert parameters.fps is not None
        assert parameters.min_frames is not None
        least, most = ceil(parameters.min_frames / 2) * 2, floor(parameters.max_frames / 2) * 2
        count = floor(min(max(total / fps * parameters.fps, least), most, total) / 2) * 2
    _need(count >= LEAST_FRAMES, f"of {total} frames there is no pair to take")
    return count


def official_indices(parameters: VideoParameters, total: int, fps: float) -> tuple[np.ndarray, float]:
    """The numbers of the frames to take, ends included, and the seconds that each of them stands for."""
    first, last = official_range(parameters, total, fps)
    count = official_count(parameters, last - first + 1, fps)
    return np.linspace(first, last, count).round().astype(np.int64), 1 / (count / (last - first + 1) * fps)


def nemo_rl_indices(parameters: VideoParameters, total: int, fps: float) -> tuple[np.ndarray, float]:
    """The same by NeMo-RL's rule: multiples of a whole number of frames, of which the last may lie well before the end."""
    first, last = official_range(parameters, total, fps)
    held, asked = last - first + 1, parameters.frames
    if asked is None:
        assert parameters.fps is not None
        asked = min(max(int(held / fps * parameters.fps), 1), parameters.max_frames)
    _need(asked <= held, f"{asked} frames are asked for and it has {held}")
    return first + np.arange(asked, dtype=np.int64) * (held // asked), NEMO_RL_SECONDS_PER_FRAME


def official_size(size: tuple[int, int], frames: int, parameters: VideoParameters) -> tuple[int, int]:
    """The (width, height) of each frame within the budgets. A clip's budget counts two frames as one temporal step."""
    least, most = parameters.min_pixels_per_frame, parameters.max_pixels_per_frame
    clip, multiple = parameters.max_pixels_per_clip, parameters.multiple
    assert least is not None
    assert most is not None
    assert clip is not None
    assert multiple is not None
    return smart_size(size, multiple, least, min(most, max(clip / frames * 2, int(least * 1.05))))


def smart_size(size: tuple[int, int], multiple: int, least: float, most: float) -> tuple[int, int]:
    """The (width, height) near ``size`` whose sides are multiples, with at least and at most so many pixels."""
    width, height = size
    _need(max(size) <= LARGEST_RATIO * min(size), f"frames of {width} x {height} are too long and thin")
    near = [max(multiple, round(side / multiple) * multiple) for side in size]
    if near[0] * near[1] > most:
        scale = sqrt(width * height / most)
        near = [max(multiple, floor(side / scale / multiple) * multiple) for side in size]
    elif near[0] * near[1] < least:
        scale = sqrt(least / (width * height))
        near = [ceil(side * scale / multiple) * multiple for side in size]
    return near[0], near[1]


def _need(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(f"{problem}. Ask for other frames, or for another rule (sampling: middle)")


# Rules of sampling. ``official`` and ``nemo_rl``: media/official_sampling.py. ``middle``: the range asked for is cut
# into N equal parts, and of each part the frame shown at its middle is taken (the last one that began by then; the
# first of all where none has); N is given, or the range's length times fps, rounded. Times count from the start of the
# file, whatever was trimmed off. Few frames of a long video are sought one by one.


SEEK_S = 4.0
"""A gap between sampled times above which to seek: nearer ones are mostly in the same group of pictures."""

EXACT = ("BICUBIC", "FULL_CHR_H_INT", "ACCURATE_RND", "BITEXACT")
"""Colours converted alike on every machine; without the full chroma step exact rounding darkens them by two levels."""


@dataclass(frozen=True)
class DecodedVideo:
    """Frames [T, H, W, 3] of 8-bit RGB, the moments they were sampled at [T], and the clip they came from.

    ``size`` is the source's (width, height) as shown; ``start_s`` and ``end_s`` bound the range that was sampled.
    ``indices`` [T] count the frames within the file, and each sampled frame stands for ``seconds_per_frame``.
    """

    frames: np.ndarray
    times_s: np.ndarray
    source_fps: float
    duration_s: float
    size: tuple[int, int]
    start_s: float
    end_s: float
    indices: np.ndarray
    seconds_per_frame: float

    def __post_init__(self) -> None:
        for array in (self.frames, self.times_s, self.indices):
            array.flags.writeable = False  # shared by all who ask for this clip

    @property
    def frame_times_s(self) -> tuple[float, ...]:
        """When each frame begins, by its number and the file's average rate."""
        return tuple(index / self.source_fps for index in self.indices.tolist())

    @property
    def nbytes(self) -> int:
        """What the arrays take in memory."""
        return self.frames.nbytes + self.times_s.nbytes + self.indices.nbytes


def decode_video(source: Source, parameters: VideoParameters, name: str, limits: MediaLimits | None = None) -> DecodedVideo:
    """Sample a video given as bytes or a path; ``name`` (file, row) is what errors call it."""
    limits = limits or MediaLimits()
    parameters = parameters.resolved(FrameRule())  # what a family resolved stays as it is
    length = _length(source, name)
    start, end = trimmed(parameters, length, "video", name)
    _refuse(name, limits.refuse_length(end - start))
    numbered = None if parameters.sampling == "middle" else _by_number(source, parameters, name)
    count = frame_count(parameters, start, end) if numbered is None else len(numbered.indices)
    _refuse(name, limits.refuse_decoded(3 * count))
    times = sampled_times(parameters, start, end) if numbered is None else numbered.moments
    for seek in (True, False):
        with opened(source, name, "video") as container:
            clip = _Clip(container, name, limits)
            shown = clip.shown_at(times, parameters, seek=seek)
            if shown is not None:
                frames, begins = shown
                indices = np.array([round(begin * clip.fps) for begin in begins])
                each = (end - start) / len(times)
                if numbered is not None:
                    times, indices, each = np.array(begins), numbered.indices, numbered.seconds_per_frame
                return DecodedVideo(np.stack(frames), times, clip.fps, length, clip.size, start, end, indices, each)
        # The container's index sent us past the frame, so go through it from the start.
    raise AssertionError("without seeking no frame is passed over")


def frame_count(parameters: VideoParameters, start: float, end: float) -> int:
    """How many frames are sampled of a range."""
    if parameters.frames is not None:
        return parameters.frames
    assert parameters.fps is not None
    assert parameters.min_frames is not None
    return min(max(floor((end - start) * parameters.fps + 0.5), parameters.min_frames), parameters.max_frames)


def sampled_times(parameters: VideoParameters, start: float, end: float) -> np.ndarray:
    """The moments to sample: the middles of equal parts."""
    count = frame_count(parameters, start, end)
    return start + (np.arange(count, dtype=np.float64) + 0.5) * ((end - start) / count)


def budgeted(size: tuple[int, int], frames: int, parameters: VideoParameters) -> tuple[int, int]:
    """The (width, height) that fits the budgets and keeps the aspect; the size itself if it fits."""
    width, height = size
    assert parameters.max_pixels_per_frame is not None
    assert parameters.max_pixels_per_clip is not None
    assert parameters.min_pixels_per_frame is not None
    most = max(1, min(parameters.max_pixels_per_frame, parameters.max_pixels_per_clip // frames))
    wanted = min(max(width * height, parameters.min_pixels_per_frame), most)
    if wanted == width * height:
        return size
    scale = sqrt(wanted / (width * height))
    width, height = max(1, floor(width * scale)), max(1, floor(height * scale))
    # A sliver ends with a side of a single pixel, and only the other can still give.
    return min(width, max(1, most // height)), min(height, max(1, most // width))


@dataclass(frozen=True)
class _NumberedFrames:
    """Frames that are taken by their numbers: these, moments at which each is shown, seconds each stands for."""

    indices: np.ndarray
    moments: np.ndarray
    seconds_per_frame: float


def _by_number(source: Source, parameters: VideoParameters, name: str) -> _NumberedFrames:
    """The frames taken by their numbers in the file, which is read through for it, not decoded."""
    sampled = nemo_rl_indices if parameters.sampling == "nemo_rl" else official_indices
    begins: list[float] = []
    end = 0.0
    with opened(source, name, "video") as container:
        stream = track(container, "video", name)
        fps = _rate(stream)
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                told = packet.pts is not None
                begins.append(float(packet.pts * packet.time_base) - zero(container) if told else len(begins) / fps)
                shown = float(packet.duration * packet.time_base) if packet.duration else 1 / fps
                end = max(end, begins[-1] + shown)
        if not begins:
            raise BadClip(name, "the video has no frames: zero length, or truncated. Restore the file.")
        begins.sort()
        check_whole(container, stated_end(container, stream), end, "video", name)
    try:
        indices, each = sampled(parameters, len(begins), fps)
    except ValueError as error:
        raise BadClip(name, f"the frames cannot be sampled: {error}.") from error
    ends = np.array([*begins[1:], begins[-1] + 1 / fps])
    return _NumberedFrames(indices, ((np.array(begins) + ends) / 2)[indices], each)


def _length(source: Source, name: str) -> float:
    """The length of the video track. Where the container does not state it the file is read through, not decoded."""
    with opened(source, name, "video") as container:
        stream = track(container, "video", name)
        stated = stated_end(container, stream)
        if stated is not None:
            return stated
        end, packets, fps = 0.0, 0, _rate(stream)
        for packet in container.demux(stream):
            if packet.size:
                packets += 1
                if packet.pts is not None:
                    begins = float(packet.pts * packet.time_base) - zero(container)
                    end = max(end, begins + (float(packet.duration * packet.time_base) if packet.duration else 1 / fps))
        return end or packets / fps


def _rate(stream: Any) -> float:
    """Frames a second: counted where the track's length is known, else what the codec declares."""
    rates = (stream.average_rate, stream.guessed_rate)
    return float(next((rate for rate in (rates if stream.duration is not None else rates[::-1]) if rate), 25))


class _Clip:
    """The video track of an open container, and the frame it stands at."""

    def __init__(self, container: Any, name: str, limits: MediaLimits) -> None:
        self.container, self.name, self.limits = container, name, limits
        self.stream = track(container, "video", name)
        self.fps = _rate(self.stream)
        self.zero = zero(container)
        self.size = (0, 0)
        self._rewound()

    def shown_at(
        self, times: np.ndarray, parameters: VideoParameters, *, seek: bool
    ) -> tuple[list[np.ndarray], list[float]] | None:
        """The picture shown at each time, upright and within the budgets, and when it began; None if seeking overshot."""
        pictures: list[np.ndarray] = []
        begins: list[float] = []
        target, before, drawn = (0, 0), 0.0, None
        for time in times.tolist():
            if sought := seek and time - before > SEEK_S:
                self.container.seek(round((time + self.zero) / self.stream.time_base), stream=self.stream)
                self._rewound()
            shown = self._advance(time)
            if sought and shown[0] > time:
                return None
            if self._ahead is None:
                length = float(shown[1].duration * shown[1].time_base) if shown[1].duration else 1 / self.fps
                check_whole(self.container, time, shown[0] + length, "video", self.name)
            if drawn is None or drawn[0] is not shown:
                if not pictures:
                    self.size = self._shape(shown[1])
                    target = self._target(len(times), parameters)
                    _refuse(self.name, self.limits.refuse_decoded(3 * len(times) * target[0] * target[1]))
                drawn = (shown, self._upright(shown[1], target))
            pictures.append(drawn[1])
            begins.append(max(0.0, shown[0]))
            before = time
        return pictures, begins

    def _target(self, frames: int, parameters: VideoParameters) -> tuple[int, int]:
        """The (width, height) of the frames."""
        if parameters.sampling == "middle":
            return budgeted(self.size, frames, parameters)
        try:
            return official_size(self.size, frames, parameters)
        except ValueError as error:
            raise BadClip(self.name, f"the frames cannot be sized: {error}.") from error

    def _rewound(self) -> None:
        self._frames = self._decoded()
        self._current: tuple[float, Any] | None = None
        self._ahead = next(self._frames, None)

    def _advance(self, time: float) -> tuple[float, Any]:
        """Go to the frame shown at a time."""
        while self._ahead is not None and (self._current is None or self._ahead[0] <= time):
            self._current, self._ahead = self._ahead, next(self._frames, None)
        if self._current is None:
            raise BadClip(self.name, "the video has no frames: zero length, or truncated. Restore the file.")
        if self._current[1].is_corrupt:
            raise BadClip(self.name, f"the video is damaged at {time:.2f} s. Restore the file.")
        return self._current

    def _decoded(self) -> Iterator[tuple[float, Any]]:
        """Frames in the order shown, each with its time; a track without timestamps is counted out at its rate."""
        for number, frame in enumerate(self.container.decode(self.stream)):
            yield (frame.time - self.zero if frame.time is not None else number / self.fps), frame

    def _shape(self, frame: Any) -> tuple[int, int]:
        """(width, height) as shown: pixels made square, and turned."""
        _refuse(self.name, self.limits.refuse_pixels(frame.width, frame.height, "a frame"))
        square = self.stream.sample_aspect_ratio or Fraction(1)
        size = max(1, round(frame.width * square)), frame.height
        return size[::-1] if _quarters(frame) % 2 else size

    def _upright(self, frame: Any, target: tuple[int, int]) -> np.ndarray:
        picture = frame.reformat(format="rgb24", interpolation=exactly(), threads=1).to_ndarray()
        picture = np.ascontiguousarray(np.rot90(picture, _quarters(frame)))
        if picture.shape[1::-1] == target:
            return picture
        return np.asarray(Image.fromarray(picture).resize(target, Image.Resampling.BICUBIC))


def _refuse(name: str, problem: str) -> None:
    if problem:
        raise BadClip(name, f"the video is too large: {problem}")


def _quarters(frame: Any) -> int:
    """Quarter turns to the left that set a frame upright."""
    return round(frame.rotation / 90) % 4


@cache
def exactly() -> Any:
    """The way colours are converted."""
    ways = library().video.reformatter.Interpolation
    return reduce(or_, (ways[name] for name in EXACT))
