"""What a step collects: rounds until enough groups have signal, early stop, shares of variance, greedy baselines."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.rollout.play import CANCELLED
from sensorium.runs.episodes import read_episodes
from sensorium.runs.ledger import Ledger
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.collect import BASELINE, CollectedStep
from sensorium.trainer.run import open_trainer, train
from sensorium.trainer.selection import NO_SIGNAL, TOO_ALIKE, UNUSED
from sensorium.vocabulary import Episode, Message, Score, Task, system, user
from sensorium.vocabulary.errors import NothingTrained, RewardFailure
from tests.recipes import parsed, quick

HERE = "tests.trainer.test_collect"
RECIPE = quick(
    "collecting",
    model={"path": "tiny:qwen2_5_vl"},
    tasks={"train": [{"source": "environments", "options": {"environment": f"{HERE}:Ladder", "size": 64}}]},
    batch={"prompts_per_step": 4, "group_size": 2},
    rollout={"max_new_tokens": 3, "max_turns": 4, "ignore_stop_tokens": True},
    rewards={"terms": [{"name": f"{HERE}:EvenSeeds"}], "retries": 0},
)


class Ladder:
    """An environment of one to three turns, by its seed."""

    instant = True

    def __init__(self, store: MediaStore) -> None:
        self.turn = 0

    @classmethod
    def content_key(cls, seed: int, options: dict[str, Any]) -> str:
        return str(seed)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self.turns = 1 + seed % 3
        return (system("climb"),), Observation((user("0"),))

    def step(self, response: str) -> StepResult:
        self.turn += 1
        done = self.turn == self.turns
        return StepResult(None if done else Observation((user(str(self.turn)),)), reward=1.0, done=done)

    def demonstrate(self) -> str:
        return "up"

    def close(self) -> None: ...


class EvenSeeds:
    """Pays the members of groups with an even seed differently, the more so the larger the seed; others alike.

    ``no_greedy``: has nothing to say of greedy episodes whose seed divides by three.
    """

    name = "even"
    instant = True

    def __init__(self, no_greedy: bool = False) -> None:
        self.no_greedy = no_greedy

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        seed = seed_of(task)
        if episode.id.startswith("greedy/"):
            if self.no_greedy and seed % 3 == 0:
                raise RewardFailure("speechless")
            return (Score("even", 0.25),)
        return (Score("even", (1 + seed % 1000) * float(episode.index) if seed % 2 == 0 else 0.25),)


def seed_of(task: Task) -> int:
    assert task.environment is not None
    return task.environment.seed


def recipe_of(folder: Path, changes: dict[str, Any]) -> Any:
    return parsed(RECIPE, folder, **changes)


def collect(folder: Path, **changes: Any) -> tuple[CollectedStep, list[Task]]:
    """The first step's collection, and the stream it came from."""
    directory = RunDirectory(folder)
    directory.create()
    trainer = open_trainer(recipe_of(folder, changes), directory)
    try:
        collected = asyncio.run(trainer.collector.collect(1, lambda *phase: nullcontext()))
        return collected, list(trainer.loader.planner.stream.draw(0, 64).tasks)
    finally:
        trainer.close()


def ids(groups: Any) -> list[str]:
    return [group.task.id for group in groups]


def test_rounds_draw_what_is_missing_until_enough_groups_have_signal(tmp_path: Path) -> None:
    collected, stream = collect(tmp_path, selection={"dynamic": True, "max_rounds": 12})
    even = [task for task in stream if seed_of(task) % 2 == 0]
    rounds, drawn, found = 0, 0, 0
    while found < 4:
        more = stream[drawn : drawn + 4 - found]
        found += sum(seed_of(task) % 2 == 0 for task in more)
        rounds, drawn = rounds + 1, drawn + len(more)
    assert rounds > 1, "the seeds ask for more than one round"
    assert ids(collected.selection.groups) == [task.id for task in even[:4]]
    assert ids(collected.groups) == [task.id for task in stream[:drawn]]
    assert collected.drawn == drawn
    assert collected.metrics["groups/rounds"] == rounds
    assert collected.metrics["groups/without_signal"] == drawn - 4
    assert collected.metrics["groups/short"] == 0
    alike = [e.id for group in collected.groups if seed_of(group.task) % 2 for e in group.episodes]
    assert collected.fates == dict.fromkeys(alike, NO_SIGNAL)
    assert len({group.id for group in collected.groups}) == drawn
    assert len({e.id for group in collected.groups for e in group.episodes}) == 2 * drawn


def test_at_the_cap_a_step_trains_on_what_there_is(tmp_path: Path) -> None:
    collected, stream = collect(tmp_path, selection={"dynamic": True, "max_rounds": 1})
    even = [task.id for task in stream[:4] if seed_of(task) % 2 == 0]
    assert 0 < len(even) < 4
    assert ids(collected.selection.groups) == even
    assert collected.metrics["groups/short"] == 4 - len(even)


def test_tasks_that_come_again_within_a_step_are_other_groups_with_other_episodes(tmp_path: Path) -> None:
    worlds = {"environment": f"{HERE}:Ladder", "size": 3}
    selection = {"dynamic": True, "max_rounds": 4}
    terms = [{"name": "environment"}]
    tasks = {"train": [{"source": "environments", "options": worlds}]}
    collected, _ = collect(tmp_path, tasks=tasks, selection=selection, rewards={"terms": terms})
    assert len(collected.groups) == 16
    assert len(set(ids(collected.groups))) == 3
    assert len({group.id for group in collected.groups}) == 16
    written = [tuple(turn.response.tokens for turn in e.turns) for group in collected.groups for e in group.episodes]
    assert len(set(written)) == len(written)


def test_a_step_without_signal_is_skipped_counted_and_recorded(tmp_path: Path) -> None:
    changes = {"selection": {"dynamic": True, "max_rounds": 3}, "rewards": {"terms": [{"name": f"{HERE}:Nothing"}]}}
    with pytest.raises(NothingTrained, match="or nobody leads"):
        train(recipe_of(tmp_path / "run", changes))
    first, second = read_metrics(tmp_path / "run/metrics.jsonl")
    for row in (first, second):
        assert (row["groups/rounds"], row["groups/without_signal"], row["groups/short"]) == (3, 12, 4)
        assert (row["policy/skipped"], row["groups/trained"], row["reward/mean"]) == (1, 0, 0.0)
    logs = [list(read_episodes(tmp_path / f"run/episodes/step_{step:06}.jsonl")) for step in (1, 2)]
    assert [len(log) for log in logs] == [24, 24]
    assert not {task.id for _, task, _ in logs[0]} & {task.id for _, task, _ in logs[1]}, "the stream goes on"
    ledger = Ledger(tmp_path / "run/ledger.sqlite")
    assert ledger.states() == {1: "trained", 2: "trained"}
    assert ledger.fates(2) == {e.id: NO_SIGNAL for _, _, e in logs[1]}


class Nothing:
    """Pays nothing."""

    name = "nothing"
    instant = True

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        return (Score("nothing", 0.0),)


def test_over_sampling_takes_the_first_complete_and_cancels_the_rest(tmp_path: Path) -> None:
    collected, stream = collect(tmp_path, selection={"oversample": 2.0})
    turns = {task.id: 1 + seed_of(task) % 3 for task in stream[:8]}
    by_turns = sorted(turns, key=lambda id: turns[id])
    last = turns[by_turns[3]]
    assert last < 3, "the seeds leave something to cancel"
    complete = [id for id in turns if turns[id] <= last]
    assert ids(collected.groups) == complete
    assert sorted(ids(collected.selection.groups)) == sorted(by_turns[:4])
    assert ids(collected.selection.groups) == [id for id in turns if id in by_turns[:4]], "trained in the stream's order"
    assert sorted(ids(collected.aside)) == sorted(set(turns) - set(complete))
    assert collected.metrics["groups/cancelled"] == 8 - len(complete)
    assert collected.metrics["groups/unused"] == len(complete) - 4
    assert collected.drawn == 8
    for group in collected.aside:
        assert all(collected.fates[e.id] == CANCELLED and e.scores == () for e in group.episodes)
        assert all(len(e.turns) == last for e in group.episodes)
    unused = [group for group in collected.groups if group.task.id not in by_turns[:4]]
    assert all(collected.fates[e.id] == UNUSED for group in unused for e in group.episodes)


def test_rounds_and_over_sampling_combine(tmp_path: Path) -> None:
    selection = {"dynamic": True, "max_rounds": 9, "oversample": 1.5}
    collected, _ = collect(tmp_path / "once", selection=selection)
    assert len(collected.selection.groups) == 4
    assert all(seed_of(group.task) % 2 == 0 for group in collected.selection.groups)
    assert collected.metrics["groups/rounds"] > 1
    assert collected.metrics["groups/cancelled"] > 0
    assert len({group.id for group in collected.played}) == len(collected.played) == collected.drawn
    trained = {e.id for group in collected.selection.groups for e in group.episodes}
    everyone = {e.id for group in collected.played for e in group.episodes}
    assert collected.fates.keys() == everyone - trained
    again, _ = collect(tmp_path / "again", selection=selection)
    assert again == collected


def test_the_groups_that_vary_most_are_trained(tmp_path: Path) -> None:
    collected, stream = collect(tmp_path, selection={"variance_share": 0.3})
    spread = {task.id: (1 + seed_of(task) % 1000) * (seed_of(task) % 2 == 0) for task in stream[:4]}
    best = sorted(spread, key=lambda id: -spread[id])[:2]
    assert sorted(ids(collected.selection.groups)) == sorted(best)
    assert collected.metrics["groups/too_alike"] == 2
    assert set(collected.fates.values()) == {TOO_ALIKE}


def test_greedy_rewards_are_kept_by_group_and_greedy_episodes_on_record(tmp_path: Path) -> None:
    collected, _ = collect(
        tmp_path, algorithm={"advantage": {"name": "remax"}}, batch={"prompts_per_step": 4, "group_size": 1}
    )
    assert len(collected.selection.groups) == 4, "a group of one is enough where none is compared"
    assert collected.greedy == {group.id: 0.25 for group in collected.selection.groups}
    assert collected.metrics["reward/greedy"] == 0.25
    assert ids(collected.aside) == ids(collected.groups)
    for greedy, sampled in zip(collected.aside, collected.groups, strict=True):
        (episode,) = greedy.episodes
        assert collected.fates[episode.id] == BASELINE
        assert len(episode.turns) == len(sampled.episodes[0].turns)
        assert episode.turns[0].response.tokens == collected.aside[0].episodes[0].turns[0].response.tokens


def test_a_group_without_a_greedy_score_is_dropped_and_says_why(tmp_path: Path) -> None:
    terms = [{"name": f"{HERE}:EvenSeeds", "options": {"no_greedy": True}}]
    rewards = RECIPE["rewards"] | {"terms": terms}
    selection = {"dynamic": True, "max_rounds": 9}
    advantage = {"advantage": {"name": "remax"}}
    collected, stream = collect(tmp_path, algorithm=advantage, rewards=rewards, selection=selection)
    played = stream[: collected.drawn]
    with_signal = [task.id for task in played if seed_of(task) % 2 == 0 and seed_of(task) % 3]
    assert ids(collected.selection.groups) == with_signal[:4]
    assert collected.greedy.keys() == {group.id for group in collected.selection.groups}
    speechless = [group for group in collected.groups if seed_of(group.task) % 3 == 0]
    assert speechless
    for episode in (e for group in speechless for e in group.episodes):
        assert "no greedy episode to compare it with" in collected.fates[episode.id]
        assert "speechless" in collected.fates[episode.id]
    assert len({group.id for group in collected.aside}) == len(collected.groups), "greedy ids count on through the rounds"


@pytest.mark.parametrize("schedule", ["lockstep", "eager"])
def test_a_whole_run_trains_with_rounds_and_early_stop(schedule: str, tmp_path: Path) -> None:
    selection = {"dynamic": True, "max_rounds": 6, "oversample": 1.5}
    changes = {"selection": selection, "rollout": RECIPE["rollout"] | {"schedule": schedule}}
    train(recipe_of(tmp_path / "run", changes))
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    ledger = Ledger(tmp_path / "run/ledger.sqlite")
    for step, row in enumerate(rows, start=1):
        assert row["groups/trained"] == 4 - row["groups/short"] > 0
        assert (row["groups/zero_variance"], row["groups/dropped"], row["episodes/dropped"]) == (0, 0, 0)
        assert row["policy/grad_norm"] > 0
        log = list(read_episodes(tmp_path / f"run/episodes/step_{step:06}.jsonl"))
        fates = ledger.fates(step)
        assert {e.id for _, _, e in log} == fates.keys()
        assert sum(fate == "trained" for fate in fates.values()) == 2 * row["groups/trained"]
        aside = {NO_SIGNAL: "groups/without_signal", UNUSED: "groups/unused", CANCELLED: "groups/cancelled"}
        for why, name in aside.items():
            assert sum(fate == why for fate in fates.values()) == 2 * row[name]
