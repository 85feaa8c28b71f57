"""MiniWorld as the renderer of scenes: one thread of the process owns it, and every picture is drawn there.

Invariant: OpenGL's state belongs to a thread, and MiniWorld's environments share one display list, so with environments in
several threads pictures are silently wrong. Here one thread makes and uses all of it; others hand it a scene and a pose.
"""

import math
import os
import queue
import sys
import threading
from concurrent.futures import Future
from contextlib import redirect_stdout
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sensorium.envs.navigation.scenes import Pose, Scene
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.plain import words

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
