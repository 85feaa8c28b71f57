"""Clips made from arrays, where the same input gives the same bytes; and blank media, which show or sound nothing.

PyAV is imported where a clip is made: a run without clips needs none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from io import BytesIO
from platform import machine
from typing import Any

import numpy as np

from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.sound import DecodedAudio, encode_wav, sixteen_bits
from sensorium.data.video import DecodedVideo, exactly, library
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import AudioParameters, VideoParameters

GREY = 127
CLOCK = 90000  # ticks a second in the times of frames

# With AVX-512, x264's choices depend on uninitialised memory; with SSE2 and on ARM they are those of plain C.
OLDER_INSTRUCTIONS = {"x264-params": "asm=sse2"} if machine() in ("x86_64", "AMD64") else {}


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

    ``quality`` is H.264's scale, 0 is lossless. ``times_s``: when each frame begins, for a rate that varies.
    ``rotation`` (degrees to the left) is a note to the player; the pixels are not rotated.
    """
    buffer = BytesIO()
    with library().open(buffer, "w", format=format) as container:
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
        frame = library().VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        frame = frame.reformat(format=stream.pix_fmt, interpolation=exactly(), threads=1)
        if times_s is None:
            frame.pts, frame.time_base = number, 1 / Fraction(fps).limit_denominator(1000)
        else:
            frame.pts, frame.time_base = round(times_s[number] * CLOCK), Fraction(1, CLOCK)
        yield frame


def _sound(samples: np.ndarray, sample_rate: int, layout: str, stream: Any) -> Iterator[Any]:
    """The samples in the codec's format, in a few large frames."""
    turned = sixteen_bits(samples).reshape(1, -1)
    frame = library().AudioFrame.from_ndarray(turned, format="s16", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = sample_rate, 0, Fraction(1, sample_rate)
    yield from library().AudioResampler(format=stream.format, layout=layout, rate=sample_rate).resample(frame)


def blank(media: Media, decoder: Decoder, store: MediaStore) -> Media:
    """A grey picture of the same size, a grey video of as many frames of that size, or as much silence.

    It takes as many tokens as the medium itself. A video with its own sound keeps that.
    """
    shown, origin = decoder.get(media), f"blank for {media.name}"
    if isinstance(shown, DecodedVideo):
        assert isinstance(media.parameters, VideoParameters)
        count, seconds = len(shown.frames), max(shown.end_s - shown.start_s, 1e-3)
        if media.parameters.sampling != "middle":  # of the file's size, which becomes the clip's own
            width, height = shown.size
            grey = np.full((height, width, 3), GREY, np.uint8)
            clip = encode_clip([grey] * count, 1 / shown.seconds_per_frame)
        else:
            clip = encode_clip(np.full_like(shown.frames, GREY), count / seconds)
        asked = replace(media.parameters, frames=count, fps=None, start=0.0, end=None)
        video = store.put(clip, "video", origin, asked)
        if media.sound is None:
            return video
        heard = decoder.get(media.sound)
        assert isinstance(heard, DecodedAudio)
        return video.heard_with(store.put(encode_wav(heard.samples, heard.sample_rate), "sound", origin))
    if isinstance(shown, DecodedAudio):
        silence = encode_wav(np.zeros_like(shown.samples), shown.sample_rate)
        return store.put(silence, "sound", origin, AudioParameters(shown.sample_rate))
    grey = np.full((shown.height, shown.width, 3), GREY, np.uint8)
    return store.put(encode_png(grey), "picture", origin)


def muted(video: Media, decoder: Decoder, store: MediaStore) -> Media:
    """A video with its own sound, with silence of the same length instead."""
    assert video.sound is not None
    heard = decoder.get(video.sound)
    assert isinstance(heard, DecodedAudio)
    silence = np.zeros(round(heard.start_s * heard.sample_rate) + len(heard.samples), np.float32)
    sound = store.put(encode_wav(silence, heard.sample_rate), "sound", f"blank for {video.name}")
    return video.heard_with(sound)
