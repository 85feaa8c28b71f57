"""Making small real clips with video and sound from arrays. The same input gives the same bytes."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from io import BytesIO
from platform import machine
from typing import Any

import av
import numpy as np

from sensorium.data.sound import sixteen_bits
from sensorium.data.video import exactly

CLOCK = 90000
"""Ticks a second in which the times of frames are given."""

OLDER_INSTRUCTIONS = {"x264-params": "asm=sse2"} if machine() in ("x86_64", "AMD64") else {}
"""With the instructions of AVX-512, x264's choices depend on memory that nothing has written to; those of SSE2 and ARM
choose as plain C does."""


def encode_clip(
    frames: "np.ndarray | Sequence[np.ndarray] | None" = None,
    fps: float = 8.0,
    samples: np.ndarray | None = None,
    sample_rate: int = 16000,
    *,
    format: str = "mp4",
    video_codec: str = "libx264",
    audio_codec: str = "aac",
    quality: int = 18,
    keyframe_every: int = 12,
    rotation: int = 0,
    times_s: Sequence[float] | None = None,
) -> bytes:
    """A file of RGB frames [T, H, W, 3] and samples in [-1, 1] ([N] or [N, 2]), either of which may be missing.

    ``quality`` is H.264's scale, 0 for none lost. ``times_s`` says when each frame begins where the rate is not steady.
    ``rotation`` is written as a note to the player (degrees to the left), not done to the pixels.
    """
    buffer = BytesIO()
    with av.open(buffer, "w", format=format) as container:
        encoders: list[tuple[Any, Iterator[Any]]] = []
        if frames is not None:
            video: Any = container.add_stream(video_codec, rate=Fraction(fps).limit_denominator(1000))
            height, width = frames[0].shape[:2]
            video.width, video.height = width, height
            # Half-size colour is what every player shows, but it needs even sides.
            video.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
            video.codec_context.gop_size = keyframe_every
            video.codec_context.thread_count = 1
            if times_s is not None:
                video.codec_context.time_base = Fraction(1, CLOCK)
            if video_codec == "libx264":
                video.options = {"crf": str(quality), **OLDER_INSTRUCTIONS}
            if rotation:
                video.set_display_rotation(rotation)
            encoders.append((video, _frames(frames, times_s, fps, video)))
        if samples is not None:
            layout = "stereo" if samples.ndim == 2 and samples.shape[1] == 2 else "mono"
            audio: Any = container.add_stream(audio_codec, rate=sample_rate, layout=layout)
            if audio_codec == "aac":
                audio.options = {"aac_coder": "fast"}
            encoders.append((audio, _sound(samples, sample_rate, layout, audio)))
        for stream, parts in encoders:
            for part in parts:
                container.mux(stream.encode(part))
        for stream, _ in encoders:
            container.mux(stream.encode(None))
    return buffer.getvalue()


def _frames(
    frames: "np.ndarray | Sequence[np.ndarray]", times_s: Sequence[float] | None, fps: float, stream: Any
) -> Iterator[Any]:
    for number, picture in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        frame = frame.reformat(format=stream.pix_fmt, interpolation=exactly(), threads=1)
        if times_s is None:
            frame.pts, frame.time_base = number, 1 / Fraction(fps).limit_denominator(1000)
        else:
            frame.pts, frame.time_base = round(times_s[number] * CLOCK), Fraction(1, CLOCK)
        yield frame


def _sound(samples: np.ndarray, sample_rate: int, layout: str, stream: Any) -> Iterator[Any]:
    """The samples in the form that the codec takes, in a few large frames."""
    turned = sixteen_bits(samples).reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(turned, format="s16", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = sample_rate, 0, Fraction(1, sample_rate)
    yield from av.AudioResampler(format=stream.format, layout=layout, rate=sample_rate).resample(frame)
