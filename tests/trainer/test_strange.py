"""Whatever a reward term or an environment returns or raises, the run goes on and the thing is named."""

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sensorium.data.media_store import MediaStore
from sensorium.engines.protocol import Sampling, ScriptedEngine
from sensorium.envs.protocol import Observation
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import RolloutSection
from sensorium.rewards.scorer import Scorer
from sensorium.rollout.play import Attempt, Rollout
from sensorium.runs.durable import to_line
from sensorium.runs.episodes import episode_from_json, episode_row, read_episodes
from sensorium.runs.ledger import Ledger
from sensorium.runs.metrics import read_metrics
from sensorium.trainer.run import train
from sensorium.vocabulary import Episode, Status, Task, system, user
from tests.recipes import parsed, quick

from . import strange

LIMITS = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(str(make_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))), store=MediaStore(), device="cpu")


class StrangeEnvironment:
    """One turn, in place; does what it is told."""

    instant = True

    def __init__(self, deed: Any, when: str) -> None:
        self.deed, self.when = deed, when

    def reset(self, seed: int) -> Any:
        return self.deed() if self.when == "reset" else ((system("go"),), Observation((user("0"),)))

    def step(self, response: str) -> Any:
        return self.deed()

    def demonstrate(self) -> Any:
        return self.deed() if self.when == "demonstrate" else "go on"

    def close(self) -> None: ...


class Term:
    """Judges in place as it is told."""

    name, instant = "term", True

    def __init__(self, deed: Any) -> None:
        self.deed = deed

    def score(self, task: Task, episode: Episode) -> Any:
        return self.deed()


def played(policy: Policy, deed: Any, when: str) -> Episode:
    engine = ScriptedEngine(policy.chat, lambda request: "one")
    rollout = Rollout(policy.chat, engine, RolloutSection(max_turns=2), lambda task: StrangeEnvironment(deed, when))
    attempt = Attempt(0, 1, demonstrate=when == "demonstrate")
    (group,) = asyncio.run(rollout.stream([Task("t", (user("?"),))], 1, attempt, Sampling(max_new_tokens=8)).in_order())
    return group.episodes[0]


def check(episode: Episode) -> None:
    """An episode that can be logged, read back and trained on or left out, and says why it failed."""
    row = json.loads(to_line(episode_row(1, Task("t"), episode)).encode())
    assert episode_from_json(row["episode"]).status == episode.status
    assert all(turn.reward is None or type(turn.reward) is float for turn in episode.turns)
    if episode.status == Status.FAILED:
        assert "'StrangeEnvironment'" in episode.failure or "picture" in episode.failure or "t: " in episode.failure
        assert len(episode.failure) < 2000


def raising(error: BaseException) -> Any:
    def deed() -> Any:
        raise error

    return deed


@pytest.mark.parametrize("field", strange.STEP_FIELDS)
def test_any_value_an_environment_returns_costs_at_most_its_episode(policy: Policy, field: str) -> None:
    for value in strange.VALUES:
        check(played(policy, lambda v=value: strange.step_result(field, v), "step"))


@pytest.mark.parametrize("when", ["reset", "step", "demonstrate"])
def test_anything_an_environment_raises_or_returns_at_the_start_fails_its_episode(policy: Policy, when: str) -> None:
    for error in strange.RAISED:
        episode = played(policy, raising(error), when)
        assert episode.status == Status.FAILED
        assert f"'StrangeEnvironment' failed in {when}: {type(error).__name__}" in episode.failure
        check(episode)
    for value in strange.VALUES:
        check(played(policy, lambda v=value: v, when))


@LIMITS
@given(value=strange.ANYTHING, field=st.sampled_from(strange.STEP_FIELDS))
def test_random_values_of_an_environment(policy: Policy, value: Any, field: str) -> None:
    check(played(policy, lambda: strange.step_result(field, value), "step"))


@pytest.fixture(scope="module")
def one(policy: Policy) -> Episode:
    from sensorium.envs.protocol import StepResult

    return played(policy, lambda: StepResult(None, reward=1.0, done=True), "step")


def judged(deed: Any, episode: Episode, ledger: Ledger) -> None:
    """Score it, and write the scores wherever a run does."""
    scorer = Scorer([(Term(deed), 1.0), (Other(), 1.0)], judgements=ledger)
    scored = asyncio.run(scorer.score(Task("t"), episode))
    assert scored.scores[-1].value == 0.5, "the other term has its word"
    for score in scored.scores:
        assert score.value is None or type(score.value) is float
        assert score.value is not None or score.reason
    check(scored)
    ledger.put(str(id(deed)), scored.scores)
    assert ledger.get(str(id(deed))) == scored.scores


class Other:
    name, instant = "other", True

    def score(self, task: Task, episode: Episode) -> float:
        return 0.5


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return Ledger(tmp_path_factory.mktemp("ledger") / "ledger.sqlite")


def test_any_value_or_exception_of_a_term_is_a_score_or_a_missing_one(one: Episode, ledger: Ledger) -> None:
    for value in strange.VALUES:
        for field in strange.SCORE_FIELDS:
            judged(lambda f=field, v=value: strange.returned_score(f, v), one, ledger)
    for error in strange.RAISED:
        judged(raising(error), one, ledger)


@LIMITS
@given(value=strange.ANYTHING, field=st.sampled_from(strange.SCORE_FIELDS))
def test_random_values_of_a_term(one: Episode, ledger: Ledger, value: Any, field: str) -> None:
    judged(lambda: strange.returned_score(field, value), one, ledger)


def test_a_run_with_a_strange_environment_and_strange_terms_goes_on(tmp_path: Path) -> None:
    here = "tests.trainer.strange"
    recipe = quick(
        "strange",
        tasks={"train": [{"source": "environments", "options": {"environment": f"{here}:StrangeWorld", "size": 40}}]},
        batch={"prompts_per_step": 12, "group_size": 6},
        rollout={"max_new_tokens": 3, "max_turns": 3},
        rewards={
            "terms": [
                {"name": f"{here}:StrangeTerm", "options": {"instant": True, "name": "quick"}},
                {"name": f"{here}:StrangeTerm", "options": {"name": "slow"}, "weight": 0.0},
            ],
            "retries": 1,
            "retry_wait_s": 0.0,
        },
        optimizer={"lr": 1e-5},
    )
    train(parsed(recipe, tmp_path / "run"))
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 2
    episodes = [e for path in sorted((tmp_path / "run/episodes").glob("*")) for _, _, e in read_episodes(path)]
    failed = [e for e in episodes if e.status == Status.FAILED]
    assert len(episodes) / 10 < len(failed) < len(episodes)
    assert all("'StrangeWorld'" in e.failure or "picture" in e.failure for e in failed)
    missing = [score for e in episodes if e.status != Status.FAILED for score in e.scores if score.missing]
    assert missing
    assert all(score.reason for score in missing)
    assert sqlite3.connect(tmp_path / "run/ledger.sqlite").execute("SELECT count(*) FROM judgements").fetchone()[0] > 0
