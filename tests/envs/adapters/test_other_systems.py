"""Environments written for slime and VAGEN run here as they are."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from sensorium.assembly.playing import EnvironmentMaker
from sensorium.data.environment_tasks import EnvironmentTasks
from sensorium.data.media_store import MediaStore
from sensorium.engines.protocol import Request, Sampling, ScriptedEngine
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import RolloutSection
from sensorium.rollout.play import Attempt, Rollout
from sensorium.systems.geo3k.slime_adapter import SlimeEnvironment
from sensorium.systems.vagen.adapter import VagenEnvironment
from sensorium.vocabulary import EnvironmentSpec, Status, Task
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError

SLIME = """
from PIL import Image


class Env:
    def __init__(self, label, max_turns):
        self.label, self.max_turns, self.turn, self.closed = label, max_turns, 0, False

    def reset(self):
        return {"obs_str": "never shown"}, {}

    def step(self, text):
        self.turn += 1
        if self.label in text:
            return {"obs_str": "right"}, True, {"score": 1.0}
        pictures = {"image": [Image.new("RGB", (32, 32))]}
        observation = {"obs_str": "wrong, look", "role": "tool", "multi_modal_data": pictures}
        return observation, self.turn >= self.max_turns, {"score": 0.0}

    def format_observation(self, observation):
        images = [{"type": "image", "image": i} for l in observation.get("multi_modal_data", {}).values() for i in l]
        return {"role": "user", "content": [*images, {"type": "text", "text": observation["obs_str"]}]}

    def close(self):
        self.closed = True


def build_env(sample, args):
    return Env(sample.label, args.max_turns)
"""


@pytest.fixture
def slime(tmp_path: Path) -> str:
    (tmp_path / "env_geo.py").write_text(SLIME)
    return str(tmp_path / "env_geo.py")


TASK = Task("q", (user("What is x?"),), answer="42")


def test_a_slime_module_plays_a_row(slime: str) -> None:
    async def play() -> None:
        environment = SlimeEnvironment(MediaStore(), TASK, slime, {"max_turns": 2})
        head, first = await environment.reset(0)
        assert (head, first.messages) == ((), TASK.messages)
        result = await environment.step("41")
        assert result.observation is not None
        (message,) = result.observation.messages
        assert (message.role, message.text, len(message.media)) == ("user", "wrong, look", 1)
        assert (result.reward, result.info) == (None, {"valid": True, "score": 0.0})
        result = await environment.step("it is 42")
        assert (result.done, result.observation, result.info["score"]) == (True, None, 1.0)
        inner = environment._environment
        await environment.close()
        assert inner.closed

    asyncio.run(play())


def test_a_slime_module_is_played_by_the_rollout(slime: str, tmp_path: Path) -> None:
    policy = load_policy(str(make_tiny("qwen2_5_vl", tmp_path)), store=MediaStore(), device="cpu")

    def write(request: Request) -> str:
        return ["41", "42"][request.order[-1]]

    maker = EnvironmentMaker(policy.chat.store)
    task = Task("q", TASK.messages, "42", EnvironmentSpec("slime", {"path": slime}))
    rollout = Rollout(policy.chat, ScriptedEngine(policy.chat, write), RolloutSection(max_turns=3), maker)
    (group,) = asyncio.run(rollout.stream([task], 2, Attempt(0, 1), Sampling()).in_order())
    assert [(e.status, e.failure, len(e.turns)) for e in group.episodes] == [(Status.FINISHED, "", 2)] * 2
    rollout.close()


def test_what_is_no_slime_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    for path, problem in ((str(tmp_path / "empty.py"), "no build_env"), ("no.such.module", "cannot be loaded")):
        with pytest.raises(RecipeError, match=problem):
            SlimeEnvironment(MediaStore(), TASK, path)


class Today:
    """A VAGEN environment of today: coroutines, no compute_reward."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.size, self.closed = env_config.get("size", 8), False

    async def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        self.number = seed % 7
        return self._seen("Start <image> of"), {}

    async def system_prompt(self) -> dict[str, Any]:
        return {"obs_str": "Guess the number."}

    async def step(self, action_str: str) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        right = action_str == str(self.number)
        metrics = {"turn_metrics": {"valid": True}, "traj_metrics": {"success": right}}
        return self._seen("Now <image>"), 1.0 if right else -0.1, False, {"metrics": metrics}

    async def close(self) -> None:
        self.closed = True

    def _seen(self, text: str) -> dict[str, Any]:
        shade = (30 * self.number,) * 3
        picture = Image.new("RGB", (self.size, self.size), shade)
        return {"obs_str": text, "multi_modal_input": {"<image>": [picture]}}


class Legacy:
    """A VAGEN environment of the old kind."""

    def __init__(self, config: Any) -> None:
        self.goal = config.goal

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"obs_str": "Start <image>", "multi_modal_data": {"<image>": [Image.new("RGB", (8, 8))]}}, {}

    def system_prompt(self) -> str:
        return "Reach the goal."

    def step(self, llm_raw_response: str) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        done = llm_raw_response == self.goal
        return {"obs_str": "Now"}, 0.5, done, {"metrics": {"traj_metrics": {"success": done}}}

    def compute_reward(self) -> float:
        return 3.0

    def close(self) -> None: ...


class Crooked(Today):
    def _seen(self, text: str) -> dict[str, Any]:
        return {"obs_str": "<image><image>", "multi_modal_input": {"<image>": [Image.new("RGB", (8, 8))]}}


def config(goal: str) -> Any:
    return SimpleNamespace(goal=goal)


def test_a_vagen_class_of_today() -> None:
    async def play() -> None:
        environment = VagenEnvironment(MediaStore(), f"{__name__}:Today", {"size": 12})
        head, first = await environment.reset(10)
        assert head[0].text == "Guess the number."
        (message,) = first.messages
        assert message.text == "Start  of"
        assert environment.store.picture(message.media[0]).size == (12, 12)
        result = await environment.step("1")
        assert (result.done, result.reward, result.success) == (False, {"step": -0.1}, None)
        result = await environment.step("3")
        assert (result.done, result.truncated, result.reward, result.success) == (True, False, {"step": 1.0}, True)
        await environment.close()
        assert environment._environment.closed

    asyncio.run(play())


def test_a_legacy_vagen_class_is_paid_at_its_end() -> None:
    async def play() -> None:
        options = {"config": {"goal": "here"}, "config_class": f"{__name__}:config", "max_turns": 2}
        environment = VagenEnvironment(MediaStore(), f"{__name__}:Legacy", **options)  # type: ignore[arg-type]
        head, _ = await environment.reset(0)
        assert head[0].text == "Reach the goal."
        assert (await environment.step("there")).reward == {"step": 0.5, "final": 0.0}
        result = await environment.step("nowhere")
        assert (result.reward, result.done, result.truncated) == ({"step": 0.5, "final": 3.0}, True, True)

    asyncio.run(play())


def test_a_picture_too_few_is_named() -> None:
    with pytest.raises(EnvironmentFailure, match=r"the text has 2 <image> and there are 1 pictures"):
        asyncio.run(VagenEnvironment(MediaStore(), f"{__name__}:Crooked").reset(0))


def test_vagen_splits_by_what_is_shown() -> None:
    options = {"path": f"{__name__}:Today"}
    keys = {VagenEnvironment.content_key(seed, options) for seed in range(14)}
    assert len(keys) == 7
    sources = [
        EnvironmentTasks("vagen", MediaStore(), options, split=split, size=20, distinct=False)
        for split in ("train", "test")  # type: ignore[arg-type]
    ]
    train, test = ({seed % 7 for seed in source.seeds} for source in sources)
    assert train
    assert test
    assert not train & test
