"""Clips that are made: the same input gives the same bytes."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
MAKE = """
import hashlib
from random import Random
from sensorium.data.made_media import encode_clip
from sensorium.systems.taskmem.memory_clips import DIRECTIONS, moving_square
made = hashlib.sha256()
for number, direction in enumerate(DIRECTIONS.values()):
    made.update(encode_clip(moving_square((255, 0, 0), direction, Random(number), 4, 56), 2))
print(made.hexdigest())
"""


def test_a_clip_does_not_depend_on_what_memory_held_before() -> None:
    made = set()
    for filled_with in ("1", "165", "254"):
        surroundings = {**os.environ, "MALLOC_PERTURB_": filled_with, "PYTHONPATH": str(SOURCE)}
        done = subprocess.run([sys.executable, "-c", MAKE], env=surroundings, capture_output=True, text=True, check=True)
        made.add(done.stdout)
    assert len(made) == 1
