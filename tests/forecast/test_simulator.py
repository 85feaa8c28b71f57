"""The simulator: what each schedule must do, whatever the numbers, and a thousand GPUs in seconds."""

import time
from dataclasses import replace

import pytest

from sensorium.forecast.costs import Costs, StepWork, costs_of, kinds, machine, published_configs
from sensorium.forecast.simulator import Deployment, Engine, PlayedGroup, play, simulate
from sensorium.recipe.model_shape import shape_by_config

WORK = StepWork(prompts=16, group=8, prompt=276, response=256, tail=4.0, patches=1024)
COSTS = Costs(costs_of(shape_by_config(published_configs()["Qwen2.5-VL-3B"])), machine(kinds()["h200"]))
APART = Deployment(engines=2, learners=2, apart=True, pushed_bytes=7.5e9)


def test_an_engine_writes_every_token_and_fills_free_rows_from_the_queue() -> None:
    groups = [PlayedGroup(row) for row in WORK.lengths(16, 1).tolist()]
    wide, narrow = Engine(COSTS, WORK, 512), Engine(COSTS, WORK, 32)
    play([wide], groups)
    assert wide.steps == max(max(group.lengths) for group in groups)
    assert all(group.open_rows == 0 and 0 < group.ended_s <= wide.now_s for group in groups)
    play([narrow], groups)
    assert narrow.steps >= sum(group.written for group in groups) / 32
    assert narrow.now_s > wide.now_s


def test_a_synchronous_step_is_the_sum_of_its_parts_and_one_step_off_hides_the_shorter_of_update_and_scoring() -> None:
    plan = replace(APART, scoring_s=3.0)
    waits = simulate(COSTS, COSTS, WORK, plan, steps=2)
    parts = (waits.rollout_s, waits.scoring_s, waits.update_s, waits.push_s, waits.other_s)
    assert waits.gather_s < waits.update_s, "gathering is hidden behind computing here"
    assert waits.step_s == pytest.approx(sum(parts))
    off = simulate(COSTS, COSTS, WORK, replace(plan, schedule="one_step_off"), steps=2)
    hidden = min(waits.scoring_s, waits.update_s + waits.push_s)
    assert waits.step_s - off.step_s == pytest.approx(hidden)
    assert off.stale_max == 1


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_an_asynchronous_run_never_trains_on_what_is_older_than_its_bound_and_is_bound_by_its_slower_side(
    staleness: int,
) -> None:
    plan = replace(APART, schedule="asynchronous", staleness=staleness, pushed_bytes=0.0)
    found = simulate(COSTS, COSTS, WORK, plan, steps=12)
    assert found.stale_max <= staleness
    waits = simulate(COSTS, COSTS, WORK, replace(plan, schedule="synchronous"), steps=12)
    assert found.step_s <= 1.05 * waits.step_s
    assert found.step_s >= 0.95 * (waits.update_s + waits.other_s)
    if staleness == 3:
        assert found.step_s < 0.8 * waits.step_s
        assert found.stale_max > 0


def test_an_asynchronous_step_takes_at_least_its_update_and_its_push() -> None:
    found = simulate(COSTS, COSTS, WORK, replace(APART, schedule="asynchronous", staleness=4), steps=12)
    assert found.push_s > 5
    assert found.step_s >= 0.99 * (found.update_s + found.other_s + found.push_s)


def test_an_asynchronous_engine_on_the_learners_gpu_stands_still_during_updates() -> None:
    alone = Deployment(schedule="asynchronous", staleness=1)
    found = simulate(COSTS, COSTS, WORK, alone, steps=6)
    assert found.engines_busy + found.learners_busy <= 1.0


def test_the_same_seed_gives_the_same_run() -> None:
    plan = replace(APART, schedule="asynchronous")
    assert simulate(COSTS, COSTS, WORK, plan, seed=4) == simulate(COSTS, COSTS, WORK, plan, seed=4)


def test_a_thousand_gpus_take_seconds() -> None:
    work = replace(WORK, prompts=1024, group=16)
    began = time.process_time()
    for schedule in ("synchronous", "asynchronous"):
        plan = Deployment(engines=500, learners=500, apart=True, schedule=schedule, pushed_bytes=7.5e9)
        found = simulate(COSTS, COSTS, work, plan, steps=1)
        assert found.step_s > 0
    assert time.process_time() - began < 30, "a second or two on an idle core"


def test_more_prompts_than_ranks_can_divide_leave_ranks_idle() -> None:
    few = simulate(COSTS, COSTS, WORK, replace(APART, learners=16), steps=1)
    more = simulate(COSTS, COSTS, WORK, replace(APART, learners=64), steps=1)
    assert more.update_s == pytest.approx(few.update_s), "a group is computed by one rank"
