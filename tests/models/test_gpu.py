"""On a GPU the parts follow the stock model, and the CPU in float32, within stated bounds."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from sensorium.data.media_store import MediaStore
from sensorium.models.attention import MaskedAttention, causal_attention, masked_attention
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.family_facts import FAMILIES
from sensorium.vocabulary.content import user

from .clips import noise
from .stock_pair import Pair, processed, row

# Relative to the largest logit. In bfloat16 eight bits remain: the bound is a few roundings of the residual stream.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.03}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_logits_and_gradients_on_the_gpu(family: str, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_tiny(family, tmp_path_factory.mktemp(family), seed=1)
    policy = load_policy(str(folder), store=MediaStore(), dtype=dtype, device="cuda")
    stock = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    pair = Pair(policy, stock, folder)
    messages = [user("Look", noise(policy.chat.store, 1), noise(policy.chat.store, 2, 120, 60), "which?")]
    want_TV = pair.want(processed(policy, messages)).detach()

    for recompute in (False, True):
        policy.checkpoint_gradients(recompute)
        policy.model.zero_grad()
        ids_T, positions_3T, placed = row(policy, [policy.chat.render(messages)])
        ids_1T, positions_31T = ids_T[None].to(policy.device), positions_3T[:, None].to(policy.device)
        hidden_1TH = policy.language(ids_1T, positions_31T, MaskedAttention(), placed)
        got_TV = policy.logits(hidden_1TH[0])
        assert got_TV.dtype == torch.float32
        worst = float((got_TV.detach().cpu() - want_TV).abs().max() / want_TV.abs().max())
        assert worst <= BOUNDS[dtype]
        got_TV.logsumexp(-1).mean().backward()
        for name, parameter in policy.model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_what_goes_straight_to_the_gpu_is_what_the_cpu_loads(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / family)
    there, here = (load_policy(str(folder), store=MediaStore(), device=d).tensors() for d in ("cuda", "cpu"))
    assert there.keys() == here.keys()
    for name, tensor in there.items():
        assert tensor.is_cuda, name
        assert torch.equal(tensor.cpu(), here[name]), name


@pytest.mark.gpu
def test_causal_attention_on_the_gpu_is_masked_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(3, 50, heads, 64, generator=generator).to("cuda", torch.bfloat16) for heads in (8, 2, 2)]
    query, key, value = (x.transpose(1, 2) for x in drawn)
    mask = torch.ones(50, 50, dtype=torch.bool, device="cuda").tril()[None, None]
    expected = masked_attention(query.float(), key.float(), value.float(), 0.1, mask)
    assert float((causal_attention(query, key, value, 0.1) - expected).abs().max()) <= 0.01 * float(expected.abs().max())
