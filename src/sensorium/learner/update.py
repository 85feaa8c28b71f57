"""What an update minimises: the policy loss with its settings, KL, entropy, correction, and who learns.

Example. ``algorithm.loss: {name: clip, clip_low: 0.2, clip_high: 0.28, entropy_coef: 0.01}`` gives

    objective.loss          the function ``clip`` with the settings it takes: clip_low, clip_high, dual_clip
    objective.aggregation   the recipe's; where that is ``auto``, the loss's own (``recipe/estimators_and_losses.py``)
    objective.idles(batch)  False: the entropy bonus gives every token a gradient, also where all advantages are 0
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite

import torch
from torch import Tensor

from sensorium.algorithms import correction, kl
from sensorium.algorithms.correction import effective_share
from sensorium.algorithms.losses import (
    RouterLoad,
    TokenLoss,
    Tokens,
    UpdateTokens,
    balance_loss,
    load_metrics,
    log_ratio,
    router_load,
    sequence_weights,
)
from sensorium.learner.credited_episode import AskedValues, SampledTokens
from sensorium.learner.critic import Critic, ValuePass
from sensorium.learner.forward import LogprobScorer, TowerPasses, UpdateFeatures, hidden_states, tower_passes
from sensorium.learner.optimizer import Optimizer
from sensorium.learner.packing import MicroBatch, Packing
from sensorium.learner.team import ALONE, Team
from sensorium.models.policy import Policy
from sensorium.recipe.estimators_and_losses import loss_traits
from sensorium.recipe.registry import resolve
from sensorium.recipe.schema import AlgorithmSection, CorrectionSection
from sensorium.vocabulary.errors import NonFiniteUpdate

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


# Each token computed counts once, however often a split group computes it again, so neither the loss nor the loads
# depend on packing. The loss needs the whole update's loads beforehand; an update of several micro-batches finds them
# by looking ahead.


class Routers:
    """Measures the routers of a policy; without experts there are none, and no metrics."""

    def __init__(self, policy: Policy, objective: Objective, team: Team = ALONE) -> None:
        self._policy, self._team = policy, team
        self._coef = objective.algorithm.router_coef
        self._experts = policy.experts_per_token
        self._ahead: RouterLoad | None = None
        self._whole: RouterLoad | None = None
        self._part: RouterLoad | None = None

    @property
    def pull(self) -> bool:
        """True if the routers add to the loss."""
        return bool(self._experts) and self._coef > 0

    @contextmanager
    def watch(self, microbatch: MicroBatch, *, ahead: bool = False) -> Iterator[None]:
        """Count what the routers do in the pass inside."""
        if not self._experts:
            yield
            return
        with self._policy.watch_routers() as seen:
            yield
        logits, chosen = [one.logits_TE for one in seen], [one.ids_TK for one in seen]
        self._part = router_load(logits, chosen, microbatch.fresh_T, microbatch.routes_TLK)
        told = self._part.detach()
        if ahead:
            self._ahead = told if self._ahead is None else self._ahead + told
        else:
            self._whole = told if self._whole is None else self._whole + told

    def close_ahead(self) -> None:
        """Looking ahead is over: what was counted is now of the whole update, on all ranks."""
        self._ahead = self._over_ranks(self._ahead)

    def loss(self) -> Tensor:
        """The share of the last pass in the load-balancing loss, weighted."""
        if not self.pull or self._part is None:
            return torch.zeros((), device=self._policy.device)
        return self._coef * balance_loss(self._part, self._ahead if self._ahead is not None else self._part.detach())

    def metrics(self) -> dict[str, float]:
        """How evenly the experts were used over the whole update."""
        whole = self._over_ranks(self._whole)
        return {} if whole is None else load_metrics(whole)

    def _over_ranks(self, load: RouterLoad | None) -> RouterLoad | None:
        if load is None:
            return None
        return load.over(self._team.sum)


# The loss is a sum over tokens with weights from whole-update counts; what is measured is measured over whole-update
# vectors in canonical order. So neither depends on how the update was packed. All gradients, the critic's too, are
# found and checked before anything moves.


@dataclass(frozen=True)
class UpdateBatch:
    """The data of an update: sampled tokens in canonical order, their packing, and what is known of them beforehand.

    ``old_N`` None: the weights have not moved since sampling, so old is current. ``old_entropies_N`` are of the same pass
    as ``old_N``; None: not known. ``corrections_N`` are weights against the mismatch where they take whole sequences;
    ``rejected_S`` marks those left out for it. ``key`` decides random choices.
    """

    tokens: SampledTokens
    packing: Packing
    key: tuple[int, ...] = ()
    old_N: Tensor | None = None
    old_entropies_N: Tensor | None = None
    reference_N: Tensor | None = None
    corrections_N: Tensor | None = None
    rejected_S: Tensor | None = None
    asked: AskedValues | None = None


@dataclass(frozen=True)
class Shares:
    """The current learning rates of policy and critic, as shares of the recipe's."""

    policy: float
    critic: float = 0.0


@dataclass(frozen=True)
class UpdateResult:
    """What an update saw, per sampled token in canonical order; ``loss`` and ``grad_norm`` of the whole.

    ``advantages_N`` of rejected sequences are 0. ``others`` are the metrics of critic and routers, which are not per
    sampled token.
    """

    loss: float
    grad_norm: float
    logprobs_N: Tensor
    old_N: Tensor
    entropies_N: Tensor
    clipped_N: Tensor
    advantages_N: Tensor
    reference_N: Tensor | None
    corrections_N: Tensor | None
    rejected_S: Tensor | None
    others: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """Token means, the largest ratio of new and old, and how many tokens the corrected ones are worth."""
        named = {
            "policy/clip_fraction": self.clipped_N,
            "policy/learning_share": self._learning_N(),
            "policy/ratio_max": log_ratio(self.logprobs_N, self.old_N).exp().max(),
            "policy/kl_old": kl.k3(self.old_N, self.logprobs_N),
            "policy/entropy": self.entropies_N,
        }
        if self.reference_N is not None:
            named["policy/kl_ref"] = kl.k3(self.logprobs_N, self.reference_N)
        if self.corrections_N is not None:
            named["correction/weight"] = self.corrections_N
            named["correction/zeroed"] = self.corrections_N == 0
            named["correction/effective_share"] = effective_share(self.corrections_N)
        if self.rejected_S is not None:
            named["correction/rejected"] = self.rejected_S
        means = torch.stack([values.double().mean() for values in named.values()]).tolist()
        row = {"policy/loss": self.loss, "policy/grad_norm": self.grad_norm, **dict(zip(named, means, strict=True))}
        return row | self.others

    def _learning_N(self) -> Tensor:
        """Which tokens give the policy a gradient: with an advantage, not clipped, not rejected, not weighted 0."""
        learning_N = (self.advantages_N != 0) & ~self.clipped_N
        return learning_N if self.corrections_N is None else learning_N & (self.corrections_N != 0)


def update(
    scorer: LogprobScorer,
    optimizer: Optimizer,
    batch: UpdateBatch,
    objective: Objective,
    shares: Shares,
    critic: Critic | None,
    team: Team = ALONE,
) -> UpdateResult:
    """Run one update; raises NonFiniteUpdate with all weights as they were, on every rank of the team."""
    learners = [optimizer] if critic is None else [optimizer, critic.optimizer]
    try:
        with ExitStack() as gathering:
            for one in learners:
                gathering.enter_context(one.gathering())
            value = None if critic is None or batch.asked is None else ValuePass(critic, batch.asked)
            if value is not None and not value.critic.shared:
                value.gather(batch.packing)
            pass_ = _Pass(scorer, batch, objective, value, team)
            pass_.run()
        for policy in (scorer.policy,) if critic is None else (scorer.policy, critic.trunk):
            policy.rest()
        norms = [one.grad_norm() for one in learners]
        if objective.policy_learns:
            optimizer.prepare(shares.policy, norms[0])
        if critic is not None:
            critic.optimizer.prepare(shares.critic, norms[1])
        measured = pass_.measured(norms)
        if not (isfinite(measured.loss) and all(bool(norm.isfinite()) for norm in norms)):
            raise NonFiniteUpdate(_complaint(measured, learners))
    except BaseException:
        for one in learners:
            one.forget()
        raise
    if objective.policy_learns:
        optimizer.step(shares.policy, norms[0])
        scorer.policy.version += 1
    else:
        optimizer.forget()
    if critic is not None:
        critic.optimizer.step(shares.critic, norms[1])
    return measured


def corrections(
    section: CorrectionSection, old_N: Tensor, engine_N: Tensor, sequences_N: Tensor, counts_S: Tensor
) -> Tensor:
    """Weights against the mismatch as the recipe has them."""
    mode, low, high = section.mode, section.low, section.high
    return correction.weights(
        old_N, engine_N, sequences_N, counts_S, weights=section.weights, mode=mode, low=low, high=high
    )


class _Pass:
    """Forward and backward over micro-batches, filling whole-update vectors."""

    def __init__(
        self, scorer: LogprobScorer, batch: UpdateBatch, objective: Objective, value: ValuePass | None, team: Team
    ) -> None:
        self.scorer, self.batch, self.objective, self.value, self.team = scorer, batch, objective, value, team
        counts_S = batch.tokens.counts_S
        self.kept_N: Tensor | None = None
        if batch.rejected_S is not None:
            counts_S = torch.where(batch.rejected_S, 0, counts_S)
            self.kept_N = ~batch.rejected_S[batch.tokens.sequences_N]
        constant = objective.algorithm.loss.aggregation_constant
        weights_S = sequence_weights(objective.aggregation, counts_S, constant=constant)
        self.weights_N = weights_S[batch.tokens.sequences_N]
        self.logprobs_N, self.entropies_N, self.losses_N = torch.zeros(
            3, len(batch.tokens), device=self.weights_N.device
        ).unbind()
        self.clipped_N = torch.zeros_like(self.losses_N, dtype=torch.bool)
        correcting = not objective.supervised and objective.algorithm.correction.weights != "none"
        self.corrections_N = torch.zeros_like(self.losses_N) if correcting else None
        self.routers = Routers(scorer.policy, objective, team)
        self.whole_N = self._look_ahead() if self._looks_ahead() else None

    def _looks_ahead(self) -> bool:
        """Whether the loss must know log-probs that other micro-batches will find; then they are found beforehand."""
        over, microbatches = self.objective.over, self.batch.packing.microbatches
        if len(microbatches) == self.team.size == 1:
            return False
        if self.routers.pull:
            return True
        if over == "token":
            return False
        if over == "update":
            return True
        if self.batch.old_N is None:  # with old as current every ratio is 1
            return False
        if self.team.tokens is not None:  # ranks share the tokens of a sequence
            return True
        present = [self.batch.tokens.sequences_N[microbatch.places_M].unique() for microbatch in microbatches]
        cut = sum(len(sequences) for sequences in present) > len(torch.cat(present).unique())
        return bool(self.team.largest(cut)[0])

    @torch.no_grad()
    def _look_ahead(self) -> Tensor:
        """Log-probs of the whole update, and where its experts' tokens go."""
        policy, packing = self.scorer.policy, self.batch.packing
        features = UpdateFeatures(policy, packing.microbatches)
        logprobs_N = torch.zeros_like(self.logprobs_N)
        for microbatch in packing.microbatches:
            with policy.replay_routes(microbatch.routes_TLK), self.routers.watch(microbatch, ahead=True):
                hidden_TH = hidden_states(policy, microbatch, features)
            logprobs_N[microbatch.places_M] = self.scorer.score(hidden_TH, microbatch)[0]
        self.routers.close_ahead()
        return self.team.sum(logprobs_N)

    def run(self) -> None:
        """All micro-batches: those that teach the policy with a graph, the others without; then the towers, once.

        Media that a micro-batch encodes for itself are done with in it.
        """
        microbatches = self.batch.packing.microbatches
        learning = [microbatch for microbatch in microbatches if not self._idles(microbatch)]
        idle = [microbatch for microbatch in microbatches if self._idles(microbatch)]
        policy = self.scorer.policy
        room = policy.tower_room if policy.sharding is None else None  # ranks run sharded towers equally often
        passes = tower_passes(policy, learning, idle, room) if room is not None else TowerPasses()
        features = UpdateFeatures(policy, learning, idle, passes)
        for microbatch in (*learning, *idle):
            policy.give_way()
            with features.shown_by(microbatch):
                self._run(microbatch, features)
        features.backward()
        for found_N in (self.logprobs_N, self.entropies_N, self.losses_N, self.clipped_N, self.corrections_N):
            if found_N is not None:
                self.team.sum(found_N)
        if self.value is not None:
            self.value.over_ranks(self.team)

    def _run(self, microbatch: MicroBatch, features: UpdateFeatures) -> None:
        """Forward and backward of one micro-batch; one that idles has no graph, but for a critic's."""
        with self.scorer.policy.replay_routes(microbatch.routes_TLK):
            self._run_routed(microbatch, features)

    def _run_routed(self, microbatch: MicroBatch, features: UpdateFeatures) -> None:
        with torch.set_grad_enabled(not self._idles(microbatch)):
            with self.routers.watch(microbatch):
                hidden_TH = hidden_states(self.scorer.policy, microbatch, features)
            loss = self._policy_loss(hidden_TH, microbatch) + self.routers.loss()
        if self.value is not None and self.value.critic.shared:
            loss = loss + self.value.loss(hidden_TH, microbatch)
        if loss.requires_grad:
            loss.backward()

    def _idles(self, microbatch: MicroBatch) -> bool:
        """True if a micro-batch gives the policy no gradient."""
        value = self.value
        pulled = value is not None and value.critic.shared and value.critic.section.trunk_coef > 0
        return self.objective.idles(microbatch) and not (pulled and self.objective.policy_learns)

    def _policy_loss(self, hidden_TH: Tensor, microbatch: MicroBatch) -> Tensor:
        """A micro-batch's share of the policy loss."""
        batch, objective, places_M = self.batch, self.objective, microbatch.places_M
        logprobs_M, entropies_M = self.scorer.score(hidden_TH, microbatch)
        if not len(places_M):  # nothing is read here, but the gradient of every parameter is there: zero
            return logprobs_M.sum()
        still_M = logprobs_M.detach()
        self.logprobs_N[places_M] = still_M
        self.entropies_N[places_M] = entropies_M.detach()
        old_M = still_M if batch.old_N is None else batch.old_N[places_M]
        tokens = batch.tokens
        out = objective.loss(
            Tokens(logprobs_M, old_M, tokens.advantages_N[places_M], tokens.sequences_N[places_M], places_M, self._update())
        )
        loss_M = out.loss_N
        if self.corrections_N is not None:
            corrections_M = self._corrections(old_M, places_M)
            self.corrections_N[places_M] = corrections_M
            loss_M = loss_M * corrections_M
        if objective.kl_coef and batch.reference_N is not None:
            estimator = objective.algorithm.kl.estimator
            loss_M = loss_M + objective.kl_coef * kl.penalty(logprobs_M, batch.reference_N[places_M], estimator)
        if objective.entropy_coef:
            loss_M = loss_M - objective.entropy_coef * entropies_M
        self.losses_N[places_M] = loss_M.detach()
        self.clipped_N[places_M] = out.clipped_N
        return (loss_M * self.weights_N[places_M]).sum()

    def _update(self) -> UpdateTokens | None:
        """The whole update as far as the loss asks; log-probs that it does not need yet stand at their old values."""
        if self.objective.over == "token":
            return None
        batch = self.batch
        current_N = self.logprobs_N if self.whole_N is None else self.whole_N
        old_N = current_N if batch.old_N is None else batch.old_N
        tokens = batch.tokens
        return UpdateTokens(
            current_N, old_N, tokens.advantages_N, tokens.sequences_N, tokens.counts_S, self._uniforms_N, self.kept_N
        )

    @cached_property
    def _uniforms_N(self) -> Tensor:
        """Random numbers that depend on nothing but the update's key and the token's place."""
        seed = int.from_bytes(hashlib.blake2b(repr(self.batch.key).encode(), digest_size=7).digest())
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(len(self.weights_N), generator=generator, dtype=torch.float64).to(self.weights_N.device)

    def _corrections(self, old_M: Tensor, places_M: Tensor) -> Tensor:
        """Weights against the mismatch: of the tokens here, or of their whole sequences as found beforehand."""
        if self.batch.corrections_N is not None:
            return self.batch.corrections_N[places_M]
        section, tokens = self.objective.algorithm.correction, self.batch.tokens
        engine_M = tokens.engine(section.engine_logprobs)[places_M]
        return corrections(section, old_M, engine_M, tokens.sequences_N[places_M], tokens.counts_S)

    def measured(self, norms: list[Tensor]) -> UpdateResult:
        """What was seen, once all micro-batches have run."""
        loss, grad_norm = torch.stack([(self.losses_N.double() * self.weights_N).sum(), norms[0].double()]).tolist()
        batch = self.batch
        advantages_N = batch.tokens.advantages_N
        others = self.routers.metrics()
        if self.value is not None:
            others |= self.value.metrics() | {"value/grad_norm": float(norms[1])}
        return UpdateResult(
            loss,
            grad_norm,
            self.logprobs_N,
            self.logprobs_N if batch.old_N is None else batch.old_N,
            self.entropies_N,
            self.clipped_N,
            advantages_N if self.kept_N is None else torch.where(self.kept_N, advantages_N, 0),
            batch.reference_N,
            self.corrections_N,
            batch.rejected_S,
            others,
        )


def _complaint(measured: UpdateResult, learners: list[Optimizer]) -> str:
    tokens = int((~measured.logprobs_N.isfinite()).sum())
    advantages = int((~measured.advantages_N.isfinite()).sum())
    parameters = [name for one in learners for name in one.not_finite()]
    return (
        f"the update is not finite: loss {measured.loss}, gradient norm {measured.grad_norm}, {tokens} of "
        f"{len(measured.logprobs_N)} tokens without a finite log-prob, {advantages} without a finite advantage, "
        f"{len(parameters)} parameters with a bad gradient"
        f"{' (' + parameters[0] + ', …)' if parameters else ''}."
    )
