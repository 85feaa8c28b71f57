"""The table of estimators and losses: a line here and a function in ``algorithms/`` are all that a new one needs.

The function has the same name in ``algorithms/advantages.py`` or ``algorithms/losses.py``. An estimator or loss of the
user's own (``module:attribute``) has the default traits: no critic, groups of any size, single tokens. Imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

Over = Literal["token", "sequence", "update"]
SEQUENCE_MEAN = ("sequence_mean_token_mean",)
PPO_CLIP = (0.2, 0.2)


@dataclass(frozen=True)
class EstimatorTraits:
    """``settings``: keys of algorithm.advantage it takes. ``compares``: its episodes against others of their group.

    ``critic``: it needs values; ``observations``: also those at the environment's tokens. ``greedy``: it needs each task
    played once greedily. ``per_term``: it works on the terms apart.
    """

    settings: tuple[str, ...] = ()
    compares: bool = False
    critic: bool = False
    observations: bool = False
    greedy: bool = False
    per_term: bool = False


@dataclass(frozen=True)
class LossTraits:
    """``settings``: keys of algorithm.loss it takes. ``over``: what it must know whole. ``aggregations``: those allowed.

    Empty: any. The first is what ``aggregation: auto`` means; token_mean where any is allowed. ``clip``: the published
    (clip_low, clip_high), which are meant where a recipe leaves them out. ``credited_only``: a token without an advantage
    has no gradient, so that where there is no advantage no backward pass is needed.
    """

    settings: tuple[str, ...] = ()
    over: Over = "token"
    aggregations: tuple[str, ...] = ()
    clip: tuple[float, float] = PPO_CLIP
    credited_only: bool = False

    @property
    def aggregation(self) -> str:
        """The aggregation of ``auto``."""
        return self.aggregations[0] if self.aggregations else "token_mean"


CLIP = ("clip_low", "clip_high")
COV = ("cov_share", *CLIP)
TURN = ("turn_gamma", "turn_lam")

ESTIMATORS: dict[str, EstimatorTraits] = {
    "grpo": EstimatorTraits(("std", "leave_one_out"), compares=True),
    "rloo": EstimatorTraits(compares=True),
    "opo": EstimatorTraits(compares=True),
    "remax": EstimatorTraits(greedy=True),
    "gpg": EstimatorTraits(compares=True),
    "pass_at_k": EstimatorTraits(compares=True),
    "gdpo": EstimatorTraits(("std", "leave_one_out"), compares=True, per_term=True),
    "reinforce_plus_plus": EstimatorTraits(("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorTraits(compares=True),
    "gae": EstimatorTraits(("gamma", "lam"), critic=True, observations=True),
    "masked_gae": EstimatorTraits(("gamma", "lam"), critic=True),
    "turn_wise_gae": EstimatorTraits(TURN, critic=True),
    "bi_level_gae": EstimatorTraits(("gamma", "lam", *TURN), critic=True),
}

LOSSES: dict[str, LossTraits] = {
    "clip": LossTraits((*CLIP, "dual_clip"), credited_only=True),
    "gspo": LossTraits(
        (*CLIP, "dual_clip"), over="sequence", aggregations=SEQUENCE_MEAN, clip=(3e-4, 4e-4), credited_only=True
    ),
    "cispo": LossTraits(CLIP, clip=(1.0, 4.0), credited_only=True),
    "gmpo": LossTraits(
        (*CLIP, "dual_clip"), over="sequence", aggregations=SEQUENCE_MEAN, clip=(0.4, 0.4), credited_only=True
    ),
    "sapo": LossTraits(("tau_positive", "tau_negative"), aggregations=SEQUENCE_MEAN, credited_only=True),
    "gpg": LossTraits(credited_only=True),
    "dppo": LossTraits((*CLIP, "ratio_cap"), clip=(0.15, 0.15), credited_only=True),
    "clip_cov": LossTraits((*COV, "dual_clip", "cov_low", "cov_high"), over="update", credited_only=True),
    "kl_cov": LossTraits(("cov_share", "cov_kl_coef", "ratio_cap"), over="update"),
    "likelihood": LossTraits(),
}


def estimator_traits(name: str) -> EstimatorTraits:
    return ESTIMATORS.get(name, EstimatorTraits())


def loss_takes(name: str, setting: str) -> bool:
    """Whether a loss takes a setting; a loss of the user's own may take any."""
    return name not in LOSSES or setting in LOSSES[name].settings


def loss_traits(name: str) -> LossTraits:
    return LOSSES.get(name, LossTraits())
