"""Small real clips for tests: frames that tell their number, and tones."""

import io
from pathlib import Path
from typing import Any

import av
import numpy as np

from sensorium.data.made_media import encode_clip
from sensorium.vocabulary.decoding import VideoParameters

STEP = 8


def numbered(count: int = 24, height: int = 48, width: int = 64) -> np.ndarray:
    """Frames whose grey level tells their number."""
    return np.stack([np.full((height, width, 3), 4 + STEP * (i % 30), np.uint8) for i in range(count)])


def numbers(frames: np.ndarray) -> list[int]:
    """The numbers that frames tell."""
    return [round((float(frame.mean()) - 4) / STEP) for frame in frames]


def tone(seconds: float = 3.0, pitch: float = 440.0, rate: int = 16000, loud: float = 0.5) -> np.ndarray:
    """A sine tone."""
    return (loud * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def pitch_of(samples: np.ndarray, rate: int) -> float:
    """The loudest frequency."""
    return float(np.argmax(np.abs(np.fft.rfft(samples * np.hanning(len(samples))))) * rate / len(samples))


def index_first(data: bytes, folder: Path) -> bytes:
    """The same MP4 with its index before its frames, so that a truncated copy still opens."""
    return remuxed(data, folder / "index_first.mp4", options={"movflags": "+faststart"})


def remuxed(data: bytes, path: Path, sound_late_s: float = 0.0, options: dict[str, str] | None = None) -> bytes:
    """The same tracks in another file, the sound perhaps later."""
    with av.open(io.BytesIO(data)) as source, av.open(str(path), "w", options=options or {}) as target:
        streams = {stream.index: target.add_stream_from_template(stream) for stream in source.streams}
        for packet in source.demux():
            if packet.dts is None or packet.pts is None:
                continue
            late = round(sound_late_s / packet.time_base) if packet.stream.type == "audio" else 0
            packet.pts, packet.dts = packet.pts + late, packet.dts + late
            packet.stream = streams[packet.stream.index]
            target.mux(packet)
    return path.read_bytes()


CLIP = encode_clip(numbered(), 8.0, tone())
"""Three seconds: 24 frames at 8 a second, with a tone."""


def middle(**asked: Any) -> VideoParameters:
    """Parameters of a video that is sampled by the rule ``middle``."""
    return VideoParameters(sampling="middle", **asked)
