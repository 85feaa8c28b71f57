"""Pictures in an OpenEnv observation: there is no standard, so a map from field to form says which fields they are.

{"screenshot": "base64"}          PNG or JPEG as base64, or a list of them
{"screenshot": "pixels"}          nested whole numbers, [height][width][3]
{"screen": "screen_shape"}        flat whole numbers, and the field that holds their shape
{"result": "mcp"}                 content blocks of a tool's result, of which the images are taken
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sensorium.vocabulary.errors import EnvironmentFailure


def pictures_of(fields: Mapping[str, Any], media: Mapping[str, Any], where: str) -> tuple[list[Any], set[str]]:
    """The pictures that an observation's fields hold, in the order of the map, and the fields that are used up by them."""
    found: list[Any] = []
    used: set[str] = set()
    for field, form in media.items():
        value = fields.get(field)
        if value is None:
            continue
        if form == "mcp":
            found += _of_blocks(value)
            continue
        used.add(field)
        if form in ("base64", "pixels"):
            several = form == "base64" and isinstance(value, list)
            found += value if several else [value]
        elif form in fields:
            used.add(form)
            found.append(_shaped(value, fields[form], where))
        else:
            raise EnvironmentFailure(f"{where}: '{field}' is a picture of form '{form}', and there is no field '{form}'.")
    return found, used


def _of_blocks(result: Any) -> list[Any]:
    blocks = result.get("content") if isinstance(result, Mapping) else result
    return [
        block["data"]
        for block in (blocks if isinstance(blocks, list) else [])
        if isinstance(block, Mapping) and block.get("type") == "image" and "data" in block
    ]


def _shaped(flat: Any, shape: Any, where: str) -> Any:
    try:
        numbers = np.asarray(flat)
        if numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() > 255:
            raise ValueError("whole numbers from 0 to 255 are needed")
        return numbers.astype(np.uint8).reshape([int(side) for side in shape])
    except (ValueError, TypeError) as error:
        raise EnvironmentFailure(f"{where}: its numbers are no picture of shape {shape!r:.40}: {error}") from error
