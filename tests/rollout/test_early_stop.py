"""Early stop: enough groups end a rollout at a tick; the clock has no say, nothing is left behind, work is saved."""

import asyncio
import random
import threading
import time
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Sampling, ScriptedEngine
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.question import Question
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import RolloutSection
from sensorium.rollout.play import CANCELLED, Attempt, EarlyStop, Rollout
from sensorium.vocabulary import Group, Message, Status, Task, system, user
from sensorium.vocabulary.errors import EnvironmentFailure

TOKENS = 4
SAMPLING = Sampling(max_new_tokens=TOKENS, stop_tokens=False)
SIZE = 2
OVER = Status.TRUNCATED  # the last response of every episode is cut at its budget


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = make_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny"), initializer_range=0.15)
    return load_policy(str(folder), store=MediaStore(), device="cpu")


COUNTING = threading.Lock()


class Conversation:
    """Ends after as many turns as its task's id says; one of 0 turns is torn. Remembers who opened, worked and closed."""

    opened = 0
    closed = 0
    closed_at_work = 0

    def __init__(self, task: Task, instant: bool = True, jitter: random.Random | None = None) -> None:
        self.turns, self.instant, self.jitter = int(task.id.split("-")[0]), instant, jitter
        self.turn, self.working = 0, False
        with COUNTING:
            Conversation.opened += 1

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        if not self.turns:
            raise EnvironmentFailure("torn")
        return (system("count"),), Observation((user("0"),))

    def step(self, response: str) -> StepResult:
        self.working = True
        self.work()
        self.turn += 1
        self.working = False
        done = self.turn == self.turns
        return StepResult(None if done else Observation((user(str(self.turn)),)), reward=1.0, done=done)

    def work(self) -> None:
        if self.jitter is not None:
            time.sleep(self.jitter.random() * 0.02)

    def demonstrate(self) -> str:
        return ""

    def close(self) -> None:
        with COUNTING:
            Conversation.closed += 1
            Conversation.closed_at_work += self.working


def all_closed() -> bool:
    """Whether every environment is closed in the end; those of cancelled episodes are closed by threads of their own."""
    until = time.monotonic() + 120
    while Conversation.opened != Conversation.closed and time.monotonic() < until:
        time.sleep(0.01)
    return Conversation.opened == Conversation.closed


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    Conversation.opened = Conversation.closed = Conversation.closed_at_work = 0


def tasks(*turns: int) -> list[Task]:
    """A task for each conversation, named by its turns and its place."""
    return [Task(f"{count}-{place}", (user("what?"),)) for place, count in enumerate(turns)]


def play(
    rollout: Rollout, stop: EarlyStop | None, played: list[Task], before: list[Task] | None = None, size: int = SIZE
) -> list[Group]:
    return asyncio.run(rollout.stream(played, size, Attempt(0, 1), SAMPLING, before=before or (), stop=stop).in_order())


def native(policy: Policy, *, lockstep: bool = True, seed: int | None = None, **section: Any) -> Rollout:
    jitter = None if seed is None else random.Random(seed)
    settings = RolloutSection(max_turns=9, **section)
    engine = NativeEngine(policy, lockstep=lockstep)
    return Rollout(policy.chat, engine, settings, lambda task: Conversation(task, jitter is None, jitter))


def tokens_of(rollout: Rollout) -> int:
    assert isinstance(rollout.engine, NativeEngine)
    return rollout.engine.counters.decoded_tokens


def test_the_rest_is_cancelled_as_soon_as_enough_are_complete_and_their_tokens_are_saved(policy: Policy) -> None:
    rollout, stop = native(policy), EarlyStop(2)
    groups = play(rollout, stop, tasks(3, 1, 4, 2))
    assert sorted(stop.complete) == [groups[1].id, groups[3].id]
    assert stop.complete[groups[1].id] < stop.complete[groups[3].id]
    assert [[e.status for e in group.episodes] for group in groups] == [
        [Status.ABORTED] * SIZE, [OVER] * SIZE, [Status.ABORTED] * SIZE, [OVER] * SIZE,
    ]  # fmt: skip
    assert {e.failure for group in (groups[0], groups[2]) for e in group.episodes} == {CANCELLED}
    assert [len(group.episodes[0].turns) for group in groups] == [2, 1, 2, 2], "what was written so far is kept"
    assert tokens_of(rollout) == SIZE * TOKENS * (2 + 1 + 2 + 2)
    whole = native(policy)
    full = play(whole, None, tasks(3, 1, 4, 2))
    assert tokens_of(whole) == SIZE * TOKENS * (3 + 1 + 4 + 2)
    assert [group.episodes for group in (groups[1], groups[3])] == [group.episodes for group in (full[1], full[3])]
    assert all_closed()


def test_a_response_in_the_middle_is_cut(policy: Policy) -> None:
    """Two questions whose responses run to the end of the context: the longer one ends where the shorter is complete."""
    engine = NativeEngine(policy)
    rollout = Rollout(policy.chat, engine, RolloutSection(max_context_tokens=200), Question)
    questions = [Task("long", (user("what?"),)), Task("short", (user("what? " * 40),))]
    room = [200 - rollout.length((rollout.renderer.start(question.messages),)) for question in questions]
    endless = Sampling(max_new_tokens=500, stop_tokens=False)
    cut, complete = asyncio.run(rollout.stream(questions, 1, Attempt(0, 1), endless, stop=EarlyStop(1)).in_order())
    assert (cut.episodes[0].status, cut.episodes[0].turns) == (Status.ABORTED, ())
    assert complete.episodes[0].sampled_tokens == room[1] < room[0]
    assert engine.counters.decoded_tokens == 2 * room[1]


def test_what_is_complete_and_what_is_cancelled_does_not_depend_on_the_clock(policy: Policy) -> None:
    turns = (3, 2, 4, 2, 5, 2, 3)
    for concurrency in (0, 5):
        runs = []
        for seed in (None, 1, 2, 3):
            stop = EarlyStop(2)
            groups = play(native(policy, seed=seed, concurrency=concurrency), stop, tasks(*turns))
            runs.append((groups, stop.complete))
        assert runs[0] == runs[1] == runs[2] == runs[3]
        groups, complete = runs[0]
        assert any(e.failure == CANCELLED for group in groups for e in group.episodes)
        assert len(complete) >= 2
    assert all_closed()


def test_groups_complete_at_the_same_tick_are_equals(policy: Policy) -> None:
    stop = EarlyStop(2)
    groups = play(native(policy, seed=4), stop, tasks(2, 1, 2, 2, 3))
    assert sorted(stop.complete) == sorted(groups[i].id for i in range(4))
    assert len({stop.complete[groups[i].id] for i in (0, 2, 3)}) == 1


def test_the_engine_serves_on_as_if_nothing_had_been_cancelled(policy: Policy) -> None:
    rollout = native(policy)
    play(rollout, EarlyStop(1), tasks(5, 1, 5, 5))
    before = tokens_of(rollout)
    again = play(rollout, None, tasks(2, 3))
    assert tokens_of(rollout) - before == SIZE * TOKENS * 5, "rows of cancelled episodes are written no more"
    assert again == play(native(policy), None, tasks(2, 3))
    rollout.engine.update_weights(policy, policy.version)


def test_episodes_that_had_not_begun_come_back_empty(policy: Policy) -> None:
    stop = EarlyStop(1)
    groups = play(native(policy, concurrency=SIZE), stop, tasks(1, 2, 2))
    assert list(stop.complete) == [groups[0].id]
    assert all(e.turns == () and e.failure == CANCELLED for group in groups[1:] for e in group.episodes)
    assert all_closed()


def test_a_group_that_failed_whole_is_not_one_of_enough(policy: Policy) -> None:
    stop = EarlyStop(1)
    groups = play(native(policy), stop, tasks(0, 2, 3))
    assert [group.episodes[0].status for group in groups] == [Status.FAILED, OVER, Status.ABORTED]
    assert set(stop.complete) == {groups[0].id, groups[1].id}


def test_never_enough_plays_everything(policy: Policy) -> None:
    stop = EarlyStop(3)
    groups = play(native(policy), stop, tasks(0, 2, 3))
    assert len(stop.complete) == 3
    assert groups[2].episodes[0].status == OVER


def test_an_eager_rollout_stops_too(policy: Policy) -> None:
    rollout, stop = native(policy, lockstep=False, seed=5), EarlyStop(2)
    groups = play(rollout, stop, tasks(1, 7, 1, 8, 9))
    assert len(stop.complete) >= 2
    assert any(e.failure == CANCELLED for group in groups for e in group.episodes)
    assert play(rollout, None, tasks(2))[0].episodes[0].status == OVER


class Slow(Conversation):
    """One of several turns works for long; one of a single turn ends while such a one is at work."""

    at_work = threading.Event()
    may_end = threading.Event()

    def work(self) -> None:
        if self.turns > 1:
            self.at_work.set()
            self.may_end.wait(300)
        else:
            self.at_work.wait(300)


def test_a_world_at_work_is_closed_when_it_is_done(policy: Policy) -> None:
    engine = NativeEngine(policy, lockstep=False)
    rollout = Rollout(policy.chat, engine, RolloutSection(max_turns=9), lambda task: Slow(task, instant=False))
    groups = play(rollout, EarlyStop(1), tasks(1, 2))
    assert Conversation.closed < Conversation.opened, "nobody waits for it"
    assert [group.episodes[0].status for group in groups] == [OVER, Status.ABORTED]
    Slow.may_end.set()
    deadline = time.monotonic() + 300
    while Conversation.closed < Conversation.opened and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Conversation.closed == Conversation.opened
    assert Conversation.closed_at_work == 0


class InPlace(Conversation):
    """Plain computation, its constructor too."""

    instant = True


def test_a_scripted_rollout_stops_before_the_rest_has_begun(policy: Policy) -> None:
    rollout = Rollout(policy.chat, ScriptedEngine(policy.chat, lambda request: "one"), RolloutSection(max_turns=9), InPlace)
    groups = play(rollout, EarlyStop(1), tasks(1, 1, 1))
    assert [group.episodes[0].status for group in groups] == [Status.FINISHED, Status.ABORTED, Status.ABORTED]


def test_cancelling_the_rollout_itself_is_not_an_early_stop(policy: Policy) -> None:
    rollout = native(policy)

    async def run() -> None:
        task = asyncio.create_task(rollout.stream(tasks(9, 9), SIZE, Attempt(0, 1), SAMPLING, stop=EarlyStop(1)).in_order())
        while tokens_of(rollout) < 9:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert all_closed()
    assert play(rollout, None, tasks(1))[0].episodes[0].status == OVER


def test_a_task_that_comes_again_is_another_group_with_other_random_numbers(policy: Policy) -> None:
    one = tasks(1)[0]
    twice = play(native(policy), None, [one, one])
    assert len({group.id for group in twice}) == 2
    written = [e.turns[0].response.tokens for group in twice for e in group.episodes]
    assert len(set(written)) == 2 * SIZE
    first = play(native(policy), None, [one])
    second = play(native(policy), None, [one], before=[one])
    again = [e.turns[0].response.tokens for group in (*first, *second) for e in group.episodes]
    assert again == written, "in one call or in two"  # log-probs of two rows and of four may differ in their last bits
    assert [group.id for group in (*first, *second)] == [group.id for group in twice]
    other = Task("2-other", (user("what?"),))
    later = play(native(policy), None, [one], before=[other])[0]
    assert [e.turns[0].response.tokens for e in later.episodes] == written[:SIZE], "only the same task counts on"
    assert later.id != first[0].id
