"""The critic: a value head on a trunk of its own, or on the policy's.

A head starts at zero, so a fresh critic says 0 everywhere. Its own optimizer moves the head, and an own trunk with it; a
shared trunk belongs to the policy and sees the value loss through ``trunk_coef`` only.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sensorium.algorithms.losses import value_loss
from sensorium.learner.credited_episode import AskedValues
from sensorium.learner.forward import UpdateFeatures, hidden_states
from sensorium.learner.optimizer import Optimizer, rate_share
from sensorium.learner.packing import MicroBatch, Packing
from sensorium.learner.saved_state import copy_state, distinct_state
from sensorium.learner.team import ALONE, Team
from sensorium.models.policy import Policy
from sensorium.recipe.schema import CriticSection

HEAD = "value_head"


class Critic:
    """Values of prefixes. ``trunk`` is the policy itself where it is shared."""

    def __init__(self, trunk: Policy, section: CriticSection, *, total_steps: int, team: Team = ALONE) -> None:
        self.trunk = trunk
        self.shared = section.trunk == "shared"
        self.section = section
        self._total_steps = total_steps
        width = trunk.adapter.head.weight.shape[1]
        if trunk.general is not None:
            trunk.general.reads = "both" if self.shared else "states"
        self.head = nn.Linear(width, 1, device=trunk.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        named = {HEAD: {f"{HEAD}.{name}": parameter for name, parameter in self.head.named_parameters()}}
        groups = named if self.shared else {**_trunk_groups(trunk), **named}
        self.optimizer = Optimizer(groups, section.optimizer, section.freeze, where="algorithm.critic", team=team)

    def share(self, step: int) -> float:
        """The share of its learning rate at a step."""
        return rate_share(self.section.optimizer, step, self._total_steps)

    def read(self, hidden_QH: Tensor) -> Tensor:
        """Values [Q] of hidden states, behind which logits may stand.

        A shared trunk gets its share of the gradient, the head all of it.
        """
        hidden_QH = hidden_QH[:, : self.head.in_features]
        if self.shared:
            still_QH = hidden_QH.detach()
            coef = self.section.trunk_coef
            hidden_QH = still_QH + coef * (hidden_QH - still_QH) if coef else still_QH
        values_Q: Tensor = self.head(hidden_QH.float())[:, 0]
        return values_Q

    @torch.no_grad()
    def values(self, packing: Packing, count: int) -> Tensor:
        """All ``count`` values that a packing asks for; those it does not ask for are 0."""
        features = UpdateFeatures(self.trunk, packing.microbatches)
        values_P = torch.zeros(count, device=self.trunk.device)
        for microbatch in packing.microbatches:
            with self.trunk.replay_routes(microbatch.routes_TLK if self.shared else None):
                hidden_TH = hidden_states(self.trunk, microbatch, features)
            values_P[microbatch.value_places_Q] = self.read(hidden_TH.index_select(0, microbatch.value_states_Q))
        return values_P

    def state_dict(self) -> dict[str, Any]:
        """Weights and moments; a shared trunk's weights are the policy's and not in it."""
        trunk = None if self.shared else distinct_state(self.trunk.model)
        return {"trunk": trunk, "head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state`` was taken."""
        if not self.shared:
            copy_state(self.trunk.model, state["trunk"])
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])


def _trunk_groups(trunk: Policy) -> dict[str, dict[str, nn.Parameter]]:
    """What an own trunk learns: everything but the head that writes tokens, which stays as it is and is not used."""
    trunk.model.requires_grad_(False)
    return {group: named for group, named in trunk.trainable().items() if group != "head"}


class ValuePass:
    """The critic's part of an update: losses of micro-batches, filling whole-update vectors."""

    def __init__(self, critic: Critic, asked: AskedValues) -> None:
        self.critic, self.asked = critic, asked
        self.values_P = torch.zeros_like(asked.targets_P)
        self.losses_P = torch.zeros_like(asked.targets_P)
        self.clipped_P = torch.zeros_like(asked.targets_P, dtype=torch.bool)

    def loss(self, hidden_TH: Tensor, microbatch: MicroBatch) -> Tensor:
        """A micro-batch's share of the value loss."""
        inside_Q = microbatch.value_places_Q < len(self.values_P)  # values after an episode are never taught
        places_Q = microbatch.value_places_Q[inside_Q]
        values_Q = self.critic.read(hidden_TH.index_select(0, microbatch.value_states_Q[inside_Q]))
        asked = self.asked
        loss_Q, clipped_Q = value_loss(
            values_Q, asked.old_P[places_Q], asked.targets_P[places_Q], clip=self.critic.section.value_clip
        )
        self.values_P[places_Q] = values_Q.detach()
        self.losses_P[places_Q] = loss_Q.detach()
        self.clipped_P[places_Q] = clipped_Q
        return (loss_Q * asked.weights_P[places_Q]).sum()

    def gather(self, packing: Packing) -> None:
        """Forward and backward through a trunk of the critic's own; its optimizer holds the gradients."""
        features = UpdateFeatures(self.critic.trunk, packing.microbatches)
        for microbatch in packing.microbatches:
            self.loss(hidden_states(self.critic.trunk, microbatch, features), microbatch).backward()
        features.backward()

    def over_ranks(self, team: Team) -> None:
        """Fill in what the other ranks have found."""
        for found_P in (self.values_P, self.losses_P, self.clipped_P):
            team.sum(found_P)

    def metrics(self) -> dict[str, float]:
        """Over the positions that were taught."""
        asked_P = self.asked.asked_P
        values_P, targets_P = self.values_P[asked_P].double(), self.asked.targets_P[asked_P].double()
        variance = targets_P.var(correction=0)
        explained = torch.where(variance > 0, 1 - (targets_P - values_P).var(correction=0) / variance, 0.0)
        named = {
            "value/loss": (self.losses_P.double() * self.asked.weights_P).sum(),
            "value/clip_fraction": self.clipped_P[asked_P].double().mean(),
            "value/mean": values_P.mean(),
            "value/explained_variance": explained,
        }
        return dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True))
