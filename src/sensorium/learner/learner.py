"""The learner: assesses episodes before a step, and makes all updates of the step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sensorium.algorithms import correction, kl
from sensorium.algorithms.correction import mismatch
from sensorium.algorithms.kl import AdaptiveKL
from sensorium.learner.credited_episode import (
    Assessment,
    CreditedEpisode,
    Groups,
    Positions,
    TokenMeasures,
    asked_values,
    find_positions,
    sampled_tokens,
    uncredited,
    with_observations,
)
from sensorium.learner.critic import Critic
from sensorium.learner.forward import LogprobScorer
from sensorium.learner.optimizer import Optimizer, rate_share
from sensorium.learner.packing import Packing, pack, pack_rows
from sensorium.learner.team import ALONE, Team
from sensorium.learner.update import Objective, Shares, UpdateBatch, UpdateResult, corrections, update
from sensorium.models.experts import check_routers
from sensorium.models.policy import Policy, Reference
from sensorium.recipe.checks import GENERAL_ALONE, NO_ROUTES, STATES_APART
from sensorium.recipe.schema import AlgorithmSection, BatchSection, OptimizerSection
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import ModelError, NonFiniteUpdate, RecipeError

__all__ = ["Assessment", "CreditedEpisode", "Learner"]
POWERS = np.array([float(f"1e{power}") for power in range(16)])  # exact: quotients by them have few digits


@dataclass(frozen=True)
class InterruptedStep:
    """A step that stopped between updates: how many it had made, and its old log-probs, to continue exactly."""

    updates: int
    old: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class StepTokens:
    """Entropies and mismatches of a step's tokens, and where in them each episode's turns begin and end."""

    turns: dict[str, list[tuple[int, int]]]
    entropies_N: Tensor
    mismatches_N: Tensor

    def of(self, episodes: Collection[str]) -> dict[str, TokenMeasures]:
        """By turn, for those of these episodes that the step trained on."""
        entropies = rounded(self.entropies_N.cpu().numpy(), decimals=4)
        mismatches = rounded(self.mismatches_N.cpu().numpy(), digits=3)
        return {
            id: TokenMeasures(
                tuple([tuple(entropies[start:end]) for start, end in self.turns[id]]),
                tuple([tuple(mismatches[start:end]) for start, end in self.turns[id]]),
            )
            for id in episodes
            if id in self.turns
        }


def rounded(values_N: np.ndarray, *, decimals: int = 0, digits: int = 0) -> list[float]:
    """Numbers with so many decimals, or significant digits, as floats that a log writes in few characters."""
    exact_N = values_N.astype(np.float64)
    power = np.full(len(exact_N), decimals)
    if digits:
        sizes_N = np.where(np.isfinite(exact_N) & (exact_N != 0), np.abs(exact_N), 1)
        power = np.clip(digits - 1 - np.floor(np.log10(sizes_N)).astype(int), 0, len(POWERS) - 1)
    found: list[float] = (np.round(exact_N * POWERS[power]) / POWERS[power] + 0.0).tolist()  # + 0.0: no -0.0
    return found


class Learner:
    """Trains a policy. ``reference`` is the frozen policy of a KL, ``critic`` gives values, where a recipe asks for one.

    The policy is the distribution that was sampled: at ``temperature``, and without its stop tokens if those are ignored.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        optimizer: OptimizerSection,
        algorithm: AlgorithmSection,
        batch: BatchSection,
        temperature: float,
        total_steps: int,
        freeze: Sequence[str] = (),
        reference: Reference | None = None,
        critic: Critic | None = None,
        seed: int = 0,
        stop_tokens: bool = True,
        team: Team = ALONE,
    ) -> None:
        if policy.general is not None and team.size > 1:
            raise ModelError(GENERAL_ALONE)
        if team.tokens is not None and policy.delta_layers:
            raise ModelError(f"cluster.sequence_parallel: {STATES_APART}")
        self.policy = policy
        self.team = team
        self.reference = reference
        self.critic = critic
        self.steps = 0
        self._interrupted: InterruptedStep | None = None
        self._tokens: StepTokens | None = None
        self._optimizer_section, self._algorithm, self._batch = optimizer, algorithm, batch
        self._total_steps = total_steps
        self._temperature, self._stop_tokens = temperature, stop_tokens
        self._seed = seed
        self._kl_in_reward: float | None = None
        self._kl = AdaptiveKL(algorithm.kl.coef, algorithm.kl.target, algorithm.kl.horizon)
        policy.model.requires_grad_(False)
        adapted = policy.adapters is not None
        self._optimizer = Optimizer(policy.trainable(), optimizer, freeze, adapted=adapted, team=team)
        self._scorer = LogprobScorer(policy, temperature, stop_tokens=stop_tokens)
        if algorithm.router_coef and not policy.experts_per_token:
            raise RecipeError(
                f"algorithm.router_coef {algorithm.router_coef} balances a mixture of experts, and this {policy.family} "
                "model has none; leave it out."
            )
        if algorithm.router_replay:
            if not policy.experts_per_token:
                raise RecipeError(NO_ROUTES.format(family=policy.family))
            check_routers(policy.adapter.language_model)

    @property
    def policy_learns(self) -> bool:
        """False while only the critic warms up."""
        return self.critic is None or self.steps >= self.critic.section.warmup_steps

    def assess(self, groups: Sequence[Sequence[Episode]], costs: Sequence[float] | None = None) -> Assessment:
        """Positions of the episodes, and what the models think of them, as far as credit needs it.

        ``costs`` of the groups decide which rank of the team computes which.
        """
        episodes = [episode for group in groups for episode in group]
        positions = self._positions(episodes)
        in_reward = self._algorithm.kl.place == "reward" and self._kl.coef > 0
        if not episodes or (self.critic is None and not in_reward):
            return Assessment(positions)
        packing = self._pack(uncredited(groups), positions if self.critic is not None else None, costs)
        values_P = after_S = old_N = reference_N = None
        if self.critic is not None:
            both = self.team.sum(self.critic.values(packing, len(positions) + len(episodes))).cpu()
            self.critic.trunk.rest()
            values_P, after_S = both[: len(positions)], both[len(positions) :]
        if in_reward:
            old_N, reference_N = self._logprobs(packing).cpu(), self._reference(packing).cpu()
            self._kl_in_reward = float(kl.k3(old_N, reference_N).double().mean())
        return Assessment(positions, values_P, after_S, old_N, reference_N, self._kl.coef)

    def step(self, groups: Groups, loss: str | None = None, costs: Sequence[float] | None = None) -> dict[str, float]:
        """All updates of one step; returns its metrics. ``loss`` overrides the recipe's (``likelihood``: supervised)."""
        objective = self._objective(loss or self._algorithm.loss.name)
        self._scorer.scale, self._tokens = 0.0, None
        written = {id(turn.response) for group in groups for sample in group for turn in sample.episode.turns}
        lay_out, forbidden = self.policy.chat.layout, self._scorer.forbidden
        groups = [[with_observations(sample, lay_out, forbidden) for sample in group] for group in groups]
        seen = self.policy.counters.tower_items
        parts = _partition(groups, self._batch.updates_per_epoch)
        batches = [
            self._prepare([groups[i] for i in part], objective, None if costs is None else [costs[i] for i in part])
            for part in parts
        ]
        count = len(batches) * self._batch.epochs_per_step
        interrupted, self._interrupted = self._interrupted, None
        if interrupted is not None:
            batches = [replace(batch, old_N=old_N) for batch, old_N in zip(batches, interrupted.old, strict=True)]
        elif not objective.supervised:
            batches = self._with_old(batches)
        batches = [self._corrected(batch, objective) for batch in batches]
        share = rate_share(self._optimizer_section, self.steps, self._total_steps)
        shares = Shares(share, self.critic.share(self.steps) if self.critic is not None else 0.0)
        measured = []
        for index in range(interrupted.updates if interrupted is not None else 0, count):
            place = index % len(batches)
            batch = replace(batches[place], key=(self._seed, self.steps, index))
            if index == 0:  # the weights are those that sampled: old is current, and every ratio exactly 1
                batch = replace(batch, old_N=None)
            try:
                measured.append(update(self._scorer, self._optimizer, batch, objective, shares, self.critic, self.team))
            except NonFiniteUpdate as error:
                self._interrupted = InterruptedStep(index, tuple(batch.old_N for batch in batches))
                raise NonFiniteUpdate(f"update {index + 1} of {count}: {error}") from error
            if index == 0 and batches[0].old_N is None:
                batches[0] = replace(batches[0], old_N=measured[0].logprobs_N, old_entropies_N=measured[0].entropies_N)
        self.steps += 1
        metrics = _over_updates([one.metrics() for one in measured])
        if not objective.supervised:
            metrics |= _mismatch(batches, measured, self.team.largest(self._scorer.scale)[0])
            metrics |= self._controlled(metrics, sum(len(group) for group in groups))
            self._tokens = _step_tokens(batches, [s for part in parts for i in part for s in groups[i]], written)
        return metrics | {
            "policy/lr": self._optimizer_section.lr * share if objective.policy_learns else 0.0,
            "packing/trained_tokens": sum(batch.packing.trained for batch in batches),
            **self._packing_metrics(batches, self.policy.counters.tower_items - seen),
        }

    def token_measures(self, episodes: Collection[str]) -> dict[str, TokenMeasures]:
        """Entropies and mismatches that the last step found, for those of these episodes that it trained on.

        None of a supervised step, nor of one that went on after an interruption.
        """
        return {} if self._tokens is None else self._tokens.of(episodes)

    def logprobs(self, groups: Groups) -> list[list[tuple[Tensor, ...]]]:
        """Log-probs of every sampled token under the current weights: group, sample, turn."""
        flat_N = self._logprobs(self._pack(groups))
        lengths = [len(turn.response.tokens) for group in groups for s in group for turn in s.episode.turns]
        parts = iter(flat_N.split(lengths))
        return [[tuple(next(parts) for _ in sample.episode.turns) for sample in group] for group in groups]

    def weights(self) -> dict[str, Tensor]:
        """The live parameters that learn, by name."""
        return self._optimizer.weights()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy's weights that is needed to go on exactly."""
        return {
            "steps": self.steps,
            "optimizer": self._optimizer.state_dict(),
            "critic": None if self.critic is None else self.critic.state_dict(),
            "kl": self._kl.state_dict(),
            "begun": None
            if self._interrupted is None
            else {"updates": self._interrupted.updates, "old": self._interrupted.old},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; the policy's weights are loaded by the caller.

        Parts that a fork left out of it start afresh.
        """
        self.steps = state["steps"]
        if state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        if self.critic is not None and state["critic"] is not None:
            self.critic.load_state_dict(state["critic"])
        if state["kl"] is not None:
            self._kl.load_state_dict(state["kl"])
        interrupted, self._interrupted = state["begun"], None
        if interrupted is not None:
            moved = tuple(None if old_N is None else old_N.to(self.policy.device) for old_N in interrupted["old"])
            self._interrupted = InterruptedStep(interrupted["updates"], moved)

    def _objective(self, name: str) -> Objective:
        objective = Objective(name, self._algorithm, policy_learns=self.policy_learns)
        in_loss = self._algorithm.kl.place == "loss" and not objective.supervised
        return replace(objective, kl_coef=self._kl.coef if in_loss else 0.0)

    def _positions(self, episodes: Sequence[Episode]) -> Positions:
        return find_positions(episodes, self.policy.chat.layout, observations=self._algorithm.sees_observations)

    def _packing_metrics(self, batches: Sequence[UpdateBatch], tower_items: int) -> dict[str, float]:
        """What was computed for the step, on all ranks."""
        counts = {
            "packing/tokens": sum(batch.packing.tokens for batch in batches),
            "packing/splits": sum(batch.packing.splits for batch in batches),
            "packing/tower_items": tower_items,
        }
        return dict(zip(counts, self.team.total(*counts.values()), strict=True))

    def _prepare(self, groups: Groups, objective: Objective, costs: Sequence[float] | None) -> UpdateBatch:
        device = self.policy.device
        asked = asked_values(groups, device) if self.critic is not None else None
        positions = None if asked is None else self._positions([sample.episode for group in groups for sample in group])
        packing = self._pack(groups, positions, costs)
        reference_N = self._reference(packing) if objective.kl_coef else None
        return UpdateBatch(sampled_tokens(groups, device), packing, reference_N=reference_N, asked=asked)

    def _reference(self, packing: Packing) -> Tensor:
        """Log-probs of the reference policy."""
        if self.reference is None:
            raise ValueError("algorithm.kl.coef is not 0, but the learner was given no reference policy")
        with self.reference.active() as reference:
            scorer = LogprobScorer(reference, self._temperature, stop_tokens=self._stop_tokens)
            found_N = self.team.sum(scorer.logprobs(packing))
            reference.rest()
        return found_N

    def _logprobs(self, packing: Packing) -> Tensor:
        """Log-probs of a packing's tokens under the current weights, those of the other ranks included."""
        return self._scores(packing)[0]

    def _scores(self, packing: Packing) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of a packing's tokens under the current weights, those of the other ranks included."""
        logprobs_N, entropies_N = map(self.team.sum, self._scorer.scores(packing))
        self.policy.rest()
        return logprobs_N, entropies_N

    def _with_old(self, batches: list[UpdateBatch]) -> list[UpdateBatch]:
        """Old log-probs of all batches. The first update computes its own, unless the correction needs them before."""
        section = self._algorithm.correction
        whole = section.weights in ("sequence", "geometric") or section.reject != "none"
        found = []
        for i, batch in enumerate(batches):
            if i or whole:
                old_N, entropies_N = self._scores(batch.packing)
                batch = replace(batch, old_N=old_N, old_entropies_N=entropies_N)
            found.append(batch)
        return found

    def _corrected(self, batch: UpdateBatch, objective: Objective) -> UpdateBatch:
        """Corrections of the mismatch that take whole sequences; those of single tokens are found on the way."""
        section, tokens, old_N = self._algorithm.correction, batch.tokens, batch.old_N
        if objective.supervised or old_N is None:
            return batch
        known = (old_N, tokens.engine(section.engine_logprobs), tokens.sequences_N, tokens.counts_S)
        if section.weights in ("sequence", "geometric"):
            batch = replace(batch, corrections_N=corrections(section, *known))
        if section.reject != "none":
            above, estimator = section.reject_above, section.estimator
            rejected_S = correction.rejected(*known, by=section.reject, estimator=estimator, above=above)
            batch = replace(batch, rejected_S=rejected_S)
        return batch

    def _controlled(self, metrics: dict[str, float], episodes: int) -> dict[str, float]:
        """The measured KL and its coefficient, which an adaptive control then changes."""
        coef, seen = self._kl.coef, metrics.get("policy/kl_ref", self._kl_in_reward)
        self._kl_in_reward = None
        if seen is None:
            return {}
        if self._algorithm.kl.control == "adaptive":
            self._kl.update(seen, episodes)
        return {"policy/kl_ref": seen, "policy/kl_coef": coef}

    def _pack(self, groups: Groups, positions: Positions | None = None, costs: Sequence[float] | None = None) -> Packing:
        for episode in (sample.episode for group in groups for sample in group):
            for turn in episode.turns:
                if not self._scorer.forbidden.isdisjoint(turn.response.tokens):
                    raise ModelError(_forbidden_token(episode, turn.index, self._stop_tokens))
        if costs is None:
            costs = [sum(sample.episode.sampled_tokens for sample in group) for group in groups]
        policy, limit, team = self.policy, self._batch.tokens_per_microbatch, self.team
        if policy.general is not None:
            return pack_rows(groups, policy, limit, positions)
        lay_out, owned = policy.chat.layout, team.owned(costs)
        given = limit, policy.device, positions, owned, policy.matched, team.tokens
        return team.level(pack(groups, lay_out, *given, replay=self._algorithm.router_replay))


def _forbidden_token(episode: Episode, turn: int, stop_tokens: bool) -> str:
    kinds = "a placeholder or special token" if stop_tokens else "a placeholder, special or stop token"
    ignored = "" if stop_tokens else " Stop tokens are among them because of rollout.ignore_stop_tokens; leave that out."
    return (
        f"episode {episode.id}, turn {turn}: the response holds a token that the model may not write ({kinds}); take it "
        f"out of the demonstration.{ignored}"
    )


def _partition(groups: Groups, updates: int) -> list[range]:
    """The numbers of the groups in order, in as many parts as there are updates; none is empty."""
    size, more = divmod(len(groups), updates)
    parts, start = [], 0
    for i in range(updates):
        end = start + size + (i < more)
        parts.append(range(start, end))
        start = end
    trained = [part for part in parts if any(sample.episode.sampled_tokens for i in part for sample in groups[i])]
    if not trained:
        raise ValueError("a step needs at least one sampled token")
    return trained


def _over_updates(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates of a step; of one that is a maximum, the largest."""

    def together(name: str) -> float:
        values = [row[name] for row in rows]
        return max(values) if name.endswith("_max") else sum(values) / len(values)

    return {name: together(name) for name in rows[0]}


def _step_tokens(
    batches: Sequence[UpdateBatch], samples: Sequence[CreditedEpisode], written: Collection[int]
) -> StepTokens | None:
    """The step's tokens as the weights that it began with see them; ``written`` are the ids of responses as objects."""
    old = [(batch.old_N, batch.old_entropies_N, batch.tokens.engine_N) for batch in batches]
    turns: dict[str, list[tuple[int, int]]] = {}
    end = 0
    for sample in samples:
        places = turns[sample.episode.id] = []
        for turn in sample.episode.turns:
            start, end = end, end + len(turn.response.tokens)
            if id(turn.response) in written:  # else what the environment showed, which is trained too
                places.append((start, end))
    entropies = [entropies_N for _, entropies_N, _ in old if entropies_N is not None]
    mismatches = [old_N - engine_N for old_N, _, engine_N in old if old_N is not None]
    if not len(entropies) == len(mismatches) == len(old):
        return None
    return StepTokens(turns, torch.cat(entropies), torch.cat(mismatches))


def _mismatch(batches: Sequence[UpdateBatch], measured: Sequence[UpdateResult], scale: float) -> dict[str, float]:
    """Over all tokens of the step, once. A single update has found its own old log-probs.

    Where the logits' ``scale`` is known, rounding bounds the largest gap: ``mismatch/relative`` is the gap in units of it.
    """
    old_N = torch.cat([batch.old_N if batch.old_N is not None else measured[0].old_N for batch in batches])
    counts_S = torch.cat([batch.tokens.counts_S for batch in batches])
    sequences_N = torch.repeat_interleave(torch.arange(len(counts_S), device=counts_S.device), counts_S)
    found = mismatch(old_N, torch.cat([batch.tokens.engine_N for batch in batches]), sequences_N, counts_S)
    row = {
        "mismatch/prob_error": found.prob_error,
        "mismatch/kl": found.kl,
        "mismatch/max": found.maximum,
        "mismatch/sequence_max": found.sequence_max,
        "mismatch/sequence_min": found.sequence_min,
        "mismatch/effective_share": found.effective_share,
    }
    return row | ({"mismatch/relative": found.maximum / max(1.0, scale)} if scale else {})
