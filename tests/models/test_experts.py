"""Experts as grouped products give what transformers' plain loop over experts gives, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sensorium.kernels.first_use import given_up
from sensorium.models import experts as experts_module
from sensorium.models.experts import GROUPED, STOCK, group_experts
from sensorium.models.policy import Policy

from .stock_pair import Pair

MIXTURES = ["qwen3_vl_moe", "qwen3_5_moe", "qwen3_omni_moe"]
Pairs = Callable[..., Pair]


def results(policy: Policy, name: str, tokens: int, *, frozen: bool, alone: int | None = None) -> list[Tensor]:
    """Values and gradients of the first layer's experts; ``alone``: an expert that all tokens are sent to first."""
    policy.model.set_experts_implementation(name)
    block = policy.adapter.language_model.layers[0].mlp
    drawn, weight = torch.Generator().manual_seed(tokens), block.experts.gate_up_proj
    given = torch.randn(2, tokens, weight.shape[2], generator=drawn).to(weight.device, weight.dtype)
    x_TH, given_TH = given[0].requires_grad_(), given[1]
    logits_TE = torch.randn(tokens, len(weight), generator=drawn)
    weights_TK, ids_TK = (part.to(weight.device) for part in logits_TE.softmax(-1).topk(2, -1))
    weights_TK = weights_TK.to(weight.dtype)
    if alone is not None:
        ids_TK = torch.stack([torch.full_like(ids_TK[:, 0], alone), (alone + 1 + ids_TK[:, 1] % 2) % 4], 1)
    weights_TK = weights_TK.requires_grad_()
    learning = [] if frozen else [block.experts.gate_up_proj, block.experts.down_proj]
    for parameter in (block.experts.gate_up_proj, block.experts.down_proj):
        parameter.requires_grad_(not frozen)
    out_TH = block.experts(x_TH, ids_TK, weights_TK)
    return [out_TH.detach(), *torch.autograd.grad(out_TH, [x_TH, weights_TK, *learning], given_TH)]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("family", MIXTURES)
def test_values_and_gradients_are_those_of_a_loop_over_experts(family: str, frozen: bool, pairs: Pairs) -> None:
    policy = pairs(family).policy
    for tokens, alone in ((1, None), (37, None), (64, 2)):
        plain, grouped = (results(policy, name, tokens, frozen=frozen, alone=alone) for name in ("eager", GROUPED))
        for found, expected in zip(grouped, plain, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    policy.model.requires_grad_(True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_bfloat16_they_are_no_farther_from_float32_than_the_library_s(device: str, pairs: Pairs) -> None:
    narrow = pairs("qwen3_vl_moe").policy.copy()
    narrow.model.to(device, torch.bfloat16)
    wide = narrow.copy()
    wide.model.float()
    for frozen in (True, False):
        exact = results(wide, "eager", 64, frozen=frozen)
        stock, ours = (results(narrow, name, 64, frozen=frozen) for name in ("grouped_mm", GROUPED))
        for one, other, right in zip(ours, stock, exact, strict=True):
            gaps = [float((found.float() - right).norm() / right.norm()) for found in (one, other)]
            assert gaps[0] <= 1.3 * gaps[1] + 1e-4


def test_a_form_that_gives_other_numbers_is_given_up_with_the_reason(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = pairs("qwen3_vl_moe").policy.copy()
    model, language = policy.model, policy.adapter.language_model
    group_experts(model, language)
    assert language.config._experts_implementation == GROUPED
    monkeypatch.setattr(experts_module, "_summed", lambda rows_SH, rank_TK: rows_SH[: len(rank_TK)])
    with pytest.warns(UserWarning, match="experts"):
        group_experts(model, language)
    assert language.config._experts_implementation == STOCK
    assert any("experts run as transformers" in reason for reason in given_up())
