"""Look again at a part of a picture: the part comes back enlarged, as a new picture in the conversation."""

from collections.abc import Mapping
from typing import Any, Literal

from PIL import Image

from sensorium.data.pictures import encode_png
from sensorium.envs.protocol import one_of, within
from sensorium.envs.tool_use import ToolContext, ToolResult, ToolSpec
from sensorium.vocabulary.content import Text

LEAST_SIDE = 4
"""Pixels of a part's shorter side, of the picture it is cut from."""


class Crop:
    """Cuts a box [left, top, right, bottom] out of a picture and enlarges it until its longer side has ``side`` pixels.

    ``coordinates`` are ``relative`` (0 to 1000 across the picture, as Qwen3-VL counts) or ``pixels`` (as Qwen2.5-VL does).
    Pictures are numbered from 0 as they were shown; what the tool cuts out is numbered on, so a part can be cut again.
    """

    instant = True

    def __init__(self, coordinates: Literal["relative", "pixels"] = "relative", side: int = 448) -> None:
        one_of("crop", "coordinates", coordinates, ["relative", "pixels"])
        within("crop", "side", side, 16, 4096)
        self.coordinates, self.side = coordinates, side
        counted = "from 0 to 1000 across the picture" if coordinates == "relative" else "in pixels"
        self.spec = ToolSpec(
            "crop",
            "Looks again at a part of a picture: cuts out a box and enlarges it.",
            {
                "type": "object",
                "properties": {
                    "box": {
                        "type": "array",
                        "items": {"type": "number"},
                        "minItems": 4,
                        "maxItems": 4,
                        "description": f"left, top, right, bottom, {counted}",
                    },
                    "picture": {"type": "integer", "description": "which picture, 0 is the first (default)"},
                },
                "required": ["box"],
                "additionalProperties": False,
            },
        )

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """The part, as a picture."""
        number = int(arguments.get("picture", 0))
        if not 0 <= number < len(context.pictures):
            shown = len(context.pictures)
            return ToolResult.error(f"there is no picture {number}; {shown} were shown, 0 to {shown - 1}.")
        source = context.pictures[number]
        picture = context.store.picture(source)
        box = self._pixels(arguments["box"], picture.width, picture.height)
        if min(box[2] - box[0], box[3] - box[1]) < LEAST_SIDE:
            return ToolResult.error(
                f"the box {arguments['box']} holds fewer than {LEAST_SIDE} pixels a side of the picture."
            )
        part = picture.crop(box)
        scale = self.side / max(part.size)
        if scale > 1:
            size = (max(1, round(part.width * scale)), max(1, round(part.height * scale)))
            part = part.resize(size, Image.Resampling.BICUBIC)
        origin = f"{source.name}, cut to {', '.join(map(str, box))}"
        media = context.store.put(encode_png(part), "picture", origin)
        return ToolResult((Text(f"Picture {len(context.pictures)}, cut out of picture {number}:\n"), media))

    def close(self) -> None:
        """Nothing is held."""

    def _pixels(self, box: list[float], width: int, height: int) -> tuple[int, int, int, int]:
        """The box in whole pixels, within the picture, its corners in order. Numbers beyond all bounds are bounded."""
        unit = (width / 1000, height / 1000) if self.coordinates == "relative" else (1.0, 1.0)
        across = sorted(_within(box[i], width / unit[0]) * unit[0] for i in (0, 2))
        down = sorted(_within(box[i], height / unit[1]) * unit[1] for i in (1, 3))
        return int(across[0]), int(down[0]), round(across[1]), round(down[1])


def _within(value: float, most: float) -> float:
    return min(max(value, 0.0), most) if value == value else 0.0
