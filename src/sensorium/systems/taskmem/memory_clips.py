"""Memory clips: short videos of a moving square, clip by clip, whose first look must be remembered.

In the first clip of a video the square has a colour, in all later ones it is grey. In every clip it moves and has another
number, as people in TaskMem's clips do. The memory of a clip has number and colour, ``<face_2>red``, so from the second
clip on the colour is in the history alone. An index always gives the same task, and every clip is a file of its own. Rows
come in blocks of ``together`` videos: the first clips of all of them, then the second ones, and so on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np

from sensorium.data.causal_history import END_OF_THOUGHT, ClipPlace
from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.systems.taskmem.memory_rows import rewrite_faces
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.task import Task

COLOURS = {"red": (214, 48, 49), "green": (46, 160, 67), "blue": (52, 92, 210), "yellow": (240, 200, 40)}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
GREY = (140, 140, 140)
FACES = 3
FPS = 4.0


@dataclass(frozen=True)
class ClipTruth:
    """The square's number in a clip, its colour (shown or remembered), and its direction."""

    face: int
    colour: str
    direction: str

    @property
    def description(self) -> str:
        return f"<face_{self.face}>{self.colour}"


class MemoryClips:
    """A source of ``videos`` videos of ``clips`` clips each, one row a clip.

    ``history``: the memories of earlier clips in rows without a planner, ``true`` or ``blank``. ``guessed`` is the share of
    demonstrations whose colour is a guess.
    """

    def __init__(
        self,
        *,
        store: MediaStore,
        split: Literal["train", "test"] = "train",
        videos: int = 512,
        clips: int = 3,
        together: int = 8,
        seed: int = 0,
        history: Literal["true", "blank"] = "true",
        guessed: float = 0.0,
        frames: int = 4,
        picture_size: int = 56,
    ) -> None:
        if videos < 1 or clips < 1 or together < 1 or videos % together or frames < 2 or picture_size % 28:
            raise TaskError(
                "memory_clips: videos must be a multiple of together, clips at least 1, frames at least 2, and "
                "picture_size a multiple of 28."
            )
        if split not in ("train", "test") or history not in ("true", "blank") or not 0 <= guessed <= 1:
            raise TaskError("memory_clips: split is train or test, history true or blank, guessed a share from 0 to 1.")
        self.store, self.split, self.videos, self.clips, self.together = store, split, videos, clips, together
        self.seed, self.history, self.guessed = seed, history, guessed
        self.frames, self.picture_size = frames, picture_size
        self._made: dict[tuple[int, int], Media] = {}

    def __len__(self) -> int:
        return self.videos * self.clips

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(f"memory_clips: there is no task {index} among {len(self)}")
        video, clip = self._video_and_clip(index)
        known = {} if self.history == "blank" else {i: self.truth(video, i).description for i in range(clip)}
        return self.with_history(index, known)

    def place_of(self, index: int) -> ClipPlace:
        """The clip of a row; it needs the memories of all clips before it."""
        video, clip = self._video_and_clip(index)
        return ClipPlace(self._name(video), clip, tuple(range(clip)))

    def with_history(self, index: int, memories: Mapping[int, str]) -> Task:
        """The task with these memories of earlier clips, the square numbered as in its own clip."""
        video, clip = self._video_and_clip(index)
        maps = {i: {1: self.truth(video, i).face} for i in range(self.clips)}
        rewritten = rewrite_faces(memories, maps, clip)
        history = " ".join(rewritten[i] for i in sorted(rewritten))
        truth = self.truth(video, clip)
        random = self._random("guess", video, clip)
        shown = truth.description
        if random.random() < self.guessed:
            shown = ClipTruth(truth.face, random.choice([*COLOURS]), truth.direction).description
        mark = "" if self.history == "true" else "/blank"
        return Task(
            id=f"{self._name(video)}*{clip}{mark}",
            messages=(user(self._clip(video, clip), f"<face_{truth.face}> {history}"),),
            answer=truth.description,
            demonstration=(f"{END_OF_THOUGHT}{json.dumps({'description': shown})}",),
            metadata={"video_id": self._name(video), "video_idx": clip, "step": clip, "history": history,
                      "category": "first clip" if clip == 0 else "later clip"},
        )  # fmt: skip

    def truth(self, video: int, clip: int) -> ClipTruth:
        colour = self._random("colour", video).choice([*COLOURS])
        random = self._random("clip", video, clip)
        return ClipTruth(random.randint(1, FACES), colour, random.choice([*DIRECTIONS]))

    def truths(self) -> dict[str, ClipTruth]:
        """The truth about every clip by the hash of its file, for judges that see the file."""
        places = [(video, clip) for video in range(self.videos) for clip in range(self.clips)]
        return {self._clip(*place).hash: self.truth(*place) for place in places}

    def _video_and_clip(self, index: int) -> tuple[int, int]:
        block, place = divmod(index, self.together * self.clips)
        clip, member = divmod(place, self.together)
        return block * self.together + member, clip

    def _clip(self, video: int, clip: int) -> Media:
        if (video, clip) not in self._made:
            truth = self.truth(video, clip)
            colour = COLOURS[truth.colour] if clip == 0 else GREY
            seed = self._random("picture", video, clip)
            frames_THWC = moving_square(colour, DIRECTIONS[truth.direction], seed, self.frames, self.picture_size)
            asked = VideoParameters(frames=self.frames, sampling="middle")
            origin = f"{self._name(video)}, clip {clip}"
            self._made[video, clip] = self.store.put(encode_clip(frames_THWC, FPS), "video", origin, asked)
        return self._made[video, clip]

    def _name(self, video: int) -> str:
        return f"memory_clips-{self.split}-{self.seed}-{video}"

    def _random(self, purpose: str, *numbers: int) -> Random:
        return Random(f"memory clips {self.seed} {self.split} {purpose} {numbers}")


def moving_square(colour: Sequence[int], direction: tuple[int, int], random: Random, count: int, size: int) -> np.ndarray:
    """Frames [T, H, W, 3] of a square that moves over a ground of its own."""
    ground = [random.randint(225, 255) for _ in range(3)]
    frames_THWC = np.empty((count, size, size, 3), np.uint8)
    frames_THWC[:] = ground
    radius, step = size // 5, size // 7
    free = size - 2 * radius - step * (count - 1)
    x, y = (
        radius + random.randint(0, max(0, free)) + (step * (count - 1) if way < 0 else 0)
        if way
        else random.randint(radius, size - radius)
        for way in direction
    )
    for frame_HWC in frames_THWC:
        frame_HWC[max(0, y - radius) : y + radius, max(0, x - radius) : x + radius] = colour
        x, y = x + step * direction[0], y + step * direction[1]
    speck = random.randrange(size * size)  # clips that are otherwise alike differ in a dot
    frames_THWC[:, speck // size, speck % size] = 0
    return frames_THWC
