"""How large an advantage or a gradient can get at most, for any rewards and ratios, and that bad numbers stay visible."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sensorium.algorithms import advantages
from sensorium.algorithms.advantages import Episodes
from sensorium.recipe.estimators_and_losses import ESTIMATORS, LOSSES
from sensorium.recipe.registry import resolve
from sensorium.recipe.schema import LossSection
from sensorium.vocabulary.episode import LARGEST
from tests.algorithms.batches import Batch, of_rewards
from tests.algorithms.updates import Token, slopes, whole

ONE = {"gamma": 1.0, "lam": 1.0}
TURNS = {"turn_gamma": 0.9, "turn_lam": 0.9}
ESTIMATES: dict[str, Callable] = {
    "grpo": advantages.grpo,
    "grpo without std": lambda e: advantages.grpo(e, std=False),
    "grpo leave one out": lambda e: advantages.grpo(e, leave_one_out=True),
    "grpo leave one out without std": lambda e: advantages.grpo(e, std=False, leave_one_out=True),
    "rloo": advantages.rloo,
    "opo": advantages.opo,
    "remax": advantages.remax,
    "gpg": advantages.gpg,
    "pass_at_k": advantages.pass_at_k,
    "gdpo": advantages.gdpo,
    "gdpo leave one out": lambda e: advantages.gdpo(e, leave_one_out=True),
    "reinforce_plus_plus": lambda e: advantages.reinforce_plus_plus(e, gamma=1.0),
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
    "gae": lambda e: advantages.gae(e, **ONE),
    "masked_gae": lambda e: advantages.masked_gae(e, **ONE),
    "turn_wise_gae": lambda e: advantages.turn_wise_gae(e, **TURNS),
    "bi_level_gae": lambda e: advantages.bi_level_gae(e, **ONE, **TURNS),
}
ROUNDING = 1.01
"""Means of numbers that differ in their twelfth digit are known to three."""

rewards = st.floats(-LARGEST, LARGEST) | st.floats(-2, 2) | st.sampled_from([0.0, 0.5, 0.5 + 1e-7, 0.5 + 1e-11, 1.0])
groups_of_rewards = st.lists(st.lists(rewards, min_size=1, max_size=8), min_size=1, max_size=4)


def bounds(name: str, batch: Batch) -> list[float]:
    """The most that docs/reference/algorithms.md allows every episode, in order."""
    total = len(batch.played)
    found = []
    for played in batch.played:
        group = [p.reward for p in batch.played if p.group == played.group]
        size, apart = len(group), max(group) - min(group)
        if name == "grpo":
            found.append((size - 1) / math.sqrt(size))
        elif name in ("grpo leave one out", "pass_at_k"):
            found.append(math.sqrt(size))
        elif name in ("grpo without std", "grpo leave one out without std", "rloo", "opo"):
            found.append(apart)
        elif name == "gpg":
            found.append(total * apart)
        elif name == "remax":
            found.append(abs(played.reward - played.greedy))
        else:  # whitened or standardised over the step; every episode here has one token and one turn
            found.append((total - 1) / math.sqrt(total))
    return found


def test_every_estimator_is_here() -> None:
    assert {name.split(" ")[0] for name in ESTIMATES} == set(ESTIMATORS)


@pytest.mark.parametrize("name", ESTIMATES)
@given(groups_of_rewards)
def test_no_advantage_is_beyond_its_bound_for_any_finite_rewards(name: str, groups: list[list[float]]) -> None:
    batch = of_rewards(*groups)
    got = ESTIMATES[name](batch.episodes()).advantages_P.tolist()
    for advantage, bound in zip(got, bounds(name, batch), strict=True):
        assert abs(advantage) <= ROUNDING * bound + 1e-9


def test_leave_one_out_is_held_where_the_others_hardly_differ() -> None:
    first, second, third = ESTIMATES["grpo leave one out"](of_rewards([1.0, 0.5, 0.5 + 1e-7]).episodes()).advantages_P
    assert float(first) == pytest.approx(math.sqrt(3))
    assert [float(second), float(third)] == pytest.approx([-1 / math.sqrt(2)] * 2, rel=1e-5)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=16))
def test_leave_one_out_of_right_and_wrong_is_not_touched_by_the_bound(values: list[float]) -> None:
    got = ESTIMATES["grpo leave one out"](of_rewards(values).episodes()).advantages_P.tolist()
    for i, (value, advantage) in enumerate(zip(values, got, strict=True)):
        others = torch.tensor(values[:i] + values[i + 1 :], dtype=torch.float64)
        away = value - float(others.mean())
        spread = float(others.std()) if len(others) > 1 else 0.0
        assert advantage == pytest.approx(away / (spread + 1e-6) if spread else away)
        assert abs(advantage) < math.sqrt(len(values))


@pytest.mark.parametrize("name", ESTIMATES)
@given(st.data())
def test_a_reward_that_is_no_number_is_never_taken_for_no_difference(name: str, data: st.DataObject) -> None:
    bad = data.draw(st.sampled_from([math.inf, -math.inf, math.nan]))
    sizes = data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    groups = [[data.draw(st.sampled_from([0.0, 1.0, bad])) for _ in range(size)] for size in sizes]
    groups[0][0] = bad
    episodes: Episodes = of_rewards(*groups).episodes()
    if name.startswith("gdpo"):
        assume(not math.isnan(bad))  # NaN says that a term did not judge an episode
    if name == "remax":
        episodes = replace(episodes, greedy_S=torch.zeros_like(episodes.rewards_S))
    assert not ESTIMATES[name](episodes).advantages_P.isfinite().all()


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "likelihood"])
@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-3, 3)), min_size=1, max_size=12))
def test_no_ratio_gives_a_gradient_of_more_than_twenty_advantages(name: str, rows: list[tuple[float, float]]) -> None:
    """With the defaults of the recipe; kl_cov adds the pull of its KL."""
    section = LossSection(name=name)
    tokens = whole([[Token(-31.0 + gap, -31.0, advantage, 0.5)] for gap, advantage in rows])
    out = resolve("loss", name)(tokens, **{key: getattr(section, key) for key in LOSSES[name].settings})
    pull = section.cov_kl_coef if name == "kl_cov" else 0.0
    limit_N = 20 * tokens.advantages_N.abs() + pull + 1e-9
    assert bool((slopes(out, tokens).abs() <= limit_N).all())
    assert bool(out.loss_N.isfinite().all())


def test_without_the_dual_clip_one_ratio_drowns_everything() -> None:
    tokens = whole([[Token(-0.1, -20.0, -1.0, 0.5)]])
    bounded = resolve("loss", "clip")(tokens)
    assert float(bounded.loss_N.detach()) == pytest.approx(10.0)
    assert bounded.clipped_N.all()
    assert float(slopes(resolve("loss", "clip")(tokens, dual_clip=None), tokens)) == pytest.approx(math.exp(19.9))
