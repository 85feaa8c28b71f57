"""Pictures are decoded upright, in RGB and whole, or refused by name."""

import base64
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sensorium.data.pictures import decode_picture, encode_png, picture_bytes
from sensorium.vocabulary.errors import MediaError


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def gradient(height: int = 20, width: int = 30) -> Image.Image:
    return Image.fromarray(np.arange(height * width * 3, dtype=np.uint32).reshape(height, width, 3).astype(np.uint8))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 255))
def test_png_round_trip_keeps_every_pixel(height: int, width: int, fill: int) -> None:
    pixels = np.full((height, width, 3), fill, np.uint8)
    pixels[0, 0] = (1, 2, 3)
    assert np.array_equal(np.asarray(decode_picture(encode_png(pixels), "x")), pixels)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_usual_formats_decode_to_rgb(form: str) -> None:
    picture = decode_picture(encoded(gradient(), form), "x")
    assert (picture.mode, picture.size) == ("RGB", (30, 20))


def test_transparency_becomes_white() -> None:
    clear = encoded(Image.new("RGBA", (2, 2), (255, 0, 0, 0)), "PNG")
    assert decode_picture(clear, "x").getpixel((0, 0)) == (255, 255, 255)


def test_palette_transparency_becomes_white() -> None:
    image = Image.new("P", (2, 2), 0)
    image.putpalette([255, 0, 0] * 256)
    assert decode_picture(encoded(image, "PNG", transparency=0), "x").getpixel((1, 1)) == (255, 255, 255)


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode_picture(encoded(gradient(20, 30), "JPEG", exif=exif), "x")
    assert turned.size == (20, 30)


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    grey = Image.fromarray(np.array([[0, 32768, 65535]], np.uint16))
    values = np.asarray(decode_picture(encoded(grey, "PNG"), "x"))[0, :, 0]
    assert values.tolist() == [0, 128, 255]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_truncated_file_is_found_and_named(form: str) -> None:
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    data = encoded(noisy, form)
    with pytest.raises(MediaError, match=r"train\.jsonl:7"):
        decode_picture(data[: len(data) // 2], "train.jsonl:7")


@given(st.binary(max_size=200))
def test_no_bytes_whatever_raise_anything_but_media_error(data: bytes) -> None:
    for start in (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a"):
        with pytest.raises(MediaError, match=r"row 3"):
            decode_picture(start + data, "row 3")


def test_animation_is_refused_rather_than_cut_to_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    with pytest.raises(MediaError, match="2 frames"):
        decode_picture(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), "x")


def test_every_form_of_source_gives_the_same_bytes(tmp_path: Path) -> None:
    data = encode_png(gradient())
    (tmp_path / "a.png").write_bytes(data)
    coded = base64.b64encode(data).decode()
    sources = [
        "a.png",
        tmp_path / "a.png",
        data,
        f"data:image/png;base64,{coded}",
        {"bytes": data, "path": None},
        {"bytes": None, "path": "a.png"},
    ]
    assert {picture_bytes(source, "x", tmp_path) for source in sources} == {data}


@pytest.mark.parametrize(
    "source",
    ["no.png", "https://example.org/a.png", "data:image/png", "data:image/png;base64,???", {"path": None}, {}, 3, None],
)
def test_unreadable_sources_name_their_row(source: object, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"row 9"):
        picture_bytes(source, "row 9", tmp_path)


def test_array_of_floats_is_no_picture() -> None:
    with pytest.raises(ValueError, match="uint8"):
        encode_png(np.zeros((2, 2, 3)))
