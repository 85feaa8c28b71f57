"""Primitive skills: a robot arm picks, places and pushes things on a table, simulated by ManiSkill.

pick(x, y, z)                   open, go above the place, down to it, close, up again
place(x, y, z)                  go above the place, down to it, open, up again
push(x1, y1, z1, x2, y2, z2)    close, go down to the first place, along to the second, up again
"""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from sensorium.data.media_store import MediaStore
from sensorium.envs.actions import ActionTurn, PlayedTurn, State, TurnEnvironment, TurnOptions, observation_of
from sensorium.envs.adapters.content import picture
from sensorium.envs.protocol import Observation, StepResult, within
from sensorium.vocabulary.content import Message, system
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.plain import words

NAME = "primitive_skill"
NUMBERS = {"pick": 3, "place": 3, "push": 6}
SKILL = re.compile(r"(pick|place|push)\s*\(([^()]{0,200})\)", re.IGNORECASE)
MAX_CHARACTERS = 2000
MAX_MILLIMETRES = 10_000
CELL_MM = 50
FURNITURE = ("table", "ground", "goal_site")

OPEN, CLOSED = 1.0, -1.0  # what ManiSkill's gripper controller takes
STRIDE = 0.1  # metres of a full move of its controller pd_ee_delta_pos
ABOVE, NEAR, MAX_MOVES, GRIP_MOVES = 0.1, 0.006, 60, 8

INSTRUCTIONS = {
    "StackCube-v1": "Put the red cube on top of the green cube and let go of it.",
    "PickCube-v1": "Pick the cube up and hold it at the goal.",
    "PushCube-v1": "Push the cube onto the goal region.",
}
RULES = (
    "You control a robot arm over a table by skills, in millimetres: pick(x, y, z) grasps what is there, place(x, y, z) "
    "puts down what is held, push(x1, y1, z1, x2, y2, z2) pushes from one place to another. z is up. A place is the middle "
    "of a thing; when you put one onto another, aim higher. You are told where things are, and see which is which."
)

Vector = NDArray[np.float64]
_probes = threading.local()  # environments that content_key resets


@dataclass(frozen=True)
class Skill:
    """One call of a skill, its numbers in millimetres."""

    name: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.numbers))})"


def skills_in(answer: str, most: int) -> tuple[Skill, ...]:
    """The calls of an answer, separated by | , ; or lines; none at all where one cannot be read or there are too many."""
    if len(answer) > MAX_CHARACTERS:
        return ()
    found = list(SKILL.finditer(answer))
    between = SKILL.sub("", answer)
    if not 0 < len(found) <= most or re.sub(r"[\s|,;]", "", between):
        return ()
    skills = []
    for call in found:
        name, given = call[1].lower(), [number.strip() for number in call[2].split(",")]
        if len(given) != NUMBERS[name] or not all(re.fullmatch(r"[-+]?\d{1,6}(\.\d{0,6})?", number) for number in given):
            return ()
        skills.append(Skill(name, tuple(round(float(number)) for number in given)))
    within = all(abs(number) <= MAX_MILLIMETRES for skill in skills for number in skill.numbers)
    return tuple(skills) if within else ()


def first_skills(answer: str, most: int) -> tuple[tuple[Skill, ...], bool]:
    """As VAGEN reads them: the first ``most`` calls between |, up to one that cannot be read; and whether there is one."""
    skills: list[Skill] = []
    for part in [part for part in answer[:MAX_CHARACTERS].split("|") if part.strip()][:most]:
        if not (read := skills_in(part, 1)):
            return tuple(skills), True
        skills += read
    return tuple(skills), False


class Arm:
    """The arm of a ManiSkill environment (unbatched, as CPUGymWrapper gives it). ``info`` is of its last step."""

    def __init__(self, environment: Any, info: Any) -> None:
        self._environment, self.info = environment, info
        self.terminated = self.truncated = False

    def perform(self, skill: Skill) -> bool:
        """Carry a skill out; returns whether the gripper reached the places it was sent to."""
        places = np.array(skill.numbers, np.float64).reshape(-1, 3) / 1000.0
        above = np.array([0.0, 0.0, ABOVE])
        first, last = places[0], places[-1]
        if skill.name == "push":
            grips, down, along = (CLOSED, CLOSED), [], [first + above, first, last, last + above]
        else:
            grips = (OPEN, CLOSED) if skill.name == "pick" else (CLOSED, OPEN)
            down, along = [first + above, first], [first + above]
        reached = all(self._to(place, grips[0]) for place in down)
        gripped = all(self._move(np.zeros(3), grips[1]) for _ in range(GRIP_MOVES))
        return reached & gripped & all(self._to(place, grips[1]) for place in along)

    def _to(self, place: Vector, grip: float) -> bool:
        for _ in range(MAX_MOVES):
            off = place - self._at()
            if np.abs(off).max() < NEAR:
                return True
            if not self._move(np.clip(off / STRIDE, -1.0, 1.0), grip):
                return False
        return bool(np.abs(place - self._at()).max() < 5 * NEAR)

    def _move(self, towards: Vector, grip: float) -> bool:
        if self.truncated:
            return False
        action = np.append(towards, grip).astype(np.float32)
        _, _, terminated, truncated, self.info = self._environment.step(action)
        self.terminated, self.truncated = bool(terminated), bool(truncated)
        return not self.truncated

    def _at(self) -> Vector:
        return vector(self._environment.unwrapped.agent.tcp.pose.p)


def vector(batch: Any) -> Vector:
    """The first row of a batch of positions, whatever it is held in."""
    held = batch.cpu().numpy() if hasattr(batch, "cpu") else batch
    return np.asarray(held, np.float64).reshape(-1, 3)[0]


class PrimitiveSkills(TurnEnvironment):
    """A task of ManiSkill (``id``), played by skills: up to ``max_actions_per_turn`` a response, ``max_steps`` in all.

    Gives ``stage_reward`` for each stage that is newly reached (``stage_N_success`` of the task's info, as VAGEN's tasks
    have it) and ``success_reward``. A description of the state has places by cells of 50 mm, counted from the corner of
    ``workspace`` (least x and least y).
    """

    instant = False
    recipe_only = ("id", "modules", "make", "render_backend")

    def __init__(
        self,
        store: MediaStore,
        id: str = "StackCube-v1",
        modules: Sequence[str] = (),
        make: Mapping[str, Any] | None = None,
        render_backend: str = "gpu",
        instruction: str = "",
        workspace: Sequence[int] = (-300, 300, -300, 300, 0, 400),
        max_steps: int = 10,
        max_actions_per_turn: int = 2,
        success_reward: float = 10.0,
        stage_reward: float = 2.0,
        **play: Unpack[TurnOptions],
    ) -> None:
        within(NAME, "max_steps", max_steps, 1, 10**6)
        within(NAME, "max_actions_per_turn", max_actions_per_turn, 1, 10**6)
        if len(workspace) != 6 or not all(low < high for low, high in zip(workspace[::2], workspace[1::2], strict=True)):
            raise RecipeError(f"{NAME}: workspace is least and largest x, y and z in millimetres, not {list(workspace)}.")
        options: dict[str, Any] = {"prompt": "full", **play}
        rewards = {"success": success_reward, "stage": stage_reward}
        super().__init__(NAME, store, ["picture", "text"], rewards, **options)
        self.id, self.max_steps, self.most = id, max_steps, max_actions_per_turn
        self.instruction = instruction or INSTRUCTIONS.get(id, "")
        self._workspace = tuple(workspace)
        self._making = (id, tuple(modules), dict(make or {}), render_backend)
        self._environment: Any = None
        self._arm: Arm | None = None
        self._steps = self._stage = 0

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """Where things are. One environment per thread is reset for it."""
        key = repr(sorted((name, repr(value)) for name, value in options.items()))
        held: dict[str, PrimitiveSkills] = _probes.__dict__.setdefault("held", {})
        if key not in held:
            held[key] = cls(MediaStore(), **options)
        held[key]._begin(seed)
        return f"{options.get('id', 'StackCube-v1')} {held[key]._positions()}"

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self._begin(seed)
        self._seed, self._turn, self._steps, self._over = seed, 0, 0, False
        return (system(self._rules()),), self._shown("")

    def step(self, response: str) -> StepResult:
        self._refuse_over()
        assert self._arm is not None
        parsed = self.format.parse(response)
        skills, unknown = skills_in(parsed.answer or "", self.most), False
        if self.format.grammar == "vagen":
            skills, unknown = first_skills(parsed.answer or "", self.most)
        before, made, worked = self._state(), 0, True
        for skill in skills[: self.max_steps - self._steps]:
            worked = self._arm.perform(Skill(skill.name, self._clipped(skill.numbers)))
            made, self._steps = made + 1, self._steps + 1
            if self._success() or self._arm.truncated:
                break
        success = self._success()
        reached, self._stage = max(0, self._stages() - self._stage), max(self._stage, self._stages())
        taken = " | ".join(map(str, skills[:made]))
        done = f"You did: {taken}." if taken else "That was no valid answer; nothing was done."
        info: dict[str, Any] = {"actions": taken, "worked": worked, "stage": self._stage}
        cut = self._steps >= self.max_steps or self._arm.truncated
        played = PlayedTurn(made, success, success, {"success": success, "stage": reached}, info, cut)
        asked = ActionTurn((0,) if skills else (), parsed.sections, parsed.well_formed, unknown)
        return self._turn_result(asked, played, before, self._state(), lambda: self._shown(done))

    def demonstrate(self) -> str:
        raise EnvironmentFailure(f"{NAME}: there is no demonstration; warm start from rows that have one.")

    def close(self) -> None:
        environment, self._environment, self._arm = self._environment, None, None
        if environment is not None:
            environment.close()

    def _begin(self, seed: int) -> None:
        if self._environment is None:
            self._environment = _made(*self._making)
        _, info = self._environment.reset(seed=seed)
        self._arm = Arm(self._environment, info)
        self._stage = self._stages()

    def _success(self) -> bool:
        assert self._arm is not None
        return bool(np.asarray(self._arm.info.get("success", False)).any())

    def _stages(self) -> int:
        """How many stages are reached, by the last of them."""
        assert self._arm is not None
        reached = [key for key, value in self._arm.info.items() if bool(np.asarray(value).any())]
        marks = (re.fullmatch(r"stage_(\d+)_success", str(key)) for key in reached)
        return max((int(mark[1]) + 1 for mark in marks if mark), default=0)

    def _positions(self) -> dict[str, tuple[int, int, int]]:
        """Where things are, in millimetres."""
        actors = self._environment.unwrapped.scene.actors
        kept = sorted(name for name in actors if not str(name).startswith(FURNITURE))
        rounded = {name: np.round(vector(actors[name].pose.p) * 1000).astype(int).tolist() for name in kept}
        return {name: (x, y, z) for name, (x, y, z) in rounded.items()}

    def _state(self) -> State:
        low_x, _, low_y = self._workspace[:3]
        return {
            name: frozenset([(max(0, (x - low_x) // CELL_MM), max(0, (y - low_y) // CELL_MM))])
            for name, (x, y, _) in self._positions().items()
        }

    def _clipped(self, numbers: Sequence[int]) -> tuple[int, ...]:
        bounds = self._workspace
        return tuple(min(max(n, bounds[2 * (i % 3)]), bounds[2 * (i % 3) + 1]) for i, n in enumerate(numbers))

    def _shown(self, done: str) -> Observation:
        own = getattr(self._environment.unwrapped, "instruction", None)
        asked = str(own()) if callable(own) and not self.instruction else self.instruction
        places = f"Things are at {', '.join(map(str, self._positions().values()))}."
        text = "\n".join(filter(None, [done, asked, places, self._form() if self.full else ""]))
        if self.view == "text":
            return observation_of("", text)
        try:
            rendered = self._environment.render()
        except Exception as error:  # the renderer needs Vulkan
            raise EnvironmentFailure(f"{NAME}: '{self.id}' cannot be drawn: {words(error)}; use view: text.") from error
        return observation_of(text, picture(self.store, rendered, f"{self.id} seed {self._seed} turn {self._turn}"))

    def _form(self) -> str:
        many = f"up to {self.most} skills, separated by |" if self.most > 1 else "one skill"
        return f"Answer with {many}, in this form:\n{self.format.shown('your skills')}"

    def _rules(self) -> str:
        if not self.full:
            return "Move things on the table."
        low_x, high_x, low_y, high_y, low_z, high_z = self._workspace
        room = f"x lies between {low_x} and {high_x}, y between {low_y} and {high_y}, z between {low_z} and {high_z}."
        states = ""
        if self._rewards_descriptions:
            things = list(self._positions())
            states = (
                f"\nSay where things are ({', '.join(things)}) by cells of {CELL_MM} mm, counted from x {low_x} and "
                f"y {low_y}, as in: {things[0] if things else 'cube'} at (3, 5)."
            )
        reason = "The cube is on the left; I put it on the other one."
        example = self.format.write("pick(62, -55, 20) | place(75, 33, 60)", think=reason, reasoning=reason)
        return f"{RULES} {room}{states}\n{self._form()}\nFor example: {example}"


def _made(id: str, modules: Sequence[str], make: Mapping[str, Any], render_backend: str) -> Any:
    try:
        import gymnasium
        import mani_skill.envs  # noqa: F401  it registers the tasks
        from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper
    except ImportError as error:
        raise RecipeError(
            f"{NAME}: ManiSkill is not installed ({error}); use: pip install 'sensorium[maniskill]' on x86 Linux (its "
            "dependency mplib has no ARM build)."
        ) from error
    try:
        for module in modules:
            import_module(module)
        settings = {"num_envs": 1, "obs_mode": "state", "control_mode": "pd_ee_delta_pos", "render_mode": "rgb_array"}
        backends = {"sim_backend": "cpu", "render_backend": render_backend, "robot_uids": "panda"}
        return CPUGymWrapper(gymnasium.make(id, **{**settings, **backends, "max_episode_steps": 10_000, **make}))
    except Exception as error:  # no such task, no Vulkan, no graphics card
        raise RecipeError(f"{NAME}: '{id}' cannot be made: {words(error)}") from error
