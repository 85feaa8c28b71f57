"""Only what the model wrote is scored: right answers that an environment whispers in its observations earn nothing."""

import asyncio
from typing import Any

import pytest

from sensorium.engines.protocol import Request, Sampling, ScriptedEngine
from sensorium.envs.protocol import Observation, StepResult
from sensorium.models.policy import Policy
from sensorium.recipe.registry import build, plays_for_anybody, resolve, table
from sensorium.recipe.schema import RolloutSection
from sensorium.rewards.scorer import Scorer
from sensorium.rollout.play import Attempt, Rollout
from sensorium.vocabulary import Episode, Task
from sensorium.vocabulary.content import Message, Text, user

OTHERS = {"primitive_skill", "agent"}  # one needs a GPU or x86, the other a program
SEEDED = sorted(name for name in {*table("environment")} - OTHERS if plays_for_anybody(resolve("environment", name)))
WHISPER = "<think>x</think><answer>42</answer> \\boxed{42} The answer is 42."
OPTIONS: dict[str, dict[str, Any]] = {"svg": {"side": 16, "max_turns": 3}, "navigation": {"side": 16}}


class Whispering:
    """An environment that shows with everything a response which would be paid."""

    instant = False

    def __init__(self, inner: Any, said: str = "") -> None:
        self.inner, self.said = inner, said

    def reset(self, seed: int) -> Any:
        head, first = self.inner.reset(seed)
        return head, self._with(first)

    def step(self, response: str) -> StepResult:
        result = self.inner.step(response)
        shown = self._with(result.observation) if result.observation is not None else None
        return StepResult(shown, result.reward, result.done, result.truncated, result.success, result.info)

    def demonstrate(self) -> str:
        return ""

    def close(self) -> None:
        self.inner.close()

    def _with(self, shown: Observation) -> Observation:
        said = Text(self.said or self.inner.demonstrate())
        return Observation(tuple(Message(m.role, (*m.content, said)) for m in shown.messages))


def scored(policy: Policy, made: Any, task: Task, said: str, *terms: tuple[str, dict[str, Any]]) -> Episode:
    def say(request: Request) -> str:
        return said

    section = RolloutSection(max_turns=3, max_context_tokens=100_000, environment_deadline_s=600)
    rollout = Rollout(policy.chat, ScriptedEngine(policy.chat, say), section, lambda _: made)
    (group,) = asyncio.run(rollout.stream([task], 1, Attempt(0, 1), Sampling(max_new_tokens=64)).in_order())
    rollout.close()
    scorer = Scorer([(build("reward", name, options), 1.0) for name, options in terms])
    return asyncio.run(scorer.score_group(group)).episodes[0]


@pytest.mark.parametrize("name", SEEDED)
def test_an_environment_pays_nothing_for_what_it_shows_itself(name: str, policy: Policy) -> None:
    inner = build("environment", name, OPTIONS.get(name, {}), "x", store=policy.chat.store)
    episode = scored(policy, Whispering(inner), Task("t"), "Hm.", ("environment", {}))
    assert episode.failure == ""
    assert episode.reward is not None
    assert episode.reward <= 0
    assert not episode.correct


class Talking:
    """Asks, and answers itself."""

    instant = True

    def reset(self, seed: int) -> Any:
        self.turn = 0
        return (), Observation((user("What is it?"),))

    def step(self, response: str) -> StepResult:
        self.turn += 1
        return StepResult(None if self.turn == 2 else Observation((user(WHISPER),)), done=self.turn == 2)

    def demonstrate(self) -> str:
        return ""

    def close(self) -> None: ...


TERMS = [("exact", {}), ("math", {}), ("numeric", {}), ("format", {}), ("choice", {})]


@pytest.mark.parametrize(("name", "options"), TERMS)
def test_a_term_pays_nothing_for_what_was_shown(name: str, options: dict[str, Any], policy: Policy) -> None:
    task = Task("t", (user("What is it?"),), answer="A" if name == "choice" else "42")
    right = WHISPER.replace("42", "A") if name == "choice" else WHISPER
    silent, answered = (scored(policy, Talking(), task, said, (name, options)) for said in ("Hm.", right))
    assert not silent.reward
    assert (answered.reward or 0) > 0 or name == "format"


@pytest.mark.parametrize("name", ["geo3k", "tools"])
def test_a_tools_answer_in_an_observation_is_not_the_models(name: str, policy: Policy) -> None:
    task = Task("t", (user("How much is 40 + 2?"),), answer="42")
    options = {"tools": ["calculator"], "offer": "text"} if name == "tools" else {}
    inner = build("environment", name, options, "x", store=policy.chat.store, task=task)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "40 + 2"}}</tool_call>'
    try_ = '<tool_call>{"name": "calc_score", "arguments": {"answer": "41"}}</tool_call>'
    terms = [("math", {}), *([("environment", {})] if name == "geo3k" else [])]
    episode = scored(policy, Whispering(inner, WHISPER), task, call if name == "tools" else try_, *terms)
    assert episode.failure == ""
    assert len(episode.turns) > 1
    assert not episode.reward
