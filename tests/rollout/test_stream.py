"""Groups come as a stream, each when it is complete; judges work while other groups are still played."""

import asyncio
import threading
from pathlib import Path

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.engines.protocol import Sampling, ScriptedEngine
from sensorium.envs.protocol import Observation, StepResult
from sensorium.evaluation.evaluate import cut, play_chunks
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import RolloutSection
from sensorium.rewards.scorer import Scorer
from sensorium.rollout.play import Attempt, Rollout
from sensorium.vocabulary import Episode, Group, Message, Score, Status, Task, user

WAIT = 60
ATTEMPT, SAMPLING = Attempt(0, 1), Sampling(max_new_tokens=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder: Path = make_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))
    return load_policy(str(folder), store=MediaStore(), device="cpu")


class Waiting:
    """Ends after one step. That of the task "late" waits for an event, and pays 1 if it came."""

    def __init__(self, task: Task, event: threading.Event) -> None:
        self.task, self.event = task, event
        self.closed = False

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        return (), Observation((user("?"),))

    def step(self, response: str) -> StepResult:
        came = self.event.wait(WAIT) if self.task.id == "late" else True
        return StepResult(None, reward=float(came), done=True)

    def demonstrate(self) -> str:
        return ""

    def close(self) -> None:
        self.closed = True


class Judge:
    """Sets the event when it judges."""

    name = "judge"
    instant = True

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def score(self, task: Task, episode: Episode) -> Score:
        self.event.set()
        return Score(self.name, sum(turn.reward or 0.0 for turn in episode.turns))


def rollout_of(policy: Policy, event: threading.Event, made: list[Waiting] | None = None) -> Rollout:
    def make(task: Task) -> Waiting:
        environment = Waiting(task, event)
        if made is not None:
            made.append(environment)
        return environment

    section = RolloutSection(environment_deadline_s=2 * WAIT)
    return Rollout(policy.chat, ScriptedEngine(policy.chat, lambda request: "one"), section, make)


def test_a_group_comes_when_it_is_complete_and_with_its_place(policy: Policy) -> None:
    event = threading.Event()

    async def run() -> list[tuple[int, Group]]:
        found = []
        async with rollout_of(policy, event).stream([Task("late"), Task("soon")], 2, ATTEMPT, SAMPLING) as stream:
            async for place, group in stream:
                found.append((place, group))
                event.set()  # the late one ends only now: it would never end if nothing came before all are complete
        return found

    found = asyncio.run(run())
    assert [(place, group.task.id, len(group.episodes)) for place, group in found] == [(1, "soon", 2), (0, "late", 2)]
    assert all(episode.turns[0].reward == 1.0 for _, group in found for episode in group.episodes)


def test_a_group_is_judged_while_another_is_still_played_and_all_come_in_the_tasks_order(policy: Policy) -> None:
    event = threading.Event()
    tasks, scorer = [Task("late"), Task("soon")], Scorer([(Judge(event), 1.0)])

    async def run() -> list[Group]:
        rollout = rollout_of(policy, event)
        chunks = play_chunks(rollout, scorer, tasks, cut(tasks), 2, ATTEMPT, SAMPLING, rollout.section)
        return [group async for groups in chunks for group in groups]

    late, soon = asyncio.run(run())
    assert [late.task.id, soon.task.id] == ["late", "soon"]
    assert [e.reward for e in late.episodes] == [1.0, 1.0], "the judgement of the other group let this one end"


def test_leaving_a_stream_early_ends_what_is_still_played(policy: Policy) -> None:
    event, made = threading.Event(), list[Waiting]()

    async def run() -> None:
        rollout = rollout_of(policy, event, made)
        async with rollout.stream([Task("late"), Task("soon")], 1, ATTEMPT, SAMPLING) as stream:
            async for _ in stream:
                while len(made) < 2:  # the other one is still being made, in a thread
                    await asyncio.sleep(0.01)
                break
        event.set()
        again = await rollout.stream([Task("soon")], 1, ATTEMPT, SAMPLING).in_order()
        assert again[0].episodes[0].status == Status.FINISHED, "the engine waits for nobody who has left"

    asyncio.run(run())
    assert len(made) == 3


def test_an_error_of_our_own_ends_the_stream_as_one_error(policy: Policy) -> None:
    rollout = rollout_of(policy, threading.Event())

    async def broken(request: object, episodes: object) -> None:
        raise RuntimeError("a defect")

    rollout.engine.generate = broken  # type: ignore[assignment, method-assign]

    async def run() -> None:
        async with rollout.stream([Task("soon"), Task("soon too")], 2, ATTEMPT, SAMPLING) as stream:
            async for _ in stream:
                raise AssertionError("nothing can be complete")

    with pytest.raises(RuntimeError, match="a defect"):
        asyncio.run(run())
