"""The learner: all updates of a step, on groups of samples."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sensorium.algorithms.mismatch import mismatch
from sensorium.learner.forward import Scorer
from sensorium.learner.optimizer import Optimizer, rate_share
from sensorium.learner.packing import Packing, pack
from sensorium.learner.sample import Groups, Sample, sampled_tokens
from sensorium.learner.update import LossFunction, Measured, Objective, UpdateBatch, update
from sensorium.models.policy import Policy
from sensorium.models.reference import Reference
from sensorium.recipe.names import resolve
from sensorium.recipe.schema import AlgorithmSection, BatchSection, OptimizerSection
from sensorium.vocabulary.errors import ModelError, NonFiniteUpdate

__all__ = ["Learner", "Sample"]


@dataclass(frozen=True)
class Begun:
    """A step that stopped: how many updates it had made, and its old log-probs. So that it can be gone on with exactly."""

    updates: int
    old: tuple[Tensor | None, ...]


class Learner:
    """Trains a policy. ``reference`` is what the KL is measured to, where the recipe has a coefficient for it."""

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
    ) -> None:
        self.policy = policy
        self.reference = reference
        self.steps = 0
        self._begun: Begun | None = None
        self._forbidden = frozenset(policy.forbidden_ids)
        self._optimizer_section, self._algorithm, self._batch = optimizer, algorithm, batch
        self._total_steps = total_steps
        self._temperature = temperature
        self._optimizer = Optimizer(policy, optimizer, freeze)
        self._scorer = Scorer(policy, temperature)

    def step(self, groups: Groups, loss: str | None = None) -> dict[str, float]:
        """All updates of one step; returns its metrics. ``loss`` overrides the recipe's (``likelihood``: supervised)."""
        objective = self._objective(loss or self._algorithm.loss.name)
        seen = self.policy.counters.tower_items
        batches = [self._prepare(part, objective) for part in _partition(groups, self._batch.updates_per_epoch)]
        count = len(batches) * self._batch.epochs_per_step
        begun, self._begun = self._begun, None
        if begun is not None:
            batches = [replace(batch, old_N=old_N) for batch, old_N in zip(batches, begun.old, strict=True)]
        elif count > 1 and not objective.supervised:
            batches = [replace(batch, old_N=self._scorer.logprobs(batch.packing)) for batch in batches]
        share = rate_share(self._optimizer_section, self.steps, self._total_steps)
        measured = []
        for index in range(begun.updates if begun is not None else 0, count):
            try:
                batch = batches[index % len(batches)]
                measured.append(update(self._scorer, self._optimizer, batch, objective, share))
            except NonFiniteUpdate as error:
                self._begun = Begun(index, tuple(batch.old_N for batch in batches))
                raise NonFiniteUpdate(f"update {index + 1} of {count}: {error}") from error
        self.steps += 1
        metrics = _mean([one.metrics() for one in measured])
        if not objective.supervised:
            metrics |= _mismatch(batches, measured)
        return metrics | {
            "policy/lr": self._optimizer_section.lr * share,
            "packing/trained_tokens": sum(batch.packing.trained for batch in batches),
            "packing/tokens": sum(batch.packing.tokens for batch in batches),
            "packing/splits": sum(batch.packing.splits for batch in batches),
            "packing/tower_items": self.policy.counters.tower_items - seen,
        }

    def logprobs(self, groups: Groups) -> list[list[tuple[Tensor, ...]]]:
        """Log-probs of every sampled token under the current weights: group, sample, turn."""
        flat_N = self._scorer.logprobs(self._pack(groups))
        lengths = [len(turn.response.tokens) for group in groups for s in group for turn in s.episode.turns]
        parts = iter(flat_N.split(lengths))
        return [[tuple(next(parts) for _ in sample.episode.turns) for sample in group] for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy's weights that is needed to go on exactly."""
        return {"steps": self.steps, "optimizer": self._optimizer.state_dict(), "begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; the policy's weights are loaded by the caller."""
        self.steps = state["steps"]
        self._optimizer.load_state_dict(state["optimizer"])
        begun: Begun | None = state["begun"]
        if begun is not None:
            moved = tuple(None if old_N is None else old_N.to(self.policy.device) for old_N in begun.old)
            begun = Begun(begun.updates, moved)
        self._begun = begun

    def _objective(self, name: str) -> Objective:
        return Objective(_loss_function(name, self._algorithm), self._algorithm, supervised=name == "likelihood")

    def _prepare(self, groups: Groups, objective: Objective) -> UpdateBatch:
        packing = self._pack(groups)
        reference_N = None
        if objective.kl_coef:
            if self.reference is None:
                raise ValueError("algorithm.kl.coef is not 0, but the learner was given no reference policy")
            with self.reference.active() as reference:
                reference_N = Scorer(reference, self._temperature).logprobs(packing)
        return UpdateBatch(sampled_tokens(groups, self.policy.device), packing, None, reference_N)

    def _pack(self, groups: Groups) -> Packing:
        for episode in (sample.episode for group in groups for sample in group):
            for turn in episode.turns:
                if not self._forbidden.isdisjoint(turn.response.tokens):
                    raise ModelError(
                        f"episode {episode.id}, turn {turn.index}: the response holds a token that the model may not write "
                        "(a placeholder or special token); take it out of the demonstration."
                    )
        return pack(groups, self.policy.layout, self._batch.tokens_per_microbatch, self.policy.device)


def _loss_function(name: str, algorithm: AlgorithmSection) -> LossFunction:
    """The named loss with those of the recipe's settings that it takes."""
    function = resolve("loss", name, "algorithm.loss.name")
    settings = algorithm.loss.model_dump()
    return partial(function, **{key: settings[key] for key in inspect.signature(function).parameters if key in settings})


def _partition(groups: Groups, updates: int) -> list[Groups]:
    """Groups in order, in as many parts as there are updates; none is empty."""
    size, more = divmod(len(groups), updates)
    parts, start = [], 0
    for i in range(updates):
        end = start + size + (i < more)
        parts.append(groups[start:end])
        start = end
    trained = [part for part in parts if any(sample.episode.sampled_tokens for group in part for sample in group)]
    if not trained:
        raise ValueError("a step needs at least one sampled token")
    return trained


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def _mismatch(batches: Sequence[UpdateBatch], measured: Sequence[Measured]) -> dict[str, float]:
    """Over all tokens of the step, once. A single update has found its own old log-probs."""
    old = [batch.old_N if batch.old_N is not None else measured[0].old_N for batch in batches]
    found = mismatch(torch.cat(old), torch.cat([batch.tokens.engine_N for batch in batches]))
    return {"mismatch/prob_error": found.prob_error, "mismatch/kl": found.kl, "mismatch/max": found.maximum}
