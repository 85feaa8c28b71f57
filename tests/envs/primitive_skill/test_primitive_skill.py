"""Primitive skills: what is read of an answer, and an arm that moves things in a stand-in with the shape of ManiSkill."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.data.environment_tasks import EnvironmentTasks
from sensorium.data.media_store import MediaStore
from sensorium.envs.primitive_skill import Skill, skills_in
from sensorium.recipe.registry import build
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError


class Table(gymnasium.Env):
    """A gripper and two cubes, with batched positions and info as ManiSkill has them; closed, it holds what is in it."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str = "", **options: Any) -> None:
        assert options["control_mode"] == "pd_ee_delta_pos"
        assert options["num_envs"] == 1
        self.render_mode = render_mode
        self.action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        self.observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.tcp = np.array([0.0, 0.0, 0.2])
        xy = self.np_random.integers(-10, 10, 2) / 100
        self.cubes = {"cubeA": np.array([*xy, 0.02]), "cubeB": np.array([xy[0] + 0.15, xy[1], 0.02])}
        self.held = ""
        poses = {name: SimpleNamespace(pose=_Pose(self, name)) for name in ("cubeA", "cubeB", "table-workspace")}
        self.scene = SimpleNamespace(actors=poses)
        self.agent = SimpleNamespace(tcp=SimpleNamespace(pose=_Pose(self, "")))
        return np.zeros(1, np.float32), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        moved = np.asarray(action[:3], float) * 0.1
        self.tcp = self.tcp + moved
        if action[3] < 0 and not self.held:
            self.held = next((name for name, at in self.cubes.items() if np.abs(at - self.tcp).max() < 0.02), "")
        if action[3] > 0:
            if self.held:
                self.cubes[self.held][2] = 0.06 if self.held == "cubeA" and self._over() else 0.02
            self.held = ""
        if self.held:
            self.cubes[self.held] = self.tcp.copy()
        return np.zeros(1, np.float32), 0.0, False, False, self._info()

    def render(self) -> Any:
        return np.full((32, 32, 3), int(abs(self.tcp[0]) * 500) % 256, np.uint8)

    def _over(self) -> bool:
        return bool(np.abs(self.cubes["cubeA"] - self.cubes["cubeB"])[:2].max() < 0.02)

    def _info(self) -> dict[str, Any]:
        stacked = not self.held and self._over()
        return {"stage_0_success": np.array(self.held == "cubeA" or stacked), "success": np.array(stacked)}


class _Pose:
    def __init__(self, table: Table, name: str) -> None:
        self.table, self.name = table, name

    @property
    def p(self) -> Any:
        import torch

        return torch.tensor(np.array([self.table.cubes.get(self.name, self.table.tcp)]))


@pytest.fixture
def maniskill(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = [
        "mani_skill",
        "mani_skill.envs",
        "mani_skill.utils",
        "mani_skill.utils.wrappers",
        "mani_skill.utils.wrappers.gymnasium",
    ]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].CPUGymWrapper = gymnasium.Wrapper  # type: ignore[attr-defined]
    sys.modules["mani_skill"].envs = sys.modules["mani_skill.envs"]  # type: ignore[attr-defined]
    gymnasium.register("StackCube-v1", Table, disable_env_checker=True, order_enforce=False)
    yield
    gymnasium.registry.pop("StackCube-v1")


def test_cubes_are_stacked_by_skills_and_paid_by_stage(maniskill: None) -> None:
    environment = build(
        "environment", "primitive_skill", {"response_format": "grounding", "state_reward": 1.0}, "x", store=MediaStore()
    )
    head, first = environment.reset(3)
    assert "x lies between -300 and 300" in head[0].content[0].text
    assert isinstance(first.messages[0].content[-1], Media)
    (ax, ay, az), (bx, by, bz) = environment._positions().values()
    assert f"Things are at ({ax}, {ay}, {az}), ({bx}, {by}, {bz})." in first.messages[0].content[0].text
    said = f"cubeA at ({(ax + 300) // 50}, {(ay + 300) // 50}); cubeB at (0, 0)"
    form = "<think><observation>{}</observation><reasoning>so</reasoning></think><answer>{}</answer>"
    lifted = environment.step(form.format(said, f"pick({ax}, {ay}, {az})"))
    assert lifted.reward == {"success": 0.0, "stage": 2.0, "format": 0.5, "observation": 0.5}
    assert environment._positions()["cubeA"][2] == pytest.approx(az + 100, abs=7)
    placed = environment.step(form.format("", f"place({bx},{by},{bz + 40})"))
    assert (placed.reward["success"], placed.reward["stage"], placed.success, placed.done) == (10.0, 0.0, True, True)
    with pytest.raises(EnvironmentFailure, match="reset it first"):
        environment.step("")
    environment.close()


def test_what_is_no_skill_does_nothing_and_skills_are_counted(maniskill: None) -> None:
    environment = build(
        "environment", "primitive_skill", {"max_steps": 3, "view": "text", "prompt": "short"}, "x", store=MediaStore()
    )
    environment.reset(0)
    nothing = environment.step("<answer>fly(1, 2, 3)</answer>")
    assert (nothing.reward, nothing.info["valid"]) == ({"success": 0.0, "stage": 0.0, "format": 0.0}, False)
    environment.step("<answer>push(0, 0, 50, 10, 10, 50) | pick(9999, 0, 300)</answer>")
    assert environment._environment.unwrapped.tcp[0] == pytest.approx(0.3, abs=0.02)
    last = environment.step("<answer>pick(0, 0, 20)</answer>")
    assert (last.done, last.truncated, last.success) == (True, True, False)


def test_seeds_are_split_by_where_things_are(maniskill: None) -> None:
    store = MediaStore()
    sides = [EnvironmentTasks("primitive_skill", store, {"view": "text"}, side, 5) for side in ("train", "test")]  # type: ignore[arg-type]
    assert not set(sides[0].seeds) & set(sides[1].seeds)


def test_without_maniskill_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    environment = build("environment", "primitive_skill", {}, "x", store=MediaStore())
    with pytest.raises(RecipeError, match=r"pip install 'sensorium\[maniskill\]' on x86 Linux"):
        environment.reset(0)
    with pytest.raises(RecipeError, match="workspace"):
        build("environment", "primitive_skill", {"workspace": [1, 2]}, "x", store=MediaStore())


def test_answers_are_read_as_vagen_writes_them() -> None:
    assert skills_in("pick(62,-55,20)|place(75,33,50)", 2) == (Skill("pick", (62, -55, 20)), Skill("place", (75, 33, 50)))
    assert skills_in(" PUSH( 1, 2,3, 4.0, 5, -6 ) ", 1) == (Skill("push", (1, 2, 3, 4, 5, -6)),)
    for wrong in (
        "",
        "pick(1, 2)",
        "pick(1, 2, x)",
        "pick(1,2,3) place(1,2,3) pick(1,2,3)",
        "then pick(1,2,3)",
        "pick(1e9,2,3)",
    ):
        assert skills_in(wrong, 2) == ()


@given(st.text(max_size=100))
def test_any_answer_is_read(text: str) -> None:
    assert len(skills_in(text, 2)) <= 2
    assert skills_in(f"pick({text})" * 1000, 2) == ()
