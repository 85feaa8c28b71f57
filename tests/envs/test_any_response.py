"""Whatever a model writes, no registered environment breaks, and nothing but what is valid is paid."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import StepResult, checked_step
from sensorium.recipe.registry import build, parameters_of, resolve, table
from sensorium.vocabulary import Task
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import RecipeError

FOREIGN = {"gymnasium", "slime", "vagen", "openenv", "ai2thor", "primitive_skill", "agent"}
PLAYED = sorted(set(table("environment")) - FOREIGN - {"question", "remote", "isolated", "rows"})
PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "Left",
    ",",
    "1+1",
    "((",
    "\ud800",
    "\0",
    "é",
    "<tool_call>",
    "{",
    '"name"',
    "<svg>",
    "</svg>",
    "<rect/>",
]
TEXTS = st.one_of(st.text(max_size=80), st.lists(st.sampled_from(PIECES), max_size=20).map("".join))


QUESTION = Task("t", (user("How much is 1 + 1?"),), answer="2")
OPTIONS: dict[str, dict[str, Any]] = {
    "tools": {"tools": ["calculator", "crop"]},
    "svg": {"side": 16},
    "navigation": {"side": 16},
}


def opened(name: str, seed: int) -> Any:
    options = {"max_turns": 3, **OPTIONS.get(name, {})}
    environment = build("environment", name, options, "x", store=MediaStore(), task=QUESTION)
    environment.reset(seed)
    return environment


@pytest.mark.parametrize("name", PLAYED)
@settings(max_examples=25, deadline=None)
@given(TEXTS, st.integers(0, 50))
def test_no_response_breaks_an_environment(name: str, response: str, seed: int) -> None:
    environment = opened(name, seed)
    for _ in range(2):
        result: StepResult = environment.step(response)
        assert isinstance(result.info["valid"], bool)
        if result.done:
            break
    environment.close()


@pytest.mark.parametrize("name", PLAYED)
def test_megabytes_are_answered_like_anything_else(name: str) -> None:
    for piece in ("<answer>", "Left,", "((((", "\U0001f600"):
        environment = opened(name, 0)
        text = piece * (1_000_000 // len(piece))
        result = checked_step(environment.step(f"<think></think><answer>{text}</answer>"), name)
        assert result.success is not True
        assert len(str(result.info)) < 10_000


DESCRIBING = [
    name for name in [*PLAYED, "primitive_skill"] if "state_reward" in parameters_of(resolve("environment", name))
]


def test_pay_for_descriptions_needs_a_place_for_them() -> None:
    assert DESCRIBING == ["frozen_lake", "navigation", "sokoban", "svg", "primitive_skill"]
    for name in DESCRIBING:
        with pytest.raises(RecipeError, match="has no place for a description"):
            build("environment", name, {"state_reward": 1.0, "response_format": "free_think"}, "x", store=MediaStore())
