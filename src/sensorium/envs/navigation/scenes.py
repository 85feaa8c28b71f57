"""Scenes to walk in: rooms with coloured things, one of them the target, and where the walker stands and looks.

Everything here is plain geometry on the floor, in metres; no picture is needed to know what a seed leads to or where one
can walk. Headings are degrees, counted to the left from +x; +z is to the right of +x, as in MiniWorld. So from (0, 0),
heading 0, ``moveahead`` of 0.5 leads to (0.5, 0) and ``moveright`` to (0, 0.5).
"""

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from sensorium.envs.way_back import way_back
from sensorium.vocabulary.errors import EnvironmentFailure

ACTIONS = ("moveahead", "moveback", "moveright", "moveleft", "rotateright", "rotateleft", "lookup", "lookdown")
"""Legacy VAGEN's actions of navigation, in its order."""

CURRENT_ACTIONS = (
    "move_forward", "move_backward", "move_right", "move_left", "turn_right", "turn_left", "look_up", "look_down",
)  # fmt: skip
"""What today's VAGEN calls them. It separates them by | and wants them in <action>."""

AHEAD_RIGHT = ((1, 0), (-1, 0), (0, 1), (0, -1))
"""Steps ahead and to the right of the four moves."""

SIDEWAYS_FIRST = (2, 3, 0, 1)
"""Of ways that are equally short, the one that first brings the target straight ahead, where it is seen."""

TURN, TILT, MOST_TILT = 90, 30, 60
BODY, THING = 0.4, 0.45
"""Radii of the walker and of things."""

SHAPES = ("box", "ball")
COLOURS = ("red", "green", "blue", "purple", "yellow")
MOST_TRIES = 1000
MOST_PLACES = 20_000

Point = tuple[float, float]
Rectangle = tuple[float, float, float, float]
"""Least and largest x, least and largest z."""


@dataclass(frozen=True)
class Thing:
    """A coloured thing on the floor."""

    shape: str
    colour: str
    at: Point

    @property
    def name(self) -> str:
        """What an instruction calls it."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Pose:
    """Where the walker stands, its heading, and how far the camera is tilted up, in degrees."""

    at: Point
    heading: float
    tilt: int = 0


@dataclass(frozen=True)
class Scene:
    """Rooms (one, or four joined by passages), the things in them (the first is the target), and the start."""

    rooms: tuple[Rectangle, ...]
    passages: tuple[Rectangle, ...]
    things: tuple[Thing, ...]
    start: Pose

    @property
    def target(self) -> Thing:
        """What to walk to."""
        return self.things[0]

    @cached_property
    def walls(self) -> tuple[tuple[Point, Point], ...]:
        """The walls as segments: the sides of rooms, open where a passage meets them, and the sides of passages."""
        return tuple(_walls(self))

    def free(self, at: Point) -> bool:
        """Whether the walker can stand there."""
        if any(math.dist(at, thing.at) < BODY + THING for thing in self.things):
            return False
        return all(_distance(at, *wall) >= BODY for wall in self.walls)

    def after(self, pose: Pose, action: int, step: float) -> tuple[Pose, bool]:
        """The pose that an action leads to, and whether it worked: a wall, a thing or the tilt's end may stop it."""
        if action >= len(AHEAD_RIGHT) + 2:
            tilt = pose.tilt + (TILT if action == ACTIONS.index("lookup") else -TILT)
            return (pose, False) if abs(tilt) > MOST_TILT else (replace(pose, tilt=tilt), True)
        if action >= len(AHEAD_RIGHT):
            turn = -TURN if action == ACTIONS.index("rotateright") else TURN
            return replace(pose, heading=(pose.heading + turn) % 360), True
        at = _moved(pose, action, step)
        return (replace(pose, at=at), True) if self.free(at) else (pose, False)

    def distance(self, pose: Pose) -> float:
        """Metres from the walker to the middle of the target."""
        return math.dist(pose.at, self.target.at)

    def bearing(self, pose: Pose) -> float:
        """Degrees from straight ahead to the target, to the right positive, from -180 to 180."""
        x, z = self.target.at[0] - pose.at[0], self.target.at[1] - pose.at[1]
        return (math.degrees(math.atan2(z, x)) + pose.heading + 180) % 360 - 180

    def way(self, pose: Pose, near: float, step: float) -> tuple[int, ...]:
        """The moves of a shortest way from here until the target is near, without turning."""
        came: dict[tuple[int, int], tuple[tuple[int, int], int] | None] = {(0, 0): None}
        frontier = deque([(0, 0)])
        while frontier and len(came) < MOST_PLACES:
            here = frontier.popleft()
            if math.dist(_lattice(pose, here, step), self.target.at) <= near:
                return way_back(came, here)
            for action in SIDEWAYS_FIRST:
                there = (here[0] + AHEAD_RIGHT[action][0], here[1] + AHEAD_RIGHT[action][1])
                if there not in came and self.free(_lattice(pose, there, step)):
                    came[there] = (here, action)
                    frontier.append(there)
        raise EnvironmentFailure(f"navigation: no way of steps of {step:g} m leads to the {self.target.name} from here.")


@lru_cache(maxsize=4096)
def scene_of(rooms: int, size: float, things: int, near: float, step: float, seed: int) -> Scene:
    """The scene a seed stands for; the target can be walked to, and is not near yet."""
    chance = random.Random(f"navigation/{rooms}/{size}/{things}/{near}/{step}/{seed}")
    for _ in range(MOST_TRIES):
        scene = _tried(chance, rooms, size, things)
        if scene is not None and scene.distance(scene.start) > near + step:
            try:
                scene.way(scene.start, near, step)
            except EnvironmentFailure:
                continue
            return scene
    raise EnvironmentFailure(
        f"navigation: of {MOST_TRIES} tries none put {things} things and a walker into {rooms} rooms of {size:g} m so that "
        "the target can be reached; ask for fewer things or larger rooms."
    )


def _tried(chance: random.Random, rooms: int, size: float, things: int) -> Scene | None:
    places, passages = _plan(rooms, size)
    named = chance.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], things)
    stood = [_somewhere(chance, places, THING + 0.1) for _ in named]
    if any(math.dist(a, b) < 2 * (THING + BODY) for n, a in enumerate(stood) for b in stood[:n]):
        return None
    put = tuple(Thing(shape, colour, at) for (shape, colour), at in zip(named, stood, strict=True))
    start = Pose(_somewhere(chance, places, BODY), float(chance.randrange(360)))
    scene = Scene(places, passages, put, start)
    return scene if scene.free(start.at) else None


def _plan(rooms: int, size: float) -> tuple[tuple[Rectangle, ...], tuple[Rectangle, ...]]:
    """One room from the origin; or four around it, each joined to its neighbours by a passage 2 m long and wide."""
    if rooms == 1:
        return ((0.0, size, 0.0, size),), ()
    low, high, middle = 1.0, 1.0 + size, 1.0 + size / 2
    four = ((-high, -low, low, high), (low, high, low, high), (low, high, -high, -low), (-high, -low, -high, -low))
    return four, (
        (-low, low, middle - 1, middle + 1),
        (middle - 1, middle + 1, -low, low),
        (-low, low, -middle - 1, -middle + 1),
        (-middle - 1, -middle + 1, -low, low),
    )


def _somewhere(chance: random.Random, rooms: tuple[Rectangle, ...], margin: float) -> Point:
    left, right, near, far = chance.choice(rooms)
    at = chance.uniform(left + margin, right - margin), chance.uniform(near + margin, far - margin)
    return round(at[0], 3), round(at[1], 3)


def _walls(scene: Scene) -> Iterator[tuple[Point, Point]]:
    for left, right, near, far in scene.rooms:
        for z in (near, far):
            gaps = [(a, b) for a, b, c, d in scene.passages if z in (c, d) and left <= a and b <= right]
            yield from (((a, z), (b, z)) for a, b in _between(left, right, gaps))
        for x in (left, right):
            gaps = [(c, d) for a, b, c, d in scene.passages if x in (a, b) and near <= c and d <= far]
            yield from (((x, a), (x, b)) for a, b in _between(near, far, gaps))
    for number, (left, right, near, far) in enumerate(scene.passages):
        if number % 2 == 0:
            yield from (((left, z), (right, z)) for z in (near, far))
        else:
            yield from (((x, near), (x, far)) for x in (left, right))


def _between(low: float, high: float, gaps: list[tuple[float, float]]) -> Iterator[Point]:
    for start, end in sorted(gaps):
        yield low, start
        low = end
    yield low, high


def _distance(at: Point, a: Point, b: Point) -> float:
    """How far a point is from a segment."""
    x, z = b[0] - a[0], b[1] - a[1]
    along = ((at[0] - a[0]) * x + (at[1] - a[1]) * z) / (x * x + z * z)
    along = min(1.0, max(0.0, along))
    return math.dist(at, (a[0] + along * x, a[1] + along * z))


def _moved(pose: Pose, action: int, step: float) -> Point:
    return _lattice(pose, AHEAD_RIGHT[action], step)


def _lattice(pose: Pose, steps: tuple[int, int], step: float) -> Point:
    """The point so many steps ahead and to the right."""
    ahead, right = steps[0] * step, steps[1] * step
    cos, sin = math.cos(math.radians(pose.heading)), math.sin(math.radians(pose.heading))
    return pose.at[0] + ahead * cos + right * sin, pose.at[1] - ahead * sin + right * cos
