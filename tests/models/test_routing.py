"""The routers of a mixture of experts are read as they run, and only where somebody watches."""

from collections.abc import Callable

import torch
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from sensorium.algorithms.losses import RouterLoad, balance_loss, router_load
from sensorium.models.attention import MaskedAttention
from sensorium.models.experts import RouterOutput
from sensorium.models.policy import Policy
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Segment

from .stock_pair import Pair, close, row

Pairs = Callable[..., Pair]


def watched_pass(policy: Policy, segments: list[Segment]) -> list[RouterOutput]:
    ids_T, positions_3T, placed = row(policy, segments)
    with policy.watch_routers() as seen:
        policy.language(ids_T[None], positions_3T[:, None], MaskedAttention(), placed)
    return seen


def load_of(seen: list[RouterOutput]) -> RouterLoad:
    return router_load([one.logits_TE for one in seen], [one.ids_TK for one in seen])


def test_router_logits_and_their_loss_are_those_of_the_stock_model(pairs: Pairs) -> None:
    pair = pairs("qwen3_vl_moe")
    messages = [user(pair.picture(1), pair.clip(1), "what?")]
    seen = watched_pass(pair.policy, [pair.policy.chat.render(messages)])
    with torch.no_grad():
        stock = pair.stock(**pair.inputs(messages), use_cache=False, output_router_logits=True)
    assert len(seen) == len(stock.router_logits) == 2
    for ours, theirs in zip(seen, stock.router_logits, strict=True):
        close(ours.logits_TE, theirs)
    load = load_of(seen)
    close(balance_loss(load, load), stock.aux_loss)
    close(balance_loss(load, load), load_balancing_loss_func(stock.router_logits, 4, 2))


def test_the_loss_reaches_every_weight_before_the_last_router_recomputed_or_not(pairs: Pairs) -> None:
    policy = pairs("qwen3_vl_moe").policy
    segment = policy.chat.render([user(pairs("qwen3_vl_moe").picture(1), "what?")])

    def gradients() -> dict[str, torch.Tensor]:
        policy.model.zero_grad()
        load = load_of(watched_pass(policy, [segment]))
        balance_loss(load, load.detach()).backward()
        return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}

    kept = gradients()
    policy.checkpoint_gradients()
    recomputed = gradients()
    policy.checkpoint_gradients(False)
    policy.model.zero_grad()
    assert kept.keys() == recomputed.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient)
    for name in ("layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight", "layers.0.mlp.experts.down_proj"):
        assert kept[f"model.language_model.{name}"].any()
    assert kept["model.visual.patch_embed.proj.weight"].any()
    assert "model.language_model.layers.1.mlp.experts.down_proj" not in kept, "it comes after the last router"


def test_nobody_watches_outside_and_dense_models_have_no_routers(pairs: Pairs) -> None:
    policy = pairs("qwen3_vl_moe").policy
    segment = policy.chat.render([user("what?")])
    seen = watched_pass(policy, [segment])
    ids_T, positions_3T, placed = row(policy, [segment])
    policy.language(ids_T[None], positions_3T[:, None], MaskedAttention(), placed)
    assert len(seen) == 2
    assert not any(module._forward_hooks for module in policy.model.modules() if type(module).__name__.endswith("Router"))
    dense = pairs("qwen3_vl").policy
    assert (policy.experts_per_token, dense.experts_per_token) == (2, 0)
    assert watched_pass(dense, [dense.chat.render([user("what?")])]) == []
