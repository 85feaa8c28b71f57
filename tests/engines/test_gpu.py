"""On a GPU the engine's log-probs are the stock model's within stated bounds, from CUDA graphs as without them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.engines.native.graphs import WIDER, FusedStep
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.native.pipeline import PagedWriter
from sensorium.engines.native.sampler import uniforms
from sensorium.engines.protocol import Request, Sampling
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import LoraSection
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Segment

from .conftest import Bench, ask, generate, make_bench
from .test_routes import check

# Relative to the largest logit, against the stock model in float32 on the CPU. bfloat16 keeps eight bits.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}
SAMPLING = Sampling(temperature=0.8, max_new_tokens=40, stop_tokens=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"])
def test_logprobs_on_the_gpu(family: str, dtype: str, tmp_path: Path) -> None:
    bench = make_bench(family, tmp_path, device="cuda", dtype=dtype)
    policy, engine = bench.policy, NativeEngine(bench.policy)
    first = [policy.chat.render([user(bench.picture(i), "what colour? " * (i + 1))]) for i in range(3)]
    threads = [[segment] for segment in first for _ in range(2)]
    for turn in range(2):
        requests = [ask(f"{i}", thread, SAMPLING, order=(i, 0, turn), key=i + 10 * turn, name=f"{i}/{turn}")
                    for i, thread in enumerate(threads)]  # fmt: skip
        for thread, response in zip(threads, generate(engine, *requests), strict=True):
            thread.append(response.segment)
            thread.append(policy.chat.extend([user(bench.picture(7), "and now?")], after=response.segment))
    assert (engine.counters.prefills, engine.counters.extensions, engine.counters.features) == (3, 6, 4)
    # In float32 torch has no grouped product of experts, and reads sizes on the host.
    assert bool(engine.notes) == (family.endswith("moe") and dtype == "float32")
    writer = engine._writer
    assert isinstance(writer, PagedWriter)
    assert type(writer._runner._step) is FusedStep
    for thread in threads:
        expected, scale = bench.logprobs(thread, SAMPLING)
        for segment, logprobs in zip(thread[1::2], expected, strict=True):
            bound = BOUNDS[dtype] * (WIDER if bench.has_states else 1)
            assert (torch.tensor(segment.logprobs) - logprobs).abs().max() <= bound * scale


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_weights_changed_in_place_are_what_steps_of_few_rows_read(family: str, tmp_path: Path) -> None:
    """They are as close to the stock model as without compiled kernels, the same again, and others with other weights."""
    bench = make_bench(family, tmp_path, device="cuda", dtype="bfloat16", num_hidden_layers=6)
    policy, engine = bench.policy, NativeEngine(bench.policy)
    context = [policy.chat.render([user(bench.picture(1), "what colour? ")])]

    def asked(engine: NativeEngine = engine) -> tuple[list[tuple[int, ...]], float]:
        """The tokens, and how far their log-probs are from the stock model's in float32, on average."""
        requests = [ask(f"{i}", context, SAMPLING, order=(i,), key=i) for i in range(6)]
        found = [response.segment for response in generate(engine, *requests)]
        errors = []
        for segment in found:
            (expected,), _ = bench.logprobs([*context, segment], SAMPLING)
            errors.append((torch.tensor(segment.logprobs) - expected).abs())
        return [tuple(segment.tokens) for segment in found], float(torch.cat(errors).mean())

    plain = asked(NativeEngine(policy, compile=False))
    first = asked()
    assert first[1] < 1.5 * plain[1]
    policy.version += 1
    engine.update_weights(policy, policy.version)
    assert asked() == first
    with torch.no_grad():
        for name, parameter in bench.stock.named_parameters():
            if "layers.4.mlp" in name:
                parameter.mul_(2.0)
        for name, parameter in policy.model.named_parameters():
            if "layers.4.mlp" in name:
                parameter.mul_(2.0)
    policy.version += 1
    engine.update_weights(policy, policy.version)
    changed = asked()
    assert changed[0] != first[0]
    assert changed[1] < 2 * plain[1]
    assert not engine.notes


@pytest.mark.gpu
def test_random_numbers_are_the_same_bits_on_the_gpu() -> None:
    keys, tokens = torch.randint(-(2**63), 2**63 - 1, (1000,)), torch.arange(1000)
    assert torch.equal(uniforms(keys, tokens), uniforms(keys.cuda(), tokens.cuda()).cpu())


def crowd(bench: Bench, kinds: list[Sampling], members: int = 4) -> list[Request]:
    """Groups with prompts of different length and responses of different length, so that buckets come and go."""
    requests = []
    for i, kind in enumerate(kinds):
        context = [bench.policy.chat.render([user(bench.picture(i % 2), "what? " * (1 + 40 * (i % 2)))])]
        for member in range(members):
            sampling = Sampling(**{**vars(kind), "max_new_tokens": 20 + 13 * i + 7 * member})
            requests.append(ask(f"{i}/{member}", context, sampling, order=(i, member), key=10 * i + member))
    return requests


MIXED = [
    Sampling(stop_tokens=False), Sampling(temperature=0.6), Sampling(temperature=0.0), Sampling(top_p=0.7),
    Sampling(top_k=3), Sampling(stop=("a",)),
]  # fmt: skip
PLAIN = [Sampling(stop_tokens=False), Sampling(temperature=0.7, stop_tokens=False), Sampling()]


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni"])
def test_graphs_give_what_the_reference_gives(family: str, kinds: list[Sampling], tmp_path: Path) -> None:
    bench = make_bench(family, tmp_path, device="cuda")
    if family == "qwen2":
        bench.picture = lambda seed, size=(0, 0): "picture"  # type: ignore[method-assign, assignment]
    requests = crowd(bench, kinds)
    expected = generate(NativeEngine(bench.policy, record=False), *requests)
    engine = NativeEngine(bench.policy)
    found = generate(engine, *requests)
    assert not engine.notes
    assert engine.counters.captured > 1
    for one, other in zip(found, expected, strict=True):
        assert one.segment.tokens == other.segment.tokens
        assert torch.allclose(torch.tensor(one.segment.logprobs), torch.tensor(other.segment.logprobs), atol=1e-4)
    again = generate(NativeEngine(bench.policy), *requests)
    assert [response.segment for response in again] == [response.segment for response in found]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
def test_experts_decode_with_a_graph_or_say_why_not(dtype: str, tmp_path: Path) -> None:
    """With recorded routes, too. In float32 torch has no grouped product and reads sizes on the host."""
    bench = make_bench("qwen3_vl_moe", tmp_path, device="cuda", dtype=dtype)
    requests = crowd(bench, PLAIN)
    expected = generate(NativeEngine(bench.policy, record=False), *requests)
    engine = NativeEngine(bench.policy, routes=True)
    found = generate(engine, *requests)
    assert bool(engine.counters.captured) != bool(engine.notes)
    if dtype == "bfloat16" and torch.cuda.get_device_capability() >= (9, 0):
        assert engine.counters.captured, engine.notes
    for request, one, other in zip(requests, found, expected, strict=True):
        assert dtype == "bfloat16" or one.segment.tokens == other.segment.tokens
        check(bench, [*request.context, one.segment], one.segment.routes, same=0.99 if dtype == "float32" else 0.85)


@pytest.mark.gpu
def test_graphs_see_new_weights_adapters_and_parameters_that_moved(tmp_path: Path) -> None:
    make_tiny("qwen2_5_vl", tmp_path, seed=1, initializer_range=0.15)
    lora = LoraSection(rank=4, alpha=8, groups=("language",))
    policy = load_policy(str(tmp_path), store=MediaStore(), device="cuda", lora=lora, seed=1)
    bench = Bench(policy, None)
    requests, engine = crowd(bench, PLAIN), NativeEngine(policy)
    assert policy.adapters is not None
    seen = []
    for change in ("none", "in place", "moved"):
        for parameter in policy.adapters.parameters.values():
            with torch.no_grad():
                if change == "in place":
                    parameter.normal_(generator=torch.Generator("cuda").manual_seed(3)).mul_(0.1)
                elif change == "moved":
                    parameter.data = parameter.data * 2
        policy.version += 1
        engine.update_weights(policy, policy.version)
        found = [response.segment.tokens for response in generate(engine, *requests)]
        expected = generate(NativeEngine(policy, record=False), *requests)
        assert found == [response.segment.tokens for response in expected], change
        seen.append(found)
    assert seen[0] != seen[1] != seen[2]
    assert not engine.notes


@pytest.mark.gpu
def test_engines_in_threads_capture_their_steps_side_by_side(tmp_path: Path) -> None:
    """Each on a stream of its own, which must not become the stream of another's capture: torch hands out 32 in turn."""
    bench = make_bench("qwen2_5_vl", tmp_path, device="cuda")
    requests = crowd(bench, PLAIN)
    expected = [response.segment for response in generate(NativeEngine(bench.policy), *requests)]

    def work(stream: torch.cuda.Stream) -> list[tuple[list[Segment], Sequence[str]]]:
        found = []
        with torch.cuda.stream(stream):
            for _ in range(3):
                engine = NativeEngine(bench.policy)
                found.append(([response.segment for response in generate(engine, *requests)], engine.notes))
            stream.synchronize()
        return found

    with ThreadPoolExecutor(3) as threads:
        for several in threads.map(work, [torch.cuda.Stream() for _ in range(3)]):
            for segments, notes in several:
                assert segments == expected
                assert not notes


@pytest.mark.gpu
def test_turns_on_the_gpu_reuse_what_was_kept(tmp_path: Path) -> None:
    bench = make_bench("qwen2_5_vl", tmp_path, device="cuda")
    policy = bench.policy
    played = []
    for engine in (NativeEngine(policy), NativeEngine(policy, record=False)):
        threads = [[policy.chat.render([user(bench.picture(i), "what colour? " * 9)])] for i in range(2) for _ in range(2)]
        for turn in range(3):
            requests = [ask(f"{i}", thread, SAMPLING, order=(i, turn), key=i + 10 * turn, name=f"{i}/{turn}")
                        for i, thread in enumerate(threads)]  # fmt: skip
            for thread, response in zip(threads, generate(engine, *requests), strict=True):
                thread.append(response.segment)
                thread.append(policy.chat.extend([user(bench.picture(7), "and now?")], after=response.segment))
        assert engine.counters.extensions == 8
        assert not engine.notes
        played.append([[segment.tokens for segment in thread] for thread in threads])
    assert played[0] == played[1]
