"""The conversation: budgets end it, statuses tell why, deadlines that fired are repeated and not waited for."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.engines.protocol import Capabilities, LiveEpisodes, Request, Response, Sampling, ScriptedEngine
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.question import Question
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import RolloutSection
from sensorium.rollout.play import Attempt, Deadlines, Rollout
from sensorium.vocabulary import Episode, Message, Status, Task, system, user
from sensorium.vocabulary.errors import EnvironmentFailure, EnvironmentLost, ModelError, RecipeError
from sensorium.vocabulary.task import EnvironmentSpec

from ..models.clips import clip


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(str(make_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))), store=MediaStore(), device="cpu")


class Counting:
    """A environment of ``turns`` turns that pays one each, and remembers what it was told."""

    instant = True

    def __init__(self, turns: int) -> None:
        self.turns, self.heard = turns, list[str]()

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        return (system("count"),), Observation((user("0"),))

    def step(self, response: str) -> StepResult:
        self.heard.append(response)
        done = len(self.heard) == self.turns
        return StepResult(None if done else Observation((user(str(len(self.heard))),)), reward=1.0, done=done)

    def demonstrate(self) -> str:
        return "next"

    def close(self) -> None: ...


class Cutting(ScriptedEngine):
    """Says of every response that its budget ended it."""

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        return replace(await super().generate(request, episodes), finish="length")


def play(
    policy: Policy,
    environment: Callable[[Task], Any],
    says: Callable[[Request], str] = lambda request: "one",
    deadlines: Deadlines | None = None,
    demonstrate: bool = False,
    spec: EnvironmentSpec | None = None,
    engine: type[ScriptedEngine] = ScriptedEngine,
    **section: Any,
) -> Episode:
    rollout = Rollout(policy.chat, engine(policy.chat, says), RolloutSection(**section), environment)
    sampling = Sampling(max_new_tokens=section.get("max_new_tokens", 64))
    attempt = Attempt(0, 1, demonstrate=demonstrate)
    task = Task("t", (user("what?"),), demonstration=("told",), environment=spec)
    (group,) = asyncio.run(rollout.stream([task], 1, attempt, sampling, deadlines).in_order())
    return group.episodes[0]


def test_a_question_ends_after_one_turn(policy: Policy) -> None:
    episode = play(policy, Question)
    assert (episode.status, len(episode.turns), episode.response) == (Status.FINISHED, 1, "one")


class Losing(Counting):
    """An environment whose worker dies in its second step, as often as there is one in ``deaths``."""

    def __init__(self, deaths: list[str]) -> None:
        super().__init__(2)
        self.deaths = deaths

    def step(self, response: str) -> StepResult:
        if self.heard and self.deaths:
            raise EnvironmentLost(self.deaths.pop())
        return super().step(response)


def test_an_episode_is_rolled_again_when_its_worker_dies_and_fails_when_a_second_one_does(policy: Policy) -> None:
    deaths = ["killed"]
    episode = play(policy, lambda task: Losing(deaths), max_turns=5)
    assert (episode.status, [turn.reward for turn in episode.turns]) == (Status.FINISHED, [1.0, 1.0])
    deaths = ["killed"] * 9
    with pytest.warns(UserWarning, match=r"task \S+: 2 environment processes were lost while they played it"):
        episode = play(policy, lambda task: Losing(deaths), max_turns=5)
    assert episode.status == Status.FAILED
    assert "another environment process was lost while it played this episode's task" in episode.failure
    assert len(deaths) == 7, "each of them costs a worker"


def test_a_world_is_played_to_its_end_in_one_thread(policy: Policy) -> None:
    episode = play(policy, lambda task: Counting(3), max_turns=5)
    assert episode.status == Status.FINISHED
    assert [turn.reward for turn in episode.turns] == [1.0, 1.0, 1.0]
    assert len(episode.threads) == 1
    assert [turn.observation[0].text for turn in episode.turns] == ["0", "1", "2"]
    assert all(episode.threads[t.thread].segments[t.segment] is t.response for t in episode.turns)


def test_an_environment_that_has_ended_is_finished_though_its_last_response_was_cut(policy: Policy) -> None:
    """Where it counted as truncated, a critic's value was added to an episode that had reached its goal."""
    spec = EnvironmentSpec("counting", {}, 0)
    ended = play(policy, lambda task: Counting(1), spec=spec, engine=Cutting)
    assert (ended.status, ended.turns[-1].cut) == (Status.FINISHED, True)
    answer = play(policy, Question, engine=Cutting)
    assert (answer.status, answer.turns[-1].cut) == (Status.TRUNCATED, True)


def test_the_turn_limit_truncates(policy: Policy) -> None:
    episode = play(policy, lambda task: Counting(9), max_turns=2)
    assert (episode.status, len(episode.turns)) == (Status.TRUNCATED, 2)


def test_the_episode_budget_truncates_before_a_turn_that_has_no_tokens_left(policy: Policy) -> None:
    one = len(policy.chat.respond("one", "x").tokens)
    episode = play(policy, lambda task: Counting(9), max_turns=9, max_episode_tokens=2 * one)
    assert episode.status == Status.TRUNCATED
    assert episode.sampled_tokens == 2 * one


def test_the_episode_budget_counts_what_was_shown_where_that_is_asked_for(policy: Policy) -> None:
    """As slime does: of 100 tokens, a response may have what prompt, responses and observations have left."""
    asked: list[tuple[int, int]] = []

    def says(request: Request) -> str:
        asked.append((request.sampling.max_new_tokens, sum(len(policy.chat.layout(s)) for s in request.context)))
        return "one"

    counting = {"max_turns": 50, "max_episode_tokens": 100, "max_new_tokens": 100}
    plain = play(policy, lambda task: Counting(50), says, **counting)
    assert asked[0][0] == 100
    asked.clear()
    counted = play(policy, lambda task: Counting(50), says, **counting, count_observations=True)
    assert len(asked) == len(counted.turns) >= 2
    assert all(budget == 100 - length > 0 for budget, length in asked)
    assert (counted.status, plain.status) == (Status.TRUNCATED, Status.TRUNCATED)
    assert len(counted.turns) < len(plain.turns)
    short = play(policy, Question, max_episode_tokens=16, count_observations=True)
    assert (short.status, short.turns, short.info) == (Status.ABORTED, (), {"prompt_too_long": True})
    assert "rollout.max_episode_tokens" in short.failure


def test_the_context_budget_truncates(policy: Policy) -> None:
    episode = play(policy, lambda task: Counting(50), max_turns=50, max_context_tokens=80)
    assert episode.status == Status.TRUNCATED
    (thread,) = episode.threads
    assert thread.home[-1], "an observation that was never answered is not part of the thread"
    before = sum(len(policy.chat.layout(segment)) for segment in thread.segments[:-1])
    assert before < 80 <= before + len(thread.segments[-1].tokens) + len(thread.segments[-2].tokens)


def test_a_prompt_without_room_is_marked_and_nothing_is_written(policy: Policy) -> None:
    episode = play(policy, Question, max_context_tokens=16)
    assert (episode.status, episode.turns) == (Status.ABORTED, ())
    assert episode.info["prompt_too_long"]
    assert "max_context_tokens is 16" in episode.failure


def test_demonstrations_are_played_instead_of_the_engine(policy: Policy) -> None:
    episode = play(policy, lambda task: Counting(3), demonstrate=True, max_turns=3)
    assert [turn.response.text for turn in episode.turns] == ["told", "next", "next"]


class Untouchable(Counting):
    """Must not be stepped in its second turn."""

    def step(self, response: str) -> StepResult:
        if len(self.heard) == 1:
            raise AssertionError("a deadline that fired is repeated, not waited for again")
        return super().step(response)


def test_a_deadline_known_from_before_is_repeated(policy: Policy) -> None:
    known = {("train/1/0/t/0", 1): "it took too long"}
    deadlines = Deadlines(known=known)
    episode = play(policy, lambda task: Untouchable(3), deadlines=deadlines, max_turns=3)
    assert episode.status == Status.FAILED
    assert "turn 1: it took too long" in episode.failure
    assert deadlines.fired == known


def test_a_failing_world_is_named(policy: Policy) -> None:
    class Broken(Counting):
        def step(self, response: str) -> StepResult:
            raise EnvironmentFailure("no floor")

    episode = play(policy, lambda task: Broken(3), max_turns=3)
    assert episode.status == Status.FAILED
    assert episode.failure == "task t, turn 0: no floor"


def test_a_template_that_rewrites_history_is_refused_for_growing_threads(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_tiny("qwen3", tmp_path_factory.mktemp("tiny"))
    thinking = load_policy(str(folder), store=MediaStore(), device="cpu")
    assert not thinking.chat.append_only
    with pytest.raises(RecipeError, match="window: 1"):
        play(thinking, lambda task: Counting(3), max_turns=3)
    episode = play(thinking, lambda task: Counting(3), max_turns=3, window=1)
    assert (episode.status, len(episode.threads)) == (Status.FINISHED, 3)
    episode = play(thinking, lambda task: Counting(3), max_turns=3, keep_thoughts=True)
    assert (episode.status, len(episode.threads)) == (Status.FINISHED, 1)


def test_media_that_the_family_or_the_engine_lacks_are_refused_by_task_and_name(policy: Policy) -> None:
    engine = ScriptedEngine(policy.chat, lambda request: "one")
    rollout = Rollout(policy.chat, engine, RolloutSection(), Question)
    sound = Task("listen-7", (user(policy.chat.store.put(b"...", "sound", "clip.wav"), "what?"),))
    with pytest.raises(ModelError, match=r"task listen-7: family qwen2_5_vl takes .* not sound, which clip\.wav is"):
        rollout.prepare([Task("read-1", (user("what?"),)), sound])
    engine.capabilities = Capabilities(frozenset(["text", "picture"]), deterministic=True)
    video = Task("watch-3", (user(policy.chat.store.put(b"...", "video", "clip.mp4"), "what?"),))
    with pytest.raises(ModelError, match=r"task watch-3: the engine takes picture, text and not video, which clip\.mp4 is"):
        asyncio.run(rollout.stream([video], 1, Attempt(0, 1), Sampling()).in_order())


def test_clips_are_decoded_off_the_event_loop_once_and_a_broken_one_fails_its_episode(policy: Policy) -> None:
    good = clip(policy.chat.store, 1)
    bad = policy.chat.store.put(b"no video", "video", "broken.mp4")
    threads: list[str] = []
    prepare = policy.chat.prepare

    def noting(media: Any) -> Any:
        threads.append(threading.current_thread().name)
        return prepare(media)

    class Showing(Counting):
        def step(self, response: str) -> StepResult:
            result = super().step(response)
            shown = None if result.done else Observation((user(good if len(self.heard) == 1 else bad, "what?"),))
            return StepResult(shown, reward=1.0, done=result.done)

    before = policy.chat.decoder.counters.decoded
    policy.chat.prepare = noting  # type: ignore[method-assign]
    try:
        episode = play(policy, lambda task: Showing(5), max_turns=5)
        again = play(policy, lambda task: Showing(2), max_turns=5)
    finally:
        del policy.chat.prepare
    assert (episode.status, len(episode.turns)) == (Status.FAILED, 2)
    assert "turn 2: broken.mp4" in episode.failure
    assert again.status == Status.FINISHED
    assert policy.chat.decoder.counters.decoded == before + 1
    assert threads
    assert threading.main_thread().name not in threads
