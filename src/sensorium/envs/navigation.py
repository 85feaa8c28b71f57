"""First-person navigation: walk to what the instruction names. Scenes are made from seeds and drawn by MiniWorld.

A scene is plain geometry on the floor, in metres, so no picture is needed to know where one can walk. Headings are degrees,
counted to the left from +x; +z is to the right of +x, as in MiniWorld. So from (0, 0), heading 0, ``moveahead`` of 0.5
leads to (0.5, 0) and ``moveright`` to (0, 0.5).
"""

import math
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from sensorium.cluster.pool import Worker
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.envs.actions import (
    ActionEnvironment,
    ActionTurn,
    PlayedTurn,
    PlayOptions,
    State,
    describe,
    observation_of,
    path_to,
)
from sensorium.envs.protocol import Observation, one_of, within
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.plain import words

NAME = "navigation"
# Legacy VAGEN's actions in its order, and what today's VAGEN calls them (separated by |, in <action>).
ACTIONS = ("moveahead", "moveback", "moveright", "moveleft", "rotateright", "rotateleft", "lookup", "lookdown")
CURRENT_ACTIONS = (
    "move_forward", "move_backward", "move_right", "move_left", "turn_right", "turn_left", "look_up", "look_down",
)  # fmt: skip
RIGHT, LEFT, UP = ACTIONS.index("rotateright"), ACTIONS.index("rotateleft"), ACTIONS.index("lookup")
AHEAD_RIGHT = ((1, 0), (-1, 0), (0, 1), (0, -1))  # steps ahead and to the right of the four moves
SIDEWAYS_FIRST = (2, 3, 0, 1)  # of equally short ways, take the one that first brings the target straight ahead
TURN, TILT, MAX_TILT = 90, 30, 60
BODY, THING = 0.4, 0.45  # radii of the walker and of things
SHAPES = ("box", "ball")
COLOURS = ("red", "green", "blue", "purple", "yellow")
MAX_TRIES = 1000
MAX_PLACES = 20_000
MAX_ACROSS = 120  # steps from wall to wall: a way is searched step by step
DEFAULTS = {"rooms": 1, "room_size": 6.0, "things": 3, "success_distance": 1.5, "step_length": 0.5}

Point = tuple[float, float]
Rectangle = tuple[float, float, float, float]  # least and largest x, least and largest z
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Thing:
    """A coloured thing on the floor."""

    shape: str
    colour: str
    at: Point

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Pose:
    """The place of the walker, its heading, and how far the camera is tilted up, in degrees."""

    at: Point
    heading: float
    tilt: int = 0

    def moved(self, ahead: float, right: float) -> Point:
        """The point so many metres ahead and to the right."""
        cos, sin = math.cos(math.radians(self.heading)), math.sin(math.radians(self.heading))
        return self.at[0] + ahead * cos + right * sin, self.at[1] - ahead * sin + right * cos


@dataclass(frozen=True)
class Scene:
    """Rooms (one, or four joined by passages), the things in them (the first is the target), and the start."""

    rooms: tuple[Rectangle, ...]
    passages: tuple[Rectangle, ...]
    things: tuple[Thing, ...]
    start: Pose

    @property
    def target(self) -> Thing:
        return self.things[0]

    @cached_property
    def walls(self) -> tuple[tuple[Point, Point], ...]:
        """The walls as segments: the sides of rooms, open where a passage meets them, and the sides of passages."""
        found: list[tuple[Point, Point]] = []
        for left, right, near, far in self.rooms:
            for z in (near, far):
                gaps = [(a, b) for a, b, c, d in self.passages if z in (c, d) and left <= a and b <= right]
                found += (((a, z), (b, z)) for a, b in _between(left, right, gaps))
            for x in (left, right):
                gaps = [(c, d) for a, b, c, d in self.passages if x in (a, b) and near <= c and d <= far]
                found += (((x, a), (x, b)) for a, b in _between(near, far, gaps))
        for number, (left, right, near, far) in enumerate(self.passages):
            if number % 2 == 0:
                found += (((left, z), (right, z)) for z in (near, far))
            else:
                found += (((x, near), (x, far)) for x in (left, right))
        return tuple(found)

    def free(self, at: Point) -> bool:
        """Whether the walker fits there."""
        if any(math.dist(at, thing.at) < BODY + THING for thing in self.things):
            return False
        return all(_distance(at, *wall) >= BODY for wall in self.walls)

    def after(self, pose: Pose, action: int, step: float) -> tuple[Pose, bool]:
        """The pose after an action, and whether it worked: a wall, a thing or the limit of the tilt may stop it."""
        if action >= UP:
            tilt = pose.tilt + (TILT if action == UP else -TILT)
            return (pose, False) if abs(tilt) > MAX_TILT else (replace(pose, tilt=tilt), True)
        if action >= len(AHEAD_RIGHT):
            return replace(pose, heading=(pose.heading + (-TURN if action == RIGHT else TURN)) % 360), True
        ahead, right = AHEAD_RIGHT[action]
        at = pose.moved(ahead * step, right * step)
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
        while frontier and len(came) < MAX_PLACES:
            here = frontier.popleft()
            if math.dist(pose.moved(here[0] * step, here[1] * step), self.target.at) <= near:
                return path_to(here, came)
            for action in SIDEWAYS_FIRST:
                there = (here[0] + AHEAD_RIGHT[action][0], here[1] + AHEAD_RIGHT[action][1])
                if there not in came and self.free(pose.moved(there[0] * step, there[1] * step)):
                    came[there] = (here, action)
                    frontier.append(there)
        raise EnvironmentFailure(f"navigation: no way of steps of {step:g} m leads to the {self.target.name} from here.")

    def demonstration(self, pose: Pose, near: float, step: float) -> tuple[int, ...]:
        """Turn until the target is ahead, then walk the shortest way."""
        bearing = self.bearing(pose)
        if abs(bearing) > 45:
            return (RIGHT,) if bearing > 0 else (LEFT,)
        return self.way(pose, near, step)


@lru_cache(maxsize=4096)
def scene_of(rooms: int, size: float, things: int, near: float, step: float, seed: int) -> Scene:
    """The scene of a seed; the target can be walked to, and is not near yet."""
    chance = random.Random(f"navigation/{rooms}/{size}/{things}/{near}/{step}/{seed}")
    for _ in range(MAX_TRIES):
        scene = _tried(chance, rooms, size, things)
        if scene is not None and scene.distance(scene.start) > near + step:
            try:
                scene.way(scene.start, near, step)
            except EnvironmentFailure:
                continue
            return scene
    raise EnvironmentFailure(
        f"navigation: none of {MAX_TRIES} tries put {things} things and a walker into {rooms} rooms of {size:g} m so that "
        "the target can be reached; ask for fewer things or larger rooms."
    )


def _tried(chance: random.Random, rooms: int, size: float, things: int) -> Scene | None:
    places, passages = _plan(rooms, size)
    names = chance.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], things)
    points = [_somewhere(chance, places, THING + 0.1) for _ in names]
    if any(math.dist(a, b) < 2 * (THING + BODY) for n, a in enumerate(points) for b in points[:n]):
        return None
    put = tuple(Thing(shape, colour, at) for (shape, colour), at in zip(names, points, strict=True))
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


def _between(low: float, high: float, gaps: list[tuple[float, float]]) -> Iterator[Point]:
    for start, end in sorted(gaps):
        yield low, start
        low = end
    yield low, high


def _distance(at: Point, a: Point, b: Point) -> float:
    """The distance of a point from a segment."""
    x, z = b[0] - a[0], b[1] - a[1]
    along = ((at[0] - a[0]) * x + (at[1] - a[1]) * z) / (x * x + z * z)
    along = min(1.0, max(0.0, along))
    return math.dist(at, (a[0] + along * x, a[1] + along * z))


WAIT_S = 120.0
WAY_OUT = (
    "It draws without a display through EGL: on Debian and Ubuntu install libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri "
    "libglu1-mesa."
)


# OpenGL's state belongs to a thread, and MiniWorld's environments share one display list, so environments in several
# threads draw wrong pictures silently. All drawing happens in one thread.
_lock = threading.Lock()
_drawn: tuple[Any, Scene] | None = None  # the stage that drew last, and its scene; used in the renderer's thread only


@lru_cache(maxsize=1)
def _renderer() -> Worker:
    return Worker("miniworld")


def view(scene: Scene, pose: Pose, side: int, degrees: float) -> Pixels:
    """What is seen from a pose: uint8 of [side, side, 3], ``degrees`` wide and high."""
    with _lock:
        call = _renderer().submit(lambda: _draw(scene, pose, side, degrees), WAIT_S)
    if not call.wait(WAIT_S):
        raise EnvironmentFailure(f"navigation: MiniWorld drew no picture within {WAIT_S:g} s.")
    if call.error is not None:
        raise call.error
    pixels: Pixels = call.value
    return pixels


def _draw(scene: Scene, pose: Pose, side: int, degrees: float) -> Pixels:
    global _drawn
    stage = _stage(side)
    if _drawn is None or _drawn[0] is not stage or _drawn[1] != scene:  # the display list is of another scene
        _drawn = None
        stage.scene = scene
        stage.reset(seed=0)
        _drawn = (stage, scene)
    stage.agent.pos = np.array([pose.at[0], 0.0, pose.at[1]])
    stage.agent.dir, stage.agent.cam_pitch, stage.agent.cam_fov_y = math.radians(pose.heading), pose.tilt, degrees
    return np.array(stage.render_obs())


def refuse_missing() -> None:
    """Say what to install where MiniWorld is missing."""
    if find_spec("miniworld") is None:
        raise RecipeError("navigation: it is drawn by MiniWorld; install it with: pip install 'sensorium[navigation]'.")


@lru_cache(maxsize=8)
def _stage(side: int) -> Any:
    """A MiniWorld environment that shows scenes at a size. Made and used in the renderer's thread only."""
    os.environ.setdefault("PYGLET_HEADLESS", "1")
    refuse_missing()
    try:
        from miniworld.entity import Ball, Box
        from miniworld.miniworld import MiniWorldEnv
    except Exception as error:  # pyglet raises ImportError and errors of its own where libraries are missing
        raise RecipeError(f"navigation: MiniWorld cannot be loaded: {words(error)}. {WAY_OUT}") from error

    class Stage(MiniWorldEnv):
        scene: Scene | None = None

        def _gen_world(self) -> None:
            if self.scene is None:
                self.add_rect_room(min_x=0, max_x=1, min_z=0, max_z=1)
                self.place_entity(self.agent, pos=np.zeros(3), dir=0.0)
                return
            rooms = [self.add_rect_room(min_x=a, max_x=b, min_z=c, max_z=d) for a, b, c, d in self.scene.rooms]
            for number, (left, right, near, far) in enumerate(self.scene.passages):
                ends = {"min_z": near, "max_z": far} if number % 2 == 0 else {"min_x": left, "max_x": right}
                self.connect_rooms(rooms[number], rooms[(number + 1) % len(rooms)], max_y=2.2, **ends)
            for thing in self.scene.things:
                entity = Box(thing.colour, size=0.6) if thing.shape == "box" else Ball(thing.colour, size=0.6)
                self.place_entity(entity, pos=np.array([thing.at[0], 0.0, thing.at[1]]), dir=0.0)
            start = self.scene.start
            self.place_entity(self.agent, pos=np.array([start.at[0], 0.0, start.at[1]]), dir=math.radians(start.heading))

    try:
        with redirect_stdout(sys.stderr):  # it prints how many samples a pixel has
            return Stage(obs_width=side, obs_height=side, window_width=side, window_height=side)
    except Exception as error:
        raise RecipeError(f"navigation: MiniWorld cannot draw here: {words(error)}. {WAY_OUT}") from error


class WalkOptions(PlayOptions, total=False):
    """Options of navigation, wherever it takes place."""

    max_steps: int
    success_distance: float
    success_reward: float
    action_names: Literal["moveahead", "move_forward"]


class NavigationPlay(ActionEnvironment):
    """Walk to what the instruction names, within ``success_distance`` metres, in at most ``max_steps`` actions.

    Gives ``success_reward`` there. A description of the state is ``target at (3, 2)``: 3 metres away, towards two o'clock.
    A subclass simulates the rooms (the private methods at the end); ACTIONS are known by number, distances are metres,
    bearings degrees from straight ahead, to the right positive.
    """

    instant = False

    def __init__(
        self,
        name: str,
        store: MediaStore,
        max_steps: int = 30,
        success_distance: float = 1.5,
        success_reward: float = 10.0,
        action_names: Literal["moveahead", "move_forward"] = "moveahead",
        **play: Unpack[PlayOptions],
    ) -> None:
        one_of(name, "action_names", action_names, [ACTIONS[0], CURRENT_ACTIONS[0]])
        within(name, "max_steps", max_steps, 1, 10**6)
        within(name, "success_distance", success_distance, 0.1, 100.0)
        current = action_names == CURRENT_ACTIONS[0]
        names, tag, separator = (CURRENT_ACTIONS, "action", "|") if current else (ACTIONS, "answer", ",")
        options: dict[str, Any] = {"max_actions_per_turn": 5, "answer_tag": tag, "separator": separator, **play}
        super().__init__(name, store, names, ["picture", "blank"], {"success": success_reward}, **options)
        self.max_steps, self.success_distance = max_steps, success_distance
        self._instruction, self._steps, self._worked = "", 0, True

    def _begin(self, seed: int) -> None:
        self._steps, self._worked = 0, True
        self._instruction = self._start(seed)

    def _read(self, response: str) -> ActionTurn:
        asked = self.grammar.read(response)
        if self.grammar.format.grammar == "vagen" and not asked.well_formed:
            return ActionTurn((), asked.sections)  # VAGEN's navigation, unlike its other environments, does nothing then
        return asked

    def _play(self, actions: tuple[int, ...]) -> PlayedTurn:
        made, near, self._worked = 0, False, True
        for action in actions:
            self._worked = self._act(action)
            made, self._steps = made + 1, self._steps + 1
            near = self._target()[0] <= self.success_distance
            if near or self._steps >= self.max_steps:
                break
        info = {"distance": round(self._target()[0], 3), "worked": self._worked}
        return PlayedTurn(made, near, near, {"success": near}, info, cut=self._steps >= self.max_steps)

    def _state(self, actions: tuple[int, ...] = ()) -> State:
        """The target's distance in whole metres and its bearing in hours of the clock."""
        distance, bearing = self._target(actions)
        return {"target": frozenset([(round(distance), round(bearing / 30) % 12 or 12)])}

    def _thought(self, actions: tuple[int, ...]) -> dict[str, str]:
        reason = f"The target is reached by {self.grammar.spell(actions)}."
        states = {"observation": describe(self._state()), "prediction": describe(self._state(actions))}
        return {"think": reason, "reasoning": reason, **states}

    def _shown(self, above: str) -> Observation:
        failed = "" if self._worked else "The last action did not work: something is in the way."
        pixels = self._look()
        if self.view == "blank":
            pixels = pixels * 0 + 127
        picture = self.store.put(encode_png(pixels), "picture", f"{self.name} seed {self._seed} turn {self._turn}")
        return observation_of("\n".join(filter(None, [self._instruction, failed, above])), picture)

    def _rules(self) -> str:
        states = ""
        if self._rewards_descriptions:
            states = (
                "\nSay where the target is by its distance in metres and its direction on the clock, 12 being straight "
                "ahead and 3 to the right, as in: target at (3, 12)."
            )
        names = self.grammar.names
        explained = (
            "You walk through rooms and see what is before you. Walk to what the instruction names, until it is within "
            f"{self.success_distance:g} metres. {names[0]}, {names[1]}, {names[2]} and {names[3]} take a step "
            f"without turning; {names[4]} and {names[5]} turn you by 90 degrees; {names[6]} and {names[7]} tilt your "
            f"view.{states}"
        )
        reason = "It is straight ahead, and there is floor before me."
        states_of_example = {"observation": "target at (3, 12)", "prediction": "target at (2, 12)"}
        return self._system_prompt("Walk to it.", explained, (0, 0), think=reason, reasoning=reason, **states_of_example)

    def _start(self, seed: int) -> str:
        raise NotImplementedError

    def _act(self, action: int) -> bool:
        raise NotImplementedError

    def _target(self, actions: tuple[int, ...] = ()) -> tuple[float, float]:
        """Distance and bearing of the target, as they would be after some actions."""
        raise NotImplementedError

    def _look(self) -> Pixels:
        raise NotImplementedError


class Navigation(NavigationPlay):
    """Navigation in one room, or four that are joined, with coloured things, drawn by MiniWorld on the CPU or a GPU."""

    def __init__(
        self,
        store: MediaStore,
        rooms: int = 1,
        room_size: float = 6.0,
        things: int = 3,
        side: int = 224,
        field_of_view: float = 100.0,
        step_length: float = 0.5,
        **walk: Unpack[WalkOptions],
    ) -> None:
        refuse_missing()
        within(NAME, "room_size", room_size, 3.0, 50.0)
        within(NAME, "things", things, 1, 10)
        within(NAME, "side", side, 16, 1024)
        within(NAME, "field_of_view", field_of_view, 10.0, 150.0)
        within(NAME, "step_length", step_length, 0.1, 0.7)
        one_of(NAME, "rooms", str(rooms), ["1", "4"])
        across = (room_size if rooms == 1 else 2 * room_size + 2) / step_length
        within(NAME, "room_size (all rooms, in steps across)", round(across), 1, MAX_ACROSS)
        super().__init__(NAME, store, **walk)
        self.side, self.field_of_view, self.step_length = side, field_of_view, float(step_length)
        self._kind = (rooms, float(room_size), things, float(self.success_distance), self.step_length)

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """The scene of a seed: where things are, and where the walker is and looks."""
        rooms, size, things, near, step = (options.get(key, value) for key, value in DEFAULTS.items())
        scene = scene_of(rooms, float(size), things, float(near), float(step), seed)
        return repr((scene.rooms, scene.things, scene.start))

    def _start(self, seed: int) -> str:
        self._scene = scene_of(*self._kind, seed)
        self._pose = self._scene.start
        return f"Walk to the {self._scene.target.name}."

    def _act(self, action: int) -> bool:
        self._pose, worked = self._scene.after(self._pose, action, self.step_length)
        return worked

    def _target(self, actions: tuple[int, ...] = ()) -> tuple[float, float]:
        pose = self._pose
        for action in actions:
            pose, _ = self._scene.after(pose, action, self.step_length)
        return self._scene.distance(pose), self._scene.bearing(pose)

    def _look(self) -> Pixels:
        return view(self._scene, self._pose, self.side, self.field_of_view)

    def _way(self) -> tuple[int, ...]:
        return self._scene.demonstration(self._pose, self.success_distance, self.step_length)
