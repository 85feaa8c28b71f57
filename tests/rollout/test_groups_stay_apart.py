"""Groups cannot mix: whatever order episodes end in, each is in its own group and place, by its id."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sensorium.data.media_store import MediaStore
from sensorium.engines.protocol import Request, Sampling, ScriptedEngine
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.remote.client import RemoteEnvironment
from sensorium.models.policy import Policy
from sensorium.recipe.schema import RolloutSection
from sensorium.rewards.scorer import Scorer
from sensorium.rewards.terms import EnvironmentReward
from sensorium.rollout.play import Attempt, Rollout
from sensorium.services.sessions import Offer, Offers, SessionTable
from sensorium.vocabulary import EnvironmentSpec, Status, Task
from sensorium.vocabulary.content import user
from tests.services.running import serving

TASKS, SIZE = 3, 3
ORDER: list[str] = []
"""Which response may be answered next; the others wait."""
MOVED = threading.Condition()


class InOrder:
    """Ends after one step, when the others before it in ORDER have; pays its seed, and says what it was told."""

    instant = False

    def __init__(self, store: MediaStore) -> None:
        self.seed = 0

    def reset(self, seed: int) -> Any:
        self.seed = seed
        return (), Observation((user(f"seed {seed}"),))

    def step(self, response: str) -> StepResult:
        with MOVED:
            assert MOVED.wait_for(lambda: ORDER and ORDER[0] == response, 120)
            ORDER.pop(0)
            MOVED.notify_all()
        return StepResult(None, {"seed": float(self.seed)}, done=True, info={"told": response, "seed": self.seed})

    def demonstrate(self) -> str:
        return ""

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(SessionTable(Offers({"in_order": Offer(f"{__name__}:InOrder")}), MediaStore(), capacity=50)) as address:
        yield address


@pytest.mark.parametrize("place", ["here", "service"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations([f"{group} {episode}" for group in range(TASKS) for episode in range(SIZE)]))
def test_episodes_stay_in_their_groups(place: str, policy: Policy, server: str, order: list[str]) -> None:
    ORDER[:] = order

    def made(task: Task) -> Any:
        return InOrder(MediaStore()) if place == "here" else RemoteEnvironment(MediaStore(), server, "in_order")

    def said(request: Request) -> str:
        return f"{request.order[0]} {request.order[1]}"

    section = RolloutSection(environment_calls=TASKS * SIZE, environment_deadline_s=120)
    rollout = Rollout(policy.chat, ScriptedEngine(policy.chat, said), section, made)
    tasks = [Task(f"task {n}", environment=EnvironmentSpec("in_order", {}, 100 + n)) for n in range(TASKS)]
    groups = asyncio.run(rollout.stream(tasks, SIZE, Attempt(0, 1), Sampling(max_new_tokens=8)).in_order())
    rollout.close()
    assert [group.task.id for group in groups] == [task.id for task in tasks]
    for n, group in enumerate(groups):
        scored = asyncio.run(Scorer([(EnvironmentReward(), 1.0)]).score_group(group))
        for m, episode in enumerate(scored.episodes):
            assert (episode.status, episode.group_id, episode.task_id, episode.index) == (
                Status.FINISHED,
                group.id,
                f"task {n}",
                m,
            )
            assert episode.id == f"{group.id}/{m}"
            (turn,) = episode.turns
            assert (turn.response.text, turn.info["told"], turn.info["seed"]) == (f"{n} {m}", f"{n} {m}", 100 + n)
            assert episode.reward == 100 + n
