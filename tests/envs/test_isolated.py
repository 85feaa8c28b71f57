"""Isolated environments: whatever they do to their process, this one goes on and the episode says why it failed."""

import ctypes
import os
import time
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.remote.isolated import IsolatedEnvironment
from sensorium.envs.sokoban import Sokoban
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError

WILD = f"{__name__}:Wild"


class Wild:
    """Does to its process what it is told."""

    def __init__(self, store: MediaStore) -> None: ...

    @classmethod
    def content_key(cls, seed: int, options: Any) -> str:
        if seed == 13:
            ctypes.string_at(0)
        return f"{seed} in {os.getpid()}"

    def reset(self, seed: int) -> Any:
        return (), Observation((user(f"process {os.getpid()}"),))

    def step(self, response: str) -> StepResult:
        if response == "crash":
            ctypes.string_at(0)
        if response == "hang":
            ctypes.PyDLL(None).sleep(120)  # holds Python's lock: no thread could be stopped or even run
        if response == "exit":
            os._exit(3)
        if response == "memory":
            bytearray(8 << 30)
        if response == "print":
            print("x" * 100_000, flush=True)
        if response == "raise":
            raise ValueError("told to")
        return StepResult(Observation((user(response),)), 1.0)

    def demonstrate(self) -> str:
        return "good"

    def close(self) -> None: ...


def opened(**options: Any) -> IsolatedEnvironment:
    environment = IsolatedEnvironment(MediaStore(), WILD, **options)
    environment.reset(0)
    return environment


def test_it_plays_as_the_environment_does() -> None:
    options = {"max_turns": 5}
    store = MediaStore()
    there, here = IsolatedEnvironment(store, "sokoban", options), Sokoban(MediaStore(), **options)  # type: ignore[arg-type]
    assert there.reset(3) == here.reset(3)
    response = here.demonstrate()
    assert there.demonstrate() == response
    assert there.step(response) == here.step(response)
    there.close()
    key = IsolatedEnvironment.content_key(3, {"environment": "sokoban", "options": options})
    assert key == Sokoban.content_key(3, options)


@pytest.mark.parametrize(
    ("response", "why"),
    [("crash", "died by signal 11"), ("exit", "ended with code 3"), ("hang", r"no answer within 0\.5 s")],
)
def test_what_ends_or_blocks_its_process_fails_the_episode_and_nothing_else(response: str, why: str) -> None:
    environment = opened()
    environment.deadline_s = 0.5 if response == "hang" else 60.0
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=why):
        environment.step(response)
    assert time.monotonic() - began < 50
    with pytest.raises(EnvironmentFailure, match="reset"):
        environment.step("more")
    environment.deadline_s = 60.0
    environment.reset(1)
    assert environment.step("fine").reward == 1.0
    environment.close()


def test_too_much_memory_and_errors_are_told_and_the_process_goes_on() -> None:
    environment = opened(memory_mib=2048)
    for response, why in (("memory", "MemoryError"), ("raise", "told to")):
        with pytest.raises(EnvironmentFailure, match=why):
            environment.step(response)
    assert environment.step("print").observation is not None
    environment.close()


def test_the_content_of_seeds_is_asked_for_there_too() -> None:
    options = {"environment": WILD, "memory_mib": 3000}
    said = [IsolatedEnvironment.content_key(seed, options) for seed in (1, 2)]
    assert said[0].removeprefix("1") == said[1].removeprefix("2") != f" in {os.getpid()}"
    with pytest.raises(EnvironmentFailure, match="died by signal 11"):
        IsolatedEnvironment.content_key(13, options)


def test_a_process_is_used_again() -> None:
    def process() -> str:
        environment = IsolatedEnvironment(MediaStore(), WILD, memory_mib=3000)
        _, first = environment.reset(0)
        environment.close()
        return first.messages[0].text

    assert process() == process()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RecipeError, match="memory_mib"):
        IsolatedEnvironment(MediaStore(), WILD, memory_mib=1)
    with pytest.raises(RecipeError, match="unknown environment"):
        IsolatedEnvironment(MediaStore(), "sokobann")
    with pytest.raises(EnvironmentFailure, match="option size"):
        IsolatedEnvironment(MediaStore(), "sokoban", {"size": 1}).reset(0)
