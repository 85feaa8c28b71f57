"""Media are bounded before they are decoded, and the error names the setting."""

import struct
import zlib
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from sensorium.data.decoder import Decoder
from sensorium.data.made_media import encode_clip
from sensorium.data.media_files import MediaLimits
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import FORMATS, decode_picture
from sensorium.data.sound import encode_wav
from sensorium.vocabulary.decoding import AudioParameters, VideoParameters
from sensorium.vocabulary.errors import MediaError
from tests.data.clips import middle, numbered, tone


def png_header(width: int, height: int) -> bytes:
    """A PNG of this size without its pixels: what decodes it fails, what reads its header does not."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(b"")
    chunks = b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in (head, pixels)
    )
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize("side", [8001, 13_000, 100_000])
def test_a_picture_with_too_many_pixels_is_refused_by_its_header(side: int) -> None:
    with pytest.raises(MediaError, match=r"row 7: .*(media\.max_pixels 64,000,000|exceeds limit)"):
        decode_picture(png_header(side, side), "row 7")


def test_the_limit_is_the_stores_and_can_be_raised() -> None:
    buffer = BytesIO()
    Image.new("RGB", (40, 30)).save(buffer, "PNG")
    media = MediaStore().put(buffer.getvalue(), "picture", "row 1")
    strict = MediaStore(limits=MediaLimits(pixels=1000))
    strict.put(buffer.getvalue(), "picture", "row 1")
    with pytest.raises(MediaError, match=r"row 1: a picture of 40 × 30 = 1,200 pixels is beyond media\.max_pixels 1,000"):
        strict.picture(media)
    with pytest.raises(MediaError, match="max_pixels"):
        strict.put_picture(buffer.getvalue(), "row 1")
    assert MediaStore(limits=MediaLimits(pixels=1200)).put_picture(buffer.getvalue(), "row 1") == media


def test_formats_that_run_programs_are_not_tried() -> None:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    with pytest.raises(MediaError, match="no picture in a known format"):
        decode_picture(script, "row 2")
    assert "EPS" not in FORMATS


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.mp4"
    with path.open("wb") as file:
        file.truncate(2**41)  # takes no room on the disk
    for kind in ("picture", "video", "sound"):
        with pytest.raises(MediaError, match=r"row 3: .*huge\.mp4.*beyond media\.max_file_mib 2048"):
            MediaStore().put_file(path, kind, "row 3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parameters", "limits", "what"),
    [
        (middle(frames=10**12), MediaLimits(), "media.max_clip_mib"),
        (middle(frames=2000), MediaLimits(clip_mib=1), "media.max_clip_mib"),
        (middle(frames=2), MediaLimits(clip_s=1), "media.max_clip_s"),
        (middle(frames=2), MediaLimits(pixels=100), "media.max_pixels"),
    ],
)
def test_videos_that_would_take_too_much_are_refused(parameters: VideoParameters, limits: MediaLimits, what: str) -> None:
    store = MediaStore(limits=limits)
    media = store.put(encode_clip(numbered(), 8.0), "video", "row 4", parameters)
    with pytest.raises(MediaError, match=f"row 4: the video is too large: .*{what}"):
        Decoder(store).get(media)


@pytest.mark.parametrize(
    ("parameters", "limits", "what"),
    [
        (AudioParameters(sample_rate=10**9), MediaLimits(clip_mib=64), "media.max_clip_mib"),
        (AudioParameters(), MediaLimits(clip_s=0.25), "media.max_clip_s"),
        (AudioParameters(start=0.2), MediaLimits(clip_s=0.25), "media.max_clip_s"),
    ],
)
def test_sounds_that_would_take_too_much_are_refused(parameters: AudioParameters, limits: MediaLimits, what: str) -> None:
    store = MediaStore(limits=limits)
    with pytest.raises(MediaError, match=f"row 5: the sound is too large: .*{what}"):
        Decoder(store).get(store.put(encode_wav(tone(0.5)), "sound", "row 5", parameters))
    trimmed = AudioParameters(start=0.2, end=0.4)
    assert Decoder(store).get(store.put(encode_wav(tone(0.5)), "sound", "row 5", trimmed)).samples.size == 3200  # type: ignore[union-attr]
