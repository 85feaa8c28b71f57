"""Pictures in a terminal: by kitty's or iTerm2's protocol, or as half-blocks, two pixels to a character."""

import base64
import io
import os
from collections.abc import Mapping
from typing import Literal

from PIL import Image

Way = Literal["kitty", "iterm", "blocks", "none"]
WAYS: tuple[Way, ...] = ("kitty", "iterm", "blocks", "none")
CHUNK = 4096
ACROSS, DOWN = 64, 32
"""Characters that a picture of half-blocks takes at most."""


def usual_way(terminal: bool, variables: Mapping[str, str] = os.environ) -> Way:
    """How this terminal shows pictures; what is not a terminal shows none."""
    if not terminal:
        return "none"
    if "KITTY_WINDOW_ID" in variables or "kitty" in variables.get("TERM", "") or "ghostty" in variables.get("TERM", ""):
        return "kitty"
    return "iterm" if variables.get("TERM_PROGRAM", "") in ("iTerm.app", "WezTerm") else "blocks"


def drawn(picture: Image.Image, way: Way) -> str:
    """The text that shows a picture."""
    if way == "none":
        return ""
    if way == "blocks":
        return half_blocks(picture)
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    if way == "iterm":
        return f"\x1b]1337;File=inline=1;size={len(buffer.getvalue())}:{data}\a"
    parts = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
    frames = []
    for place, part in enumerate(parts):
        control = ("a=T,f=100," if place == 0 else "") + f"m={int(place + 1 < len(parts))}"
        frames.append(f"\x1b_G{control};{part}\x1b\\")
    return "".join(frames)


def half_blocks(picture: Image.Image) -> str:
    """A picture of upper half-blocks in 24-bit colours, its proportions kept."""
    scale = min(1.0, ACROSS / picture.width, 2 * DOWN / picture.height)
    width, height = max(1, round(picture.width * scale)), max(2, round(picture.height * scale) // 2 * 2)
    small = picture.convert("RGB").resize((width, height), Image.Resampling.BOX)
    rows = []
    for top in range(0, height, 2):
        row = []
        for column in range(width):
            above, below = small.getpixel((column, top)), small.getpixel((column, top + 1))
            row.append("\x1b[38;2;{};{};{};48;2;{};{};{}m▀".format(*above, *below))  # type: ignore[misc]
        rows.append("".join(row) + "\x1b[0m")
    return "\n".join(rows)
