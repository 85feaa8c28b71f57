"""Small data sets that look like the published ones, with real files: for tests, docs and trying out a recipe.

Each clip shows a coloured square and sounds a tone; what is asked about them takes both. The same arguments give the same
rows and files.
"""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np

from sensorium.media.making import encode_clip
from sensorium.media.wav import encode_wav
from sensorium.tasks.daily_omni import COLUMNS
from sensorium.tasks.sight_and_sound import COLOURS, TONES, square_frames, tone_samples

FPS = 16.0


def make_intent(
    folder: Path,
    count: int = 8,
    *,
    bench: bool = False,
    seed: int = 0,
    problem_types: Sequence[str] = ("multiple choice", "emer_ov_mc", "numerical", "judge", "free-form"),
    seconds: float = 2.0,
    size: int = 64,
) -> None:
    """Write IntentTrain (two manifests of ``count`` rows each) or IntentBench (one), and ``videos.zip``."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "videos.zip", "w") as archive:
        for manifest in ("qa.json",) if bench else ("emer_rewrite.json", "social_iq_v2_rewrite.json"):
            rows = []
            for i in range(count):
                random = Random(f"intent {manifest} {seed} {i}")
                file = f"{Path(manifest).stem}_{i}.mp4"
                colour, tone = random.choice(list(COLOURS)), random.choice(list(TONES))
                # Half of the files lie at the root and half under videos/, as the published archives do.
                archive.writestr(
                    zipfile.ZipInfo(file if i % 2 else f"videos/{file}"), _clip(colour, tone, i, seconds, size)
                )
                row = _intent_row(problem_types[i % len(problem_types)], colour, tone, random)
                rows.append({**row, "path" if i % 3 == 2 else "video": file, "data_type": "video"})
            (folder / manifest).write_text(json.dumps(rows, indent=1))


def make_daily_omni(
    folder: Path, count: int = 12, *, seed: int = 0, seconds: float = 2.0, size: int = 64, videos: int = 4
) -> None:
    """Write ``qa.json`` with ``count`` questions of all Types about ``videos`` videos, and their files."""
    shown = []
    for i in range(videos):
        random = Random(f"daily omni {seed} {i}")
        colour, tone = random.choice(list(COLOURS)), random.choice(list(TONES))
        place = folder / "Videos" / f"v{i}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"v{i}_video.mp4").write_bytes(_clip(colour, tone, i, seconds, size))
        (place / f"v{i}_audio.wav").write_bytes(encode_wav(tone_samples(tone, i, seconds)))
        shown.append((colour, tone))
    rows = []
    for i in range(count):
        options, answer = _options(*shown[i % videos], Random(f"daily omni question {seed} {i}"))
        rows.append(
            {
                "Question": "What is seen while which tone sounds?",
                "Choice": options,
                "Answer": answer,
                "video_id": f"v{i % videos}",
                "Type": list(COLUMNS)[i % len(COLUMNS)],
                "video_duration": f"{seconds:g}s",
            }
        )
    (folder / "qa.json").write_text(json.dumps(rows, indent=1))


def _intent_row(kind: str, colour: str, tone: str, random: Random) -> dict[str, object]:
    row: dict[str, object] = {"problem_type": kind}
    if kind == "multiple choice":
        options, answer = _options(colour, tone, random)
        return {**row, "problem": "What is seen while which tone sounds?", "options": options, "answer": answer}
    if kind == "emer_ov_mc":
        options = [f"{chr(65 + i)}. {word}" for i, word in enumerate((*COLOURS, *TONES))]
        letters = sorted(option[0] for option in options if option[3:] in (colour, tone))
        return {**row, "problem": "Which of these occur?", "options": options, "answer": ",".join(letters)}
    if kind == "numerical":
        return {**row, "problem": "How many squares are there?", "options": [], "answer": "1"}
    if kind == "judge":
        asked = random.choice(list(COLOURS))
        return {**row, "problem": f"Is the square {asked}?", "options": [], "answer": "Yes" if asked == colour else "No"}
    return {**row, "problem": "What happens?", "options": [], "answer": f"A {colour} square drifts to a {tone} tone."}


def _options(colour: str, tone: str, random: Random) -> tuple[list[str], str]:
    """Four options of which one is right in both colour and tone, and its letter."""
    other_colour = random.choice([c for c in COLOURS if c != colour])
    other_tone = random.choice([t for t in TONES if t != tone])
    pairs = [(colour, tone), (other_colour, tone), (colour, other_tone), (other_colour, other_tone)]
    shuffled = random.sample(pairs, len(pairs))
    options = [f"{chr(65 + i)}. a {c} square, a {t} tone" for i, (c, t) in enumerate(shuffled)]
    return options, chr(65 + shuffled.index(pairs[0]))


def _clip(colour: str, tone: str, variant: int, seconds: float, size: int) -> bytes:
    frames_THWC: np.ndarray = square_frames(colour, variant, round(seconds * FPS), size)
    return encode_clip(frames_THWC, FPS, tone_samples(tone, variant, seconds))
