"""What other systems show, as content blocks: their forms of pictures, and texts with placeholders."""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from inspect import isawaitable
from typing import Any

import numpy as np
from PIL import Image

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.vocabulary.content import Block, Media, Message, Text
from sensorium.vocabulary.errors import EnvironmentFailure

PLACEHOLDER = "<image>"


def picture(store: MediaStore, value: Any, origin: str) -> Media:
    """A picture from what environments give: PIL, a uint8 array, bytes, base64 or a data URI, or nested whole numbers."""
    if isinstance(value, Image.Image):
        return store.put(encode_png(value.convert("RGB")), "picture", origin)
    if isinstance(value, str):
        try:
            value = base64.b64decode(value.partition(",")[2] if value.startswith("data:") else value, validate=True)
        except ValueError as error:
            raise EnvironmentFailure(f"{origin}: its picture is not base64: {value[:40]!r}") from error
    if isinstance(value, bytes | bytearray):
        return store.put_picture(bytes(value), origin)
    if isinstance(value, Sequence):
        value = byte_array(value, origin)
    if not isinstance(value, np.ndarray):
        raise EnvironmentFailure(f"{origin}: {type(value).__name__} is no picture.")
    if value.dtype != np.uint8 or value.ndim not in (2, 3) or (value.ndim == 3 and value.shape[2] not in (3, 4)):
        raise EnvironmentFailure(
            f"{origin}: a picture is uint8 of [height, width, 3], not {value.dtype} of {list(value.shape)}."
        )
    return store.put(encode_png(np.ascontiguousarray(value[..., :3] if value.ndim == 3 else value)), "picture", origin)


def byte_array(numbers: Any, origin: str, shape: Any = None) -> Any:
    """Nested whole numbers from 0 to 255 as a uint8 array, of another ``shape`` if one is given."""
    try:
        array = np.asarray(numbers)
        if array.dtype.kind not in "iu" or array.size == 0 or array.min() < 0 or array.max() > 255:
            raise ValueError("whole numbers from 0 to 255 are needed")
        return array.astype(np.uint8) if shape is None else array.astype(np.uint8).reshape([int(side) for side in shape])
    except (ValueError, TypeError) as error:
        form = "" if shape is None else f" of shape {shape!r:.40}"
        raise EnvironmentFailure(f"{origin}: its numbers are no picture{form}: {error}") from error


def with_placeholders(text: str, pictures: Sequence[Media], origin: str) -> tuple[Block, ...]:
    """A text in which each ``<image>`` stands for the next picture; there must be as many of them as pictures."""
    pieces = text.split(PLACEHOLDER)
    if len(pieces) - 1 != len(pictures):
        raise EnvironmentFailure(
            f"{origin}: the text has {len(pieces) - 1} {PLACEHOLDER} and there are {len(pictures)} pictures."
        )
    blocks: list[Block] = []
    for piece, after in zip(pieces, [*pictures, None], strict=True):
        blocks += [Text(piece)] if piece else []
        blocks += [after] if after is not None else []
    return tuple(blocks)


def key_of(messages: Iterable[Message]) -> str:
    """A hash of what messages show: equal for equal text and pictures."""
    digest = hashlib.blake2b(digest_size=16)
    for message in messages:
        for block in message.content:
            shown = block.text if isinstance(block, Text) else block.key
            digest.update(repr((message.role, shown)).encode("utf-8", "replace"))
    return digest.hexdigest()


def text_form(value: Any) -> str:
    """A value as text: text as it is, everything else as JSON, with what JSON lacks written out."""

    def plain(item: Any) -> Any:
        return item.tolist() if isinstance(item, np.ndarray | np.generic) else str(item)

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=plain)


def success_of(info: Any) -> bool | None:
    """Whether an environment's info calls the episode a success; None where it does not say."""

    def mapping(value: Any) -> Mapping[str, Any]:
        return value if isinstance(value, Mapping) else {}

    for found in (mapping(info), mapping(mapping(mapping(info).get("metrics")).get("traj_metrics"))):
        for key in ("success", "is_success"):
            if found.get(key) is not None:
                return bool(found[key])
    return None


async def awaited(value: Any) -> Any:
    """The value, or the result of an awaitable."""
    return await value if isawaitable(value) else value
