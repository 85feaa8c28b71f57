"""Sound as WAV files, which need no codec. The same input gives the same bytes."""

import wave
from io import BytesIO

import numpy as np


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
