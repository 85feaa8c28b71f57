"""Paged keys and values with steps launched ahead give what the row cache gives, on every family and sampling setting."""

import asyncio
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sensorium.assembly.session import Session
from sensorium.engines.native import graphs, pipeline
from sensorium.engines.native import graphs as decode_step
from sensorium.engines.native.decode_state import RowLayout, read_again
from sensorium.engines.native.graphs import BUCKETS, FusedStep, bucket_of, buckets_to_capture
from sensorium.engines.native.key_values import PAGE, PagePool
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.native.prefix_cache import PrefillRows, PrefixEntry, SharedContext
from sensorium.engines.protocol import LiveEpisodes, Request, Response, Sampling
from sensorium.engines.scheduler import Job
from sensorium.kernels.first_use import fallbacks
from sensorium.kernels.layer_ops import UnknownLayer
from sensorium.models.policy import Policy
from sensorium.trainer.step_metrics import Clock
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import EngineError

from .conftest import Bench, ask, generate, make_bench

KINDS = [
    Sampling(), Sampling(temperature=0.6), Sampling(top_p=0.7), Sampling(top_k=3), Sampling(temperature=0.0),
    Sampling(stop_tokens=False),
]  # fmt: skip


def paged(bench: Bench, **options: object) -> NativeEngine:
    return NativeEngine(bench.policy, kv="pages", **options)  # type: ignore[arg-type]


def crowd(bench: Bench, kinds: list[Sampling], members: int = 3, lengths: tuple[int, int] = (7, 11)) -> list[Request]:
    """Groups of different prompts and lengths, so that the batch keeps changing its size.

    ``lengths``: by how much responses are longer from group to group, and from member to member.
    """
    requests = []
    for i, kind in enumerate(kinds):
        context = [bench.policy.chat.render([user(bench.picture(i % 2), "what? " * (1 + 9 * (i % 3)))])]
        for member in range(members):
            sampling = Sampling(**{**vars(kind), "max_new_tokens": 5 + lengths[0] * i + lengths[1] * member})
            requests.append(ask(f"{i}/{member}", context, sampling, order=(i, member), key=10 * i + member))
    return requests


def same(found: list[Response], expected: list[Response]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.segment.tokens == other.segment.tokens
        assert one.finish == other.finish
        for name in ("logprobs", "sampled_logprobs"):
            pair = torch.tensor(getattr(one.segment, name)), torch.tensor(getattr(other.segment, name))
            assert torch.allclose(*pair, atol=1e-5)


def test_pages_give_what_rows_give(watching: Bench) -> None:
    """By the fused step, with every kind of sampling in one batch."""
    pages_give_what_rows_give(watching, True, crowd(watching, KINDS, members=2, lengths=(2, 9)))


def test_pages_give_what_rows_give_by_stock_layers(vision: Bench) -> None:
    pages_give_what_rows_give(vision, False, crowd(vision, [Sampling(stop_tokens=False)] * 4, members=2))


def pages_give_what_rows_give(bench: Bench, record: bool, requests: list[Request]) -> None:
    expected = generate(NativeEngine(bench.policy, record=False), *requests)
    engine = paged(bench, record=record)
    same(generate(engine, *requests), expected)
    assert engine.counters.decoded_tokens == sum(len(response.segment.tokens) for response in expected)
    assert not engine.notes


def test_text_models_too(text: Bench) -> None:
    context = [text.policy.chat.render([user("what? " * 40)])]
    requests = [ask(f"{i}", context, Sampling(max_new_tokens=80), order=(i,), key=i) for i in range(10)]
    same(generate(paged(text), *requests), generate(NativeEngine(text.policy), *requests))


def test_a_batch_is_laid_out_anew_only_when_its_bucket_shrinks(text: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight responses that end one after the other: buckets of 8, 4, 2 and 1, not eight layouts; the same tokens."""
    context = [text.policy.chat.render([user("what?")])]
    lengths = [3 + 4 * i for i in range(8)]
    requests = [
        ask(f"{i}", context, Sampling(max_new_tokens=length, stop_tokens=False), order=(i,), key=i)
        for i, length in enumerate(lengths)
    ]
    laid = []
    original = graphs.DecodeRunner.lay_out

    def counted(self: graphs.DecodeRunner, rows: Sequence[RowLayout], latest_N: torch.Tensor) -> None:
        laid.append(len(rows))
        original(self, rows, latest_N)

    monkeypatch.setattr(graphs.DecodeRunner, "lay_out", counted)
    found = generate(paged(text), *requests)
    assert laid == [8, 4, 2, 1]
    same(found, generate(NativeEngine(text.policy), *requests))


def test_a_response_that_stops_is_cut_where_it_stopped(bench: Bench) -> None:
    """Steps launched past the end are dropped: neither in the response nor counted as decoded."""
    plain = generate(NativeEngine(bench.policy), *crowd(bench, [Sampling(stop_tokens=False)]))
    text = plain[2].segment.text
    stop = next(letter for letter in text[len(text) // 3 :] if letter.isascii() and letter.isprintable())
    requests = crowd(bench, [Sampling(stop_tokens=False, stop=(stop,))])
    expected = generate(NativeEngine(bench.policy), *requests)
    assert expected[2].finish == "stop"
    engine = paged(bench)
    same(generate(engine, *requests), expected)
    assert engine.counters.dropped_tokens > 0
    assert engine.counters.decoded_tokens == sum(len(response.segment.tokens) for response in expected)


def test_turns_continue_on_kept_keys_and_pages_are_given_back(vision: Bench) -> None:
    policy = vision.policy
    sampling = Sampling(max_new_tokens=PAGE // 2 + 5, stop_tokens=False)

    def play(engine: NativeEngine) -> list[list[Segment]]:
        threads = [[policy.chat.render([user(vision.picture(i), "what colour? " * 6)])] for i in range(2) for _ in range(2)]
        for turn in range(3):
            requests = [ask(f"{i}", thread, sampling, order=(i, turn), key=i + 10 * turn, name=f"{i}/{turn}")
                        for i, thread in enumerate(threads)]  # fmt: skip
            for thread, response in zip(threads, generate(engine, *requests), strict=True):
                thread.append(response.segment)
                thread.append(policy.chat.extend([user(vision.picture(7), "and now?")], after=response.segment))
        return threads

    expected = NativeEngine(policy)
    engine = paged(vision)
    for one, other in zip(play(engine), play(expected), strict=True):
        assert [segment.tokens for segment in one] == [segment.tokens for segment in other]
    assert engine.counters.extensions == expected.counters.extensions > 0
    assert engine.counters.prefill_tokens == expected.counters.prefill_tokens
    writer = engine._writer
    assert isinstance(writer, pipeline.PagedWriter)
    writer.tick(())
    assert writer._pool.held == 0


def test_rows_wait_for_room_and_a_withdrawn_request_leaves(bench: Bench) -> None:
    requests = crowd(bench, [Sampling(stop_tokens=False)] * 3)
    expected = generate(NativeEngine(bench.policy), *requests)
    same(generate(paged(bench, max_rows=4), *requests), expected)

    async def withdraw() -> Response:
        engine = paged(bench, lockstep=False)
        gone = asyncio.ensure_future(engine.generate(requests[-1]))
        left = asyncio.ensure_future(engine.generate(requests[0]))
        await asyncio.sleep(0.01)
        gone.cancel()
        return await left

    same([asyncio.run(withdraw())], expected[:1])


def test_groups_join_whole_and_the_prompts_of_those_who_wait_are_computed_with_the_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six groups of three in twelve rows: one prefill pass, and no group is split, so each has its prompt's pages once."""
    requests = crowd(bench, [Sampling(stop_tokens=False)] * 6)
    expected = generate(NativeEngine(bench.policy), *requests)
    passes, groups = [], set()
    compute, lay_out = pipeline.prefill, graphs.DecodeRunner.lay_out

    def counted(policy: Policy, rows: PrefillRows, entries: Sequence[SharedContext], *rest: Any) -> torch.Tensor:
        passes.append([entry.suffix is not None for entry in entries])
        return compute(policy, rows, entries, *rest)

    def watched(self: graphs.DecodeRunner, rows: Sequence[RowLayout], latest_N: torch.Tensor) -> None:
        groups.update(row.group for row in rows)
        assert len(rows) <= 12
        lay_out(self, rows, latest_N)

    monkeypatch.setattr(pipeline, "prefill", counted)
    monkeypatch.setattr(graphs.DecodeRunner, "lay_out", watched)
    monkeypatch.setattr(SharedContext, "__hash__", object.__hash__)
    engine = paged(bench, max_rows=12)
    same(generate(engine, *requests), expected)
    assert engine.counters.prefills == 6 == len(groups)
    assert passes[0] == [True] * 6
    assert not any(any(later) for later in passes[1:])
    assert len(passes) > 1


def test_a_group_too_large_for_the_room_joins_in_parts(text: Bench) -> None:
    """Seven members in three rows: waiting for all of them would be for ever."""
    context = [text.policy.chat.render([user("what?")])]
    requests = [ask(f"{i}", context, Sampling(max_new_tokens=3 + i), order=(i,), key=i) for i in range(7)]
    engine = paged(text, max_rows=3)
    same(generate(engine, *requests), generate(NativeEngine(text.policy), *requests))
    assert engine.counters.prefills == 1


def test_new_weights_are_seen_also_when_parameters_move(bench: Bench) -> None:
    policy, engine = bench.policy, paged(bench)
    requests = crowd(bench, [Sampling(stop_tokens=False)])
    generate(engine, *requests)
    layer = policy.adapter.language_model.layers[0].mlp.down_proj
    kept = layer.weight
    try:
        layer.weight = torch.nn.Parameter(kept.detach() * 0.5)
        policy.version += 1
        engine.update_weights(policy, policy.version)
        same(generate(engine, *requests), generate(NativeEngine(policy), *requests))
    finally:
        layer.weight = kept


def test_a_fused_step_that_disagrees_is_not_used(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FusedStep.logits
    monkeypatch.setattr(FusedStep, "logits", lambda *given: original(*given) * 1.001)
    requests = crowd(bench, [Sampling(stop_tokens=False)])
    engine = paged(bench)
    session = SimpleNamespace(policy=SimpleNamespace(counters=SimpleNamespace(patches=0)))
    before, clock = fallbacks(), Clock(cast(Session, session), lambda phase, total: None)
    with pytest.warns(UserWarning, match="off the reference"):
        found = generate(engine, *requests)
    same(found, generate(NativeEngine(bench.policy), *requests))
    assert len(engine.notes) == 1
    told: list[str] = []
    engine = paged(bench)
    engine.tell_by(told.append)
    generate(engine, *requests)
    assert told == list(engine.notes)
    assert fallbacks() == before + 2
    assert clock.metrics([])["throughput/fallbacks"] == before + 2
    monkeypatch.setattr("sensorium.kernels.first_use._taken", [])
    assert "throughput/fallbacks" not in clock.metrics([])


def test_layers_that_the_fused_step_does_not_know_run_as_they_are(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise UnknownLayer("StrangeLayer is made of other parts")

    monkeypatch.setattr(decode_step, "parts_of", refuse)
    with pytest.warns(UserWarning, match="StrangeLayer"):
        engine = paged(bench)
    requests = crowd(bench, [Sampling(stop_tokens=False)])
    same(generate(engine, *requests), generate(NativeEngine(bench.policy), *requests))


def test_logits_that_are_not_finite_fail_the_request(text: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FusedStep.logits
    engine = paged(text)
    context = [text.policy.chat.render([user("what?")])]
    request = ask("0", context, Sampling(max_new_tokens=9, stop_tokens=False))
    generate(engine, request)
    monkeypatch.setattr(FusedStep, "logits", lambda *given: original(*given) * float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        generate(engine, request)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_prompt_without_numbers_fails_alone(device: str, tmp_path: Path) -> None:
    """Not the requests beside it, not those that get its pages, and not the fast step, which is verified beside it."""
    made = make_bench("qwen2", tmp_path, device=device, tie_word_embeddings=False)
    chat = made.policy.chat
    strange, good = chat.render([user("what? é")]), [chat.render([user("and now? " * (i + 1))]) for i in range(7)]
    bad = next(token for token in strange.tokens if all(token not in one.tokens for one in good))
    with torch.no_grad():
        made.policy.model.get_input_embeddings().weight[bad] = float("nan")

    def asked(engine: NativeEngine, *contexts: Segment) -> list[bool]:
        """Whether each was answered."""
        sampling = Sampling(max_new_tokens=9, temperature=0.0, stop_tokens=False)
        requests = [ask(f"{i}", [one], sampling, order=(i,), key=i) for i, one in enumerate(contexts)]
        episodes = LiveEpisodes()

        async def answered(request: Request) -> bool:
            try:
                return bad not in (await engine.generate(request, episodes)).segment.tokens[:-1]
            except EngineError:
                return False
            finally:
                episodes.leave()

        async def everyone() -> list[bool]:
            for _ in requests:
                episodes.enter()
            return list(await asyncio.gather(*map(answered, requests)))

        return asyncio.run(everyone())

    engine = paged(made, max_rows=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked(engine, strange, *good) == [False] + [True] * 7
        assert asked(engine, *[strange] * 3, *good) == [False] * 3 + [True] * 7
        assert asked(engine, *good) == [True] * 7
        assert asked(paged(made), strange, strange) == [False, False]  # nothing to verify by, which is not said
    assert not engine.notes


def test_a_prompt_that_a_group_shares_is_held_once() -> None:
    pool = PagePool(1, 1, 2, torch.float32, torch.device("cpu"))
    leader = pool.allocate(3)
    pool.share(leader[:2])
    own = pool.allocate(1)
    assert pool.held == 4
    pool.release(leader)
    assert pool.held == 3  # the two shared pages live on
    pool.release([*leader[:2], *own])
    assert pool.held == 0
    pool.block.normal_()
    first, second = pool.allocate(2), pool.allocate(2)
    kept = pool.take(first, PAGE + 5)
    pool.put(second, kept, PAGE + 3)
    assert torch.equal(pool.take(second, PAGE + 3), kept[:, :, :, : PAGE + 3])


@pytest.mark.parametrize(
    ("affordable", "ahead", "rounds", "moves"),
    [
        (10**6, 4, [[2, 150], [20, 140]], False),
        (0, 4, [[2, 150], [20, 140]], True),
        (10**6, 256, [[20] * 8, [20] * 7 + [80]], False),  # a page more than in the first round
    ],
)
def test_a_pool_has_room_for_whole_responses_so_that_it_does_not_move(
    text: Bench, monkeypatch: pytest.MonkeyPatch, affordable: int, ahead: int, rounds: list[list[int]], moves: bool
) -> None:
    """CUDA graphs hold its address. Where the memory is not free it grows when it must."""
    monkeypatch.setattr(PagePool, "_affordable", lambda _: affordable)
    monkeypatch.setattr(pipeline, "RESERVE_AHEAD", ahead)
    context = [text.policy.chat.render([user("what? " * 90)])]  # whose full pages a group shares
    engine, addresses = paged(text), set()
    original = graphs.DecodeRunner.step

    def watched(self: graphs.DecodeRunner) -> torch.Tensor:
        addresses.add(self._pool.block.data_ptr())
        return original(self)

    monkeypatch.setattr(graphs.DecodeRunner, "step", watched)
    for lengths in rounds:
        requests = [
            ask(f"{lengths}{i}", context, Sampling(max_new_tokens=length, stop_tokens=False), order=(i,), key=i)
            for i, length in enumerate(lengths)
        ]
        generate(engine, *requests)
    assert (len(addresses) > 1) == moves


def test_buckets_hold_what_they_are_asked_for() -> None:
    assert [bucket_of(n) for n in (1, 3, 128, 129, 512, 600)] == [1, 4, 128, 192, 512, 640]
    assert list(BUCKETS) == sorted(set(BUCKETS))


def test_once_a_batch_has_shrunk_all_smaller_buckets_are_captured() -> None:
    assert buckets_to_capture(128, ()) == [128]
    assert buckets_to_capture(256, (128,)) == [256]  # it grows: nothing says that it will shrink
    assert buckets_to_capture(24, (128,)) == [24, 16, 8, 4, 2, 1]
    assert buckets_to_capture(24, (128, 16, 2)) == [24, 8, 4, 1]
    assert buckets_to_capture(640, (768,)) == [640, *reversed(BUCKETS)]


def test_what_rows_read_again_if_each_reads_for_itself() -> None:
    def row(group: int, shared_pages: int) -> RowLayout:
        return RowLayout(0, 0, 700, 0, 0, Sampling(max_new_tokens=1), [1] * 11, shared_pages, group)

    assert read_again([row(0, 4)]) == 0  # alone there is nobody to share with
    assert read_again([row(0, 4)] * 8) == 7 * 4 * PAGE
    assert read_again([row(0, 4)] * 10) == (7 + 1) * 4 * PAGE  # eight read together, then two
    assert read_again([*[row(0, 4)] * 3, row(1, 10), *[row(2, 1)] * 2]) == (2 * 4 + 1) * PAGE


def test_kernels_are_left_alone_without_a_gpu(bench: Bench) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = paged(bench)
    assert isinstance(engine._writer, pipeline.PagedWriter)
    assert type(engine._writer._runner._ops) is graphs.TorchOps


def test_a_table_on_a_gpu_has_room_for_the_whole_context_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "find_spec", lambda name: object())
    cuda = torch.device("cuda")
    assert [graphs.first_pages(tokens, cuda) for tokens in (100, 2000, 128_000)] == [4, 32, 64]
    assert graphs.first_pages(128_000, torch.device("cpu")) == 4


def test_room_for_those_who_wait_is_within_the_context_that_a_thread_may_have(text: Bench) -> None:
    """A budget far beyond it would have the pool made as large as a part of the memory allows."""
    context = [text.policy.chat.render([user("what?")])]
    endless = ask("0", context, Sampling(max_new_tokens=10**6))
    loop = asyncio.new_event_loop()
    waiting = [Job(endless, loop.create_future())] * 5
    loop.close()
    prefix = (PrefixEntry("", 1, 100, 100),)
    row = pipeline.PagedRow(waiting[0], prefix, 2 * PAGE, frozenset(), None, [])
    assert pipeline._pages_of([[row]], [], waiting, 4, 2 * PAGE) == (2, 8)
