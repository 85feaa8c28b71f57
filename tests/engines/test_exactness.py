"""The engine's log-probs are those of a plain transformers forward over the whole thread, to the family's rounding."""

import pytest
import torch

from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Sampling
from sensorium.vocabulary.content import Message, system, user
from sensorium.vocabulary.episode import Segment
from tests.families import FAMILY_ROWS

from ..models.clips import heard_clip
from .conftest import Bench, ask, generate

SAMPLING = Sampling(temperature=0.8, max_new_tokens=12, stop_tokens=False)


def assert_exact(bench: Bench, segments: list[Segment], sampling: Sampling = SAMPLING) -> None:
    expected, scale = bench.logprobs(segments, sampling)
    written = [segment for segment in segments if segment.author == "model"]
    for segment, logprobs in zip(written, expected, strict=True):
        difference = (torch.tensor(segment.logprobs) - logprobs).abs().max()
        assert difference <= bench.rounding * scale, f"{segment.name}: {float(difference):.2e} at scale {scale:.1f}"


def talk(bench: Bench, engine: NativeEngine, observations: list[list[Message]], thread: str = "a") -> list[Segment]:
    """A conversation in one thread; the model writes after every observation."""
    segments: list[Segment] = []
    for turn, messages in enumerate(observations):
        segments.append(
            bench.policy.chat.extend(messages, after=segments[-1]) if turn else bench.policy.chat.render(messages)
        )
        request = ask(thread, segments, SAMPLING, order=(0, 0, turn), key=turn, name=f"{thread}/{turn}")
        segments.append(generate(engine, request)[0].segment)
    return segments


def test_one_picture(vision: Bench) -> None:
    segments = talk(vision, NativeEngine(vision.policy), [[user(vision.picture(1), "what colour is it?")]])
    assert_exact(vision, segments)


def test_three_pictures_of_different_sizes(vision: Bench) -> None:
    pictures = [vision.picture(1), vision.picture(2, (112, 56)), vision.picture(3, (84, 140))]
    message = user(pictures[0], "first", pictures[1], "second", pictures[2], "which is the left one?")
    assert_exact(vision, talk(vision, NativeEngine(vision.policy), [[system("Answer."), message]]))


def test_a_picture_in_turn_three_extends_the_cache(vision: Bench) -> None:
    engine = NativeEngine(vision.policy)
    turns = [[user("what?")], [user("where?")], [user(vision.picture(4, (112, 84)), "and now?")], [user("sure?")]]
    segments = talk(vision, engine, turns)
    assert_exact(vision, segments)
    assert (engine.counters.prefills, engine.counters.extensions) == (1, 3)
    new = sum(len(vision.policy.chat.layout(segment)) for segment in segments if segment.author == "environment")
    assert engine.counters.prefill_tokens + engine.counters.extension_tokens == new + 3  # and each turn's last drawn token


def test_videos(watching: Bench) -> None:
    engine = NativeEngine(watching.policy)
    counts = (4, 4, 4) if FAMILY_ROWS[watching.policy.family].one_length == "model" else (4, 5, 2)
    first, second, third = (watching.clip(i, frames, seconds=8.0 / i) for i, frames in enumerate(counts, 1))
    turns = [[user(first, "then", second, "which?")], [user("and now?")], [user(third, "or now?")]]
    assert_exact(watching, talk(watching, engine, turns))
    assert (engine.counters.prefills, engine.counters.extensions, engine.counters.features) == (1, 2, 3)


def test_sounds(hearing: Bench) -> None:
    engine, tone = NativeEngine(hearing.policy), hearing.tone
    turns = [[user("what?")], [user("Listen", tone(1, 1.3), "now?")], [user(tone(2, 0.1), tone(3, 2.2))]]
    assert_exact(hearing, talk(hearing, engine, turns))
    assert (engine.counters.prefills, engine.counters.extensions, engine.counters.features) == (1, 2, 3)


def test_a_video_with_its_sound_inside(omni: Bench) -> None:
    engine = NativeEngine(omni.policy)
    first, second = (heard_clip(omni.policy.chat.store, seed, 2.0) for seed in (1, 2))
    turns = [[user(omni.tone(1, 0.3), first, "what?")], [user(omni.picture(1), second, "and now?")]]
    assert_exact(omni, talk(omni, engine, turns))
    assert (engine.counters.prefills, engine.counters.extensions, engine.counters.features) == (1, 1, 6)


def test_sound_video_and_pictures_in_any_order(omni: Bench) -> None:
    engine = NativeEngine(omni.policy)
    first = user(omni.tone(1, 0.7), omni.clip(1), omni.picture(1), "which?")
    turns = [[first], [user(omni.clip(2, frames=6, seconds=2.5), "and", omni.tone(2, 2.9), "now?")], [user("sure?")]]
    assert_exact(omni, talk(omni, engine, turns))


def test_a_crowd_of_sights_and_sounds(omni: Bench) -> None:
    """Contexts with different media, prefilled together, are each exact; each medium went through its tower once."""
    media = [[omni.tone(1)], [omni.clip(1)], [omni.picture(1)], [omni.clip(2, 2), omni.tone(2, 1.7)], [], [omni.tone(1)]]
    contexts = [[omni.policy.chat.render([user(*shown, "what?" * (i + 1))])] for i, shown in enumerate(media)]
    requests = [ask(f"t{i}", context, SAMPLING, order=(i, 0, 0), key=i) for i, context in enumerate(contexts)]
    engine, before = NativeEngine(omni.policy), omni.policy.counters.tower_passes
    for context, response in zip(contexts, generate(engine, *requests), strict=True):
        assert_exact(omni, [*context, response.segment])
    assert engine.counters.features == 5
    assert omni.policy.counters.tower_passes == before + 2


def test_windowed_threads(vision: Bench) -> None:
    """Windows of two turns after a head: each is a thread of its own, its first segments another thread's responses."""
    policy, engine = vision.policy, NativeEngine(vision.policy)
    head = policy.chat.render([system("Move.")], generate=False)
    observations = [[user(vision.picture(turn), f"{turn}?")] for turn in range(4)]
    responses: list[Segment] = []
    for turn in range(4):
        first = max(0, turn - 1)
        segments = [head, policy.chat.render_after_head(observations[first])]
        for earlier in range(first, turn):
            segments += [responses[earlier], policy.chat.extend(observations[earlier + 1], after=responses[earlier])]
        thread = f"window {first}"
        responses.append(generate(engine, ask(thread, segments, SAMPLING, key=turn, name=f"turn {turn}"))[0].segment)
        expected, scale = vision.logprobs([*segments, responses[-1]], SAMPLING)
        assert (torch.tensor(responses[-1].logprobs) - expected[-1]).abs().max() <= vision.rounding * scale
    assert engine.counters.features == 4  # each picture went through the tower once


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_text_only_models(family: str, benches) -> None:  # type: ignore[no-untyped-def]
    bench = benches(family)
    assert_exact(bench, talk(bench, NativeEngine(bench.policy), [[user("what is red?")], [user("why?")]]))


def test_a_crowd_of_different_lengths(vision: Bench) -> None:
    """Rows of different contexts, prefilled and decoded together, are each exact."""
    prompts = [[user(vision.picture(i, (56 + 28 * (i % 3), 56)), "what colour " * (1 + i % 4))] for i in range(6)]
    contexts = [[vision.policy.chat.render(prompt)] for prompt in prompts]
    samplings = [Sampling(temperature=0.5 + i / 4, max_new_tokens=4 + 5 * i, stop_tokens=False) for i in range(6)]
    requests = [ask(f"t{i}", contexts[i], samplings[i], order=(i, 0, 0), key=i) for i in range(6)]
    for i, response in enumerate(generate(NativeEngine(vision.policy), *requests)):
        assert len(response.segment.tokens) == samplings[i].max_new_tokens
        assert_exact(vision, [*contexts[i], response.segment], samplings[i])


def test_greedy_and_truncated_rows_report_the_whole_policys_logprobs(bench: Bench) -> None:
    context = [bench.policy.chat.render([user("left or right?")])]
    samplings = [
        Sampling(temperature=0.0, max_new_tokens=8),
        Sampling(top_p=0.3, max_new_tokens=8, stop_tokens=False),
        Sampling(top_k=2, max_new_tokens=8, stop_tokens=False),
    ]
    requests = [ask(f"t{i}", context, sampling, order=(0, i, 0), key=i) for i, sampling in enumerate(samplings)]
    responses = generate(NativeEngine(bench.policy), *requests)
    for response, sampling in zip(responses, samplings, strict=True):
        assert_exact(bench, [*context, response.segment], sampling)
        assert all(s >= p - 1e-9 for s, p in zip(response.segment.sampled_logprobs, response.segment.logprobs, strict=True))
    assert set(responses[0].segment.sampled_logprobs) == {0.0}
    logits_nV = bench.logits([*context, responses[0].segment])[0]
    logits_nV[:, list(bench.policy.chat.forbidden_ids)] = -torch.inf
    assert logits_nV.argmax(-1).tolist() == list(responses[0].segment.tokens)


def test_weights_keep_their_gradients(bench: Bench) -> None:
    """Sampling leaves nothing behind that would poison the learner: the same parameters still train."""
    policy = bench.policy
    generate(NativeEngine(policy), ask("a", [policy.chat.render([user(bench.picture(1), "what?")])], SAMPLING))
    features = policy.encode([bench.picture(1)])
    loss = sum(part.embeds_NH.square().mean() for part in features.values())
    loss.backward()  # type: ignore[union-attr]
    grads = [p.grad for p in policy.model.parameters() if p.grad is not None]
    assert grads
    assert all(not p.is_inference() for p in policy.model.parameters())
    policy.model.zero_grad(set_to_none=True)


def test_a_long_response_outgrows_the_cache(text: Bench) -> None:
    """Growth in the middle of a response changes nothing."""
    sampling = Sampling(max_new_tokens=300, stop_tokens=False)
    context = [text.policy.chat.render([user("how many?")])]
    response = generate(NativeEngine(text.policy), ask("a", context, sampling))[0]
    assert len(response.segment.tokens) == 300
    assert_exact(text, [*context, response.segment], sampling)


def test_a_thread_may_be_asked_again_or_go_another_way(vision: Bench) -> None:
    """What a thread's context shares with the last one is not computed again, and the answer is still exact.

    With gated delta nets it goes on from its prompt: of the turn after it there is no state any more.
    """
    policy, engine = vision.policy, NativeEngine(vision.policy)
    segments = talk(vision, engine, [[user(vision.picture(1), "what?")], [user("where is it?")]])
    ways = [[user(vision.picture(2), "which way?")], [user("and which way, left or right?")]]
    others = [[*segments[:2], policy.chat.extend(way, after=segments[1])] for way in ways]
    for turn, (context, new) in enumerate(
        [(segments[:3], 1), *((other, len(policy.chat.layout(other[2]))) for other in others)]
    ):
        if vision.has_states:
            new = sum(len(policy.chat.layout(segment)) for segment in context[1:])
        before = engine.counters.extension_tokens
        response = generate(engine, ask("a", context, SAMPLING, key=50 + turn, name=f"other {turn}"))[0].segment
        assert engine.counters.extension_tokens - before == new
        assert_exact(vision, [*context, response])
    assert engine.counters.prefills == 1
