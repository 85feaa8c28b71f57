"""``model.precision: matched``: what the engine says of a token is what the learner says of it, to the last bit."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Sampling
from sensorium.kernels.matched_ops import KeyStore, MatchedProduct, QueryTiles, TorchMatched, tree_sum
from sensorium.learner.forward import LogprobScorer
from sensorium.learner.learner import CreditedEpisode
from sensorium.learner.packing import pack
from sensorium.models.load import load_policy
from sensorium.models.matched import MatchedLinears
from sensorium.models.policy import Policy
from sensorium.recipe.schema import LoraSection
from sensorium.vocabulary import Thread, user
from sensorium.vocabulary.errors import ModelError

from ..engines.conftest import ask, generate
from .played import Groups, Player, make_learner, open_policy

ADAPTED = LoraSection(rank=4, groups=("language", "vision"))
CASES = [
    pytest.param("qwen2_5_vl", "float32", None, id="biases"),
    pytest.param("qwen3_vl", "float32", None, id="norms of heads, deepstack"),
    pytest.param("qwen2_5_vl", "float32", ADAPTED, id="adapters"),
    pytest.param("qwen2_5_vl", "bfloat16", None, id="bfloat16"),
]


def matched(folder: Path, dtype: str = "float32", lora: LoraSection | None = None, device: str = "cpu") -> Policy:
    return load_policy(str(folder), store=MediaStore(), device=device, dtype=dtype, lora=lora, precision="matched")


def play(policy: Policy, budget: int) -> Groups:
    """Two groups sampled by the engine: three answers to a picture, one of which is asked again; two to a text."""
    engine, player = NativeEngine(policy), Player(policy)
    sampling = Sampling(max_new_tokens=budget, temperature=0.7, stop_tokens=False)
    shown = policy.chat.render([user(player.picture(84, 56), "What colour?")])
    text = policy.chat.render([user("How many are there of them? " * 4)])
    requests = [ask(f"a{i}", [shown], replace(sampling, max_new_tokens=budget - 3 * i), key=i) for i in range(3)]
    requests += [ask(f"b{i}", [text], replace(sampling, top_k=20 * i), key=9 + i) for i in range(2)]
    first = [response.segment for response in generate(engine, *requests)]
    more = policy.chat.extend([user(player.picture(28, 28), "and now?")], after=first[0])
    again = generate(engine, ask("a0", [shown, first[0], more], sampling, key=77))[0].segment
    threads = [Thread((shown, first[0], more, again), (False, True, False, True))]
    threads += [Thread((text if i > 2 else shown, first[i]), (False, True)) for i in range(1, 5)]
    samples: list[CreditedEpisode] = [player.sample([threads[0]], [(0, 1), (0, 3)])]
    samples += [player.sample([thread], [(0, 1)]) for thread in threads[1:]]
    return [samples[:3], samples[3:]]


def said(groups: Groups) -> torch.Tensor:
    """The engine's log-probs in the order of the learner."""
    return torch.tensor(
        [value for group in groups for sample in group for turn in sample.episode.turns for value in turn.response.logprobs]
    )


@pytest.mark.parametrize(("family", "dtype", "lora"), CASES)
def test_engine_and_learner_agree_bit_for_bit(
    family: str, dtype: str, lora: LoraSection | None, checkpoints: dict[str, Path], smallest: Path
) -> None:
    agree(matched(smallest if dtype == "bfloat16" else checkpoints[family], dtype, lora))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "lora"), [("qwen2_5_vl", None), ("qwen3_vl", None), ("qwen2_5_vl", ADAPTED)])
def test_engine_and_learner_agree_bit_for_bit_on_the_gpu(
    family: str, lora: LoraSection | None, dtype: str, checkpoints: dict[str, Path]
) -> None:
    agree(matched(checkpoints[family], dtype, lora, "cuda"))


def agree(policy: Policy) -> None:
    if policy.adapters is not None:
        with torch.no_grad():  # fresh ones compute nothing
            for parameter in policy.adapters.parameters.values():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    groups = play(policy, 12)
    scorer = LogprobScorer(policy, 0.7, stop_tokens=False)
    for limit in (10_000, 60):  # all in one row, and prompts computed again for some of their answers
        packing = pack(groups, policy.chat.layout, limit, policy.device, matched=policy.matched)
        assert torch.equal(scorer.logprobs(packing).cpu(), said(groups))
    assert len(packing.microbatches) > 1


def test_gradients_are_those_of_the_fast_learner(checkpoints: dict[str, Path]) -> None:
    policies = [matched(checkpoints["qwen2_5_vl"]), open_policy(checkpoints["qwen2_5_vl"])]
    norms = []
    for policy in policies:
        learner = make_learner(policy)
        norms.append(learner.step([Player(policy).single_turn(pictures=1)])["policy/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    changed = [dict(policy.model.named_parameters()) for policy in policies]
    for name, parameter in changed[0].items():  # where a gradient is almost 0, its sign decides about a step of 1e-3
        assert float((parameter - changed[1][name]).abs().mean()) < 5e-6, name


def test_layers_that_compute_tokens_together_are_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"model.precision is 'matched', which this model has no layers for: .*Moe"):
        matched(checkpoints["qwen3_vl_moe"])
    with pytest.raises(ModelError, match=r"model.precision is 'matched', which this model has no layers for: .*delta"):
        matched(checkpoints["qwen3_5"])


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 45, generator=generator).bfloat16() for rows in (37, 19))
    ops = TorchMatched()
    given = (weight, None, torch.float32)
    whole = ops.product(x, *given)
    assert torch.equal(torch.cat([ops.product(row[None], *given) for row in x]), whole)
    assert torch.allclose(whole, x.float() @ weight.float().T, atol=1e-5)
    assert not ops.product(x[:0], *given).numel()
    assert torch.equal(tree_sum(torch.arange(7.0)[None]), torch.tensor([21.0]))
    leaves = [part.float().requires_grad_() for part in (x, weight, weight[:, 0])]
    found = torch.autograd.grad(MatchedProduct.apply(*leaves, torch.float32, ops).square().sum(), leaves)
    right = torch.autograd.grad(torch.nn.functional.linear(*leaves).square().sum(), leaves)
    for one, other in zip(found, right, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-3)


def test_attention_by_tiles_is_causal_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(150, heads, 8, generator=generator) for heads in (6, 2, 2))
    first = torch.arange(0, 150, 16)
    zero, counts, entries = torch.zeros_like(first), (150 - first).clamp(max=16), torch.arange(150)
    store = KeyStore(key, value, 2, 16, 8)
    tiled = TorchMatched().attend(query, store, QueryTiles(first, counts, zero, first, entries), 0.3)
    flat = [x.transpose(0, 1)[None] for x in (query, key, value)]
    right = torch.nn.functional.scaled_dot_product_attention(*flat, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.allclose(tiled, right[0].transpose(0, 1), atol=1e-5)
    one = torch.tensor([70])
    alone = TorchMatched().attend(query, store, QueryTiles(one, torch.ones_like(one), one * 0, one, entries), 0.3)
    assert torch.equal(alone[70], tiled[70])
    assert not alone[:70].any()


def test_linear_layers_of_a_tower_are_matched_products_when_they_are_recomputed_too() -> None:
    ops, generator = TorchMatched(), torch.Generator().manual_seed(0)
    x = torch.randn(9, 24, generator=generator, requires_grad=True)
    block = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.GELU(), torch.nn.Linear(24, 8))
    with MatchedLinears(ops):
        plain = block(x)
        recomputed = checkpoint(block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), MatchedLinears(ops)))
    first = ops.product(x, block[0].weight, block[0].bias, torch.float32)
    right = ops.product(torch.nn.functional.gelu(first), block[2].weight, block[2].bias, torch.float32)
    assert torch.equal(plain, right)
    assert torch.equal(recomputed, right)
    found = torch.autograd.grad(recomputed.sum(), [x, *block.parameters()])
    for one, other in zip(found, torch.autograd.grad(plain.sum(), [x, *block.parameters()]), strict=True):
        assert torch.equal(one, other)
