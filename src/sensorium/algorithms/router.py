"""Load balancing of a mixture of experts: the router's auxiliary loss, and how evenly its experts are used.

The loss is experts · Σ_e chosen_e · probability_e, both as means over all tokens and layers of the update. It is no sum
over tokens: what experts were chosen is counted over the whole update first, and every micro-batch then adds its share.
Axes: T tokens, L layers, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RouterLoad:
    """What routers did with some tokens: how often each expert was chosen, its summed probabilities, how many rows.

    A row is a token in a layer. ``probabilities_E`` carries the gradient; the loads of parts add up to that of the whole.
    """

    chosen_LE: Tensor
    probabilities_E: Tensor
    rows: Tensor

    def __add__(self, other: "RouterLoad") -> "RouterLoad":
        return RouterLoad(
            self.chosen_LE + other.chosen_LE,
            self.probabilities_E + other.probabilities_E,
            self.rows + other.rows,
        )

    def detach(self) -> "RouterLoad":
        """The same without gradient."""
        return RouterLoad(self.chosen_LE, self.probabilities_E.detach(), self.rows)


def router_load(logits: Sequence[Tensor], top_k: int, weights_T: Tensor | None = None) -> RouterLoad:
    """The load by the router logits [T, E] of each layer. ``weights_T``: how often a token counts (once if not said)."""
    tokens, experts = logits[0].shape
    if weights_T is None:
        weights_T = torch.ones(tokens, device=logits[0].device)
    weights_T = weights_T.to(torch.float32)
    chosen, probabilities = [], torch.zeros(experts, device=logits[0].device)
    for logits_TE in logits:
        probabilities_TE = logits_TE.softmax(-1, dtype=torch.float32)
        probabilities = probabilities + weights_T @ probabilities_TE
        picked_TK = probabilities_TE.detach().topk(top_k, dim=-1).indices
        picked_TE = torch.zeros_like(probabilities_TE).scatter_(1, picked_TK, 1.0)
        chosen.append(weights_T @ picked_TE)
    return RouterLoad(torch.stack(chosen), probabilities, weights_T.sum() * len(logits))


def balance_loss(part: RouterLoad, whole: RouterLoad) -> Tensor:
    """The share of ``part`` in the loss of the update ``whole``; the shares of its parts add up to it."""
    experts = whole.chosen_LE.shape[1]
    chosen_E = whole.chosen_LE.sum(0) / whole.rows
    return experts * (chosen_E * part.probabilities_E).sum() / whole.rows


def load_metrics(whole: RouterLoad) -> dict[str, float]:
    """How evenly experts are used: 1 is an even share. The busiest and the idlest of any layer, and how many are idle."""
    share_LE = whole.chosen_LE.double() * whole.chosen_LE.shape[1] / whole.chosen_LE.double().sum(1, keepdim=True)
    found = torch.stack(
        [share_LE.max(), share_LE.min(), (share_LE == 0).double().mean(), balance_loss(whole, whole).double()]
    )
    names = ("router/busiest_expert", "router/idlest_expert", "router/unused_experts", "router/balance_loss")
    return dict(zip(names, found.tolist(), strict=True))
