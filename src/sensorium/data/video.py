"""Video: frames evenly sampled from a file, with their times, within pixel budgets.

Rules of sampling, for 300 frames at 30 a second:

    official     the Qwen models' own tools. 2 a second: 20 frames, an even number of at least four, from the first to the
                 last: 0, 16, 31, 47 … 283, 299. At 1080 x 1920 and 28 pixels a token each becomes 560 x 1008: at most 768
                 tokens.
    nemo_rl      8 frames are 0, 37, 74 … 222, 259, because the step is cut to a whole number; and two frames count as one
                 second, however long the clip is.
    middle       the range is cut into N equal parts, and of each part the frame shown at its middle is taken (the last one
                 that began by then, or the first of all); N is given, or the range's length times fps, rounded.

Times count from the start of the file, whatever was trimmed off.

Files of video and sound are opened here, a track is chosen, and checked to be whole. PyAV is imported where a clip is
opened: a run without clips needs none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, reduce
from io import BytesIO
from math import ceil, floor
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sensorium.data.augmentation import jitters
from sensorium.data.frame_sizes import frame_size
from sensorium.data.media_files import MediaLimits
from sensorium.vocabulary.decoding import Augmentation, FrameRule, Parameters, VideoParameters, resolved_value
from sensorium.vocabulary.errors import MediaError

Source = bytes | Path

# Only containers of recorded media: playlists, image sequences and text screens would make one file open others.
FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,gif,h264,hevc,m4v,ivf,"
    "wav,w64,flac,mp3,ogg,aac,ac3,eac3,aiff,au,amr,caf"
)
# Containers that state a track's length; the others' lengths are estimates, by which nothing can be found missing.
STATE_LENGTH = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "wav", "w64", "flac", "avi"}
# How far a stated length or a trim may exceed the content: tables are rounded, and tracks seldom end together.
SLACK_S = 0.5


class BadClip(MediaError):
    """A video or sound that cannot be decoded as asked. ``what`` is the reason without the item's name."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.what = what


@cache
def library() -> Any:
    """PyAV, without its log."""
    try:
        import av
        import av.error
        import av.logging
        import av.stream
        import av.video.reformatter
    except ImportError as error:
        raise MediaError(f"videos and sounds are decoded by PyAV, which is not here ({error}): pip install av.") from error
    av.logging.set_level(None)
    return av


@contextmanager
def opened(source: Source, name: str, kind: str) -> Iterator[Any]:
    """An open container; any error in the block becomes a BadClip that names it."""
    if isinstance(source, bytes) and not source:
        raise BadClip(name, f"the {kind} is empty (0 bytes). Restore the file or drop the row.")
    av = library()
    # PyAV before 19 fails at titles that are not UTF-8 unless it replaces such bytes.
    lenient = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    try:
        # A file object, not a path: a name such as 'concat:…' must not be taken for a protocol.
        with (
            BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file,
            av.open(file, container_options={"format_whitelist": FORMATS}, **lenient) as container,
        ):
            yield container
    except (BadClip, AssertionError):
        raise
    except av.error.InvalidDataError as error:
        raise BadClip(name, f"no {kind} in a known format, or a truncated or damaged one. Restore it.") from error
    except OSError as error:
        raise BadClip(name, f"cannot read the {kind}: {error.strerror or error}.") from error
    except Exception as error:  # decoders raise whatever a broken file provokes: MemoryError, ValueError, …
        raise BadClip(name, f"cannot decode the {kind}: {error}. Restore the file or drop the row.") from error


def track(container: Any, kind: str, name: str) -> Any:
    """The first video or sound track, with a codec that can be decoded; cover pictures are no video."""
    streams = container.streams.video if kind == "video" else container.streams.audio
    cover = library().stream.Disposition.attached_pic
    kept = [stream for stream in streams if not stream.disposition & cover]
    if not kept:
        held = sorted({stream.type for stream in container.streams}) or ["nothing"]
        raise BadClip(name, f"has no {kind} track, only {', '.join(held)}. Drop the block, or give a file that has one.")
    if kept[0].codec_context is None:
        raise BadClip(name, f"its {kind} track has a codec that cannot be decoded. Convert it, to H.264 and AAC for one.")
    kept[0].codec_context.thread_count = 1  # several items are decoded at once instead
    return kept[0]


def zero(container: Any) -> float:
    """The start of the clip in the container's clock, from which all its times count."""
    return container.start_time / library().time_base if container.start_time is not None else 0.0


def stated_end(container: Any, stream: Any) -> float | None:
    """The end of a track by its container, in seconds from the clip's start; None if it is not stated."""
    if stream.duration is not None:
        start = stream.start_time if stream.start_time is not None else 0
        return float((start + stream.duration) * stream.time_base) - zero(container)
    stated = stream.metadata.get("DURATION", "")  # Matroska: 00:00:03.000000000
    if stated.count(":") == 2:
        hours, minutes, seconds = stated.split(":")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds) - zero(container)
    return None


def check_whole(container: Any, end: float | None, found: float, kind: str, name: str) -> None:
    """Refuse a track that is shorter (``found`` seconds) than its container states."""
    if end is not None and container.format.name in STATE_LENGTH and found < end - SLACK_S:
        raise BadClip(name, f"is truncated: its {kind} should last {end:.2f} s and ends at {found:.2f} s. Restore it.")


def trimmed(parameters: Parameters, length: float, kind: str, name: str) -> tuple[float, float]:
    """The range asked for, in seconds; one outside of the clip is refused."""
    if length <= 0:
        raise BadClip(name, f"the {kind} has no length (0 s). Restore the file or drop the row.")
    start, end = parameters.start, length if parameters.end is None else parameters.end
    if start >= length or end > length + SLACK_S:
        asked = f"from {start:g} s to {'the end' if parameters.end is None else f'{parameters.end:g} s'}"
        raise BadClip(name, f"the part asked for, {asked}, lies outside of the {kind}, which lasts {length:.2f} s.")
    return start, min(end, length)


LEAST_FRAMES = 2
NEMO_RL_SECONDS_PER_FRAME = 0.5
SEEK_S = 4.0  # a gap between sampled times above which to seek: nearer ones are mostly in the same group of pictures

# Colours converted alike on every machine; without the full chroma step exact rounding darkens them by two levels.
EXACT = ("BICUBIC", "FULL_CHR_H_INT", "ACCURATE_RND", "BITEXACT")


def official_range(parameters: VideoParameters, total: int, fps: float) -> tuple[int, int]:
    """The first and last frame of the part asked for, of ``total`` frames."""
    length = total / fps
    first = ceil(min(parameters.start, length) * fps)
    last = total - 1 if parameters.end is None else min(floor(min(parameters.end, length) * fps), total - 1)
    if parameters.start > 0 or parameters.end is not None:
        _need(first < last, f"the part asked for holds no two frames of the video's {total}")
    return first, last


def official_count(parameters: VideoParameters, total: int, fps: float) -> int:
    """How many of ``total`` frames are taken, always an even number; ValueError if there are too few."""
    if parameters.frames is not None:
        count = round(parameters.frames / 2) * 2
        _need(count <= total, f"{count} frames are asked for and it has {total}")
    else:
        least, most = ceil(resolved_value(parameters.min_frames) / 2) * 2, floor(parameters.max_frames / 2) * 2
        count = floor(min(max(total / fps * resolved_value(parameters.fps), least), most, total) / 2) * 2
    _need(count >= LEAST_FRAMES, f"of {total} frames there is no pair to take")
    return count


def official_indices(parameters: VideoParameters, total: int, fps: float) -> tuple[np.ndarray, float]:
    """The numbers of the frames to take, ends included, and the seconds that each of them represents."""
    first, last = official_range(parameters, total, fps)
    count = official_count(parameters, last - first + 1, fps)
    return np.linspace(first, last, count).round().astype(np.int64), 1 / (count / (last - first + 1) * fps)


def nemo_rl_indices(parameters: VideoParameters, total: int, fps: float) -> tuple[np.ndarray, float]:
    """The same by NeMo-RL's rule: multiples of a whole step, so that the last may be well before the end."""
    first, last = official_range(parameters, total, fps)
    held, asked = last - first + 1, parameters.frames
    if asked is None:
        asked = min(max(int(held / fps * resolved_value(parameters.fps)), 1), parameters.max_frames)
    _need(asked <= held, f"{asked} frames are asked for and it has {held}")
    return first + np.arange(asked, dtype=np.int64) * (held // asked), NEMO_RL_SECONDS_PER_FRAME


def _need(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(f"{problem}. Ask for other frames, or for another rule (sampling: middle)")


@dataclass(frozen=True)
class DecodedVideo:
    """Frames [T, H, W, 3] of 8-bit RGB, the moments they were sampled at [T], and the clip they came from.

    ``size`` is the source's (width, height) as shown; ``start_s`` and ``end_s`` bound the range that was sampled.
    ``indices`` [T] count the frames within the file, and each sampled frame represents ``seconds_per_frame``.
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
            array.flags.writeable = False  # shared by all users of this clip

    @property
    def frame_times_s(self) -> tuple[float, ...]:
        """When each frame begins, by its number and the file's average rate."""
        return tuple(index / self.source_fps for index in self.indices.tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.frames.nbytes + self.times_s.nbytes + self.indices.nbytes


def decode_video(
    source: Source,
    parameters: VideoParameters,
    name: str,
    limits: MediaLimits | None = None,
    augmentation: Augmentation | None = None,
) -> DecodedVideo:
    """Sample a video given as bytes or a path; ``name`` (file, row) is its name in errors."""
    limits = limits or MediaLimits()
    parameters = parameters.resolved(FrameRule())  # values that a family resolved stay
    length = _length(source, name)
    start, end = trimmed(parameters, length, "video", name)
    _refuse(name, limits.refuse_length(end - start))
    if parameters.sampling == "middle":
        _refuse(name, limits.refuse_decoded(3 * frame_count(parameters, start, end)))
        times = sampled_times(parameters, start, end)
        numbers, each = None, (end - start) / len(times)
        if (moved := jitters(len(times), augmentation)) is not None:
            times = times + moved * each
    else:
        numbers, times, each = _by_number(source, parameters, name, augmentation)
        _refuse(name, limits.refuse_decoded(3 * len(numbers)))
    for seek in (True, False):  # the second time if the container's index led past a frame
        with opened(source, name, "video") as container:
            clip = _Clip(container, name, limits)
            shown = clip.shown_at(times, parameters, seek=seek)
            if shown is not None:
                frames, begins = shown
                indices = np.array([round(begin * clip.fps) for begin in begins]) if numbers is None else numbers
                moments = times if numbers is None else np.array(begins)
                return DecodedVideo(np.stack(frames), moments, clip.fps, length, clip.size, start, end, indices, each)
    raise AssertionError("without seeking no frame is missed")


def frame_count(parameters: VideoParameters, start: float, end: float) -> int:
    """How many frames are sampled of a range."""
    if parameters.frames is not None:
        return parameters.frames
    wanted = floor((end - start) * resolved_value(parameters.fps) + 0.5)
    return min(max(wanted, resolved_value(parameters.min_frames)), parameters.max_frames)


def sampled_times(parameters: VideoParameters, start: float, end: float) -> np.ndarray:
    """The moments to sample: the middles of equal parts."""
    count = frame_count(parameters, start, end)
    return start + (np.arange(count, dtype=np.float64) + 0.5) * ((end - start) / count)


def _by_number(
    source: Source, parameters: VideoParameters, name: str, augmentation: Augmentation | None
) -> tuple[np.ndarray, np.ndarray, float]:
    """The frames to take: their numbers, moments at which each is shown, seconds each represents.

    The file is read through for it, not decoded.
    """
    sampled = nemo_rl_indices if parameters.sampling == "nemo_rl" else official_indices
    begins: list[float] = []
    end = 0.0
    with opened(source, name, "video") as container:
        stream = track(container, "video", name)
        fps = _rate(stream)
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                counted = len(begins) / fps
                begins.append(counted if packet.pts is None else float(packet.pts * packet.time_base) - zero(container))
                end = max(end, begins[-1] + _shown_s(packet, fps))
        if not begins:
            raise BadClip(name, "the video has no frames: zero length, or truncated. Restore the file.")
        begins.sort()
        check_whole(container, stated_end(container, stream), end, "video", name)
    try:
        indices, each = sampled(parameters, len(begins), fps)
    except ValueError as error:
        raise BadClip(name, f"the frames cannot be sampled: {error}.") from error
    moved = jitters(len(indices), augmentation)
    if moved is not None and len(indices) > 1:  # by whole frames, rounded towards none: no two meet, none leaves the part
        shifts = np.trunc(moved * np.diff(indices).min()).astype(np.int64)
        indices = np.clip(indices + shifts, indices[0], indices[-1])
    ends = np.array([*begins[1:], begins[-1] + 1 / fps])
    return indices, ((np.array(begins) + ends) / 2)[indices], each


def _shown_s(part: Any, fps: float) -> float:
    """How long a packet or frame is shown."""
    return float(part.duration * part.time_base) if part.duration else 1 / fps


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
                    end = max(end, begins + _shown_s(packet, fps))
        return end or packets / fps


def _rate(stream: Any) -> float:
    """Frames a second: counted where the track's length is known, else as the codec declares."""
    rates = (stream.average_rate, stream.guessed_rate)
    return float(next((rate for rate in (rates if stream.duration is not None else rates[::-1]) if rate), 25))


class _Clip:
    """The video track of an open container, and the current frame."""

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
        """The frame shown at each time, upright and within the budgets, and when it began; None if seeking overshot."""
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
                check_whole(self.container, time, shown[0] + _shown_s(shown[1], self.fps), "video", self.name)
            if drawn is None or drawn[0] is not shown:
                if not pictures:
                    self.size = self._shape(shown[1])
                    try:
                        target = frame_size(self.size, len(times), parameters)
                    except ValueError as error:
                        raise BadClip(self.name, f"the frames cannot be sized: {error}.") from error
                    _refuse(self.name, self.limits.refuse_decoded(3 * len(times) * target[0] * target[1]))
                drawn = (shown, self._upright(shown[1], target))
            pictures.append(drawn[1])
            begins.append(max(0.0, shown[0]))
            before = time
        return pictures, begins

    def _rewound(self) -> None:
        # Frames in the order shown, each with its time; without timestamps by their number and the rate.
        self._frames = (
            (number / self.fps if frame.time is None else frame.time - self.zero, frame)
            for number, frame in enumerate(self.container.decode(self.stream))
        )
        self._current: tuple[float, Any] | None = None
        self._ahead = next(self._frames, None)

    def _advance(self, time: float) -> tuple[float, Any]:
        """The frame shown at a time."""
        while self._ahead is not None and (self._current is None or self._ahead[0] <= time):
            self._current, self._ahead = self._ahead, next(self._frames, None)
        if self._current is None:
            raise BadClip(self.name, "the video has no frames: zero length, or truncated. Restore the file.")
        if self._current[1].is_corrupt:
            raise BadClip(self.name, f"the video is damaged at {time:.2f} s. Restore the file.")
        return self._current

    def _shape(self, frame: Any) -> tuple[int, int]:
        """(width, height) as shown: with square pixels, and rotated."""
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
    """Quarter turns to the left that make a frame upright."""
    return round(frame.rotation / 90) % 4


@cache
def exactly() -> Any:
    """The interpolation flags of EXACT."""
    ways = library().video.reformatter.Interpolation
    return reduce(or_, (ways[name] for name in EXACT))
