"""Opening a file that may hold video and sound, choosing a track, and checking that it is whole.

PyAV is imported where a clip is opened: a run without clips needs none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from sensorium.vocabulary.decoding import Parameters
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
