"""Weights that change while responses are open: those go on, and say which weights wrote which tokens."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Response, Sampling
from sensorium.models.policy import Policy
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import VersionSpan

from .conftest import Bench, ask

LONG = Sampling(max_new_tokens=40, stop_tokens=False)


@contextmanager
def moved(policy: Policy, size: float) -> Iterator[None]:
    """Weights that an update has moved; afterwards they are as they were."""
    before = {name: tensor.clone() for name, tensor in policy.model.named_parameters()}
    try:
        with torch.no_grad():
            for tensor in policy.model.parameters():
                tensor.add_(size * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
        policy.version += 1
        yield
    finally:
        with torch.no_grad():
            for name, tensor in policy.model.named_parameters():
                tensor.copy_(before[name])
        policy.version -= 1


def spanning(bench: Bench, engine: Any, size: float, at: int = 5) -> list[Response]:
    """Two responses to a picture and one to a text that are open while weights move, after ``at`` tokens or so."""
    chat = bench.policy.chat
    prompts = [[user(bench.picture(1), "what?")]] * 2 + [[user("which of them?")]]

    async def go() -> list[Response]:
        contexts = [[chat.render(messages)] for messages in prompts]
        asked = [ask(f"t{i}", context, LONG, order=(i,), key=i, name=f"t{i}") for i, context in enumerate(contexts)]
        running = [asyncio.ensure_future(engine.generate(request)) for request in asked]
        counters = engine.counters.decode_steps
        while engine.counters.decode_steps < counters + at:
            await asyncio.sleep(0)
        with moved(bench.policy, size):
            engine.push_weights(bench.policy, bench.policy.version)
            found = await asyncio.gather(*running)
            bench.stock.load_state_dict(bench.policy.model.state_dict(), strict=False)
            for messages, response in zip(prompts, found, strict=True):
                check_after(bench, messages, response)
        return found

    try:
        return asyncio.run(go())
    finally:
        bench.stock.load_state_dict(bench.policy.model.state_dict(), strict=False)
        engine.update_weights(bench.policy, bench.policy.version)


def check_after(bench: Bench, messages: list[Any], response: Response) -> None:
    """What was written after the change has the log-probs of the new weights."""
    segment = response.segment
    wanted, scale = bench.logprobs([bench.policy.chat.render(messages), segment], LONG)
    first = response.versions[1].start
    assert torch.allclose(wanted[0][first:], torch.tensor(segment.logprobs[first:]), atol=bench.rounding * max(1.0, scale))


def check_spans(found: list[Response], version: int) -> None:
    for response in found:
        first = response.versions[0].end
        assert 0 < first < LONG.max_new_tokens
        assert response.versions == (VersionSpan(version, 0, first), VersionSpan(version + 1, first, LONG.max_new_tokens))
        assert response.segment.versions == response.versions
        assert response.segment.policy_version == version


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
@pytest.mark.parametrize("kv", ["rows", "pages"])
def test_open_responses_go_on_with_new_weights(kv: str, family: str, benches: Callable[[str], Bench]) -> None:
    bench = benches(family)
    engine = NativeEngine(bench.policy, lockstep=False, kv=kv)  # type: ignore[arg-type]
    check_spans(spanning(bench, engine, 0.05), bench.policy.version)


def test_an_update_that_changes_nothing_changes_no_token(bench: Bench) -> None:
    """Token t still draws hash(key, t)."""
    engine = NativeEngine(bench.policy, lockstep=False)
    early, late = spanning(bench, engine, 0.0, at=3), spanning(bench, engine, 0.0, at=20)
    assert [one.segment.tokens for one in early] == [one.segment.tokens for one in late]
