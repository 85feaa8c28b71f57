"""What the engine promises besides numbers: sharing, stops, masks, independence, and failures that stay alone."""

import asyncio
from collections import Counter

import pytest
import torch

from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.native.response_rows import StopStrings
from sensorium.engines.protocol import Request, Response, Sampling, response_key
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import EngineError, SpanMismatch

from .conftest import Bench, ask, generate

FIXED = Sampling(max_new_tokens=10, stop_tokens=False)


def group(bench: Bench, prompt: int, size: int, sampling: Sampling = FIXED) -> list[Request]:
    """A group's requests, each with its own rendering of the same prompt."""
    message = user(bench.picture(prompt), "what colour is it?")
    return [
        ask(f"{prompt}/{i}", [bench.policy.chat.render([message])], sampling, order=(prompt, i, 0),
            key=response_key(0, 0, str(prompt), i, 0))
        for i in range(size)
    ]  # fmt: skip


def test_a_group_shares_one_prefill_and_one_tower_pass(vision: Bench) -> None:
    engine = NativeEngine(vision.policy)
    passes, items = vision.policy.counters.tower_passes, vision.policy.counters.tower_items
    requests = [request for prompt in range(3) for request in group(vision, prompt, 4)]
    responses = generate(engine, *requests)
    assert engine.counters.prefills == 3
    assert engine.counters.prefill_tokens == 3 * len(vision.policy.chat.layout(requests[0].context[0]))
    assert engine.counters.features == 3
    assert vision.policy.counters.tower_passes == passes + 1
    assert vision.policy.counters.tower_items == items + 3
    assert engine.counters.decode_steps == 9
    assert engine.counters.decoded_tokens == 120
    assert len({response.segment.tokens for response in responses}) == 12


def test_members_that_come_later_share_the_prefill_too(bench: Bench) -> None:
    """With room for two rows a group of five is written in turns, from one prefill, with the tokens of a full batch."""
    requests = group(bench, 1, 5)
    narrow = NativeEngine(bench.policy, max_rows=2)
    few = generate(narrow, *requests)
    assert (narrow.counters.prefills, narrow.counters.extensions) == (1, 0)
    together = generate(NativeEngine(bench.policy), *requests)
    assert [r.segment.tokens for r in few] == [r.segment.tokens for r in together]


def test_a_response_does_not_depend_on_the_crowd(vision: Bench) -> None:
    requests = [request for prompt in range(3) for request in group(vision, prompt, 3)]
    crowd = generate(NativeEngine(vision.policy), *requests)
    backwards = generate(NativeEngine(vision.policy), *reversed(requests))[::-1]
    for i, request in list(enumerate(requests))[::2]:
        alone = generate(NativeEngine(vision.policy), request)[0].segment
        assert alone.tokens == crowd[i].segment.tokens == backwards[i].segment.tokens
        assert alone.logprobs == pytest.approx(crowd[i].segment.logprobs, abs=1e-4)
    assert [r.segment for r in crowd] == [r.segment for r in backwards]


def test_rows_leave_and_join_while_others_are_written(bench: Bench) -> None:
    """Continuous batching: late requests join at once, and everyone still draws what it draws alone."""
    requests = [request for prompt in range(3) for request in group(bench, prompt, 2)]
    requests = [
        ask(r.thread, r.context, Sampling(max_new_tokens=3 + 7 * i, stop_tokens=False), order=r.order, key=r.key)
        for i, r in enumerate(requests)
    ]
    engine = NativeEngine(bench.policy, lockstep=False)

    async def late(request: Request, ticks: int) -> Response:
        while engine.counters.decode_steps < ticks:
            await asyncio.sleep(0)
        return await engine.generate(request)

    async def play() -> list[Response]:
        last = engine.generate(requests[-1])
        return list(await asyncio.gather(*(late(r, 3 * i) for i, r in enumerate(requests[:-1])), last))

    responses = asyncio.run(play())
    assert engine.counters.decode_steps < sum(r.sampling.max_new_tokens for r in requests) // 2
    for request, response in zip(requests, responses, strict=True):
        assert response.segment.tokens == generate(NativeEngine(bench.policy), request)[0].segment.tokens


def test_stop_tokens_end_a_response_and_are_part_of_it(bench: Bench) -> None:
    sampling = Sampling(max_new_tokens=400)
    responses = generate(NativeEngine(bench.policy), *group(bench, 1, 16, sampling))
    stopped = [response for response in responses if response.finish == "stop"]
    assert stopped
    for response in stopped:
        assert response.segment.tokens[-1] in bench.policy.chat.stop_ids
        assert not set(response.segment.tokens[:-1]) & set(bench.policy.chat.stop_ids)
    for response in set(responses) - set(stopped):
        assert len(response.segment.tokens) == 400


def test_stop_strings_end_a_response_across_tokens_and_stay_in_the_text(bench: Bench) -> None:
    """A stop string taken from the middle of a response, cut across two tokens, ends the same response there."""
    policy, request = bench.policy, group(bench, 1, 1, Sampling(max_new_tokens=40, stop_tokens=False))[0]
    whole = generate(NativeEngine(policy), request)[0].segment
    pieces = [policy.chat.token_bytes(token) for token in whole.tokens]
    for i in range(5, 39):
        joined = pieces[i][-1:] + pieces[i + 1][:1]
        new_there = joined not in b"".join(pieces[: i + 1])
        if new_there and joined.isascii() and len(joined) == 2:
            break
    else:
        pytest.fail("no plain pair of letters across tokens; change the seed")
    stop = joined.decode()
    sampling = Sampling(max_new_tokens=40, stop_tokens=False, stop=("never\x00", stop))
    ended = generate(NativeEngine(policy), ask("other", request.context, sampling, key=request.key))[0]
    assert ended.finish == "stop"
    assert ended.segment.tokens == whole.tokens[: i + 2]
    assert stop in ended.segment.text


def test_stop_strings_are_found_byte_by_byte() -> None:
    stops = StopStrings(["</answer>", "ä"])
    assert [stops.feed(piece) for piece in (b"<", b"/ans", b"wer", b"> and")] == [False, False, False, True]
    stops = StopStrings(["ä"])
    assert [stops.feed(piece) for piece in (b"a\xc3", b"\xa4")] == [False, True]
    stops = StopStrings(["aab"])
    assert [stops.feed(piece) for piece in (b"a", b"a", b"a", b"b")] == [False, False, False, True]


def test_placeholders_are_never_sampled_however_likely(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = bench.policy
    original = policy.logits

    def eager_logits(hidden_NH: torch.Tensor) -> torch.Tensor:
        logits_NV = original(hidden_NH).clone()
        logits_NV[:, list(policy.chat.forbidden_ids)] = 1e6
        return logits_NV

    monkeypatch.setattr(policy, "logits", eager_logits)
    kinds = [Sampling(max_new_tokens=20), Sampling(max_new_tokens=20, temperature=0.0),
             Sampling(max_new_tokens=20, top_k=5), Sampling(max_new_tokens=20, top_p=0.2)]  # fmt: skip
    requests = [
        ask(f"t{i}", [policy.chat.render([user("what?")])], kind, order=(i,), key=i) for i, kind in enumerate(kinds)
    ]
    for response in generate(NativeEngine(policy), *requests):
        assert not set(response.segment.tokens) & set(policy.chat.forbidden_ids)


def test_masked_stop_tokens_are_never_sampled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = bench.policy
    original = policy.logits
    push = torch.zeros(policy.vocab_size)
    push[list(policy.chat.stop_ids)] = 30.0
    monkeypatch.setattr(policy, "logits", lambda hidden: original(hidden) + push)
    context = [policy.chat.render([user("what?")])]
    free = ask("a", context, Sampling(max_new_tokens=8), order=(0,))
    held = ask("b", context, Sampling(max_new_tokens=8, stop_tokens=False), order=(1,))
    stopped, ran = generate(NativeEngine(policy), free, held)
    assert len(stopped.segment.tokens) == 1
    assert len(ran.segment.tokens) == 8
    assert not set(ran.segment.tokens) & set(policy.chat.stop_ids)


def test_sampled_tokens_follow_the_models_distribution(text: Bench) -> None:
    """First tokens of many responses against softmax, by chi-square over the likely tokens."""
    policy, count = text.policy, 3000
    context = [policy.chat.render([user("left or right?")])]
    sampling = Sampling(max_new_tokens=1, temperature=0.6)
    requests = [ask(f"{i}", context, sampling, order=(i,), key=response_key(1, 0, "chi", i, 0)) for i in range(count)]
    engine = NativeEngine(policy, max_rows=count)
    responses = generate(engine, *requests)
    logits_V = text.logits([*context, responses[0].segment])[0][0] / 0.6
    logits_V[list(policy.chat.forbidden_ids)] = -torch.inf
    expected = logits_V.softmax(-1) * count
    observed = Counter(response.segment.tokens[0] for response in responses)
    likely = [token for token in range(policy.vocab_size) if expected[token] >= 8]
    chi = sum((observed[token] - float(expected[token])) ** 2 / float(expected[token]) for token in likely)
    freedom = len(likely)
    assert freedom >= 5
    assert chi < freedom + 4 * (2 * freedom) ** 0.5
    assert engine.counters.prefills == 1


def test_a_failing_request_does_not_hurt_the_others(bench: Bench) -> None:
    policy = bench.policy
    good = group(bench, 1, 2)
    prompt = policy.chat.render([user(bench.picture(2), "what?")])
    span = prompt.media[0]
    no_medium = Segment("environment", prompt.tokens)
    absent = Segment("environment", prompt.tokens, (type(span)(span.index, Media("picture", "0" * 64, "nowhere")),))
    bad = [ask("no medium", [no_medium], FIXED, order=(0, 0, 0)), ask("absent", [absent], FIXED, order=(0, 1, 0)),
           ask("empty", [], FIXED, order=(0, 2, 0))]  # fmt: skip
    engine = NativeEngine(policy)

    async def play() -> list[Response | BaseException]:
        return await asyncio.gather(*(engine.generate(r) for r in [*bad, *good]), return_exceptions=True)

    results = asyncio.run(play())
    assert isinstance(results[0], SpanMismatch)
    assert "nowhere" in str(results[1])
    assert isinstance(results[2], EngineError)
    expected = generate(NativeEngine(policy), *good)
    assert [r.segment.tokens for r in results[3:] if isinstance(r, Response)] == [r.segment.tokens for r in expected]


def test_features_that_do_not_fit_their_span_cost_one_episode(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = bench.policy
    victim, healthy = group(bench, 11, 1)[0], group(bench, 12, 1)[0]
    original = policy.encode

    def torn(media):  # type: ignore[no-untyped-def]
        made = original(media)
        for item, features in made.items():
            if item == victim.context[0].media[0].media:
                made[item] = type(features)(features.embeds_NH[:-1], features.deepstack_NH)
        return made

    monkeypatch.setattr(policy, "encode", torn)
    engine = NativeEngine(policy)

    async def play() -> list[Response | BaseException]:
        return await asyncio.gather(engine.generate(victim), engine.generate(healthy), return_exceptions=True)

    failed, fine = asyncio.run(play())
    assert isinstance(failed, SpanMismatch)
    assert "noise-11.png" in str(failed)
    assert isinstance(fine, Response)


def test_a_context_beyond_the_limit_is_refused_and_the_limit_ends_responses(text: Bench) -> None:
    policy = text.policy
    short, long = policy.chat.render([user("what?")]), policy.chat.render([user("what? " * 60)])
    limit = len(policy.chat.layout(short)) + 5
    engine = NativeEngine(policy, max_context=limit)

    async def play() -> list[Response | BaseException]:
        requests = [ask("short", [short], FIXED, order=(0,)), ask("long", [long], FIXED, order=(1,))]
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    fits, refused = asyncio.run(play())
    assert isinstance(fits, Response)
    assert (len(fits.segment.tokens), fits.finish) == (5, "length")
    assert isinstance(refused, EngineError)
    assert "max_context" in str(refused)


def test_logits_that_are_not_finite_fail_only_their_request(text: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = text.policy
    original = policy.logits

    def sometimes_nan(hidden_NH: torch.Tensor) -> torch.Tensor:
        logits_NV = original(hidden_NH).clone()
        if logits_NV.shape[0] == 2:
            logits_NV[1] = torch.nan
        return logits_NV

    monkeypatch.setattr(policy, "logits", sometimes_nan)
    engine = NativeEngine(policy)

    async def play() -> list[Response | BaseException]:
        contexts = [[policy.chat.render([user("what?")])], [policy.chat.render([user("where is it?")])]]
        requests = [ask(f"{i}", context, FIXED, order=(i,)) for i, context in enumerate(contexts)]
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    results = asyncio.run(play())
    assert sorted(type(result).__name__ for result in results) == ["EngineError", "Response"]


def test_a_refresh_forgets_keys_values_and_features(bench: Bench) -> None:
    policy, engine = bench.policy, NativeEngine(bench.policy)
    request = group(bench, 1, 1)[0]
    before = generate(engine, request)[0].segment
    weight = policy.model.get_output_embeddings().weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(0.5)
        policy.version += 1
        engine.update_weights(policy, policy.version)
        after = generate(engine, request)[0].segment
        assert engine.counters.prefills == 2
        assert engine.counters.features == 2
        assert after.policy_version == before.policy_version + 1
        assert after.logprobs != before.logprobs
        fresh = generate(NativeEngine(policy), request)[0].segment
        assert (after.tokens, after.logprobs) == (fresh.tokens, fresh.logprobs)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
        policy.version -= 1


def test_a_released_thread_is_computed_again(text: Bench) -> None:
    policy = text.policy
    for release, counts in ((False, (1, 1)), (True, (2, 0))):
        engine = NativeEngine(policy)
        first = policy.chat.render([user("what?")])
        answer = generate(engine, ask("a", [first], FIXED))[0].segment
        if release:
            engine.release("a")
        context = [first, answer, policy.chat.extend([user("why?")], after=answer)]
        generate(engine, ask("a", context, FIXED, key=2))
        assert (engine.counters.prefills, engine.counters.extensions) == counts


def test_threads_beyond_the_memory_limit_are_computed_again(text: Bench) -> None:
    policy, engine = text.policy, NativeEngine(text.policy, keep_bytes=0)
    first = policy.chat.render([user("what?")])
    answer = generate(engine, ask("a", [first], FIXED))[0].segment
    generate(engine, ask("a", [first, answer, policy.chat.extend([user("why?")], after=answer)], FIXED, key=2))
    assert (engine.counters.prefills, engine.counters.extensions) == (2, 0)


def test_a_frozen_tower_is_not_asked_again_after_an_update(bench: Bench) -> None:
    """The keys and values of a prompt go with the weights; what a tower said of its picture stays if the tower does."""
    policy = bench.policy.copy()
    for named in (policy.groups()["vision"], policy.groups()["projector"]):
        for parameter in named.values():
            parameter.requires_grad_(False)
    engine = NativeEngine(policy)
    request = group(bench, 31, 1)[0]
    generate(engine, request)
    policy.version += 1
    engine.update_weights(policy, policy.version)
    generate(engine, request)
    assert engine.counters.prefills == 2
    assert (policy.counters.tower_items, policy.counters.tower_hits) == (1, 1)
