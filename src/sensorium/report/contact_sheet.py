"""Frames, tiles and sounds drawn as pictures for people: a sheet of labelled frames, and a waveform with its seconds."""

from collections.abc import Sequence
from math import ceil, sqrt

import numpy as np
from PIL import Image, ImageDraw

SHEET_PIXELS = 12_000_000  # of a whole sheet; frames are drawn smaller where they would take more
LABEL = 14  # pixels below a frame
GAP = 4
GROUND, INK, FAINT, WAVE = (255, 255, 255), (20, 20, 20), (215, 215, 215), (40, 110, 170)
WAVE_SIZE = (960, 240)
WAVE_FOOT = 18


def contact_sheet(frames: Sequence[Image.Image], labels: Sequence[str] = ()) -> Image.Image:
    """Frames of one size in rows, each with its label below; a single frame without labels is itself."""
    if len(frames) == 1 and not labels:
        return frames[0]
    width, height = frames[0].size
    across = max(1, min(len(frames), ceil(sqrt(len(frames) * height / width))))
    down = ceil(len(frames) / across)
    scale = min(1.0, sqrt(SHEET_PIXELS / (across * down * width * height)))
    cell = max(1, round(width * scale)), max(1, round(height * scale))
    foot = LABEL if labels else 0
    step = max(cell[0], 44 if labels else 0) + GAP, cell[1] + foot + GAP
    sheet = Image.new("RGB", (across * step[0] - GAP, down * step[1] - GAP), GROUND)
    pen = ImageDraw.Draw(sheet)
    for place, frame in enumerate(frames):
        left, top = place % across * step[0], place // across * step[1]
        sheet.paste(frame if scale == 1.0 else frame.resize(cell), (left, top))
        if labels:
            pen.text((left + 1, top + cell[1] + 1), labels[place], fill=INK)
    return sheet


def waveform(samples: np.ndarray, rate: int, start_s: float = 0.0) -> Image.Image:
    """The lowest and highest sample of each column, with full scale as the height and a line at every whole second."""
    width, height = WAVE_SIZE
    picture = Image.new("RGB", (width, height + WAVE_FOOT), GROUND)
    pen = ImageDraw.Draw(picture)
    seconds = len(samples) / rate
    pace = next(pace for pace in (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 1e9) if seconds / pace <= 12)
    for nth in range(int(seconds / pace) + 1):
        x = round(nth * pace / max(seconds, 1e-9) * (width - 1))
        pen.line([(x, 0), (x, height)], fill=FAINT)
        pen.text((min(x + 2, width - 40), height + 3), f"{start_s + nth * pace:g} s", fill=INK)
    pen.line([(0, height // 2), (width, height // 2)], fill=FAINT)
    edges = np.linspace(0, len(samples), width + 1).astype(int)
    for x in range(width):
        part = samples[edges[x] : max(edges[x] + 1, edges[x + 1])]
        low, high = (float(np.clip(value, -1, 1)) for value in (part.min(), part.max()))
        pen.line([(x, (1 - high) / 2 * (height - 1)), (x, (1 - low) / 2 * (height - 1))], fill=WAVE)
    return picture
