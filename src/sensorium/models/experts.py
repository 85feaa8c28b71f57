"""Mixtures of experts: the routers of a language model watched and replayed, and experts as grouped products.

Replaying. The engine recorded that it sent token t of layer l to the experts 7 and 2, and the learner's router, whose
logits differ in the last bits, would choose 7 and 5. Then the experts 7 and 2 are used, in this order, and their weights
come from the learner's own logits: softmax over all experts, of it the values of 7 and 2, scaled to sum 1 where the stock
router scales. So the gradient reaches the router, and with the router's own choice nothing changes, to the last bit.

Grouped products. The places of tokens are sorted by expert, so that one product has the rows of each expert together. Two
tokens of two experts each:

    place    0 1 2 3              sorted   1 3 0 2        rank of each place   2 0 3 1
    expert   2 0 3 0       →      expert   0 0 2 3        ends of the experts' rows   2 2 3 4
    token    0 0 1 1              token    0 1 0 1

Axes: T tokens, L layers with experts, E experts, K experts of a token, S = T · K places, H hidden size, I inner size.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from sensorium.kernels.first_use import fall_back, trying
from sensorium.kernels.layer_ops import ops_of
from sensorium.vocabulary.errors import ModelError

UNKNOWN = -1  # in place of a recorded id: the router chooses itself
GROUPED, STOCK = "sensorium", "grouped_mm"  # our experts and the usual ones in transformers' table
# Of the trial: how far values and gradients may be from the stock experts', relative to the largest.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.005}
TRIAL_TOKENS = 48


@dataclass(frozen=True)
class RouterOutput:
    """The logits of a router, and the experts that tokens are sent to, in the order in which their results are summed."""

    logits_TE: Tensor
    ids_TK: Tensor


def routers_of(layers: Iterable[Any]) -> list[nn.Module]:
    """The router of each decoder layer that has experts, in order."""
    blocks: list[Any] = [getattr(layer, "mlp", None) for layer in layers]
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
    for kind in {type(router) for router in routers_of(language_model.layers)}:
        router: Any = kind(language_model.config).float()
        router.weight.copy_(torch.randn(router.weight.shape, generator=drawn))
        logits_TE, weights_TK, ids_TK = router(torch.randn(8, router.weight.shape[1], generator=drawn))
        if not torch.equal(chosen_weights(router, logits_TE, ids_TK), weights_TK):
            raise ModelError(
                f"algorithm.router_replay: {kind.__name__} weighs experts in a way that is not known here, so the engine's "
                "choice cannot be replayed. Set it to false."
            )


class GroupedExperts(torch.autograd.Function):
    """(x [T, H], ids [T, K], weights [T, K], gate and up [E, 2 · I, H], down [E, H, I]) → the experts' weighted sum [T, H].

    As transformers' ``grouped_mm`` experts, with half of their traffic: tokens are weighted before ``down``, where they are
    narrow, rows are gathered where autograd would scatter them, and of a token only x and gate and up are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up_EFH: Tensor, down_EHI: Tensor
    ) -> Tensor:
        order_S, rank_S, ends_E = _sorted_places(ids_TK, len(gate_up_EFH))
        tokens_S, weights_S1 = order_S // ids_TK.shape[1], weights_TK.flatten()[order_S, None]
        both_SF = grouped_mm(x_TH.index_select(0, tokens_S), gate_up_EFH.mT, offs=ends_E)
        inner_SI = ops_of(x_TH).gated_pair(both_SF).mul_(weights_S1)
        out_TH = _summed(grouped_mm(inner_SI, down_EHI.mT, offs=ends_E), rank_S.view_as(ids_TK))
        ctx.save_for_backward(x_TH, weights_S1, tokens_S, rank_S, ends_E, both_SF, gate_up_EFH, down_EHI)
        ctx.top_k = ids_TK.shape[1]
        return out_TH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weights_S1, tokens_S, rank_S, ends_E, both_SF, gate_up_EFH, down_EHI = ctx.saved_tensors
        given_SH = gradients[0].to(x_TH.dtype).index_select(0, tokens_S)
        weighted_SI = grouped_mm(given_SH, down_EHI, offs=ends_E)
        both_gradient_SF, _, inner_SI = ops_of(x_TH).gate_pair_gradients(both_SF, weighted_SI * weights_S1)
        weights_S = (weighted_SI * inner_SI).sum(1, dtype=torch.float32).to(weights_S1.dtype)
        x, gate_up, down = None, None, None
        if ctx.needs_input_grad[0]:
            found_SH = grouped_mm(both_gradient_SF, gate_up_EFH, offs=ends_E)
            x = _summed(found_SH, rank_S.view(-1, ctx.top_k))
        if ctx.needs_input_grad[3]:
            gate_up = grouped_mm(both_gradient_SF.mT, x_TH.index_select(0, tokens_S), offs=ends_E)
        if ctx.needs_input_grad[4]:
            down = grouped_mm(given_SH.mT, inner_SI.mul_(weights_S1), offs=ends_E)
        return x, None, weights_S.index_select(0, rank_S).view(-1, ctx.top_k), gate_up, down


def _sorted_places(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places [S] sorted by expert, the rank of each place, and where each expert's rows end."""
    sorted_S, order_S = ids_TK.flatten().to(torch.int16).sort(stable=True)
    known_E = torch.arange(experts, dtype=torch.int16, device=ids_TK.device)
    ends_E = torch.searchsorted(sorted_S, known_E, right=True, out_int32=True)
    return order_S, order_S.to(torch.int32).argsort(), ends_E


def _summed(rows_SH: Tensor, rank_TK: Tensor) -> Tensor:
    """Each token's K rows, summed in float32 in the order of its experts and rounded once."""
    if rows_SH.is_cuda:  # in one launch, without a copy of the rows in their old order
        return embedding_bag(rank_TK, rows_SH, mode="sum")
    return (
        rows_SH.index_select(0, rank_TK.flatten()).unflatten(0, rank_TK.shape).sum(1, dtype=torch.float32).to(rows_SH.dtype)
    )


def _grouped_experts(module: Any, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    out_TH: Tensor = GroupedExperts.apply(hidden_TH, ids_TK, weights_TK, module.gate_up_proj, module.down_proj)
    return out_TH


ALL_EXPERTS_FUNCTIONS.register(GROUPED, _grouped_experts)


def group_experts(model: Any, language_model: Any) -> None:
    """Let a model compute its experts by ``GroupedExperts``, where values and gradients are those of the stock ones."""
    experts = [layer.mlp.experts for layer in language_model.layers if routers_of([layer])]
    if not experts:
        return
    try:
        wrong = _trial(model, experts[0], language_model.config.num_experts_per_tok)
    except Exception as error:  # a product that this GPU or torch does not have is a reason to be slow, not to stop
        wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if wrong:
        model.set_experts_implementation(STOCK)
        fall_back(f"experts run as transformers computes them, which is slower: {wrong}")


def _trial(model: Any, experts: Any, top_k: int) -> str:
    """What is wrong with our form of these experts, if anything is; the model is left with it."""
    weight = experts.gate_up_proj
    drawn = torch.Generator().manual_seed(0)
    x_TH, given_TH = torch.randn(2, TRIAL_TOKENS, weight.shape[2], generator=drawn).to(weight.device, weight.dtype)
    logits_TE = torch.randn(TRIAL_TOKENS, len(weight), generator=drawn)
    weights_TK, ids_TK = logits_TE.softmax(-1).topk(top_k, -1)
    ids_TK, weights_TK = ids_TK.to(weight.device), weights_TK.to(weight.device, weight.dtype)
    results = []
    with trying():
        for name in (STOCK, GROUPED):
            model.set_experts_implementation(name)
            entered = [x_TH.clone().requires_grad_(), weights_TK.clone().requires_grad_()]
            out_TH = experts(entered[0], ids_TK, entered[1])
            results.append([out_TH.detach(), *torch.autograd.grad(out_TH, entered, given_TH)])
    error = max(float((a - b).abs().max() / b.abs().max()) for b, a in zip(*results, strict=True))
    bound = BOUNDS.get(weight.dtype, 1e-5)
    return "" if error <= bound else f"the grouped ones are {error:.2g} off (bound {bound:g})"
