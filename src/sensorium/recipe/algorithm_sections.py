"""The sections ``optimizer`` and ``algorithm`` of a recipe: how rewards become credit, and credit an update."""

from typing import Literal, Self

from pydantic import Field, model_validator

from sensorium.recipe.section import Section
from sensorium.recipe.traits import estimator_traits, loss_takes, loss_traits


class OptimizerSection(Section):
    """AdamW with warm-up, a schedule and clipping; rates by parameter group."""

    lr: float = Field(default=1e-6, gt=0)
    group_lr: dict[str, float] = Field(default={})
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_share: float = Field(default=0.0, ge=0, le=1)
    clip_norm: float = Field(default=1.0, gt=0)
    moments: Literal["float32", "bfloat16", "8-bit"] = "float32"


class AdvantageSection(Section):
    """Which estimator turns rewards into advantages. ``recipe.traits`` says which of the settings it takes."""

    name: str = "grpo"
    std: bool = True
    leave_one_out: bool = False
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount from token to token")
    lam: float = Field(default=1.0, ge=0, le=1, description="GAE's λ from token to token")
    turn_gamma: float = Field(default=1.0, ge=0, le=1, description="discount from turn to turn (Γ)")
    turn_lam: float = Field(default=1.0, ge=0, le=1, description="GAE's λ from turn to turn")
    post: Literal["none", "optimize_threshold"] = "none"


class LossSection(Section):
    """Which policy loss, and its settings. ``recipe.traits`` says which of them it takes.

    ``clip_low`` and ``clip_high`` that are left out become the published ones of the loss, where it clips at all.
    """

    name: str = "clip"
    clip_low: float | None = Field(default=None, ge=0, description="left out: as published with the loss")
    clip_high: float | None = Field(default=None, ge=0, description="left out: as published with the loss")
    dual_clip: float | None = Field(default=10.0, gt=1, description="bound of the ratio where A < 0; null: none")
    tau_positive: float = Field(default=1.0, gt=0)
    tau_negative: float = Field(default=1.05, gt=0)
    ratio_cap: float = Field(default=20.0, gt=0)
    cov_share: float = Field(default=2e-4, gt=0, le=1)
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_kl_coef: float = Field(default=1.0, ge=0)
    aggregation: Literal["auto", "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "auto"
    aggregation_constant: float = Field(default=1.0, gt=0)
    entropy_coef: float = 0.0

    @model_validator(mode="after")
    def _published_clip(self) -> Self:
        for key, published in zip(("clip_low", "clip_high"), loss_traits(self.name).clip, strict=True):
            if getattr(self, key) is None and loss_takes(self.name, key):
                self.__dict__[key] = published  # the section is frozen, and not yet anybody's
        return self


class KLSection(Section):
    """KL to the model as it was when RL began, in the loss or in the reward. Coefficient 0: no reference is kept.

    ``adaptive`` moves the coefficient towards ``target``, within ``horizon`` episodes.
    """

    coef: float = Field(default=0.0, ge=0)
    estimator: Literal["k1", "abs", "k2", "k3", "k1_straight_through", "k3_straight_through"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    control: Literal["fixed", "adaptive"] = "fixed"
    target: float = Field(default=0.1, gt=0)
    horizon: float = Field(default=10_000, gt=0)


class CorrectionSection(Section):
    """What is done about ρ = old / engine. ``truncate`` caps weights at ``high``; ``band`` drops those outside [low, high].

    ``weights`` are of each token, of the whole sequence (the product) or its geometric mean. ``reject`` leaves out
    sequences whose mean or largest ``estimator`` of the mismatch is above ``reject_above``. ``engine_logprobs`` are of the
    whole policy, or of what was ``sampled`` from: the policy cut off by top-p and top-k.
    """

    weights: Literal["none", "token", "sequence", "geometric"] = "none"
    mode: Literal["truncate", "band"] = "truncate"
    low: float = Field(default=0.5, ge=0)
    high: float = Field(default=2.0, gt=0)
    reject: Literal["none", "mean", "max"] = "none"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    reject_above: float = Field(default=1.0, gt=0)
    engine_logprobs: Literal["policy", "sampled"] = "policy"


class CriticSection(Section):
    """The value model: a trunk of its own, or a head on the policy's trunk. For the first steps only it learns.

    ``trunk_coef``: how much of the value loss a shared trunk sees; 0: none. ``path``: where an own trunk starts;
    empty: as the policy does when RL begins.
    """

    trunk: Literal["own", "shared"] = "own"
    path: str = ""
    trunk_coef: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    value_clip: float | None = Field(default=0.5, gt=0)
    freeze: tuple[str, ...] = ()
    optimizer: OptimizerSection = OptimizerSection(lr=1e-5)


class AlgorithmSection(Section):
    """Credit and loss. ``critic`` may be left out where the estimator needs none, and has its defaults where it does."""

    advantage: AdvantageSection = AdvantageSection()
    loss: LossSection = LossSection()
    kl: KLSection = KLSection()
    correction: CorrectionSection = CorrectionSection()
    router_coef: float = Field(default=0.0, ge=0, description="weight of the load-balancing loss of a mixture of experts")
    critic: CriticSection = CriticSection()
    loss_mask: bool = Field(
        default=True, description="train on what the model wrote only; false: on the text of observations after it, too"
    )
    gae_mask: bool = Field(
        default=True, description="run GAE over what the model wrote only; false: over observations, too"
    )

    @property
    def masked(self) -> bool:
        """Whether credit is a matter of the model's own tokens alone."""
        return self.loss_mask and self.gae_mask

    @property
    def sees_observations(self) -> bool:
        """Whether credit has positions at the environment's tokens."""
        return not self.masked or estimator_traits(self.advantage.name).observations
