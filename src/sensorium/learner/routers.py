"""The routers of a mixture of experts during an update: where tokens went, and the loss that spreads them.

Each token computed counts once, however often a split group computes it again, so neither the loss nor the loads depend on
packing. The loss needs the whole update's loads beforehand; an update of several micro-batches finds them by looking ahead.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sensorium.algorithms.router import RouterLoad, balance_loss, load_metrics, router_load
from sensorium.learner.objective import Objective
from sensorium.learner.packing import MicroBatch
from sensorium.learner.team import ALONE, Team
from sensorium.models.policy import Policy


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
        self._part = router_load(seen, self._experts, microbatch.fresh_T)
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
        return RouterLoad(*(self._team.sum(part) for part in (load.chosen_LE, load.probabilities_E, load.rows)))
