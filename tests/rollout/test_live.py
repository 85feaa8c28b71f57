"""Environments that hang, raise, leave or return nonsense cost their episode; healthy ones are never failed for waiting."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from sensorium.data.media_store import MediaStore
from sensorium.engines.protocol import Sampling, ScriptedEngine
from sensorium.envs.protocol import Observation, StepResult, checked_step
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import RolloutSection
from sensorium.rollout.live import refuse_strange_environments
from sensorium.rollout.play import Attempt, Deadlines, Rollout
from sensorium.vocabulary import EnvironmentSpec, Episode, Message, Status, Task, system, user
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError

RELEASED = threading.Event()
"""What hangs here hangs until the test is over."""
DEADLINE_S = 3.0
"""Of what hangs for ever. Long enough for what does not, on a machine that is busy with other things."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(str(make_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))), store=MediaStore(), device="cpu")


@pytest.fixture(autouse=True)
def _release_at_the_end() -> Iterator[None]:
    RELEASED.clear()
    yield
    RELEASED.set()


class Slow:
    """A two-turn environment in a thread; ``fault`` names the call that does ``deed`` instead."""

    def __init__(self, fault: str = "", deed: Any = None) -> None:
        self.fault, self.deed, self.turn = fault, deed, 0
        self.threads = [threading.get_ident()]
        self._maybe("create")

    def reset(self, seed: int) -> Any:
        return self._maybe("reset") or ((system("count"),), Observation((user("0"),)))

    def step(self, response: str) -> Any:
        self.turn += 1
        done = self.turn == 2
        return self._maybe("step") or StepResult(None if done else Observation((user("1"),)), reward=1.0, done=done)

    def demonstrate(self) -> Any:
        return self._maybe("demonstrate") or "go on"

    def close(self) -> Any:
        return self._maybe("close")

    def _maybe(self, what: str) -> Any:
        self.threads.append(threading.get_ident())
        return self.deed() if what == self.fault else None


def hang() -> None:
    RELEASED.wait(120)


def leave() -> None:
    raise SystemExit(0)


def rollout_of(policy: Policy, make: Any, **section: Any) -> Rollout:
    settings = {"max_turns": 5, "environment_deadline_s": 60.0} | section
    return Rollout(policy.chat, ScriptedEngine(policy.chat, lambda request: "one"), RolloutSection(**settings), make)


def play(
    rollout: Rollout, size: int = 1, deadlines: Deadlines | None = None, demonstrate: bool = False
) -> tuple[Episode, ...]:
    task = Task("t", (user("what?"),))
    attempt = Attempt(0, 1, demonstrate=demonstrate)
    (group,) = asyncio.run(rollout.stream([task], size, attempt, Sampling(max_new_tokens=64), deadlines).in_order())
    return group.episodes


@pytest.mark.parametrize("fault", ["create", "reset", "step"])
def test_a_call_that_hangs_costs_its_episode_and_is_repeated_from_the_ledger(policy: Policy, fault: str) -> None:
    deadlines = Deadlines()
    (episode,) = play(rollout_of(policy, lambda task: Slow(fault, hang), environment_deadline_s=DEADLINE_S), 1, deadlines)
    assert episode.status == Status.FAILED
    assert f"did not answer {fault} within {DEADLINE_S:g} s" in episode.failure
    (reason,) = deadlines.fired.values()
    again = Deadlines(known=deadlines.fired)
    (repeated,) = play(rollout_of(policy, lambda task: Slow()), 1, again)
    assert repeated == episode, "what the clock decided is repeated, and nothing else changes"
    assert again.fired == {next(iter(deadlines.fired)): reason}


def test_a_close_that_hangs_is_noted_and_the_episode_counts(policy: Policy) -> None:
    deadlines = Deadlines()
    (episode,) = play(rollout_of(policy, lambda task: Slow("close", hang), environment_deadline_s=DEADLINE_S), 1, deadlines)
    assert episode.status == Status.FINISHED
    assert f"did not answer close within {DEADLINE_S:g} s" in episode.info["close_failed"]
    (repeated,) = play(rollout_of(policy, lambda task: Slow()), 1, Deadlines(known=deadlines.fired))
    assert repeated == episode


@pytest.mark.parametrize("fault", ["create", "reset", "step", "close", "demonstrate"])
@pytest.mark.parametrize("instant", [False, True])
def test_an_environment_that_exits_the_process_only_fails_its_episode(policy: Policy, fault: str, instant: bool) -> None:
    class InPlace(Slow):
        instant = True

    kind = InPlace if instant else Slow
    (episode,) = play(rollout_of(policy, lambda task: kind(fault, leave)), demonstrate=fault == "demonstrate")
    if fault == "close":
        assert "SystemExit" in episode.info["close_failed"]
    else:
        assert episode.status == Status.FAILED
        assert f"failed in {fault}: SystemExit" in episode.failure


def test_healthy_environments_that_queue_for_longer_than_the_deadline_are_not_failed(policy: Policy) -> None:
    rollout = rollout_of(
        policy, lambda task: Slow("step", lambda: time.sleep(0.05)), environment_calls=1, environment_deadline_s=2.0
    )
    began = time.monotonic()
    episodes = play(rollout, size=25)
    assert time.monotonic() - began > 2.0, "all of them together take longer than the deadline of one"
    assert {e.status for e in episodes} == {Status.FINISHED}
    assert rollout.pool.take_counters().waited_most_s > 0.5


def test_threads_that_hang_are_replaced_step_after_step(policy: Policy) -> None:
    count = 0

    def sometimes(task: Task) -> Slow:
        nonlocal count
        count += 1
        return Slow("step", hang) if count % 4 == 1 else Slow()

    rollout = rollout_of(policy, sometimes, environment_calls=2, environment_deadline_s=DEADLINE_S)
    failed = [sum(e.status == Status.FAILED for e in play(rollout, size=8)) for _ in range(3)]
    assert failed == [2, 2, 2], "never more than hang"
    assert rollout.pool.hung == 6


def test_when_too_many_hang_the_next_are_told_so(policy: Policy) -> None:
    rollout = rollout_of(policy, lambda task: Slow("reset", hang), environment_calls=2, environment_deadline_s=DEADLINE_S)
    rollout.pool.most_hung = 2
    deadlines = Deadlines()
    episodes = [*play(rollout, size=2), *play(rollout, 1, deadlines)]
    assert "was not asked to create: 2 earlier calls of environments still hang" in episodes[-1].failure
    assert len(deadlines.fired) == 1, "the clock decided, so a resumed run repeats it"


def test_all_calls_of_an_environment_come_from_one_thread(policy: Policy) -> None:
    made: list[Slow] = []

    def make(task: Task) -> Slow:
        made.append(Slow())
        return made[-1]

    play(rollout_of(policy, make), size=12)
    assert len(made) == 12
    assert all(len(set(environment.threads)) == 1 for environment in made)
    assert all(threading.main_thread().ident not in environment.threads for environment in made)


class Waiting(Slow):
    """Everything is async."""

    async def reset(self, seed: int) -> Any:
        self.loop = asyncio.get_running_loop()
        return super().reset(seed)

    async def step(self, response: str) -> Any:
        assert asyncio.get_running_loop() is self.loop, "its connections live in one loop"
        await asyncio.sleep(0)
        return super().step(response)

    async def close(self) -> None: ...


def test_methods_may_be_coroutines_and_hang_as_such(policy: Policy) -> None:
    (episode,) = play(rollout_of(policy, lambda task: Waiting()))
    assert (episode.status, episode.info) == (Status.FINISHED, {})

    class Endless(Waiting):
        async def step(self, response: str) -> Any:
            while not RELEASED.is_set():
                await asyncio.sleep(0.01)

    (episode,) = play(rollout_of(policy, lambda task: Endless(), environment_deadline_s=DEADLINE_S))
    assert "did not answer step" in episode.failure


def test_the_first_look_at_environments_ends_although_they_hang(policy: Policy) -> None:
    engine = ScriptedEngine(policy.chat, lambda request: "one")
    task = Task("t", environment=EnvironmentSpec("slow"))
    for fault, deed in (("create", hang), ("reset", hang), ("close", hang), ("create", leave), ("reset", leave)):
        refuse_strange_environments([task], lambda task, f=fault, d=deed: Slow(f, d), policy.chat, engine, 0.1)  # type: ignore[misc]

    def unfit(task: Task) -> Any:
        raise RecipeError("there is no option 'sise'")

    with pytest.raises(RecipeError, match="sise"):
        refuse_strange_environments([task], unfit, policy.chat, engine, 0.1)


def test_an_environment_without_a_message_type_is_told_what_is_wrong(policy: Policy) -> None:
    wrong: dict[str, Any] = {
        "must return a StepResult": (1, 2),
        "the reward: 'much' is no number": StepResult(None, reward="much"),  # type: ignore[arg-type]
        "done: 'yes' is neither": StepResult(None, done="yes"),  # type: ignore[arg-type]
        "success: 7": StepResult(None, success=7),  # type: ignore[arg-type]
        "the key 1": StepResult(None, info={1: 2}),  # type: ignore[dict-item]
        "'when': ": StepResult(None, info={"when": object()}),
        "lone surrogate": StepResult(None, info={"said": "\ud800"}),
        "must be an Observation": StepResult("look"),  # type: ignore[arg-type]
        "the observation has no message": StepResult(Observation(())),
        "must hold messages": StepResult(Observation(("look",))),  # type: ignore[arg-type]
        "the role": StepResult(Observation((Message("robot", ()),))),  # type: ignore[arg-type]
        "A picture becomes one by": StepResult(Observation((Message("user", (Image.new("RGB", (2, 2)),)),))),  # type: ignore[arg-type]
        "surrogate": StepResult(Observation((user("\ud800"),))),
        "4,000,001 characters of text": StepResult(Observation((user("x" * 4_000_001),))),
    }
    for told, returned in wrong.items():
        (episode,) = play(rollout_of(policy, lambda task, r=returned: Slow("step", lambda: r)))  # type: ignore[misc]
        assert episode.status == Status.FAILED
        assert told in episode.failure
        assert "'Slow' failed in step" in episode.failure


def test_numbers_of_numpy_and_torch_are_taken(policy: Policy) -> None:
    import numpy as np
    import torch

    result = StepResult(
        None,
        reward=torch.tensor(0.5),
        done=np.bool_(True),
        success=np.bool_(False),
        info={"at": np.arange(2)},  # type: ignore[arg-type]
    )
    (episode,) = play(rollout_of(policy, lambda task: Slow("step", lambda: result)))
    (turn,) = episode.turns
    assert (turn.reward, type(turn.reward), turn.info, episode.info) == (0.5, float, {"at": [0, 1]}, {"success": False})


@pytest.mark.parametrize("pay", [{}, {"": 1.0}, {"goal": "much"}, {3: 1.0}, {"goal": None}])
def test_named_pay_that_is_none_ends_its_episode_by_name(pay: dict[Any, Any]) -> None:
    with pytest.raises(EnvironmentFailure, match="environment 'Paying' failed in step: the reward: "):
        checked_step(StepResult(None, reward=pay, done=True), "Paying")
