"""What an update minimises, without a model: who pulls at the policy, and what the warm start does not have."""

from types import SimpleNamespace
from typing import Any

import pytest

from sensorium.learner.update import SUPERVISED, Objective
from sensorium.recipe.estimators_and_losses import LOSSES
from sensorium.recipe.schema import AlgorithmSection, LossSection

SILENT, LOUD = SimpleNamespace(silent=True), SimpleNamespace(silent=False)


def objective(name: str = "clip", *, router_coef: float = 0.0, **given: Any) -> Objective:
    own = {key: given.pop(key) for key in ("kl_coef", "policy_learns") if key in given}
    return Objective(name, AlgorithmSection(loss=LossSection(name=name, **given), router_coef=router_coef), **own)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != SUPERVISED])
def test_tokens_without_advantage_idle_unless_the_loss_itself_pulls(name: str) -> None:
    assert objective(name).idles(SILENT) == (name != "kl_cov")  # kl_cov may hold a token that has no advantage
    assert not objective(name).idles(LOUD)


@pytest.mark.parametrize("pull", [{"kl_coef": 0.1}, {"entropy_coef": 0.01}, {"router_coef": 0.001}])
def test_nothing_idles_while_kl_entropy_or_routers_pull(pull: dict[str, float]) -> None:
    assert not objective(**pull).idles(SILENT)


def test_everything_idles_while_only_the_critic_learns() -> None:
    assert objective(policy_learns=False, kl_coef=0.1).idles(LOUD)


def test_the_warm_start_has_no_entropy_bonus_and_its_own_aggregation() -> None:
    section = AlgorithmSection(loss=LossSection(name="gspo", entropy_coef=0.1))
    assert Objective("gspo", section).entropy_coef == 0.1
    assert Objective(SUPERVISED, section).entropy_coef == 0
    summed = AlgorithmSection(loss=LossSection(aggregation="sequence_mean_token_sum"))
    assert Objective("clip", summed).aggregation == "sequence_mean_token_sum"
    assert Objective(SUPERVISED, summed).aggregation == "token_mean"
    assert Objective("gspo", section).aggregation == "sequence_mean_token_mean"
