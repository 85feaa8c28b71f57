"""The router's loss is the library's on one row, and does not depend on how an update is cut into micro-batches."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from sensorium.algorithms.losses import RouterLoad, balance_loss, load_metrics, router_load

LAYERS, EXPERTS = 3, 5


def load_of(layers: Sequence[torch.Tensor], top_k: int, weights_T: torch.Tensor | None = None) -> RouterLoad:
    """The load of routers that choose by their logits."""
    return router_load(layers, [logits_TE.topk(top_k, -1).indices for logits_TE in layers], weights_T)


def logits(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, EXPERTS, generator=generator) * 2 for _ in range(LAYERS)]


@given(tokens=st.integers(1, 40), top_k=st.integers(1, EXPERTS), seed=st.integers(0, 99))
def test_it_is_the_library_s_loss_on_one_row(tokens: int, top_k: int, seed: int) -> None:
    mine, theirs = ([layer.clone().requires_grad_() for layer in logits(tokens, seed)] for _ in range(2))
    whole = load_of(mine, top_k)
    loss, want = balance_loss(whole, whole.detach()), load_balancing_loss_func(tuple(theirs), EXPERTS, top_k)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    for ours, other in zip(torch.autograd.grad(loss, mine), torch.autograd.grad(want, theirs), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-6)


@given(tokens=st.integers(2, 40), seed=st.integers(0, 99))
def test_tokens_that_do_not_count_are_the_library_s_padding(tokens: int, seed: int) -> None:
    mask_T = torch.randint(0, 2, (tokens,), generator=torch.Generator().manual_seed(seed))
    mask_T[0] = 1
    layers = logits(tokens, seed)
    whole = load_of(layers, 2, mask_T)
    want = load_balancing_loss_func(tuple(layers), EXPERTS, 2, mask_T[None])
    torch.testing.assert_close(balance_loss(whole, whole), want, rtol=1e-5, atol=0)


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_micro_batches_add_up_to_the_whole_update(sizes: list[int], seed: int) -> None:
    layers = [layer.requires_grad_() for layer in logits(sum(sizes), seed)]
    weights_T = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(seed)) + 0.1
    whole = load_of(layers, 2, weights_T)
    loss = balance_loss(whole, whole.detach())
    want = torch.autograd.grad(loss, layers)
    parts = zip(zip(*(layer.split(sizes) for layer in layers), strict=True), weights_T.split(sizes), strict=True)
    loads = [load_of(part, 2, weights) for part, weights in parts]
    known = loads[0].detach()
    for load in loads[1:]:
        known = known + load.detach()
    shares = [balance_loss(load, known) for load in loads]
    torch.testing.assert_close(torch.stack(shares).sum(), loss, rtol=1e-5, atol=0)
    for ours, other in zip(torch.autograd.grad(torch.stack(shares).sum(), layers), want, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-7)
    assert load_metrics(known) == pytest.approx(load_metrics(whole), rel=1e-5)


def test_metrics_say_which_experts_are_overworked_and_which_idle() -> None:
    even = torch.eye(4).repeat(3, 1) * 9
    assert load_metrics(load_of([even, even], 1)) == pytest.approx(
        {"router/busiest_expert": 1, "router/idlest_expert": 1, "router/unused_experts": 0, "router/balance_loss": 1},
        rel=1e-3,
    )
    one = torch.tensor([[9.0, 0, 0, 0]]).repeat(12, 1)
    found = load_metrics(load_of([even, one], 1))
    assert (found["router/busiest_expert"], found["router/idlest_expert"]) == (4, 0)
    assert found["router/unused_experts"] == 3 / 8


def test_replayed_choices_are_the_load_and_what_the_router_would_choose_otherwise_is_counted() -> None:
    layers = [torch.tensor([[9.0, 5, 0, 0], [9, 5, 0, 0], [0, 0, 9, 5]])] * 2
    chosen = [torch.tensor([[1, 0], [0, 3], [2, 3]]), torch.tensor([[0, 1], [2, 3], [2, 3]])]
    routes_TLK = torch.stack(chosen, 1).to(torch.int16)
    routes_TLK[2] = -1  # was not recorded
    load = router_load(layers, chosen, torch.tensor([1, 1, 1]), routes_TLK)
    assert load.chosen_LE.tolist() == [[2, 1, 1, 2], [1, 1, 2, 2]]
    found = load_metrics(load)
    assert found["router/replayed_tokens"] == pytest.approx(2 / 3)
    assert found["router/changed_tokens"] == 1 / 2  # the order of experts is no difference
    assert found["router/changed_experts"] == 3 / 8
    again = load_metrics(router_load(layers, chosen, torch.tensor([1, 0, 1]), routes_TLK))
    assert (again["router/replayed_tokens"], again["router/changed_tokens"]) == (1 / 2, 0)
