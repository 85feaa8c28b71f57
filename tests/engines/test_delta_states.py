"""Gated delta nets in the engine: states of rows are forked, continued, moved and frozen, with both writers.

Every response is held against one stock forward over its whole thread: a state that took a token too many or too few, or
padding, or that of another row, differs by far more than rounding.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from sensorium.engines.native.graphs import DecodeRunner, FusedStep
from sensorium.engines.native.key_values import RowStates, StateSlots, layer_places
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.native.pipeline import PagedWriter
from sensorium.engines.protocol import Request, Response, Sampling
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Segment
from tests.float64 import in_float64

from .conftest import Bench, ask, generate, make_bench
from .test_exactness import SAMPLING, assert_exact, talk

KV = ("rows", "pages")


WAYS = [("qwen3_5", "rows"), ("qwen3_5_moe", "pages")]


@pytest.fixture
def dense(benches: Callable[[str], Bench]) -> Bench:
    return benches("qwen3_5")


def engine_of(bench: Bench, kv: str, **options: Any) -> NativeEngine:
    return NativeEngine(bench.policy, kv=kv, **options)  # type: ignore[arg-type]


def given_back(engine: NativeEngine) -> bool:
    """Whether rows that left gave back their pages and slots."""
    writer = engine._writer
    writer.tick(())
    return not isinstance(writer, PagedWriter) or (writer._pool.held, writer._pool.states.held) == (0, 0)


@pytest.mark.parametrize(("family", "kv"), WAYS)
def test_turns_with_pictures_and_video_compute_only_what_is_new(
    family: str, kv: str, benches: Callable[[str], Bench]
) -> None:
    bench = benches(family)
    engine = engine_of(bench, kv)
    turns = [
        [user(bench.picture(1), bench.clip(1), "what?")], [user("where is it? " * 8)], [user(bench.picture(2, (112, 84)))],
        [user("sure?")],
    ]  # fmt: skip
    segments = talk(bench, engine, turns)
    assert_exact(bench, segments)
    assert (engine.counters.prefills, engine.counters.extensions, engine.counters.features) == (1, 3, 3)
    new = sum(len(bench.policy.chat.layout(segment)) for segment in segments if segment.author == "environment")
    assert engine.counters.prefill_tokens + engine.counters.extension_tokens == new + 3  # and each turn's last drawn token
    assert given_back(engine)


def crowd(bench: Bench, sampling: Sampling, members: int = 3) -> list[Request]:
    """Groups whose prompts have 12 to 100 tokens and whose responses end one after the other."""
    requests = []
    for i, words in enumerate((1, 30, 8, 2, 5)):
        shown = (bench.picture(i),) if i % 2 else ()
        context = [bench.policy.chat.render([user(*shown, "what? " * words)])]
        for member in range(members):
            kind = Sampling(**{**vars(sampling), "max_new_tokens": 3 + 4 * i + 5 * member})
            requests.append(ask(f"{i}/{member}", context, kind, order=(i, member), key=10 * i + member))
    return requests


@pytest.mark.parametrize(
    ("family", "kv", "max_rows"), [("qwen3_5_moe", "rows", 4), ("qwen3_5", "pages", 4), ("qwen3_5_moe", "pages", 512)]
)
def test_groups_of_different_lengths_fork_leave_and_join(
    family: str, kv: str, max_rows: int, benches: Callable[[str], Bench]
) -> None:
    """Prompts are padded to each other and forked; with four rows, groups join as others leave."""
    bench = benches(family)
    engine = engine_of(bench, kv, max_rows=max_rows)
    requests = crowd(bench, SAMPLING, members=2)
    for request, response in zip(requests, generate(engine, *requests), strict=True):
        assert_exact(bench, [*request.context, response.segment])
    assert (engine.counters.prefills, engine.counters.extensions) == (5, 0)
    again = generate(engine, *(ask(f"again {r.thread}", r.context, r.sampling, order=r.order, key=99) for r in requests))
    for request, response in zip(requests, again, strict=True):
        assert_exact(bench, [*request.context, response.segment])
    assert engine.counters.prefills == 5, "prompts are stored, with their states"
    assert given_back(engine)


@pytest.mark.skipif(find_spec("triton") is None or torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_fused_step_with_kernels(family: str, benches: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: test_logprobs_on_the_gpu. Rows leave at different times and go on from their states."""
    bench = benches(family)
    from sensorium.engines.native.decode_kernels import TritonOps

    monkeypatch.setattr(DecodeRunner, "_fast_ops", lambda _: TritonOps())
    engine = engine_of(bench, "pages")
    context = [bench.policy.chat.render([user(bench.picture(1), "what?")])]
    threads = [list(context) for _ in range(3)]
    for turn in range(2):
        requests = [
            ask(
                f"{i}",
                thread,
                Sampling(temperature=0.8, max_new_tokens=1 + 3 * i, stop_tokens=False),
                order=(i, turn),
                key=i,
            )
            for i, thread in enumerate(threads)
        ]
        for thread, response in zip(threads, generate(engine, *requests), strict=True):
            thread.append(response.segment)
            assert_exact(bench, thread)
            thread.append(bench.policy.chat.extend([user("and now?")], after=response.segment))
    assert (engine.counters.prefills, engine.counters.extensions) == (1, 3)
    writer = engine._writer
    assert isinstance(writer, PagedWriter)
    assert (type(writer._runner._step), type(writer._runner._ops)) == (FusedStep, TritonOps)
    assert not engine.notes


def second_turns(bench: Bench, engine: NativeEngine, requests: list[Request], first: list[Response]) -> list[int]:
    """Ask on after each response, one thread at a time; every thread is exact. The tokens that each turn computed."""
    computed = []
    for request, response in zip(requests, first, strict=True):
        observation = bench.policy.chat.extend([user("and now?")], after=response.segment)
        segments: list[Segment] = [*request.context, response.segment, observation]
        before = engine.counters.extension_tokens
        answer = generate(engine, ask(request.thread, segments, SAMPLING, key=3, name=f"{request.thread} on"))[0].segment
        computed.append(engine.counters.extension_tokens - before)
        expected, scale = bench.logprobs([*segments, answer], SAMPLING)
        assert (torch.tensor(answer.logprobs) - expected[-1]).abs().max() <= bench.rounding * scale
    return computed


@pytest.mark.parametrize("kv", KV)
def test_threads_go_on_from_the_state_where_their_response_stopped(
    dense: Bench, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that stop or reach their budget stay in the batch for some steps, which must not touch their states."""
    chat = dense.policy.chat
    requests = crowd(dense, Sampling(temperature=0.8))
    at_once = generate(engine_of(dense, kv), requests[7])[0].segment.tokens[0]
    monkeypatch.setattr(chat, "stop_ids", (*chat.stop_ids, at_once, *range(100, 400, 12)))
    engine = engine_of(dense, kv)
    first = generate(engine, *requests)
    assert {response.finish for response in first} == {"stop", "length"}
    assert len(first[7].segment.tokens) == 1, "it stops at its first token"
    if kv == "pages":
        assert engine.counters.dropped_tokens > 0
    computed = second_turns(dense, engine, requests, first)
    new = [len(chat.layout(chat.extend([user("and now?")], after=response.segment))) + 1 for response in first]
    assert computed == new
    assert engine.counters.prefills == 5


@pytest.mark.parametrize("kv", KV)
def test_after_a_stop_string_a_thread_is_exact_too(dense: Bench, kv: str) -> None:
    """Only the host sees it, some steps later: in pages, such a thread goes on from the state after its prompt."""
    chat, sampling = dense.policy.chat, Sampling(temperature=0.8, stop_tokens=False, stop=("a",))
    engine = engine_of(dense, kv)
    requests = crowd(dense, sampling)
    first = generate(engine, *requests)
    assert {response.finish for response in first} == {"stop", "length"}
    computed = second_turns(dense, engine, requests, first)
    for response, tokens in zip(first, computed, strict=True):
        observation = len(chat.layout(chat.extend([user("and now?")], after=response.segment)))
        early = kv == "pages" and response.finish == "stop"
        assert tokens == observation + (len(response.segment.tokens) if early else 1)
    assert engine.counters.prefills == 5
    assert given_back(engine)


def test_rows_that_ended_stay_so_when_the_batch_is_laid_out_again(dense: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that drew a stop token is laid out again before the host has seen it."""
    chat = dense.policy.chat
    monkeypatch.setattr(chat, "stop_ids", (*chat.stop_ids, *range(100, 400, 12)))
    original = DecodeRunner.step

    def watched(self: DecodeRunner) -> torch.Tensor:
        before = [tensor.clone() for tensor in self._pool.states.tensors]
        rows = self._state.view(self._bucket)
        free = set(range(1, len(before[0]))) - set(rows.slots_B.tolist())
        packed_3B = original(self)
        for tensor, kept in zip(self._pool.states.tensors, before, strict=True):
            assert all(torch.equal(tensor[slot], kept[slot]) for slot in free)
        return packed_3B

    monkeypatch.setattr(DecodeRunner, "step", watched)
    engine = engine_of(dense, "pages", max_rows=6)
    requests = crowd(dense, Sampling(temperature=0.8))
    first = generate(engine, *requests)
    second_turns(dense, engine, requests, first)


def test_a_thread_that_shrinks_goes_on_from_its_prompt_or_from_nothing(dense: Bench) -> None:
    for stored, counts in ((None, (1, 1)), (0, (2, 0))):
        engine = engine_of(dense, "rows", keep_bytes=stored)
        segments = talk(dense, engine, [[user("what?")]])
        answer = dense.policy.chat.respond("no", "rewritten")
        context = [segments[0], answer, dense.policy.chat.extend([user("why?")], after=answer)]
        segment = generate(engine, ask("a", context, SAMPLING, key=4))[0].segment
        expected, scale = dense.logprobs([*context, segment], SAMPLING)
        assert (torch.tensor(segment.logprobs) - expected[-1]).abs().max() <= dense.rounding * scale
        assert (engine.counters.prefills, engine.counters.extensions) == counts


def test_a_request_repeated_in_its_thread_computes_nothing_of_its_prompt(dense: Bench) -> None:
    """The thread's state is behind its response; the prompt's own entry has the state and the last hidden state."""
    engine = engine_of(dense, "rows")
    context = [dense.policy.chat.render([user("what?")])]
    first, second = (generate(engine, ask("a", context, SAMPLING, key=5))[0].segment for _ in range(2))
    assert (first.tokens, first.logprobs) == (second.tokens, second.logprobs)
    assert (engine.counters.prefills, engine.counters.extensions) == (1, 0)


def test_stored_states_count_as_bytes(dense: Bench) -> None:
    engine = engine_of(dense, "rows")
    talk(dense, engine, [[user("what?")]])
    engine._writer.tick(())
    cache, states = engine._writer._prefix_cache, engine._writer._cache.states
    entries = list(cache._values.values())
    assert len(entries) == 2
    assert cache.held == sum(entry.block.nbytes for entry in entries) + 2 * states.row_bytes
    assert states.row_bytes == sum(tensor[0].nbytes for tensor in states.tensors)


def test_recorded_steps_advance_the_same_states(dense: Bench, early_recordings: None) -> None:
    requests = crowd(dense, Sampling(stop_tokens=False))
    plain, recorded = engine_of(dense, "rows", record=False), engine_of(dense, "rows")
    assert [r.segment for r in generate(recorded, *requests)] == [r.segment for r in generate(plain, *requests)]
    assert recorded._writer._steps._feed is not None


@pytest.mark.parametrize(("family", "kv"), WAYS)
def test_in_float64_only_rounding_is_left(family: str, kv: str, tmp_path: Any) -> None:
    """Turns with a picture, forked for two: 1e-9 of the logits, so what differs in float32 is rounding."""
    made, sampling = make_bench(family, tmp_path), Sampling(max_new_tokens=12, stop_tokens=False)
    for model in (made.policy.model, made.stock):
        model.double()
        model.set_experts_implementation("eager")  # the grouped products are not made for float64
    with in_float64():
        engine = engine_of(made, kv, record=False)
        segments: list[list[Segment]] = [[made.policy.chat.render([user(made.picture(1), "what?")])] for _ in range(2)]
        for turn in range(2):
            requests = [ask(f"{i}", thread, sampling, order=(i, turn), key=i) for i, thread in enumerate(segments)]
            for thread, response in zip(segments, generate(engine, *requests), strict=True):
                thread += [response.segment, made.policy.chat.extend([user("and now?")], after=response.segment)]
        for thread in segments:
            expected, scale = made.logprobs(thread[:-1], sampling)
            for segment, logprobs in zip((thread[1], thread[3]), expected, strict=True):
                assert logprobs.dtype == torch.float64
                found = torch.tensor(segment.logprobs, dtype=torch.float64)
                assert (found - logprobs).abs().max() <= 1e-9 * scale


def test_states_of_rows_grow_move_and_are_stored(dense: Bench) -> None:
    model = dense.policy.adapter.language_model
    assert layer_places(model) == [0, 0]
    states = RowStates.of(model, torch.bfloat16, torch.device("cpu"))
    assert [tensor.dtype for tensor in states.tensors] == [torch.bfloat16, torch.float32]
    states.reserve(3)
    for tensor in states.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in states.tensors]
    kept = states.take(1)
    states.copy([0, 1], [1, 0])
    states.reserve(5)
    states.put(4, kept)
    for tensor, old in zip(states.tensors, before, strict=True):
        assert torch.equal(tensor[[0, 1, 2, 4]], old[[1, 0, 2, 1]])
    assert not RowStates()
    assert not RowStates().take(3)


def test_slots_are_given_out_lowest_first_and_never_the_scratch_one(dense: Bench) -> None:
    model = dense.policy.adapter.language_model
    empty = RowStates.of(model, torch.float32, torch.device("cpu"))
    slots = StateSlots(empty.windows, empty.states)
    assert [slots.allocate() for _ in range(3)] == [1, 2, 3]
    slots.release(2)
    slots.release(1)
    assert (slots.allocate(), slots.held) == (1, 2)
    slots.reserve(6)
    address = slots.states[0].data_ptr()
    assert [slots.allocate() for _ in range(6)] == [2, 4, 5, 6, 7, 8]
    assert slots.states[0].data_ptr() == address
    assert (StateSlots().allocate(), StateSlots().held) == (0, 0), "models without delta nets have none"
