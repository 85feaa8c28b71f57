"""Skills of an arm: ``pick(62, -55, 20)`` and the like, in millimetres, carried out by small moves of the gripper.

pick(x, y, z)     open, go above the place, down to it, close, up again
place(x, y, z)    go above the place, down to it, open, up again
push(x1, y1, z1, x2, y2, z2)    close, go down to the first place, along to the second, up again
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMBERS = {"pick": 3, "place": 3, "push": 6}
MOST_CHARACTERS = 2000
MOST_MILLIMETRES = 10_000
SKILL = re.compile(r"(pick|place|push)\s*\(([^()]{0,200})\)", re.IGNORECASE)

OPEN, CLOSED = 1.0, -1.0
"""What ManiSkill's gripper controller takes."""
STRIDE = 0.1
"""Metres of a full move of its controller pd_ee_delta_pos."""
ABOVE, NEAR, MOST_MOVES, GRIP_MOVES = 0.1, 0.006, 60, 8

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Skill:
    """One call of a skill, its numbers in millimetres."""

    name: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.numbers))})"


def skills_in(answer: str, most: int) -> tuple[Skill, ...]:
    """The calls of an answer, separated by | , ; or lines; none at all where one cannot be read or there are too many."""
    if len(answer) > MOST_CHARACTERS:
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
    within = all(abs(number) <= MOST_MILLIMETRES for skill in skills for number in skill.numbers)
    return tuple(skills) if within else ()


def first_skills(answer: str, most: int) -> tuple[tuple[Skill, ...], bool]:
    """As VAGEN reads them: the first ``most`` calls between |, up to one that cannot be read; and whether there is one."""
    skills: list[Skill] = []
    for part in [part for part in answer[:MOST_CHARACTERS].split("|") if part.strip()][:most]:
        if not (read := skills_in(part, 1)):
            return tuple(skills), True
        skills += read
    return tuple(skills), False


class Arm:
    """The arm of a ManiSkill environment (unbatched, as CPUGymWrapper gives it). ``info`` is what its last step said."""

    def __init__(self, environment: Any, info: Any) -> None:
        self._environment, self.info = environment, info
        self.terminated = self.truncated = False

    def perform(self, skill: Skill) -> bool:
        """Carry a skill out; returns whether the gripper came to where it was sent."""
        places = np.array(skill.numbers, np.float64).reshape(-1, 3) / 1000.0
        above = np.array([0.0, 0.0, ABOVE])
        if skill.name == "pick":
            return (
                self._through([places[0] + above, places[0]], OPEN)
                & self._grip(CLOSED)
                & self._through([places[0] + above], CLOSED)
            )
        if skill.name == "place":
            return (
                self._through([places[0] + above, places[0]], CLOSED)
                & self._grip(OPEN)
                & self._through([places[0] + above], OPEN)
            )
        down = [places[0] + above, places[0]]
        return self._grip(CLOSED) & self._through([*down, places[1], places[1] + above], CLOSED)

    def _through(self, places: Sequence[Vector], grip: float) -> bool:
        return all(self._to(place, grip) for place in places)

    def _to(self, place: Vector, grip: float) -> bool:
        for _ in range(MOST_MOVES):
            off = place - self._at()
            if np.abs(off).max() < NEAR:
                return True
            if not self._move(np.clip(off / STRIDE, -1.0, 1.0), grip):
                return False
        return bool(np.abs(place - self._at()).max() < 5 * NEAR)

    def _grip(self, grip: float) -> bool:
        return all(self._move(np.zeros(3), grip) for _ in range(GRIP_MOVES))

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
