"""Weights that change while responses are open: those go on, and say which weights wrote which tokens."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Response, Sampling
from sensorium.models.policy import Policy
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import VersionSpan

from ..models.clips import row_inputs
from .conftest import Bench, ask, generate

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
    before = {name: tensor.clone() for name, tensor in bench.policy.model.state_dict().items()}
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
            for messages, response in zip(prompts, found, strict=True):
                bench.stock.load_state_dict(before, strict=False)
                check_after(bench, messages, response)
        return found

    try:
        return asyncio.run(go())
    finally:
        bench.stock.load_state_dict(bench.policy.model.state_dict(), strict=False)
        engine.update_weights(bench.policy, bench.policy.version)


def check_after(bench: Bench, messages: list[Any], response: Response) -> None:
    """The log-probs are of what was sampled from: after the change the new weights, on keys and values of the old ones."""
    chat, segment, first = bench.policy.chat, response.segment, response.versions[1].start
    prompt, masked = chat.render(messages), [*chat.forbidden_ids, *chat.stop_ids]
    held = replace(segment, tokens=segment.tokens[: first - 1])  # the last token before the change is fed after it
    ids_T = torch.cat([chat.layout(prompt).ids_T, chat.layout(held).ids_T])
    rest = torch.tensor([segment.tokens[first - 1 : -1]])
    positions = chat.layout(prompt).advance + torch.arange(first - 1, len(segment.tokens) - 1)
    with torch.no_grad():
        given = row_inputs(bench.policy, ids_T, [span.media for span in prompt.media])
        cache = bench.stock(**given, use_cache=True).past_key_values
        bench.stock.load_state_dict(bench.policy.model.state_dict(), strict=False)
        given = {"input_ids": rest, "position_ids": positions.expand(3, 1, -1), "past_key_values": cache}
        logits_nV = bench.stock(**given, use_cache=True).logits[0].float()
    logits_nV[:, masked] = -torch.inf
    wanted = logits_nV.log_softmax(-1).gather(1, torch.tensor(segment.tokens[first:])[:, None])[:, 0]
    scale = max(1.0, float(logits_nV[logits_nV.isfinite()].abs().max()))
    assert torch.allclose(wanted, torch.tensor(segment.logprobs[first:]), atol=bench.rounding * scale)


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


@pytest.mark.parametrize("kv", ["rows", "pages"])
def test_prompts_and_features_of_earlier_weights_are_computed_again(kv: str, bench: Bench) -> None:
    """A request after a push, with the prompt of one before it or with its picture alone."""
    chat, sampling = bench.policy.chat, Sampling(max_new_tokens=4, stop_tokens=False)
    contexts = [[chat.render([user(bench.picture(1), words)])] for words in ("what?", "where is it?")]
    asked = [ask(f"t{i}", context, sampling, order=(i,), key=i) for i, context in enumerate(contexts)]
    engine, fresh = (NativeEngine(bench.policy, lockstep=False, kv=kv) for _ in range(2))  # type: ignore[arg-type]
    generate(engine, ask("another", contexts[0], sampling))
    with moved(bench.policy, 0.05):
        engine.push_weights(bench.policy, bench.policy.version)
        found, wanted = (generate(one, *asked) for one in (engine, fresh))
    for one, other in zip(found, wanted, strict=True):
        assert one.segment.tokens == other.segment.tokens
        assert one.segment.logprobs == pytest.approx(other.segment.logprobs, abs=1e-5)
