"""One update: every micro-batch forward and backward, one tower backward, one optimizer step.

The loss is a sum over tokens with weights from whole-update counts; what is measured is measured over whole-update vectors
in canonical order. So neither depends on how the update was packed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import torch
from torch import Tensor

from sensorium.algorithms import kl
from sensorium.algorithms.aggregation import sequence_weights
from sensorium.algorithms.tokens import TokenLoss, Tokens
from sensorium.learner.forward import Scorer, UpdateFeatures
from sensorium.learner.optimizer import Optimizer
from sensorium.learner.packing import MicroBatch, Packing
from sensorium.learner.sample import SampledTokens
from sensorium.recipe.schema import AlgorithmSection
from sensorium.vocabulary.errors import NonFiniteUpdate

LossFunction = Callable[[Tokens], TokenLoss]


@dataclass(frozen=True)
class Objective:
    """What is minimised. ``supervised``: nothing was sampled by an engine, so there is no KL, no clip and no mismatch."""

    loss: LossFunction
    algorithm: AlgorithmSection
    supervised: bool = False

    def idles(self, microbatch: MicroBatch) -> bool:
        """True if a micro-batch has no gradient: none of its tokens has an advantage, and nothing else pulls at them."""
        return microbatch.silent and self._vanishes and not self.kl_coef and not self.entropy_coef

    @cached_property
    def _vanishes(self) -> bool:
        """Whether a token without advantage has no gradient, asked of the loss itself."""
        logprobs_N = torch.linspace(-4, 0, 17, requires_grad=True)
        zeros_N = torch.zeros(17)
        loss_N = self.loss(Tokens(logprobs_N, logprobs_N.detach().flip(0), zeros_N, zeros_N.long())).loss_N
        return not torch.autograd.grad(loss_N.sum(), logprobs_N)[0].any()

    @property
    def kl_coef(self) -> float:
        """Weight of the KL to the reference."""
        return 0.0 if self.supervised else self.algorithm.kl.coef

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus."""
        return 0.0 if self.supervised else self.algorithm.loss.entropy_coef


@dataclass(frozen=True)
class UpdateBatch:
    """The data of an update: sampled tokens in canonical order, their packing, and log-probs known beforehand."""

    tokens: SampledTokens
    packing: Packing
    old_N: Tensor | None
    reference_N: Tensor | None


@dataclass(frozen=True)
class Measured:
    """What an update saw, per sampled token in canonical order; ``loss`` and ``grad_norm`` of the whole."""

    loss: float
    grad_norm: float
    logprobs_N: Tensor
    old_N: Tensor
    entropies_N: Tensor
    clipped_N: Tensor
    reference_N: Tensor | None

    def metrics(self) -> dict[str, float]:
        """Token means."""
        named = {
            "policy/clip_fraction": self.clipped_N,
            "policy/kl_old": kl.k3(self.old_N, self.logprobs_N),
            "policy/entropy": self.entropies_N,
        }
        if self.reference_N is not None:
            named["policy/kl_ref"] = kl.k3(self.logprobs_N, self.reference_N)
        means = torch.stack([values_N.double().mean() for values_N in named.values()]).tolist()
        return {"policy/loss": self.loss, "policy/grad_norm": self.grad_norm, **dict(zip(named, means, strict=True))}


def update(scorer: Scorer, optimizer: Optimizer, batch: UpdateBatch, objective: Objective, share: float) -> Measured:
    """Run one update; raises NonFiniteUpdate with the weights as they were."""
    pass_ = _Pass(scorer, batch, objective)
    try:
        microbatches = batch.packing.microbatches
        learning = [microbatch for microbatch in microbatches if not objective.idles(microbatch)]
        idle = [microbatch for microbatch in microbatches if objective.idles(microbatch)]
        features = UpdateFeatures(scorer.policy, learning, idle)
        for microbatch in learning:
            pass_.run(microbatch, features).backward()
            optimizer.gather()
        with torch.no_grad():
            for microbatch in idle:
                pass_.run(microbatch, features)
        features.backward()
        optimizer.gather()
        norm = optimizer.grad_norm()
        measured = pass_.measured(norm)
        if not (isfinite(measured.loss) and isfinite(measured.grad_norm)):
            raise NonFiniteUpdate(_complaint(measured, optimizer))
    except BaseException:
        optimizer.forget()
        raise
    optimizer.step(share, norm)
    scorer.policy.version += 1
    return measured


class _Pass:
    """Forward over micro-batches, filling whole-update vectors."""

    def __init__(self, scorer: Scorer, batch: UpdateBatch, objective: Objective) -> None:
        self.scorer, self.batch, self.objective = scorer, batch, objective
        section = objective.algorithm.loss
        weights_S = sequence_weights(section.aggregation, batch.tokens.counts_S, constant=section.aggregation_constant)
        self.weights_N = weights_S[batch.tokens.sequences_N]
        self.logprobs_N, self.entropies_N, self.losses_N = torch.zeros(
            3, len(batch.tokens), device=self.weights_N.device
        ).unbind()
        self.clipped_N = torch.zeros_like(self.losses_N, dtype=torch.bool)

    def run(self, microbatch: MicroBatch, features: UpdateFeatures) -> Tensor:
        """One micro-batch forward; returns its share of the loss."""
        batch, objective, places_M = self.batch, self.objective, microbatch.places_M
        logprobs_M, entropies_M = self.scorer.score(microbatch, features)
        known = Tokens(
            logprobs_M,
            logprobs_M.detach() if batch.old_N is None else batch.old_N[places_M],
            batch.tokens.advantages_N[places_M],
            batch.tokens.sequences_N[places_M],
        )
        out = objective.loss(known)
        loss_M = out.loss_N
        if objective.kl_coef and batch.reference_N is not None:
            estimator = objective.algorithm.kl.estimator
            loss_M = loss_M + objective.kl_coef * kl.penalty(logprobs_M, batch.reference_N[places_M], estimator)
        if objective.entropy_coef:
            loss_M = loss_M - objective.entropy_coef * entropies_M
        self.logprobs_N[places_M] = logprobs_M.detach()
        self.entropies_N[places_M] = entropies_M.detach()
        self.losses_N[places_M] = loss_M.detach()
        self.clipped_N[places_M] = out.clipped_N
        return (loss_M * self.weights_N[places_M]).sum()

    def measured(self, norm: Tensor) -> Measured:
        """What was seen, once all micro-batches have run."""
        loss, grad_norm = torch.stack([(self.losses_N.double() * self.weights_N).sum(), norm.double()]).tolist()
        old_N = self.logprobs_N if self.batch.old_N is None else self.batch.old_N
        return Measured(loss, grad_norm, self.logprobs_N, old_N, self.entropies_N, self.clipped_N, self.batch.reference_N)


def _complaint(measured: Measured, optimizer: Optimizer) -> str:
    tokens = int((~measured.logprobs_N.isfinite()).sum())
    parameters = optimizer.not_finite()
    return (
        f"the update is not finite: loss {measured.loss}, gradient norm {measured.grad_norm}, {tokens} of "
        f"{len(measured.logprobs_N)} tokens without a finite log-prob, {len(parameters)} parameters with a bad gradient"
        f"{' (' + parameters[0] + ', …)' if parameters else ''}."
    )
