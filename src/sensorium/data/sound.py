"""Sound: one channel of float samples at the rate asked for, from a sound file or the sound track of a video; WAV files."""

import wave
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from io import BytesIO
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from sensorium.data.augmentation import changed_samples
from sensorium.data.media_files import MediaLimits
from sensorium.data.video import BadClip, Source, check_whole, library, opened, stated_end, track, trimmed, zero
from sensorium.vocabulary.decoding import AudioParameters, Augmentation


def encode_wav(samples: np.ndarray, sample_rate: int = 16000) -> bytes:
    """A 16-bit WAV of samples in [-1, 1], [N] or [N, channels]."""
    buffer = BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(sixteen_bits(samples).astype("<i2").tobytes())
    return buffer.getvalue()


def sixteen_bits(samples: np.ndarray) -> np.ndarray:
    """Samples in [-1, 1] as whole numbers of 16 bits; louder ones are cut."""
    return np.rint(np.clip(samples, -1.0, 1.0) * 32767).astype(np.int16)


RATES = (1000, 1_000_000)
LATEST_S = 3600.0
SHARP = "filter_size=128:cutoff=0.955"  # as steep as soxr, which the models' own tools use; libav's dampens from 6 kHz on
LOUDEST = 65536.0  # largest magnitude of a sample. Full scale is 1; files with 16-bit numbers as floats reach 32,768
STREAMED = 0x7FFFFFFF  # lengths from here on are placeholders in the header of a streamed WAV


@dataclass(frozen=True)
class DecodedAudio:
    """Samples [N] of one channel, float32 in [-1, 1], their rate, and the length of the whole track.

    Times count from the start of the file: a track that begins later is preceded by silence, so that sound and picture of
    one file stay together.
    """

    samples: np.ndarray
    sample_rate: int
    duration_s: float
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        self.samples.flags.writeable = False  # shared by all users of this sound

    @property
    def nbytes(self) -> int:
        """Bytes of the samples."""
        return self.samples.nbytes


def decode_audio(source: Source, parameters: AudioParameters, name: str, limits: MediaLimits | None = None) -> DecodedAudio:
    """Decode a sound given as bytes or a path; ``name`` (file, row) is its name in errors."""
    limits = limits or MediaLimits()
    rate = parameters.sample_rate
    first = round(parameters.start * rate)
    last = inf if parameters.end is None else round(parameters.end * rate)
    kept: list[np.ndarray] = []
    with opened(source, name, "sound") as container:
        if container.format.name == "wav":
            _check_wave(source, name)
        stream = track(container, "audio", name)
        stated = stated_end(container, stream)
        if not RATES[0] <= stream.rate <= RATES[1]:
            raise BadClip(
                name, f"its sound has a sample rate of {stream.rate} Hz, which no recording has. Restore the file."
            )
        if stated is not None:
            _refuse_long(name, *trimmed(parameters, stated, "sound", name), rate, limits)
        heard = 0
        for chunk in _resampled(container, stream, rate, name):
            kept.append(chunk[max(0, first - heard) : int(min(len(chunk), max(0, last - heard)))])
            heard += len(chunk)
            _refuse_long(name, 0.0, max(0, heard - first) / rate, rate, limits)
            if heard >= last:
                break
        else:
            check_whole(container, stated, heard / rate, "sound", name)
        if heard == 0:
            raise BadClip(name, "the sound has no samples: zero length, or truncated. Restore the file.")
    length = heard / rate if stated is None or heard < last else stated
    start, end = trimmed(parameters, length, "sound", name)
    samples = np.concatenate(kept)
    if not len(samples):
        raise BadClip(name, f"the part asked for, from {start:g} s on, holds no samples; the sound lasts {length:.2f} s.")
    if not np.isfinite(samples).all():
        raise BadClip(name, "the sound has samples that are not finite numbers. Restore the file.")
    if (peak := float(np.abs(samples).max())) > LOUDEST:
        raise BadClip(name, f"the sound has samples of {peak:.3g}, and full scale is 1. Restore the file, or scale it.")
    return DecodedAudio(samples, rate, length, start, end)


def augmented_sound(sound: DecodedAudio, asked: Augmentation) -> DecodedAudio:
    """A decoded sound at another speed (and pitch), louder or softer, with noise."""
    samples, rate = sound.samples, sound.sample_rate
    if asked.speed != 1:
        frame = library().AudioFrame.from_ndarray(np.ascontiguousarray(samples[None]), format="flt", layout="mono")
        frame.sample_rate = max(1, round(rate * asked.speed))
        resampler = _Resampler(rate)
        parts = [_mean(made) for part in (frame, None) for made in resampler(part)]
        samples = np.concatenate(parts) if parts else samples[:1]
    return replace(sound, samples=changed_samples(samples, asked))


def _refuse_long(name: str, start: float, end: float, rate: int, limits: MediaLimits) -> None:
    """Refuse a sound that is too long; one that does not state its length is refused while it is decoded."""
    problem = limits.refuse_length(end - start) or limits.refuse_decoded(round(4 * rate * (end - start)))
    if problem:
        raise BadClip(name, f"the sound is too large: {problem}")


def _resampled(container: Any, stream: Any, rate: int, name: str) -> Iterator[np.ndarray]:
    """Chunks of one channel, the mean of all, at ``rate`` from the file's start on."""
    resampler = _Resampler(rate)
    skip = 0
    for number, frame in enumerate(container.decode(stream)):
        if number == 0 and frame.time is not None:
            late = round((frame.time - zero(container)) * rate)
            skip = max(0, -late)
            if late > LATEST_S * rate:
                raise BadClip(name, f"its sound begins {late / rate:.0f} s after the file does. Restore the file.")
            if late > 0:
                yield np.zeros(late, np.float32)
        frame.pts = None  # the resampler must not act on irregular timestamps
        for made in resampler(frame):
            samples = _mean(made)
            yield samples[skip:]
            skip = max(0, skip - len(samples))
    for made in resampler(None):
        yield _mean(made)[skip:]


class _Resampler:
    """Frames at a rate, with all their channels: mixing them there would add them up, beyond 1.

    Channels are interleaved, because frames of separate channels cannot be read beyond eight.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._plain = library().AudioResampler(format="flt", rate=rate)
        self._graph: Any = None

    def __call__(self, frame: Any) -> Iterator[Any]:
        """The output available after a frame; after None, the rest."""
        if self._graph is None and (frame is None or frame.sample_rate == self.rate):
            yield from self._plain.resample(frame)
            return
        if self._graph is None:
            graph = self._graph = library().filter.Graph()
            source = graph.add_abuffer(
                sample_rate=frame.sample_rate,
                format=frame.format.name,
                layout=frame.layout.name,
                time_base=Fraction(1, frame.sample_rate),
            )
            parts = [source, graph.add("aresample", f"{self.rate}:{SHARP}"), graph.add("aformat", "sample_fmts=flt")]
            for one, other in pairwise([*parts, graph.add("abuffersink")]):
                one.link_to(other)
            graph.configure()
        self._graph.push(frame)
        errors = library().error
        with suppress(errors.BlockingIOError, errors.EOFError):
            while True:
                yield self._graph.pull()


def _mean(frame: Any) -> np.ndarray:
    """The mean of a frame's interleaved channels."""
    return frame.to_ndarray().reshape(-1, frame.layout.nb_channels).mean(axis=1)


def _check_wave(source: Source, name: str) -> None:
    """Refuse a WAV that is shorter than its header states; libav would take the rest for the whole."""
    with BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(12)
        while len(head := file.read(8)) == 8:
            length = int.from_bytes(head[4:], "little")
            if head[:4] == b"data":
                if length < STREAMED and file.tell() + length > size:
                    missing = file.tell() + length - size
                    raise BadClip(name, f"is truncated: {missing} of its {length} bytes of sound are missing. Restore it.")
                return
            file.seek(length + length % 2, 1)
