"""First-person navigation: walk to what the instruction names. Scenes are made from seeds and drawn by MiniWorld."""

import math
import os
import queue
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.envs.actions import (
    ActionGrammar,
    ActionPrompts,
    ActionTurn,
    State,
    TurnPay,
    describe,
    described_parts,
    judged,
    sight,
    turn_result,
)
from sensorium.envs.grids import way_back
from sensorium.envs.protocol import Observation, StepResult, one_of, within
from sensorium.envs.responses import ResponseFormat
from sensorium.vocabulary.content import Message, system
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.plain import words

# Everything here is plain geometry on the floor, in metres; no picture is needed to know what a seed leads to or where
# one can walk. Headings are degrees, counted to the left from +x; +z is to the right of +x, as in MiniWorld. So from
# (0, 0), heading 0, ``moveahead`` of 0.5 leads to (0.5, 0) and ``moveright`` to (0, 0.5).


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


# Invariant: OpenGL's state belongs to a thread, and MiniWorld's environments share one display list, so with
# environments in several threads pictures are silently wrong. Here one thread makes and uses all of it; others hand it
# a scene and a pose.


Pixels = NDArray[np.uint8]
WAIT_S = 120.0
WAY_OUT = (
    "It draws without a display through EGL: on Debian and Ubuntu install libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri "
    "libglu1-mesa."
)

_Request = tuple[Scene, Pose, int, float, "Future[Pixels]"]
_lock = threading.Lock()
_requests: "queue.SimpleQueue[_Request] | None" = None


def view(scene: Scene, pose: Pose, side: int, degrees: float) -> Pixels:
    """What is seen from a pose: uint8 of [side, side, 3], ``degrees`` wide and high."""
    answer: Future[Pixels] = Future()
    _queue().put((scene, pose, side, degrees, answer))
    try:
        return answer.result(WAIT_S)
    except TimeoutError as error:
        raise EnvironmentFailure(f"navigation: MiniWorld drew no picture within {WAIT_S:g} s.") from error


def refuse_missing() -> None:
    """Say what to install where MiniWorld is not there."""
    from importlib.util import find_spec

    if find_spec("miniworld") is None:
        raise RecipeError("navigation: it is drawn by MiniWorld; install it with: pip install 'sensorium[navigation]'.")


def _queue() -> "queue.SimpleQueue[_Request]":
    """Where the renderer's thread takes its requests from; it is started by the first one."""
    global _requests
    with _lock:
        if _requests is None:
            _requests = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(_requests,), name="miniworld", daemon=True).start()
        return _requests


def _serve(requests: "queue.SimpleQueue[_Request]") -> None:
    last: tuple[Any, Scene] | None = None
    while True:
        scene, pose, side, degrees, answer = requests.get()
        try:
            shown = _stage(side)
            if last is None or last[0] is not shown or last[1] != scene:  # the display list is another's
                last = None
                shown.show(scene)
                last = (shown, scene)
            answer.set_result(shown.seen(pose, degrees))
        except Exception as error:  # told to who asked; the next request is tried anew
            answer.set_exception(error)


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
        """Shows whatever scene it is given."""

        scene: Scene | None = None

        def show(self, scene: Scene) -> None:
            self.scene = scene
            self.reset(seed=0)

        def seen(self, pose: Pose, degrees: float) -> Pixels:
            agent = self.agent
            agent.pos = np.array([pose.at[0], 0.0, pose.at[1]])
            agent.dir, agent.cam_pitch, agent.cam_fov_y = math.radians(pose.heading), pose.tilt, degrees
            return np.array(self.render_obs())

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


NAME = "navigation"
DEFAULTS = {"rooms": 1, "room_size": 6.0, "things": 3, "success_distance": 1.5, "step_length": 0.5}
MOST_ACROSS = 120
"""Steps from wall to wall: a way is searched for step by step, and a larger floor would take too long."""
RIGHT, LEFT = ACTIONS.index("rotateright"), ACTIONS.index("rotateleft")


class Simulator(Protocol):
    """Somewhere to walk. Actions are numbers of ACTIONS; distances are metres, bearings degrees, to the right positive."""

    def start(self, seed: int) -> str:
        """Begin the task of a seed; returns the instruction."""
        ...

    def act(self, action: int) -> bool:
        """Act; returns whether it worked."""
        ...

    def target(self) -> tuple[float, float]:
        """How far the target is, and its bearing from straight ahead."""
        ...

    def look(self) -> Pixels:
        """What is seen."""
        ...

    def way(self) -> tuple[int, ...]:
        """Actions that lead towards the target; raises EnvironmentFailure where nobody knows."""
        ...

    def ahead(self, actions: tuple[int, ...]) -> tuple[float, float]:
        """Distance and bearing of the target after some actions, which are not taken."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass(frozen=True)
class NavigationSettings:
    """What the play has in common, wherever it is."""

    name: str
    max_turns: int
    max_steps: int
    max_actions_per_turn: int
    success_distance: float
    view: str
    prompt: str
    response_format: str
    success_reward: float
    format_reward: float
    state_reward: float
    action_names: str
    grammar: str

    def __post_init__(self) -> None:
        one_of(self.name, "action_names", self.action_names, [ACTIONS[0], CURRENT_ACTIONS[0]])
        one_of(self.name, "view", self.view, ["picture", "blank"])
        one_of(self.name, "prompt", self.prompt, ["short", "full"])
        within(self.name, "max_turns", self.max_turns, 1, 10**6)
        within(self.name, "max_steps", self.max_steps, 1, 10**6)
        within(self.name, "max_actions_per_turn", self.max_actions_per_turn, 1, 10**6)
        within(self.name, "success_distance", self.success_distance, 0.1, 100.0)


class NavigationPlay:
    """Walk to what the instruction names, within ``success_distance`` metres, in at most ``max_steps`` actions.

    Pays ``success_reward`` there, ``format_reward`` for each valid and well-formed response, and ``state_reward`` for what
    it says of where the target is: ``target at (3, 2)`` is 3 metres away in the direction of two o'clock.
    """

    instant = False

    def __init__(self, store: MediaStore, simulator: Simulator, settings: NavigationSettings) -> None:
        self.store, self.simulator, self.settings = store, simulator, settings
        full = settings.prompt == "full"
        current = settings.action_names == CURRENT_ACTIONS[0]
        names, tag, separator = (CURRENT_ACTIONS, "action", "|") if current else (ACTIONS, "answer", ",")
        form = ResponseFormat(settings.response_format or ("free_think" if full else "no_think"), tag, settings.grammar)
        self.grammar = ActionGrammar(names, settings.max_actions_per_turn, form, separator=separator)
        self.prompts = ActionPrompts(self.grammar, full=full)
        described = described_parts(settings.name, form, settings.state_reward)
        self.pay = TurnPay({"success": settings.success_reward, "format": settings.format_reward, **described})
        self._instruction = ""
        self._seed = self._turn = self._steps = 0
        self._over = True

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """Begin the task of a seed."""
        self._seed, self._turn, self._steps = seed, 0, 0
        self._instruction = self.simulator.start(seed)
        self._over = False
        return (system(self._rules()),), self._shown(f"{self._instruction}\n{self.prompts.opening()}".strip())

    def step(self, response: str) -> StepResult:
        """Take the actions that a response names, until the target is near or the last of them."""
        self._open()
        asked = self.grammar.read(response)
        if self.settings.grammar == "vagen" and not asked.well_formed:
            asked = ActionTurn((), asked.sections)  # VAGEN's navigation, unlike its other environments, then does nothing
        before, made, worked, near = self._state(), 0, True, False
        for action in asked.actions:
            worked = self.simulator.act(action)
            made, self._steps = made + 1, self._steps + 1
            near = self.simulator.target()[0] <= self.settings.success_distance
            if near or self._steps >= self.settings.max_steps:
                break
        self._turn += 1
        out = self._turn >= self.settings.max_turns or self._steps >= self.settings.max_steps
        truncated = not near and out
        self._over = near or truncated
        taken = self.grammar.spell(asked.actions[:made])
        described = judged(asked, before, self._state(), self.pay.worth)
        pay = self.pay.of(success=near, format=asked.well_formed and asked.valid, **described)
        told = "" if worked else "The last action did not work: something is in the way."
        words = "\n".join(filter(None, [self._instruction, told, self.prompts.after(taken)]))
        shown = None if self._over else self._shown(words)
        distance = round(self.simulator.target()[0], 3)
        return turn_result(
            asked, taken, shown, pay, truncated=truncated, success=near, distance=distance, worked=worked, **described
        )

    def demonstrate(self) -> str:
        """The next actions towards the target: turn until it is ahead, then walk."""
        self._open()
        actions = self.simulator.way()[: self.grammar.most_actions]
        now, then = describe(self._state()), describe(_place(*self.simulator.ahead(actions)))
        reason = f"The target is reached by {self.grammar.spell(actions)}."
        return self.grammar.write(actions, think=reason, observation=now, reasoning=reason, prediction=then)

    def close(self) -> None:
        """Give the simulator back."""
        self.simulator.close()

    def _open(self) -> None:
        if self._over:
            raise EnvironmentFailure(f"{self.settings.name}: the walk is over (or has not begun); reset it first.")

    def _state(self) -> State:
        """Where the target is."""
        return _place(*self.simulator.target())

    def _shown(self, words: str) -> Observation:
        pixels = self.simulator.look()
        if self.settings.view == "blank":
            pixels = pixels * 0 + 127
        origin = f"{self.settings.name} seed {self._seed} turn {self._turn}"
        return sight(words, self.store.put(encode_png(pixels), "picture", origin))

    def _rules(self) -> str:
        states = ""
        if self.settings.state_reward and {"observation", "prediction"} & set(self.pay.worth):
            states = (
                "\nSay where the target is by its distance in metres and its direction on the clock, 12 being straight "
                "ahead and 3 to the right, as in: target at (3, 12)."
            )
        names = self.grammar.names
        explained = (
            "You walk through rooms and see what is before you. Walk to what the instruction names, until it is within "
            f"{self.settings.success_distance:g} metres. {names[0]}, {names[1]}, {names[2]} and {names[3]} take a step "
            f"without turning; {names[4]} and {names[5]} turn you by 90 degrees; {names[6]} and {names[7]} tilt your "
            f"view.{states}"
        )
        reason = "It is straight ahead, and there is floor before me."
        thought = {
            "think": reason,
            "reasoning": reason,
            "observation": "target at (3, 12)",
            "prediction": "target at (2, 12)",
        }
        return self.prompts.rules("Walk to it.", explained, (0, 0), **thought)


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
        success_distance: float = 1.5,
        step_length: float = 0.5,
        max_turns: int = 10,
        max_steps: int = 30,
        max_actions_per_turn: int = 5,
        view: Literal["picture", "blank"] = "picture",
        prompt: Literal["short", "full"] = "short",
        response_format: str = "",
        success_reward: float = 10.0,
        format_reward: float = 0.5,
        state_reward: float = 0.0,
        action_names: Literal["moveahead", "move_forward"] = "moveahead",
        grammar: Literal["own", "vagen"] = "own",
    ) -> None:
        refuse_missing()
        within(NAME, "room_size", room_size, 3.0, 50.0)
        within(NAME, "things", things, 1, 10)
        within(NAME, "side", side, 16, 1024)
        within(NAME, "field_of_view", field_of_view, 10.0, 150.0)
        within(NAME, "step_length", step_length, 0.1, 0.7)
        one_of(NAME, "rooms", str(rooms), ["1", "4"])
        across = (room_size if rooms == 1 else 2 * room_size + 2) / step_length
        within(NAME, "room_size (all rooms, in steps across)", round(across), 1, MOST_ACROSS)
        settings = NavigationSettings(
            NAME, max_turns, max_steps, max_actions_per_turn, success_distance, view, prompt, response_format,
            success_reward, format_reward, state_reward, action_names, grammar,
        )  # fmt: skip
        kind = (rooms, float(room_size), things, float(success_distance), float(step_length))
        super().__init__(store, SceneSimulator(kind, side, field_of_view), settings)

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """What the seed leads to: what stands where, and where the walker stands and looks."""
        rooms, size, things, near, step = (options.get(key, value) for key, value in DEFAULTS.items())
        scene = scene_of(rooms, float(size), things, float(near), float(step), seed)
        return repr((scene.rooms, scene.things, scene.start))


class SceneSimulator:
    """Scenes of seeds, looked at through MiniWorld. ``kind`` is what ``scene_of`` takes before the seed."""

    def __init__(self, kind: tuple[int, float, int, float, float], side: int, degrees: float) -> None:
        self.kind, self.side, self.degrees = kind, side, degrees
        self._scene: Scene | None = None
        self._pose = Pose((0.0, 0.0), 0.0)

    def start(self, seed: int) -> str:
        """The scene of a seed."""
        self._scene = scene_of(*self.kind, seed)
        self._pose = self._scene.start
        return f"Walk to the {self._scene.target.name}."

    def act(self, action: int) -> bool:
        """Walk, turn or tilt the view."""
        self._pose, worked = self.scene.after(self._pose, action, self.kind[4])
        return worked

    def target(self) -> tuple[float, float]:
        """Distance and bearing of the target."""
        return self.scene.distance(self._pose), self.scene.bearing(self._pose)

    def look(self) -> Pixels:
        """What is seen."""
        return view(self.scene, self._pose, self.side, self.degrees)

    def way(self) -> tuple[int, ...]:
        """Turn until the target is ahead, then walk the shortest way."""
        bearing = self.scene.bearing(self._pose)
        if abs(bearing) > 45:
            return (RIGHT,) if bearing > 0 else (LEFT,)
        return self.scene.way(self._pose, self.kind[3], self.kind[4])

    def ahead(self, actions: tuple[int, ...]) -> tuple[float, float]:
        """Distance and bearing after some actions."""
        pose = self._pose
        for action in actions:
            pose, _ = self.scene.after(pose, action, self.kind[4])
        return self.scene.distance(pose), self.scene.bearing(pose)

    def close(self) -> None:
        """Nothing is held: the renderer is shared."""

    @property
    def scene(self) -> Scene:
        """The scene that was started."""
        if self._scene is None:
            raise EnvironmentFailure(f"{NAME}: it has not begun; reset it first.")
        return self._scene


def _place(distance: float, bearing: float) -> State:
    """Distance and bearing as descriptions name them: whole metres, and hours of the clock."""
    hour = round(bearing / 30) % 12
    return {"target": frozenset([(round(distance), hour or 12)])}
