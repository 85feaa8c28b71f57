"""Layouts (whole conversation, sliding window, fresh context a turn) go with every estimator, and change no advantage."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.engines.protocol import Request, Sampling, ScriptedEngine
from sensorium.envs.protocol import Observation, StepResult
from sensorium.learner.credited_episode import Assessment, find_positions
from sensorium.models.policy import Policy
from sensorium.recipe.estimators_and_losses import ESTIMATORS
from sensorium.recipe.schema import AdvantageSection, AlgorithmSection, RolloutSection
from sensorium.rewards.scorer import Scorer
from sensorium.rewards.terms import EnvironmentReward
from sensorium.rollout.play import Attempt, Rollout
from sensorium.trainer.credit import credit
from sensorium.vocabulary import EnvironmentSpec, Group, Task
from sensorium.vocabulary.content import system, user
from sensorium.vocabulary.errors import RecipeError
from tests.recipes import parsed, quick

LAYOUTS = {"whole conversation": 0, "sliding window": 2, "fresh context": 1}
TURNS = 3


class Steps:
    """Three turns; each pays by the length of the response."""

    instant = True

    def reset(self, seed: int) -> Any:
        self.turn = 0
        return (system("Speak."),), Observation((user("Begin."),))

    def step(self, response: str) -> StepResult:
        self.turn += 1
        done = self.turn == TURNS
        return StepResult(
            None if done else Observation((user(f"Turn {self.turn}."),)), {"length": float(len(response))}, done
        )

    def demonstrate(self) -> str:
        return ""

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def groups(policy: Policy) -> dict[int, list[Group]]:
    def said(request: Request) -> str:
        group, episode, turn = request.order
        return "ab "[: 1 + (group + episode + turn) % 3] * (1 + episode)

    found = {}
    for window in LAYOUTS.values():
        section = RolloutSection(max_turns=TURNS, window=window, max_new_tokens=32)
        rollout = Rollout(policy.chat, ScriptedEngine(policy.chat, said), section, lambda task: Steps())
        tasks = [Task(f"t{n}", environment=EnvironmentSpec("steps", {}, n)) for n in range(2)]
        played = asyncio.run(rollout.stream(tasks, 3, Attempt(0, 1), Sampling(max_new_tokens=32)).in_order())
        scorer = Scorer([(EnvironmentReward(per_turn=True), 1.0)])
        found[window] = [asyncio.run(scorer.score_group(group)) for group in played]
        rollout.close()
    return found


def advantages(groups: list[Group], name: str, policy: Policy) -> list[list[float]]:
    """The advantages of every turn, under values that depend on what was written and not on the layout."""
    traits = ESTIMATORS[name]
    episodes = [episode for group in groups for episode in group.episodes]
    positions = find_positions(episodes, policy.chat.layout, observations=traits.observations)
    values_P = torch.zeros(len(positions.written_P), dtype=torch.float64)
    values_P[positions.written_P] = torch.linspace(-1, 1, int(positions.written_P.sum()), dtype=torch.float64)
    after_S = torch.zeros(len(episodes), dtype=torch.float64)
    assessment = Assessment(positions, values_P, after_S) if traits.critic else Assessment(positions)
    settings = {"turn_gamma": 0.9, "gamma": 0.95} if "turn_gamma" in traits.settings and "gamma" in traits.settings else {}
    section = AlgorithmSection(advantage=AdvantageSection(name=name, **settings))
    greedy = {group.id: 1.0 for group in groups} if traits.greedy else None
    samples = credit(groups, assessment, section, greedy=greedy)
    assert [len(members) for members in samples] == [3, 3]
    return [part.tolist() for members in samples for sample in members for part in sample.advantages]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_advantages_are_the_same_in_every_layout(name: str, groups: dict[int, list[Group]], policy: Policy) -> None:
    whole = advantages(groups[0], name, policy)
    assert len(whole) == 2 * 3 * TURNS
    assert any(value for part in whole for value in part)
    for window in (2, 1):
        assert [len(episode.threads) for group in groups[window] for episode in group.episodes] == [TURNS - window + 1] * 6
        if ESTIMATORS[name].observations:
            with pytest.raises(AssertionError):
                advantages(groups[window], name, policy)
        else:
            there = advantages(groups[window], name, policy)
            assert all(part == pytest.approx(other) for part, other in zip(whole, there, strict=True))


@pytest.mark.parametrize("window", LAYOUTS.values())
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_recipe_refuses_a_window_only_where_the_estimator_reads_observations(
    name: str, window: int, tmp_path: Path
) -> None:
    changes = {"algorithm": {"advantage": {"name": name}}, "rollout": {"max_turns": 3, "window": window}}
    refused = ""
    try:
        parsed(quick("layouts", **changes), tmp_path)
    except RecipeError as error:
        refused = str(error)
    assert ("gae" in refused and f"window {window}" in refused) == (name == "gae" and window > 0)
