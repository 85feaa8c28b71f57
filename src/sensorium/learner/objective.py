"""What an update minimises: the policy loss with its settings, KL, entropy, correction, and who learns.

Example. ``algorithm.loss: {name: clip, clip_low: 0.2, clip_high: 0.28, entropy_coef: 0.01}`` gives

    objective.loss          the function ``clip`` with the settings it takes: clip_low, clip_high, dual_clip
    objective.aggregation   the recipe's, or what the loss's line in ``recipe/traits.py`` says where that is ``auto``
    objective.idles(batch)  False: the entropy bonus gives every token a gradient, also where all advantages are 0
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from sensorium.algorithms.tokens import TokenLoss, Tokens
from sensorium.learner.packing import MicroBatch
from sensorium.recipe.algorithm_sections import AlgorithmSection
from sensorium.recipe.names import resolve
from sensorium.recipe.traits import loss_traits

LossFunction = Callable[[Tokens], TokenLoss]
SUPERVISED = "likelihood"


@dataclass(frozen=True)
class Objective:
    """``kl_coef`` is the present weight of the KL in the loss. ``policy_learns``: False while only the critic warms up."""

    name: str
    algorithm: AlgorithmSection
    kl_coef: float = 0.0
    policy_learns: bool = True

    @property
    def supervised(self) -> bool:
        """Nothing was sampled by an engine, so there is no KL, no clip and no mismatch."""
        return self.name == SUPERVISED

    @property
    def over(self) -> str:
        """What the loss must know whole: its tokens, their sequences, or the update."""
        return loss_traits(self.name).over

    @property
    def aggregation(self) -> str:
        """How token losses are weighted."""
        named = self.algorithm.loss.aggregation
        return loss_traits(self.name).aggregation if named == "auto" or self.supervised else named

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus."""
        return 0.0 if self.supervised else self.algorithm.loss.entropy_coef

    @cached_property
    def loss(self) -> LossFunction:
        """The named loss, with those of the recipe's settings that are parameters of it."""
        function = resolve("loss", self.name, "algorithm.loss.name")
        settings = self.algorithm.loss.model_dump()
        taken = {key: settings[key] for key in inspect.signature(function).parameters if key in settings}
        return partial(function, **taken)

    def idles(self, microbatch: MicroBatch) -> bool:
        """True if a micro-batch gives the policy no gradient: all advantages are 0, and no other term has a gradient."""
        if not self.policy_learns:
            return True
        pulled = self.kl_coef or self.entropy_coef or self.algorithm.router_coef
        return microbatch.silent and loss_traits(self.name).credited_only and not pulled
