"""Blocks of the vision towers give with kernels what they give without; on a CPU Triton's interpreter runs them."""

from copy import deepcopy
from importlib.util import find_spec
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni

from sensorium.data.media_store import MediaStore
from sensorium.kernels import layer_ops
from sensorium.models import tower as tower_module
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.models.tower import BOUNDS, AlignedMLP, RecentPatches, TowerAttention, TowerBlock, choose, trial

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu_too = pytest.mark.gpu if DEVICE == "cuda" else lambda test: test
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen2_5_omni"]
DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"


def plain_attention(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float) -> Tensor:
    parts = [[x[start:end].transpose(0, 1) for x in (query, key, value)] for start, end in pairwise(ends.tolist())]
    assert longest == max(2, int(ends.diff().max()))
    return torch.cat([scaled_dot_product_attention(*part, scale=scaling).transpose(0, 1) for part in parts])


def use_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention is for CUDA."""
    from sensorium.models import tower
    from sensorium.models.tower import BlockSettings

    def attended(rotated: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
        three = rotated.view(len(rotated), 3, settings.heads, -1).unbind(1)
        return plain_attention(*three, settings.ends, settings.longest, settings.scaling), torch.zeros(1)

    @torch.enable_grad()
    def gradients(given: Tensor, rotated: Tensor, _seen: Tensor, _lse: Tensor, settings: BlockSettings) -> Tensor:
        again = rotated.detach().requires_grad_()
        return torch.autograd.grad(attended(again, settings)[0], again, given)[0]

    monkeypatch.setattr(tower_module, "by_flash", plain_attention)
    monkeypatch.setattr(tower, "attended", attended)
    monkeypatch.setattr(tower, "attention_gradients", gradients)


@pytest.fixture
def blocks_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if DEVICE == "cpu":
        use_plain_attention(monkeypatch)
        monkeypatch.setattr(layer_ops, "interpreted", find_spec("triton") is not None)

    def make(family: str) -> Policy:
        make_tiny(family, tmp_path, seed=1, initializer_range=0.15)
        return load_policy(str(tmp_path), store=MediaStore(), device=DEVICE, dtype=DTYPE)

    return make


@gpu_too
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_block_is_the_stock_block(family: str, blocks_of: Any) -> None:
    if family == "qwen2_5_omni" and "freqs" in signature(modeling_qwen2_5_omni.apply_rotary_pos_emb_vision).parameters:
        pytest.skip("before transformers 5.17 this tower takes angles, not cosines and sines, and runs its stock blocks")
    policy = blocks_of(family)
    policy.model.requires_grad_(True)
    tower = policy.adapter.towers["picture"].module
    assert all(isinstance(block.attn, TowerAttention) for block in tower.blocks)
    one_function = family == "qwen2_5_vl"
    for block in tower.blocks[:2]:
        assert isinstance(block, TowerBlock) == one_function
        for whole in (False, True)[: 1 + one_function]:
            assert trial(block, whole) <= (1e-5 if DEVICE == "cpu" else BOUNDS[torch.bfloat16])
    assert not tower.blocks[0].attn.fused  # a trial leaves it as it was


@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_cpu_blocks_are_the_stock_ones(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path, seed=1)
    policy = load_policy(str(tmp_path), store=MediaStore(), device="cpu", dtype="float32")
    tower = policy.adapter.towers["picture"].module
    choose(tower)
    assert not any(block.attn.fused for block in tower.blocks)


@gpu_too
def test_a_block_whose_weights_moved_or_have_adapters_computes_with_them(blocks_of: Any) -> None:
    policy = blocks_of("qwen2_5_vl")
    block = policy.adapter.towers["picture"].module.blocks[0]
    bound = 1e-5 if DEVICE == "cpu" else BOUNDS[torch.bfloat16]
    block.mlp = AlignedMLP(uneven(block.mlp))  # an inner size that has to be padded
    assert trial(block, True) <= bound
    with torch.no_grad():
        block.mlp.gate_proj.weight.mul_(3)
        block.mlp.down_proj.weight.add_(0.5)
    assert trial(block, True) <= bound
    tower_module._set(block, True, True)
    assert block._plain_weights() is not None
    block.mlp.up_proj.register_forward_hook(lambda *_: None)
    assert block._plain_weights() is None


def uneven(mlp: Any) -> Any:
    """An MLP of the same width whose inner size is no multiple of 8."""
    size = mlp.down_proj.out_features
    kind = {"dtype": mlp.down_proj.weight.dtype, "device": DEVICE}
    gate, up, down = (torch.nn.Linear(*sizes, **kind) for sizes in ((size, 20), (size, 20), (20, size)))
    named = {"gate_proj": gate, "up_proj": up, "down_proj": down, "act_fn": mlp.act_fn}
    return torch.nn.ModuleDict(named)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_keep_their_names_and_a_copy_has_its_own(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path, seed=1)
    policy = load_policy(str(tmp_path), store=MediaStore(), device="cpu", dtype="float32")
    block = policy.adapter.towers["picture"].module.blocks[0]
    names = {name for name, _ in block.named_parameters()}
    assert {"norm1.weight", "norm2.weight", "attn.proj.weight"} <= names
    assert names & {"attn.qkv.weight", "attn.q.weight"}
    copy = deepcopy(block)
    assert all(one is not other for one, other in zip(copy.parameters(), block.parameters(), strict=True))
    assert copy.attn.proj.weight is dict(copy.named_parameters())["attn.proj.weight"]


@pytest.mark.gpu
def test_the_tower_is_fused_on_a_gpu_and_says_so_where_it_is_not(blocks_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = blocks_of("qwen2_5_vl").adapter.towers["picture"].module
    choose(tower)
    assert all(block.attn.fused and block.norm1.fused and block.mlp.fused for block in tower.blocks)
    assert all(block.fused for block in tower.blocks)
    tower_module._set(tower.blocks[0], False, False)
    monkeypatch.setitem(BOUNDS, torch.bfloat16, 1e-9)
    with pytest.warns(UserWarning, match="stock blocks.*off the stock one"):
        choose(tower)
    assert not tower.blocks[0].attn.fused


@pytest.mark.gpu
def test_patches_stay_on_the_gpu_for_as_long_as_they_are_the_same() -> None:
    patches, recent = torch.randn(3, 40, 6), RecentPatches()
    cuda = torch.device("cuda")
    parts = list(patches.unbind())
    first = recent(parts, cuda, torch.bfloat16)
    again = recent([parts[1], torch.ones(2, 6), parts[0]], cuda, torch.bfloat16)
    expected = torch.cat([parts[1], torch.ones(2, 6), parts[0]]).bfloat16()
    assert torch.equal(first.cpu(), patches.flatten(0, 1).bfloat16())
    assert torch.equal(again.cpu(), expected)
    assert recent._held.hits == 2
