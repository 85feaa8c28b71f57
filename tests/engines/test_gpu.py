"""On a GPU the engine's log-probs are those of the stock model there, within stated bounds, and turns extend the cache."""

from pathlib import Path

import pytest
import torch

from sensorium.engines.native.engine import NativeEngine
from sensorium.engines.native.randomness import uniforms
from sensorium.engines.protocol import Sampling
from sensorium.vocabulary.content import user

from .conftest import ask, generate, make_bench

# Relative to the largest logit, against the stock model in float32 on the CPU. bfloat16 keeps eight bits.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}
SAMPLING = Sampling(temperature=0.8, max_new_tokens=40, stop_tokens=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_logprobs_on_the_gpu(family: str, dtype: str, tmp_path: Path) -> None:
    bench = make_bench(family, tmp_path, device="cuda", dtype=dtype)
    policy, engine = bench.policy, NativeEngine(bench.policy)
    first = [policy.render([user(bench.picture(i), "what colour? " * (i + 1))]) for i in range(3)]
    threads = [[segment] for segment in first for _ in range(2)]
    for turn in range(2):
        requests = [ask(f"{i}", thread, SAMPLING, order=(i, 0, turn), key=i + 10 * turn, name=f"{i}/{turn}")
                    for i, thread in enumerate(threads)]  # fmt: skip
        for thread, response in zip(threads, generate(engine, *requests), strict=True):
            thread.append(response.segment)
            thread.append(policy.extend([user(bench.picture(7), "and now?")], after=response.segment))
    assert (engine.counters.prefills, engine.counters.extensions, engine.counters.features) == (3, 6, 4)
    for thread in threads:
        expected, scale = bench.logprobs(thread, SAMPLING)
        for segment, logprobs in zip(thread[1::2], expected, strict=True):
            assert (torch.tensor(segment.logprobs) - logprobs).abs().max() <= BOUNDS[dtype] * scale


@pytest.mark.gpu
def test_random_numbers_are_the_same_bits_on_the_gpu() -> None:
    keys, tokens = torch.randint(-(2**63), 2**63 - 1, (1000,)), torch.arange(1000)
    assert torch.equal(uniforms(keys, tokens), uniforms(keys.cuda(), tokens.cuda()).cpu())
