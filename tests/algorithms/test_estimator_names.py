"""The table of names, the traits and the estimators themselves say the same."""

import inspect
from dataclasses import replace

import pytest
import torch

from sensorium.algorithms.advantages import Episodes
from sensorium.recipe.estimators_and_losses import ESTIMATORS
from sensorium.recipe.registry import NAMES, resolve
from sensorium.recipe.schema import AdvantageSection
from tests.algorithms.batches import of_rewards
from tests.algorithms.test_spans import SETTINGS, estimate

every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def test_every_named_estimator_has_traits() -> None:
    assert set(NAMES["advantage"]) == set(ESTIMATORS)


@every_estimator
def test_an_estimator_takes_the_settings_its_traits_name(name: str) -> None:
    episodes, *settings = inspect.signature(resolve("advantage", name)).parameters.values()
    assert episodes.name == "episodes"
    assert all(s.kind is s.KEYWORD_ONLY for s in settings)
    assert tuple(s.name for s in settings) == ESTIMATORS[name].settings
    assert set(ESTIMATORS[name].settings) <= set(AdvantageSection.model_fields)
    assert set(ESTIMATORS[name].settings) <= set(SETTINGS)


@every_estimator
def test_an_estimator_needs_what_its_traits_say(name: str) -> None:
    whole = of_rewards([0.0, 1.0], [2.0, 2.5]).episodes()
    bare = replace(whole, values_P=None, after_S=None, greedy_S=None, correct_S=None)
    traits = ESTIMATORS[name]
    if traits.critic or traits.greedy:
        with pytest.raises(AssertionError, match="needs"):
            estimate(name, bare)
    else:
        assert estimate(name, bare).targets_P is None
    assert (estimate(name, whole).targets_P is not None) == traits.critic


@every_estimator
def test_a_step_without_episodes_has_no_credit(name: str) -> None:
    none, empty = torch.zeros(0, dtype=torch.long), torch.zeros(0)
    flags = none.bool()
    assert estimate(name, Episodes(none, flags, none, none, flags, empty, empty, empty, empty)).advantages_P.tolist() == []
