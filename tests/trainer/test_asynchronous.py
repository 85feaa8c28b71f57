"""The asynchronous schedule: nothing grows too old, nothing is cut short, and every drawn task is accounted for once."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from sensorium.engines.native.native_engine import NativeEngine
from sensorium.learner.credited_episode import CreditedEpisode
from sensorium.recipe.plan import make_plan
from sensorium.recipe.schema import Recipe
from sensorium.runs.ledger import Ledger
from sensorium.runs.metrics import read_metrics
from sensorium.trainer.health.facts import StepFacts
from sensorium.trainer.health.rules import examine
from sensorium.trainer.run import train
from sensorium.trainer.schedules import AsynchronousSchedule, OpenGroup
from sensorium.trainer.selection import Selection
from sensorium.trainer.step_metrics import staleness_metrics
from sensorium.vocabulary import Episode, Group, Segment, Status, Task, Turn
from sensorium.vocabulary.episode import VersionSpan
from sensorium.vocabulary.errors import RecipeError

from .small import small

STREAM = ("algorithm.correction.weights=token", "rollout.schedule=eager")


def streamed(folder: Path, *overrides: str, staleness: int = 1, **changes: Any) -> Recipe:
    """Runs whose episodes are of very different length, so that some go on across updates."""
    schedule = {"name": "asynchronous", "max_staleness": staleness}
    terms = [{"name": "tests.trainer.test_asynchronous:unequal"}]
    given = {"schedule": schedule, "steps": 4, "rollout": {"max_new_tokens": 12}, "rewards": {"terms": terms}}
    return small(folder, *STREAM, *overrides, **given | changes)


KILL_AFTER = "KILL_AFTER"
"""The variable that names a checkpoint: a process kills itself at the first score after it, or after a later one."""


class Slow:
    """How many responses were asked for."""

    asked = 0


async def unequal(task: Any, episode: Any) -> float:
    """Groups are complete in another order than they began; now and then one has no score."""
    if checkpoint := os.environ.get(KILL_AFTER):
        # It may be gone by then: a learner that finds several steps complete goes through them without a score between.
        kept = Path(checkpoint).parent.glob("step_*")
        if any(folder.name >= Path(checkpoint).name for folder in kept):
            os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.02 * (hash(task.id) % 3))
    return float(episode.index % 2)


def settled(run: Path) -> Counter[str]:
    """What became of everything that was drawn, counted."""
    ledger = Ledger(run / "ledger.sqlite")
    draws = ledger.draws()
    ledger.close()
    assert list(draws) == list(range(len(draws))), "every row that was drawn is on record"
    return Counter(str(fate).partition(":")[0] for _, _, fate in draws.values())


def trained_groups(run: Path) -> list[str]:
    """The groups that the ledger says were trained, step by step."""
    ledger = Ledger(run / "ledger.sqlite")
    found = [{id.rpartition("/")[0] for id, fate in ledger.fates(step).items() if fate == "trained"} for step in range(9)]
    ledger.close()
    return [group for groups in found for group in sorted(groups)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_nothing_grows_older_than_the_bound_and_counts_add_up(staleness: int, tmp_path: Path) -> None:
    run = train(streamed(tmp_path / "run", staleness=staleness))
    rows = read_metrics(run / "metrics.jsonl")
    assert len(rows) == 4
    assert all(row["staleness/max"] <= staleness for row in rows)
    assert (max(row["staleness/max"] for row in rows) > 0) == (staleness > 0)
    for row in rows:
        shares = [value for name, value in row.items() if name.startswith("staleness/share_")]
        assert sum(shares) == pytest.approx(1)
        assert row["groups/trained"] == 2
        assert 0 < row["mismatch/effective_share"] <= 1
        assert row["episodes/kept_length_mean"] > 0
        assert row["wait/learner_for_episodes_s"] >= 0
    fates = settled(run)
    assert fates == {"trained": 8}, "no more is drawn than the run has steps for"
    assert len(trained_groups(run)) == len(set(trained_groups(run))) == 8


class Clockwork:
    """The schedule's own decisions, with groups that a test completes instead of an engine: P = 2 groups a step."""

    def __init__(self, folder: Path, staleness: int, seed: int) -> None:
        recipe = streamed(folder, staleness=staleness, steps=9)
        engine = SimpleNamespace(capabilities=SimpleNamespace(in_flight=True, own_weights=False))
        parts = SimpleNamespace(
            session=SimpleNamespace(engine=engine), loader=SimpleNamespace(waits_for_outcomes=False), ledger=None
        )
        self.schedule = AsynchronousSchedule(recipe, parts)  # type: ignore[arg-type]
        self.steps, self.random, self.begun = recipe.steps, Random(seed), 0

    def play(self, least: int) -> None:
        """Begin what there is room for, and complete some groups, ``least`` at least; one in eight cannot be trained."""
        schedule = self.schedule
        while schedule._room:
            group = OpenGroup(self.begun, {}, Task(f"t{self.begun}"), began=schedule._updates)
            schedule._open.append(group)
            self.begun += 1
        playing = [group for group in schedule._open if group.selection is None]
        assert len(playing) >= least, "the step waits, and nothing is played"
        for group in self.random.sample(playing, max(least, self.random.randrange(len(playing) + 1))):
            group.selection = Selection((Group("g", group.task, ()),) if self.random.random() > 0.125 else ())

    def ages(self) -> list[int]:
        """Take every step of the run; how old each trained group was."""
        schedule, found = self.schedule, []
        for step in range(1, self.steps + 1):
            schedule._step = step
            self.play(0)
            while (chosen := schedule._choose()) is None:
                self.play(1)
            found += [schedule._updates - (group.began or 0) for group in chosen]
            schedule._open = [group for group in schedule._open if group not in chosen and not group.dropped]
            schedule._updating = True
            self.play(0)
            schedule._updates += 1
            schedule._updating = False
        return found


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_whatever_order_groups_are_complete_in_none_is_trained_too_late_and_no_step_waits_for_ever(
    staleness: int, tmp_path: Path
) -> None:
    ages = [age for seed in range(60) for age in Clockwork(tmp_path / "run", staleness, seed).ages()]
    assert max(ages) == staleness, "the bound is reached, and never passed"


def test_begun_groups_that_can_never_be_trained_end_the_run_instead_of_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = AsynchronousSchedule._room.fget
    assert room is not None

    def one_batch_more(self: AsynchronousSchedule) -> bool:
        return room(self) or sum(group.began is not None for group in self._open) < 3 * self._wanted

    monkeypatch.setattr(AsynchronousSchedule, "_room", property(one_batch_more))
    with pytest.raises(RuntimeError, match=r"step \d+ would wait .*max_staleness 1"):
        train(streamed(tmp_path / "run", staleness=1))


def test_staleness_is_of_the_tokens_and_not_of_their_response() -> None:
    spans = (VersionSpan(3, 0, 3), VersionSpan(5, 3, 4))
    written = [Segment("model", (1,) * 4, policy_version=5, versions=spans), Segment("model", (1,) * 4, policy_version=4)]
    turns = tuple(Turn(i, (), response, 0, i) for i, response in enumerate(written))
    sample = CreditedEpisode(Episode("e", "t", "g", 0, (), turns, Status.FINISHED), (torch.ones(4),) * 2)
    assert staleness_metrics("asynchronous", [[sample]], version=5) == {
        "staleness/share_0": 1 / 8,
        "staleness/share_1": 4 / 8,
        "staleness/share_2": 3 / 8,
        "staleness/mean": (4 * 1 + 3 * 2) / 8,
        "staleness/spanning": 1,
        "staleness/max": 2,
    }
    assert staleness_metrics("one_step_off", [[sample]], version=5)["staleness/max"] == 1


async def scored_late(task: Any, episode: Any) -> float:
    """The second and third group have no scores before the fourth is half written."""
    if episode.group_id.split("/")[1] in "12":
        while Slow.asked < 8:
            await asyncio.sleep(0.001)
        for _ in range(4):  # as many ticks at most, of up to 16 tokens
            await asyncio.sleep(0)
    return float(episode.index % 2)


def test_responses_go_on_across_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, Slow.asked = NativeEngine.generate, 0

    async def counted(self: NativeEngine, *given: Any) -> Any:
        Slow.asked += 1
        return await generate(self, *given)

    monkeypatch.setattr(NativeEngine, "generate", counted)
    changes: dict[str, Any] = {
        "batch": {"prompts_per_step": 1, "group_size": 2},
        "rollout": {"max_new_tokens": 240, "ignore_stop_tokens": True},
        "rewards": {"terms": [{"name": "tests.trainer.test_asynchronous:scored_late"}]},
    }
    run = train(streamed(tmp_path / "run", staleness=2, **changes))
    rows = read_metrics(run / "metrics.jsonl")
    assert sum(row["staleness/spanning"] for row in rows) > 0
    assert all(row["episodes/length_max"] == 240 for row in rows), "none was cut short"
    assert settled(run) == {"trained": 4}


def killed(recipe: Recipe, step: int, *flags: str) -> int:
    """Train in a process that kills itself at the first score after a step's checkpoint; how it ended."""
    file = recipe.directory.parent / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    told = {KILL_AFTER: str(recipe.directory / f"checkpoints/step_{step:06d}"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "sensorium.cli.main", "train", str(file), *flags]
    return subprocess.run(command, env=os.environ | told, stdout=subprocess.DEVNULL, check=False).returncode


@pytest.mark.usefixtures("forked_python")
def test_after_kills_in_mid_flight_everything_drawn_is_trained_once(tmp_path: Path) -> None:
    recipe = streamed(
        tmp_path / "run", staleness=2, steps=6
    )  # at the second checkpoint at most 10 of 12 groups have scores
    for step, flags in ((1, ()), (2, ("--resume",))):
        assert killed(recipe, step, *flags) == -signal.SIGKILL
    train(recipe, resume=True)
    fates = settled(tmp_path / "run")
    assert fates == {"trained": 12}
    assert len(trained_groups(tmp_path / "run")) == len(set(trained_groups(tmp_path / "run"))) == 12
    assert all(row["staleness/max"] <= 2 for row in read_metrics(tmp_path / "run/metrics.jsonl"))
    train(streamed(tmp_path / "run", staleness=2, steps=7), resume=True)
    assert settled(tmp_path / "run") == {"trained": 14}


def refused(task: Any, episode: Any) -> float:
    if task.answer == "0":
        raise ValueError("no score for this one")
    return float(episode.index % 2)


def test_what_cannot_be_trained_on_is_on_record_and_replaced(tmp_path: Path) -> None:
    rewards = {"terms": [{"name": "tests.trainer.test_asynchronous:refused"}], "retries": 0}
    run = train(streamed(tmp_path / "run", rewards=rewards, steps=3))
    fates = settled(run)
    assert fates["trained"] == 6
    assert fates["dropped"] >= 1
    rows = read_metrics(run / "metrics.jsonl")
    assert sum(row.get("episodes/dropped_length_max", 0) > 0 for row in rows) >= 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.correction.weights=none"], "of older policies"),
        (["rollout.schedule=lockstep"], "set rollout.schedule: eager"),
        (["selection.dynamic=true"], "the groups that are complete"),
        (["algorithm.advantage.name=remax"], "a greedy episode of the same weights"),
        (["schedule.name=synchronous"], "belongs to schedule: asynchronous"),
    ],
)
def test_what_it_cannot_be_used_with_is_refused(overrides: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        streamed(tmp_path / "run", *overrides)


def test_the_plan_says_what_is_given_up(tmp_path: Path) -> None:
    plan = make_plan(streamed(tmp_path / "run"))
    assert "Given up: bit-exact repetition" in plan.schedule
    assert "native engine" in plan.schedule
    assert not plan.deterministic


def test_an_effective_sample_size_that_collapses_is_an_alarm(tmp_path: Path) -> None:
    recipe = streamed(tmp_path / "run")
    row = {"staleness/max": 2.0, "mismatch/effective_share": 0.1, "correction/effective_share": 0.05}
    found = [finding.rule for finding in examine(StepFacts(recipe, 3, row))]
    assert "stale" in found
    assert "weightless" not in found
    fresh = row | {"mismatch/effective_share": 0.9, "correction/effective_share": 0.9}
    assert "stale" not in [finding.rule for finding in examine(StepFacts(recipe, 3, fresh))]
