"""Navigation in the rooms of AI2-THOR (``pip install 'sensorium[ai2thor]'``): VAGEN's tasks, by its own task files.

A task file is JSON, as VAGEN ships them (``base.json``, ``common_sense.json``, …):

    {"tasks": [{"scene": "FloorPlan11", "instruction": "navigate to the Bread …", "target_position": {"x": …, "z": …},
                "agentPose": {"position": {"x": …, "y": …, "z": …}, "rotation": 90, "horizon": 0}}]}

AI2-THOR starts a Unity program of its own, which it downloads once (x86 Linux with Vulkan, or macOS).
"""

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from sensorium.data.media_files import open_regular
from sensorium.data.media_store import MediaStore
from sensorium.envs.navigation import NavigationPlay, Pixels, WalkOptions
from sensorium.envs.protocol import within
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.plain import strict_json, words

NAME = "ai2thor"
MOVES = ("MoveAhead", "MoveBack", "MoveRight", "MoveLeft")
TURNS = (("RotateRight", 90), ("RotateLeft", 90), ("LookUp", 30), ("LookDown", 30))
START_S = 300.0


class ThorNavigation(NavigationPlay):
    """Navigation in AI2-THOR. ``tasks`` is a task file; the seed, counted round, chooses one of its tasks.

    ``{eval_set}`` in its path stands for the option of that name, so that clients and files choose among VAGEN's files.
    ``platform`` is a class of ai2thor.platform (CloudRendering draws without a display) or empty for its own choice. The
    controller is started when the first task begins.
    """

    recipe_only = ("tasks", "platform", "gpu_device")

    def __init__(
        self,
        store: MediaStore,
        tasks: str,
        platform: str = "CloudRendering",
        gpu_device: int = 0,
        resolution: int = 255,
        fov: float = 100.0,
        step_length: float = 0.5,
        eval_set: str = "base",
        **walk: Unpack[WalkOptions],
    ) -> None:
        self._tasks = task_list(task_file(tasks, eval_set))
        within(NAME, "resolution", resolution, 16, 4096)
        within(NAME, "fov", fov, 10.0, 170.0)
        within(NAME, "step_length", step_length, 0.01, 5.0)
        options: dict[str, Any] = {"prompt": "full", **walk}
        super().__init__(NAME, store, **options)
        self._platform, self._step_length = platform, step_length
        self._camera = {"width": resolution, "height": resolution, "fieldOfView": fov, "gpu_device": gpu_device}
        self._controller: Any = None
        self._task: Mapping[str, Any] = {}

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        listed = task_list(task_file(str(options["tasks"]), str(options.get("eval_set", "base"))))
        return json.dumps(listed[seed % len(listed)], sort_keys=True)

    def close(self) -> None:
        controller, self._controller = self._controller, None
        if controller is not None:
            controller.stop()

    def _start(self, seed: int) -> str:
        self._task = self._tasks[seed % len(self._tasks)]
        if self._controller is None:
            self._controller = self._started()
        pose = self._task["agentPose"]
        try:
            self._controller.reset(scene=self._task["scene"])
            event = self._controller.step(
                action="Teleport",
                position={axis: pose["position"][axis] for axis in "xyz"},
                rotation={"x": 0, "y": pose["rotation"], "z": 0},
                horizon=pose["horizon"],
                standing=True,
            )
        except Exception as error:  # whatever the controller raises when Unity fails
            raise EnvironmentFailure(f"{NAME}: scene '{self._task['scene']}' cannot be started: {words(error)}") from error
        if not event.metadata["lastActionSuccess"]:
            raise EnvironmentFailure(f"{NAME}: the agent does not fit where the task of seed {seed} begins.")
        return str(self._task["instruction"])

    def _act(self, action: int) -> bool:
        if action < len(MOVES):
            event = self._controller.step(action=MOVES[action], moveMagnitude=self._step_length)
        else:
            name, degrees = TURNS[action - len(MOVES)]
            event = self._controller.step(action=name, degrees=degrees)
        return bool(event.metadata["lastActionSuccess"])

    def _target(self, actions: tuple[int, ...] = ()) -> tuple[float, float]:
        """Distance on the floor, and bearing: AI2-THOR counts rotation clockwise from +z."""
        agent, goal = self._controller.last_event.metadata["agent"], self._task["target_position"]
        x, z = goal["x"] - agent["position"]["x"], goal["z"] - agent["position"]["z"]
        bearing = math.degrees(math.atan2(x, z)) - agent["rotation"]["y"]
        return math.hypot(x, z), (bearing + 180) % 360 - 180

    def _look(self) -> Pixels:
        return np.ascontiguousarray(self._controller.last_event.frame[..., :3], np.uint8)

    def _started(self) -> Any:
        try:
            from ai2thor import platform as platforms
            from ai2thor.controller import Controller
        except ImportError as error:
            raise RecipeError(f"{NAME}: it is not installed ({error}); use: pip install 'sensorium[ai2thor]'.") from error
        if self._platform and not hasattr(platforms, self._platform):
            raise RecipeError(f"{NAME}: ai2thor.platform has no '{self._platform}'; there is CloudRendering, or Linux64.")
        chosen = {"platform": getattr(platforms, self._platform)} if self._platform else {}
        try:
            return Controller(
                agentMode="default",
                gridSize=0.1,
                visibilityDistance=10,
                renderDepthImage=False,
                renderInstanceSegmentation=False,
                server_timeout=START_S,
                server_start_timeout=START_S,
                **chosen,
                **self._camera,
            )
        except Exception as error:  # no build for this machine, no Vulkan, no network to fetch the build from
            raise RecipeError(
                f"{NAME}: the controller cannot be started: {words(error)}. It needs its Unity build (fetched once by "
                "network) and, for CloudRendering, x86 Linux with Vulkan (libvulkan1)."
            ) from error


def task_file(tasks: str, eval_set: str) -> str:
    """The path of the task file of an ``eval_set``: a name, never a path of its own."""
    if not re.fullmatch(r"\w{1,60}", eval_set):
        raise RecipeError(f"{NAME}: eval_set is the name of a task file, not {eval_set!r:.60}.")
    if "{eval_set}" not in tasks and eval_set not in ("base", Path(tasks).stem):
        raise RecipeError(
            f"{NAME}: eval_set '{eval_set}' was requested, but tasks names one file, '{tasks}'. Write {{eval_set}} in it."
        )
    return tasks.replace("{eval_set}", eval_set)


@lru_cache(maxsize=16)
def task_list(path: str) -> tuple[Mapping[str, Any], ...]:
    """The tasks of a file; a malformed one is refused by its number."""
    try:
        with open_regular(Path(path)) as file:
            held = strict_json(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{NAME}: the task file '{path}' cannot be read: {error}") from error
    listed = held.get("tasks") if isinstance(held, Mapping) else None
    if not isinstance(listed, list) or not listed:
        raise RecipeError(f"{NAME}: '{path}' holds no list 'tasks'.")
    for number, task in enumerate(listed):
        try:
            pose, goal = task["agentPose"], task["target_position"]
            wanted = [*(pose["position"][axis] for axis in "xyz"), pose["rotation"], pose["horizon"], goal["x"], goal["z"]]
            right = all(isinstance(value, int | float) and abs(value) < math.inf for value in wanted)
            right = right and isinstance(task["scene"], str) and isinstance(task["instruction"], str)
        except (KeyError, TypeError):
            right = False
        if not right:
            raise RecipeError(f"{NAME}: task {number} of '{path}' needs scene, instruction, agentPose, target_position.")
    return tuple(listed)
