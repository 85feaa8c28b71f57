"""The experts that an engine records are those of a stock forward over the thread, in every way a token is computed."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.native.prefix_cache import RouteRecorder
from sensorium.engines.process_engine import ProcessEngine
from sensorium.engines.protocol import Sampling
from sensorium.models.experts import routers_of, watching
from sensorium.models.policy import Policy
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Routes, Segment
from studies.fork_server import ForkServer

from ..forked import forked_python
from ..models.clips import row_inputs
from .conftest import Bench, ask, generate
from .test_in_flight import LONG, moved

MIXTURES = ["qwen3_vl_moe", "qwen3_5_moe", "qwen3_omni_moe"]
SAMPLING = Sampling(max_new_tokens=14, stop_tokens=False)


@pytest.fixture(params=MIXTURES)
def mixture(request: pytest.FixtureRequest, benches: Callable[[str], Bench]) -> Bench:
    return benches(request.param)


def recorded(routes: Routes | None) -> np.ndarray:
    """Ids [tokens, layers, experts of a token] of a record."""
    assert routes is not None
    kind = np.uint8 if routes.width == 1 else np.int16
    return np.frombuffer(routes.context + routes.own, kind).reshape(-1, routes.layers, routes.top_k)


def stock_routes(bench: Bench, segments: list[Segment]) -> np.ndarray:
    """Ids by one plain forward of the stock model over the thread."""
    ids_T = torch.cat([bench.policy.chat.layout(segment).ids_T for segment in segments])
    inputs = row_inputs(bench.policy, ids_T, [span.media for segment in segments for span in segment.media])
    with torch.no_grad(), watching(routers_of(type(bench.policy.adapter)(bench.stock).language_model.layers)) as seen:
        bench.stock(**inputs, use_cache=False)
    return torch.stack([one.ids_TK for one in seen], 1).numpy()


def length(policy: Policy, segments: list[Segment]) -> int:
    return sum(len(policy.chat.layout(segment)) for segment in segments)


def check(bench: Bench, segments: list[Segment], routes: Routes | None, start: int = 0, same: float = 0.99) -> None:
    """The record is of the thread's tokens from ``start`` on, but for the last; ties in the last bits apart."""
    assert routes is not None
    found, expected = recorded(routes), stock_routes(bench, segments)
    assert routes.start == start
    assert len(found) == length(bench.policy, segments) - 1 - start
    assert (np.sort(found, -1) == np.sort(expected[start:-1], -1)).mean() > same


@pytest.mark.parametrize("kv", ["rows", "pages"])
@pytest.mark.usefixtures("early_recordings")
def test_routes_are_those_of_the_stock_model_over_turns_and_shared_prompts(mixture: Bench, kv: Any) -> None:
    chat = mixture.policy.chat
    engine = NativeEngine(mixture.policy, kv=kv, routes=True)
    prompt = [chat.render([user(mixture.picture(1), "what?")])]
    asked = [ask(f"g/{i}", prompt, SAMPLING, order=(i,), key=i, name=f"{i}/0") for i in range(3)]
    first = [response.segment for response in generate(engine, *asked)]
    contexts = {id(segment.routes.context) for segment in first if segment.routes is not None}
    assert len(contexts) == 1, "a group's prompt is recorded once"
    for segment in first:
        check(mixture, [*prompt, segment], segment.routes)
    late = generate(engine, ask("g/3", prompt, SAMPLING, key=9, name="3/0"))[0].segment  # the prompt is stored by now
    check(mixture, [*prompt, late], late.routes)
    assert engine.counters.prefills == 1
    thread = [*prompt, first[1], chat.extend([user(mixture.picture(2), "and now?")], after=first[1])]
    second = generate(engine, ask("g/1", thread, SAMPLING, key=7, name="1/1"))[0].segment
    check(mixture, [*thread, second], second.routes, start=length(mixture.policy, [*prompt, first[1]]) - 1)


@pytest.mark.parametrize("kv", ["rows", "pages"])
def test_what_is_written_does_not_change_and_without_the_option_nothing_is_recorded(mixture: Bench, kv: Any) -> None:
    prompt = [mixture.policy.chat.render([user(mixture.picture(1), "what?")])]
    found = [
        generate(NativeEngine(mixture.policy, kv=kv, routes=routes), ask("a", prompt, SAMPLING))[0].segment
        for routes in (True, False)
    ]
    assert (found[0].tokens, found[0].logprobs) == (found[1].tokens, found[1].logprobs)
    assert found[1].routes is None


@pytest.mark.parametrize("kv", ["rows", "pages"])
def test_tokens_keep_the_routes_of_the_weights_that_computed_them_first(benches: Callable[[str], Bench], kv: Any) -> None:
    bench = benches("qwen3_vl_moe")
    engine = NativeEngine(bench.policy, lockstep=False, kv=kv, routes=True)
    prompt = [bench.policy.chat.render([user(bench.picture(1), "what?")])]
    before = stock_routes(bench, prompt)

    async def go() -> Segment:
        running = asyncio.ensure_future(engine.generate(ask("t", prompt, LONG, name="t")))
        while engine.counters.decode_steps < 8:
            await asyncio.sleep(0)
        with moved(bench.policy, 0.3):
            engine.push_weights(bench.policy, bench.policy.version)
            return (await running).segment

    segment = asyncio.run(go())
    assert len(segment.version_spans) == 2
    rows = recorded(segment.routes)
    assert len(rows) == length(bench.policy, [*prompt, segment]) - 1
    assert (np.sort(rows[: len(before)], -1) == np.sort(before, -1)).mean() > 0.99
    changed = segment.version_spans[1].start + len(before)
    after = recorded(
        generate(NativeEngine(bench.policy, routes=True), ask("u", [*prompt, segment, prompt[0]], LONG))[0].segment.routes
    )
    assert (np.sort(rows[: changed - 1], -1) == np.sort(after[: changed - 1], -1)).mean() > 0.99
    assert (np.sort(rows[changed:], -1) == np.sort(after[changed : len(rows)], -1)).mean() < 0.95


def test_another_process_records_the_same(benches: Callable[[str], Bench], fork_server: ForkServer) -> None:
    bench = benches("qwen3_vl_moe")
    prompt = [bench.policy.chat.render([user("what?")])]
    asked = [ask(f"g/{i}", prompt, SAMPLING, order=(i,), key=i, name=f"{i}/0") for i in range(2)]
    engine = ProcessEngine(bench.policy, routes=True)
    try:
        with forked_python(fork_server):
            engine.start()
        found = generate(engine, *asked)  # type: ignore[arg-type]
    finally:
        engine.close()
    assert found == generate(NativeEngine(bench.policy, routes=True), *asked)
    assert recorded(found[0].segment.routes).any()


def test_more_than_256_experts_take_two_bytes(benches: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = benches("qwen3_vl_moe").policy
    assert RouteRecorder(policy).dtype == torch.uint8
    for router in policy.routers:
        monkeypatch.setattr(router, "num_experts", 257)
    assert RouteRecorder(policy).dtype == torch.int16
