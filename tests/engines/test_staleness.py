"""After an update the next rollout of the same picture uses new features, keys and values; frozen towers keep theirs."""

from pathlib import Path

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Sampling
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import LoraSection
from sensorium.vocabulary.content import user

from .conftest import Bench, ask, generate

GREEDY = Sampling(temperature=0.0, max_new_tokens=4, stop_tokens=False)


def logprobs(engine: NativeEngine, bench: Bench) -> tuple[float, ...]:
    context = [bench.policy.chat.render([user(bench.picture(3), "what colour?")])]
    (response,) = generate(engine, ask("one", context, GREEDY, order=(0,), key=1))
    engine.release("one")
    return response.segment.logprobs


def perturb(policy: Policy, engine: NativeEngine, part: str) -> None:
    """Move the weights of a part in place, as an update does."""
    named = policy.trainable()[part]
    assert named
    with torch.no_grad():
        for parameter in named.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    policy.version += 1
    engine.update_weights(policy, policy.version)


@pytest.mark.parametrize("kv", ["rows", "pages"])
@pytest.mark.parametrize(("part", "lora"), [("vision", False), ("projector", False), ("vision", True)])
def test_a_part_that_moved_is_seen_by_the_next_rollout(part: str, lora: bool, kv: str, tmp_path: Path) -> None:
    make_tiny("qwen2_5_vl", tmp_path, seed=1, initializer_range=0.15)
    section = LoraSection(rank=4, alpha=8, groups=("vision",)) if lora else LoraSection()
    bench = Bench(load_policy(str(tmp_path), store=MediaStore(), lora=section, seed=1), None)
    engine = NativeEngine(bench.policy, kv=kv)  # type: ignore[arg-type]
    before = logprobs(engine, bench)
    assert logprobs(engine, bench) == before
    perturb(bench.policy, engine, part)
    after = logprobs(engine, bench)
    assert after != before
    assert after == logprobs(NativeEngine(bench.policy, kv=kv), bench)  # type: ignore[arg-type]


def test_a_frozen_tower_is_not_asked_again(tmp_path: Path) -> None:
    make_tiny("qwen2_5_vl", tmp_path, seed=1, initializer_range=0.15)
    policy = load_policy(str(tmp_path), store=MediaStore())
    policy.model.requires_grad_(False)
    bench, engine = Bench(policy, None), NativeEngine(policy)
    before = logprobs(engine, bench)
    passes = policy.counters.tower_items
    perturb(policy, engine, "language")
    assert logprobs(engine, bench) != before
    assert policy.counters.tower_items == passes
