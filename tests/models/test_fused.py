"""Fused decoder layers give the values and gradients of the stock ones; on a CPU in Triton's interpreter."""

from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sensorium.data.media_store import MediaStore
from sensorium.kernels import layer_ops
from sensorium.kernels.layer_ops import UnknownLayer, has_mixer, mixer_of, parts_of
from sensorium.models import fused
from sensorium.models.attention import MaskedAttention
from sensorium.models.delta_net import is_delta
from sensorium.models.fused import check, fused_layers
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import LoraSection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu_too = pytest.mark.gpu if DEVICE == "cuda" else lambda test: test
FAMILIES = ["qwen2", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "qwen3_5", "glm4v"]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU Triton's kernels run in its interpreter; without Triton their references run."""
    monkeypatch.setattr(layer_ops, "interpreted", DEVICE == "cpu" and find_spec("triton") is not None)


def policy_of(family: str, folder: Path, dtype: str = "float32", **options: Any) -> Policy:
    make_tiny(family, folder, seed=1, initializer_range=0.15)
    return load_policy(str(folder), store=MediaStore(), device=DEVICE, dtype=dtype, **options)


@gpu_too
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if DEVICE == "cuda" else ["float32"])
def test_a_fused_layer_is_the_stock_layer(family: str, dtype: str, tmp_path: Path) -> None:
    policy = policy_of(family, tmp_path, dtype)
    policy.model.requires_grad_(True)
    for layer in policy.adapter.language_model.layers:
        parts = mixer_of(layer) if has_mixer(layer) or policy.delta_layers else parts_of(layer)
        check(layer, fused.FusedLayer(parts), policy.adapter.rotary)


@gpu_too
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5_moe"])
def test_in_bfloat16_a_wrong_gradient_of_any_tensor_is_found(family: str, tmp_path: Path) -> None:
    """Without an interpreter: it has no bfloat16. The fused layer's is every second gradient that is computed.

    A delta net amplifies roundings: tensors of the tiny stock layer itself are up to 20 % off.
    """
    policy = policy_of(family, tmp_path, "bfloat16")
    policy.model.requires_grad_(True)
    layers = policy.adapter.language_model.layers
    for layer in {type(next(layer.children())): layer for layer in layers}.values():
        parts = mixer_of(layer) if policy.delta_layers else parts_of(layer)
        check(layer, fused.FusedLayer(parts), policy.adapter.rotary)
        for name, parameter in layer.named_parameters():
            factors = cycle((1.0, 1.5 if is_delta(layer) else 1.1))
            hook = parameter.register_hook(lambda gradient, factors=factors: gradient * next(factors))
            with pytest.raises(UnknownLayer, match=name):
                check(layer, fused.FusedLayer(parts), policy.adapter.rotary)
            hook.remove()


@gpu_too
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if DEVICE == "cuda" else ["float32"])
def test_merged_adapters_are_those_of_peft(family: str, dtype: str, tmp_path: Path) -> None:
    policy = adapted(family, tmp_path, dtype)
    assert policy.adapters is not None
    policy.adapters.merge(policy.adapter.language_model.layers)
    merged = [name for name, layer in policy.adapters.layers.items() if hasattr(layer, "product")]
    assert len(merged) == len(policy.adapters.layers)
    for layer in policy.adapter.language_model.layers:
        parts = mixer_of(layer) if has_mixer(layer) or policy.delta_layers else parts_of(layer)
        assert type(getattr(parts.inner, "up", None)) is (layer_ops.AdaptedLinear if family != "glm4v" else type(None))
        check(layer, fused.FusedLayer(parts), policy.adapter.rotary)


@gpu_too
@pytest.mark.usefixtures("interpreted")
def test_merged_weights_follow_what_changes(tmp_path: Path) -> None:
    policy = adapted("qwen3_vl", tmp_path)
    own, model = policy.adapters, policy.adapter.language_model
    assert own is not None
    own.merge(model.layers)
    policy._fused = fused_layers(model, policy.adapter.rotary)
    assert type(policy._fused.layers[0]) is fused.FusedLayer
    ids, positions = torch.arange(9, device=DEVICE)[None], torch.arange(9, device=DEVICE)[None, None].expand(3, 1, -1)

    def both() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            stock, merged = (policy.language(ids, positions, MaskedAttention(), stock=stock) for stock in (True, False))
        assert (stock - merged).abs().max() <= 1e-5 * stock.abs().max()
        return stock, merged

    _, first = both()
    with torch.no_grad():
        next(iter(own.parameters.values())).mul_(3)
    _, second = both()
    assert not torch.equal(first, second)
    with own.off():
        _, base = both()
    assert not torch.equal(base, second)
    assert torch.equal(both()[1], second)
    copy = policy.copy()
    assert copy.adapters is not None
    with torch.no_grad():
        next(iter(copy.adapters.parameters.values())).zero_()
    copy.settle()
    assert torch.equal(both()[1], second)
    assert not any("product" in name for name in policy.model.state_dict())


def test_small_adapters_are_not_rounded_away() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(300, 400, generator=generator).bfloat16()
    a, b = torch.randn(4, 400, generator=generator), 1e-4 * torch.randn(300, 4, generator=generator)
    whole = base.float() + 2 * b @ a
    merged = layer_ops.summed(base, a, b, 2.0)
    nearest, x = whole.bfloat16(), torch.randn(400, generator=generator)
    assert merged.dtype == torch.bfloat16
    below, above = (torch.nextafter(nearest, torch.full_like(nearest, side * torch.inf)) for side in (-1, 1))
    assert ((merged == nearest) | (merged == below) | (merged == above)).all()
    moved, wanted = merged.float() - base.float(), whole - base.float()
    share = float((moved * wanted).sum() / (wanted * wanted).sum())
    lost = float(((nearest.float() - base.float()) * wanted).sum() / (wanted * wanted).sum())
    assert abs(share - 1) < 0.05
    assert lost < 0.8
    assert torch.equal(layer_ops.summed(base, a, torch.zeros_like(b), 2.0), base)
    assert float((merged.float() @ x - whole @ x).abs().mean()) < 0.06


def adapted(family: str, folder: Path, dtype: str = "float32") -> Policy:
    """A model with adapters that matter and learn."""
    policy = policy_of(family, folder, dtype, lora=LoraSection(rank=4, alpha=8, groups=("language",)), seed=1)
    assert policy.adapters is not None
    policy.model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.adapters.parameters.values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            parameter.requires_grad_()
    return policy


@gpu_too
@pytest.mark.usefixtures("interpreted")
def test_layers_that_disagree_are_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("qwen2", tmp_path)
    model = policy.adapter.language_model
    original = fused.FusedLayer.__call__
    monkeypatch.setattr(fused.FusedLayer, "__call__", lambda self, *x, **more: original(self, *x, **more) * 1.001)
    with pytest.warns(UserWarning, match="stock layers.*off the stock one"):
        stack = fused_layers(model, policy.adapter.rotary)
    assert stack.layers is model.layers
    assert stack.norm is model.norm


def test_a_layer_of_other_parts_is_refused(tmp_path: Path) -> None:
    policy = policy_of("qwen2", tmp_path)
    layer = policy.adapter.language_model.layers[0]
    layer.extra = torch.nn.Identity()
    with pytest.raises(UnknownLayer, match="extra"):
        parts_of(layer)


@gpu_too
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_whole_model(family: str, tmp_path: Path) -> None:
    policy = policy_of(family, tmp_path)
    policy.model.requires_grad_(True)
    ids = torch.arange(60, device=DEVICE)[None] % 200
    positions = torch.arange(60, device=DEVICE)[None, None].expand(3, 1, -1)
    results: list[list[Tensor]] = []
    for stock in (True, False):
        for recompute in (False, "selective", True) if policy.delta_layers else (False, True):
            policy.checkpoint_gradients(recompute)
            policy.model.zero_grad()
            hidden = policy.language(ids, positions, MaskedAttention(), stock=stock)
            policy.logits(hidden[0]).logsumexp(-1).sum().backward()
            named = policy.adapter.language_model.named_parameters()
            results.append([hidden.detach(), *(p.grad.clone() for _, p in named if p.grad is not None)])
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            rounding = 5e-5 if policy.delta_layers else 1e-5
            assert (found - expected).abs().max() <= rounding * max(1.0, float(expected.abs().max()))
