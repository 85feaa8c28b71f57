"""Algorithms that cannot be meant are refused with the reason; degenerate ones are named for what they equal."""

from typing import Any

import pytest

from sensorium.recipe.algorithm_checks import algorithm_problems, cautions
from sensorium.recipe.estimators_and_losses import CLIP, ESTIMATORS, LOSSES, LossTraits
from sensorium.recipe.load import dump_recipe
from sensorium.recipe.schema import CriticSection, LossSection, Recipe
from sensorium.recipe.yaml import read_yaml

LENGTH = {"name": "overlong", "options": {"max_tokens": 12, "buffer_tokens": 1}}
TERMS = [{"name": "exact"}, {"name": "format", "weight": 0.2}]


def recipe(algorithm: dict[str, Any], **given: Any) -> Recipe:
    body: dict[str, Any] = {
        "name": "x",
        "steps": 10,
        "model": {"path": "package:shapes"},
        "tasks": {"train": [{"source": "shapes"}]},
        "rewards": {"terms": TERMS},
        "algorithm": algorithm,
    }
    return Recipe.model_validate(body | given)


REFUSED = {
    "a critic for an estimator that needs none": ({"critic": {"warmup_steps": 3}}, "algorithm.critic", "needs no critic"),
    "gspo with token mean": (
        {"loss": {"name": "gspo", "aggregation": "token_mean"}},
        "algorithm.loss.aggregation",
        "whole sequences",
    ),
    "sapo with token sum": (
        {"loss": {"name": "sapo", "aggregation": "sequence_mean_token_sum"}},
        "algorithm.loss.aggregation",
        "sequence_mean_token_mean",
    ),
    "a setting the estimator does not take": (
        {"advantage": {"name": "rloo", "std": False}},
        "algorithm.advantage.std",
        "does nothing",
    ),
    "a discount without a use": ({"advantage": {"gamma": 0.9}}, "algorithm.advantage.gamma", "takes std, leave_one_out"),
    "a setting the loss does not take": (
        {"loss": {"name": "cispo", "dual_clip": 3.0}},
        "algorithm.loss.dual_clip",
        "takes clip_low, clip_high",
    ),
    "supervised learning as RL": ({"loss": {"name": "likelihood"}}, "algorithm.loss.name", "ignores advantages"),
    "an empty band of covariances": (
        {"loss": {"name": "clip_cov", "cov_low": 6.0}},
        "algorithm.loss.cov_low",
        "empty",
    ),
    "k1 in the loss": ({"kl": {"coef": 0.1, "estimator": "k1"}}, "algorithm.kl.estimator", "no gradient in expectation"),
    "straight through a reward": (
        {"kl": {"coef": 0.1, "estimator": "k3_straight_through", "place": "reward"}},
        "algorithm.kl.estimator",
        "use k3",
    ),
    "a KL among the terms of gdpo": (
        {"advantage": {"name": "gdpo"}, "kl": {"coef": 0.1, "place": "reward"}},
        "algorithm.kl.place",
        "none of them",
    ),
    "control of a KL that is not there": ({"kl": {"control": "adaptive"}}, "algorithm.kl.control", "coefficient of 0"),
    "a target for a fixed KL": ({"kl": {"coef": 0.1, "target": 0.2}}, "algorithm.kl.target", "fixed"),
    "a horizon shorter than a step": (
        {"kl": {"coef": 0.1, "control": "adaptive", "horizon": 10}},
        "algorithm.kl.horizon",
        "at least 64",
    ),
    "a band without weights": ({"correction": {"mode": "band"}}, "algorithm.correction.mode", "does nothing"),
    "a lower bound of a truncation": (
        {"correction": {"weights": "token", "low": 0.1}},
        "algorithm.correction.low",
        "does nothing",
    ),
    "an empty band of ratios": (
        {"correction": {"weights": "token", "mode": "band", "low": 3.0}},
        "algorithm.correction.low",
        "empty",
    ),
    "a bound of no rejection": ({"correction": {"reject_above": 2.0}}, "algorithm.correction.reject_above", "does nothing"),
    "a path of a shared trunk": (
        {"advantage": {"name": "gae"}, "critic": {"trunk": "shared", "path": "somewhere"}},
        "algorithm.critic",
        "no trunk of its own",
    ),
    "a coefficient of an own trunk": (
        {"advantage": {"name": "gae"}, "critic": {"trunk_coef": 0.1}},
        "algorithm.critic.trunk_coef",
        "whole value loss",
    ),
    "a warm-up to the end": (
        {"advantage": {"name": "gae"}, "critic": {"warmup_steps": 10}},
        "algorithm.critic.warmup_steps",
        "never",
    ),
    "an unknown group of a critic": (
        {"advantage": {"name": "gae"}, "critic": {"freeze": ["visoin"]}},
        "algorithm.critic.freeze.0",
        "vision",
    ),
    "log-probs for no correction": (
        {"correction": {"engine_logprobs": "sampled"}},
        "algorithm.correction.engine_logprobs",
        "does nothing",
    ),
    "a GAE without its mask for groups": ({"gae_mask": False}, "algorithm.gae_mask", "does nothing"),
    "observations trained with masked GAE": (
        {"advantage": {"name": "masked_gae"}, "loss_mask": False},
        "algorithm.loss_mask",
        "gae_mask: false",
    ),
    "a threshold without groups": (
        {"advantage": {"name": "masked_gae", "post": "optimize_threshold"}},
        "algorithm.advantage.post",
        "does not compare",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_with_the_reason(case: str) -> None:
    algorithm, place, reason = REFUSED[case]
    found = dict(algorithm_problems(recipe(algorithm)))
    assert place in found, found
    assert reason in found[place]


def test_gae_over_observations_is_refused_for_a_window() -> None:
    algorithm = {"advantage": {"name": "gae"}}
    windowed = recipe(algorithm, rollout={"max_turns": 5, "window": 2})
    assert "masked_gae" in dict(algorithm_problems(windowed))["algorithm.advantage.name"]
    assert not list(algorithm_problems(recipe(algorithm, rollout={"max_turns": 5})))
    unmasked = {"advantage": {"name": "bi_level_gae"}, "gae_mask": False}
    assert "algorithm.gae_mask" in dict(algorithm_problems(recipe(unmasked, rollout={"max_turns": 5, "window": 2})))
    trained = {"loss_mask": False}
    assert "algorithm.loss_mask" in dict(algorithm_problems(recipe(trained, rollout={"max_turns": 5, "window": 2})))
    for fine in ({"loss_mask": False}, unmasked, unmasked | {"loss_mask": False}, algorithm | {"loss_mask": False}):
        assert not list(algorithm_problems(recipe(fine, rollout={"max_turns": 5})))
    assert any("loss_mask" in line for line in cautions(recipe({"loss_mask": False}, rollout={"max_turns": 5})))


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "likelihood"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_goes_with_every_loss(estimator: str, loss: str) -> None:
    assert not list(algorithm_problems(recipe({"advantage": {"name": estimator}, "loss": {"name": loss}})))


def test_a_dumped_recipe_with_every_key_written_out_is_not_refused() -> None:
    plain = recipe({})
    again = Recipe.model_validate(plain.model_dump())
    assert again.algorithm.critic == CriticSection()
    assert not list(algorithm_problems(again))


CAUTIONS = {
    "equals masked_gae": ({"advantage": {"name": "bi_level_gae"}}, {"rollout": {"max_turns": 5}}),
    "no use for turn_gamma": ({"advantage": {"name": "bi_level_gae", "turn_gamma": 0.9}}, {}),
    "minus one value": ({"advantage": {"name": "turn_wise_gae"}}, {"rewards": {"terms": [*TERMS, LENGTH]}}),
    "may learn to be cut short": ({"advantage": {"name": "masked_gae", "lam": 0.9}}, {"rollout": {"max_turns": 5}}),
    "reaches rollout.max_new_tokens 12 counts": (
        {"advantage": {"name": "masked_gae"}},
        {"rollout": {"max_new_tokens": 12}},
    ),
    "is not trained on": ({"advantage": {"name": "masked_gae"}}, {"rollout": {"mask_truncated": True}}),
    "is grpo, whitened": ({"advantage": {"name": "gdpo"}}, {"rewards": {"terms": TERMS[:1]}}),
    "about 1": ({"correction": {"weights": "token"}}, {}),
    "sampled from the truncated policy": ({}, {"rollout": {"top_p": 0.9}}),
    "trained as if from the whole one": ({"correction": {"reject": "max"}}, {"rollout": {"top_k": 20}}),
    "cuts anything off": ({"correction": {"reject": "max", "engine_logprobs": "sampled"}}, {}),
    "clips hardly anything": ({"loss": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.28}}, {}),
    "drowns the update": ({"loss": {"dual_clip": None}}, {}),
}


@pytest.mark.parametrize("says", CAUTIONS)
def test_a_degenerate_setting_is_named_for_what_it_equals(says: str) -> None:
    algorithm, given = CAUTIONS[says]
    (caution,) = cautions(recipe(algorithm, **given))
    assert says in caution


PUBLISHED = {
    "clip": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "gmpo": (0.4, 0.4),
    "dppo": (0.15, 0.15),
    "clip_cov": (0.2, 0.2),
    "package.module:own_loss": (0.2, 0.2),
}


@pytest.mark.parametrize("name", [*LOSSES, "package.module:own_loss"])
def test_a_clip_that_is_left_out_is_the_one_published_with_the_loss(name: str) -> None:
    section = LossSection(name=name)
    assert (section.clip_low, section.clip_high) == PUBLISHED.get(name, (None, None))
    if name in LOSSES:
        found = recipe({"loss": {"name": name}})
        assert not [caution for caution in cautions(found) if "algorithm.loss" in caution]
    if "clip_low" in LOSSES.get(name, LossTraits(CLIP)).settings:
        given = LossSection(name=name, clip_low=0.11)
        assert (given.clip_low, given.clip_high) == (0.11, PUBLISHED[name][1])


def test_the_clip_of_the_loss_is_in_the_dump_and_loads_back() -> None:
    gspo = recipe({"loss": {"name": "gspo"}})
    text = dump_recipe(gspo)
    assert "clip_low: 0.0003" in text
    assert "clip_high: 0.0004" in text
    assert Recipe.model_validate(read_yaml(text, "dump")[0]) == gspo


@pytest.mark.parametrize("name", ["sapo", "gpg", "kl_cov"])
def test_ppos_clip_may_stay_where_the_loss_was_replaced_by_one_without(name: str) -> None:
    kept = {"name": name, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert not list(algorithm_problems(recipe({"loss": kept})))
    assert list(algorithm_problems(recipe({"loss": {"name": name, "clip_low": 0.3}})))


def test_an_ordinary_setting_is_not_warned_of() -> None:
    turns = {"rollout": {"max_turns": 5}}
    assert not cautions(recipe({}))
    assert not cautions(recipe({"advantage": {"name": "bi_level_gae", "turn_gamma": 0.95}}, **turns))
    assert not cautions(recipe({"advantage": {"name": "masked_gae"}}, rewards={"terms": [*TERMS, LENGTH]}))
    assert not cautions(recipe({"advantage": {"name": "masked_gae", "gamma": 0.9}}))
    truncated = {"correction": {"weights": "token", "engine_logprobs": "sampled"}}
    assert not cautions(recipe(truncated, rollout={"top_p": 0.9}))
