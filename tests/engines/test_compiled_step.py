"""The compiled decode step gives what the plain one gives, to the last few bits, whatever is beside a row."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sensorium.compiled import library
from sensorium.compiled.library import NoLibrary, load_library
from sensorium.engines.native import compiled_step
from sensorium.engines.native.compiled_step import CompiledStep
from sensorium.engines.native.engine import NativeEngine
from sensorium.engines.native.sampler import SamplingRows
from sensorium.engines.native.steps import draw, feed
from sensorium.engines.protocol import Sampling
from sensorium.media.store import MediaStore
from sensorium.models.fast_paths import fallbacks, without_compiled_parts
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import EngineError

from .conftest import Bench, ask, generate
from .test_recording import few_rows
from .test_steps import KINDS, calls

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {},
    "qwen3_vl": {},  # norms of queries and keys
    "qwen2": {"tie_word_embeddings": False},  # biases
    "smolvlm": {},
    "qwen3": {"hidden_size": 24, "head_dim": 12, "intermediate_size": 40},  # whole tiles of nothing
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Policy]:
    """Models whose every weight is a number of its own."""
    folders: dict[str, Path] = {}

    def load(family: str) -> Policy:
        if family not in folders:
            folder = tmp_path_factory.mktemp(family)
            folders[family] = make_tiny(family, folder, num_hidden_layers=2, initializer_range=0.15, **FAMILIES[family])
        policy = load_policy(str(folders[family]), store=MediaStore(), device="cpu")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        return policy

    return load


def compiled(policy: Policy) -> CompiledStep:
    try:
        return CompiledStep(policy)
    except NoLibrary as error:
        pytest.skip(str(error))


def near(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_and_cache_are_those_of_the_model(family: str, loaded: Callable[[str], Policy]) -> None:
    policy = loaded(family)
    ours, theirs = few_rows(policy, 13, 21), few_rows(policy, 13, 21)
    assert near(compiled(policy).feed(*ours.fed()), feed(policy, *theirs.fed()))
    assert near(ours.block, theirs.block)


@torch.no_grad()
def test_a_row_gets_the_same_bits_in_any_company_and_by_any_number_of_threads(
    loaded: Callable[[str], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, rows = loaded("qwen3_vl"), 37
    step, batch = compiled(policy), few_rows(policy, rows, 9)
    tokens_B, positions_B, block, write_N, bias_B11S = batch.fed()
    together = step.feed(*batch.fed()).clone()
    heads = len(write_N) // rows
    for row in (0, 17, 36):
        own = write_N[row * heads : (row + 1) * heads] - row * heads * 9
        one = slice(row, row + 1)
        alone = step.feed(tokens_B[one], positions_B[one], block[:, :, one].contiguous(), own, bias_B11S[one])
        assert torch.equal(alone[0], together[row])
    monkeypatch.setattr(compiled_step, "WORK_OF_A_THREAD", 1)
    try:
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert all(torch.equal(step.feed(*batch.fed()), together) for _ in range(20))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_vl"])
@torch.no_grad()
def test_every_weight_may_change_in_place_or_be_replaced(family: str, loaded: Callable[[str], Policy]) -> None:
    policy = loaded(family)
    step, batch = compiled(policy), few_rows(policy)
    for part in (policy.adapter.language_model, policy.adapter.head):
        for name, module, parameter in _parameters(part):
            before = step.feed(*batch.fed()).clone()
            parameter.add_(torch.linspace(0.1, 0.3, parameter.numel()).view_as(parameter))
            found = step.feed(*batch.fed())
            assert near(found, feed(policy, *batch.fed())), name
            assert "k_proj.bias" in name or not torch.equal(found, before), name
            setattr(module, name.rpartition(".")[2], nn.Parameter(parameter * 0.5))
            assert near(step.feed(*batch.fed()), feed(policy, *batch.fed())), name


def _parameters(part: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for path, module in list(part.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            yield f"{path}.{name}", module, parameter


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_tokens_and_log_probs_are_those_of_the_sampler(loaded: Callable[[str], Policy], data: st.DataObject) -> None:
    step = compiled(loaded("qwen2"))
    rows, vocab = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 70))
    kind = st.builds(
        Sampling, temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]), stop_tokens=st.booleans(),
        top_k=st.integers(0, 9), top_p=st.sampled_from([1.0, 0.9, 0.3]),
    )  # fmt: skip
    kinds = data.draw(st.lists(kind, min_size=rows, max_size=rows))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits_BV = torch.randn(rows, vocab, generator=generator) * data.draw(st.sampled_from([0.0, 1.0, 30.0]))
    sampling = SamplingRows.of(kinds, torch.tensor([0] if vocab > 2 else [], dtype=torch.int64), torch.tensor([1]), vocab)
    uniforms_B = torch.rand(rows, dtype=torch.float64, generator=generator)
    if vocab == 2 and not all(one.stop_tokens for one in kinds):
        logits_BV = logits_BV.abs()
    state = (torch.zeros(rows, dtype=torch.int64), torch.arange(rows), torch.arange(2 * rows) * 4,
             torch.arange(rows) * 4, torch.full((rows, 1, 1, 4), -torch.inf))  # fmt: skip
    one, two = (tuple(tensor.clone() for tensor in state) for _ in range(2))
    expected, found = draw(sampling, logits_BV, uniforms_B, *one), step.draw(sampling, logits_BV, uniforms_B, *two)
    assert found[0].tolist() == expected[0].tolist()
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_log_probs_that_are_not(wrong: float, loaded: Callable[[str], Policy]) -> None:
    step, logits_BV = compiled(loaded("qwen2")), torch.zeros(2, 20)
    logits_BV[0, 7] = wrong
    state = (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.arange(2), torch.arange(2))
    none = torch.tensor([], dtype=torch.int64)
    sampling = SamplingRows.of([Sampling()] * 2, none, none, 20)
    tokens, logprobs, sampled = step.draw(sampling, logits_BV, torch.full((2,), 0.5).double(), *state, torch.zeros(2, 4))
    assert logprobs.isnan().tolist() == sampled.isnan().tolist() == [True, False]
    assert 0 <= int(tokens[0]) < 20
    assert int(tokens[1]) == 10


def test_weights_that_are_not_finite_are_no_reason_to_leave_the_compiled_step(loaded: Callable[[str], Policy]) -> None:
    policy, told = loaded("qwen2"), list[str]()
    compiled(policy)
    with torch.no_grad():
        policy.adapter.language_model.embed_tokens.weight[30:60] = torch.nan  # tokens of the trials, too
    engine, before = NativeEngine(policy), fallbacks()
    engine.tell_by(told.append)
    with pytest.raises(EngineError, match="not finite"):
        generate(engine, ask("0", [policy.chat.render([user("what?")])], Sampling(max_new_tokens=40, stop_tokens=False)))
    assert (told, fallbacks()) == ([], before)


def moving(policy: Policy, rows: int, steps: int) -> tuple[Tensor, ...]:
    """A cache with room for some steps of rows in the middle of their responses, and the tensors that draw moves on."""
    batch = few_rows(policy, rows, 6 + steps)
    tokens_B, positions_B, block, write_N, _ = batch.fed()
    heads = len(write_N) // rows
    reach = block.shape[4]
    bias_B11S = torch.full((rows, 1, 1, reach), -torch.inf)
    bias_B11S[..., :6] = 0.0
    write_N = torch.arange(rows * heads) * reach + 5
    return block, tokens_B, positions_B, write_N, torch.arange(rows) * reach + 5, bias_B11S


@pytest.mark.parametrize("threads", [1, 3])
@torch.no_grad()
def test_many_steps_in_one_call_are_the_steps_one_by_one(
    threads: int, loaded: Callable[[str], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, rows, steps = loaded("qwen3_vl"), 37, 7
    step = compiled(policy)
    kinds = [KINDS[i % len(KINDS)] for i in range(rows)]
    none = torch.tensor([], dtype=torch.int64)
    sampling = SamplingRows.of(kinds, none, none, policy.vocab_size)
    uniforms_TB = torch.rand(steps, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    block, *moved = moving(policy, rows, steps)
    expected = []
    for uniforms_B in uniforms_TB:
        tokens_B, positions_B, write_N, _, bias_B11S = moved
        logits_BV = step.feed(tokens_B, positions_B, block, write_N, bias_B11S)
        expected.append(step.draw(sampling, logits_BV, uniforms_B, *moved))
    monkeypatch.setattr(compiled_step, "WORK_OF_A_THREAD", 1)
    torch.set_num_threads(threads)
    try:
        other, *others = moving(policy, rows, steps)
        found = step.write(sampling, other, uniforms_TB, torch.ones(rows, dtype=torch.uint8), *others)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(found, torch.stack(expected))
    assert torch.equal(other, block)
    assert all(torch.equal(a, b) for a, b in zip(moved, others, strict=True))


@torch.no_grad()
def test_no_more_is_drawn_once_all_rows_beside_each_other_have_ended(loaded: Callable[[str], Policy]) -> None:
    policy, rows, steps = loaded("qwen2"), 3, 6
    step, none = compiled(policy), torch.tensor([], dtype=torch.int64)
    uniforms_TB = torch.rand(steps, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def drawn(stop_S: Tensor, stops: list[int]) -> Tensor:
        sampling = SamplingRows.of([Sampling()] * rows, none, stop_S, policy.vocab_size)
        block, *moved = moving(policy, rows, steps)
        return step.write(sampling, block, uniforms_TB, torch.tensor(stops, dtype=torch.uint8), *moved)

    all_T3B = drawn(none, [1, 1, 1])
    ends = all_T3B[[2, 0, 1], 0, torch.arange(rows)].long()  # what rows draw in their third, first and second step
    assert len(set(ends.tolist())) == rows
    assert torch.equal(drawn(ends, [1, 0, 1]), all_T3B), "the second row does not end"
    found_T3B = drawn(ends, [1, 1, 1])
    assert torch.equal(found_T3B[:3], all_T3B[:3])
    assert not found_T3B[3:].any()


@pytest.mark.parametrize("stops", [(), ("e", "th")], ids=["stop tokens", "stop strings"])
def test_what_is_drawn_past_an_end_is_dropped_and_counted(bench: Bench, stops: tuple[str, ...]) -> None:
    compiled(bench.policy)
    context = [bench.policy.chat.render([user("what?")])]
    requests = [
        ask(f"{i}", context, Sampling(max_new_tokens=20 + 7 * i, stop=stops, stop_tokens=bool(i % 4)), order=(i,), key=i)
        for i in range(24)
    ]
    expected = generate(NativeEngine(bench.policy, compile=False), *requests)
    engine = NativeEngine(bench.policy)
    found = generate(engine, *requests)
    assert [(r.segment.tokens, r.finish) for r in found] == [(r.segment.tokens, r.finish) for r in expected]
    assert "stop" in {r.finish for r in found}
    assert engine.counters.decoded_tokens == sum(len(r.segment.tokens) for r in found)
    assert engine.counters.dropped_tokens > 0


def test_responses_are_those_of_the_plain_engine_and_no_step_enters_the_model(
    vision: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(vision.policy)
    context = [vision.policy.chat.render([user(vision.picture(0), "what?")])]
    kinds = [Sampling(**{**vars(kind), "max_new_tokens": 12 + i}) for i, kind in enumerate(KINDS)]
    requests = [ask(f"{i}", context, kind, order=(i,), key=i) for i, kind in enumerate(kinds)]
    plain = generate(NativeEngine(vision.policy, record=False), *requests)
    engine = NativeEngine(vision.policy)
    generate(engine, requests[0])
    seen = calls(vision, monkeypatch)
    found = generate(engine, *requests)
    assert [r.segment.tokens for r in found] == [r.segment.tokens for r in plain]
    for one, other in zip(found, plain, strict=True):
        assert one.segment.logprobs == pytest.approx(other.segment.logprobs, abs=1e-4)
        assert one.segment.sampled_logprobs == pytest.approx(other.segment.sampled_logprobs, abs=1e-4)
    assert len(seen) <= 1  # the prompt


def test_without_a_compiler_steps_are_recorded_and_it_is_said_and_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library()  # the layers of prompts have theirs
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(compiled_step, "load_library", lambda: library._loaded(library.SOURCES))
    context = [bench.policy.chat.render([user("what?")])]
    request = ask("0", context, Sampling(max_new_tokens=40, stop_tokens=False), order=(0,), key=0)
    without_compiled_parts.cache_clear()
    engine, before = NativeEngine(bench.policy), fallbacks()
    recorded = NativeEngine(bench.policy, compile=False)
    with pytest.warns(UserWarning, match="sampled more slowly.*no-such-compiler.*CC") as told:
        found = [*generate(engine, request), *generate(engine, request)]
    assert len(told) == 1, "it is said once"
    expected = [*generate(recorded, request), *generate(recorded, request)]
    assert [r.segment for r in found] == [r.segment for r in expected]
    assert fallbacks() == before + 1
