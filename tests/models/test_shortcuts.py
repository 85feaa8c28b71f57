"""What is done otherwise on a GPU gives the same numbers: a padded MLP of the tower, attention with folded query heads."""

from types import SimpleNamespace

import torch
from torch import nn

from sensorium.models.attention import folded_attention, masked_attention
from sensorium.models.tower import AlignedMLP


def test_a_padded_inner_size_changes_neither_values_nor_gradients() -> None:
    torch.manual_seed(0)
    parts = SimpleNamespace(
        gate_proj=nn.Linear(16, 13), up_proj=nn.Linear(16, 13), down_proj=nn.Linear(13, 16), act_fn=nn.SiLU()
    )
    mlp, hidden = AlignedMLP(parts), torch.randn(5, 16, requires_grad=True)
    plain, padded = mlp(hidden), mlp.padded(hidden, 3)
    assert torch.allclose(plain, padded, atol=1e-6)
    inputs = [hidden, *mlp.parameters()]
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (plain, padded)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert {name for name, _ in mlp.named_parameters()} >= {"gate_proj.weight", "up_proj.weight", "down_proj.bias"}


def test_folded_query_heads_see_what_they_see_apart() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.rand(2, 1, 5, 9) > 0.3
    mask[..., 0] = True
    for seen in (mask, mask[:1]):
        expected = masked_attention(query, key, value, 0.3, seen)
        assert torch.allclose(folded_attention(query, key, value, 0.3, seen), expected, atol=1e-6)
