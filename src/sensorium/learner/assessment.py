"""What the models think of episodes before they are trained on."""

from dataclasses import dataclass

from torch import Tensor

from sensorium.learner.positions import Positions


@dataclass(frozen=True)
class Assessment:
    """What credit must know of episodes before they are trained on, in canonical order, on the CPU.

    ``values_P`` and ``after_S`` are the critic's; ``old_N`` and ``reference_N`` log-probs for a KL in the reward.
    """

    positions: Positions
    values_P: Tensor | None = None
    after_S: Tensor | None = None
    old_N: Tensor | None = None
    reference_N: Tensor | None = None
    kl_coef: float = 0.0
