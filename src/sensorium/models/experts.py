"""Mixtures of experts: the routers of a language model watched and replayed, and experts as grouped products.

Replaying. The engine recorded that it sent token t of layer l to the experts 7 and 2, and the learner's router, whose
logits differ in the last bits, would choose 7 and 5. Then the experts 7 and 2 are used, in this order, and their weights
come from the learner's own logits: softmax over all experts, of it the values of 7 and 2, scaled to sum 1 where the stock
router scales. So the gradient reaches the router, and with the router's own choice nothing changes, to the last bit.

Axes: T tokens, L layers with experts, E experts, K experts of a token, S = T · K places, H hidden size, I inner size.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sensorium.vocabulary.errors import ModelError

UNKNOWN = -1  # in place of a recorded id: the router chooses itself


@dataclass(frozen=True)
class RouterOutput:
    """The logits of a router, and the experts that tokens are sent to, in the order in which their results are summed."""

    logits_TE: Tensor
    ids_TK: Tensor


def routers_of(language_model: Any) -> list[nn.Module]:
    """The router of each layer that has experts, in order."""
    blocks = [layer.mlp for layer in language_model.layers]
    return [block.gate for block in blocks if hasattr(block, "gate") and hasattr(block, "experts")]


@contextmanager
def watching(routers: Sequence[nn.Module]) -> Iterator[list[RouterOutput]]:
    """Collects what the routers decide in the pass inside, one entry per layer with experts.

    The stock block does not return it, so hooks read it. They exist only inside: a layer that is recomputed in a backward
    pass outside is not read twice.
    """
    seen: list[RouterOutput] = []
    with ExitStack() as hooks:
        for router in routers:
            handle = router.register_forward_hook(lambda *call: seen.append(RouterOutput(call[2][0], call[2][2])))
            hooks.callback(handle.remove)
        yield seen


@contextmanager
def replaying(routers: Sequence[nn.Module], routes_TLK: Tensor) -> Iterator[None]:
    """Inside, routers send tokens to these experts; where ``UNKNOWN`` stands they choose themselves.

    Layers that are recomputed in a backward pass must find the same: backward belongs inside.
    """
    layers, top_k = routes_TLK.shape[1:]
    asked = len(routers), getattr(routers[0], "top_k", 0) if routers else 0
    if (layers, top_k) != asked:
        raise ModelError(
            f"algorithm.router_replay: the engine recorded {top_k} experts a token in {layers} layers, and the learner's "
            f"model has {asked[1]} in {asked[0]}; they are not the same model."
        )
    with ExitStack() as hooks:
        for i, router in enumerate(routers):

            def replay(router: nn.Module, given: Any, out: Any, ids_TK: Tensor = routes_TLK[:, i]) -> Any:
                return _sent_to(router, out, ids_TK)

            hooks.callback(router.register_forward_hook(replay).remove)
        yield


def _sent_to(router: nn.Module, out: tuple[Tensor, Tensor, Tensor], given_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A router's output with the given experts in place of its own, and their weights by its logits."""
    logits_TE, weights_TK, own_TK = out
    ids_TK = torch.where(given_TK >= 0, given_TK.to(own_TK.dtype), own_TK)
    return logits_TE, chosen_weights(router, logits_TE, ids_TK).to(weights_TK.dtype), ids_TK


def chosen_weights(router: nn.Module, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """The float32 weights of experts as the stock routers compute them; Qwen3-Omni's say whether they scale to sum 1."""
    chosen_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, ids_TK)
    return chosen_TK / chosen_TK.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else chosen_TK


@torch.no_grad()
def check_routers(language_model: Any) -> None:
    """Refuse routers whose weights are not those of ``chosen_weights``: their choice could not be replayed.

    Held against a router of each kind with weights of its own, for a sharded one's are elsewhere.
    """
    drawn = torch.Generator().manual_seed(0)
    for kind in {type(router) for router in routers_of(language_model)}:
        router: Any = kind(language_model.config).float()
        router.weight.copy_(torch.randn(router.weight.shape, generator=drawn))
        logits_TE, weights_TK, ids_TK = router(torch.randn(8, router.weight.shape[1], generator=drawn))
        if not torch.equal(chosen_weights(router, logits_TE, ids_TK), weights_TK):
            raise ModelError(
                f"algorithm.router_replay: {kind.__name__} weighs experts in a way that is not known here, so the engine's "
                "choice cannot be replayed. Set it to false."
            )
