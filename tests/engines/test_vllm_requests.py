"""What the engine ``vllm`` does before vLLM sees anything: prompts, checks, names of weights, versions. Needs no vLLM."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sensorium.data.media_store import MediaStore
from sensorium.engines.native.response_rows import StopStrings
from sensorium.engines.options import check_vllm_options, completed_vllm
from sensorium.engines.options import check_writer_options as check_native_options
from sensorium.engines.protocol import Sampling
from sensorium.engines.vllm import recipe_checks
from sensorium.engines.vllm import vllm_engine as engine_module
from sensorium.engines.vllm.actor import Actor, _processed
from sensorium.engines.vllm.actor_process import ActorProcess, cause_in
from sensorium.engines.vllm.prompts import EnginePrompt, RequestSender, check_prompt, lay_out, tower_fields
from sensorium.engines.vllm.recipe_checks import check_arguments, installed_version, look_at, refuse_dtype, version_of
from sensorium.engines.vllm.vllm_engine import (
    Difference,
    OneKindAtATime,
    VllmEngine,
    backend_of,
    difference,
    make_probes,
    policy_logprobs,
    refuse_apart,
)
from sensorium.engines.vllm.weight_backend import BROADCAST, FILE, SHARED, ChangedWeights, layer_of, published
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.registry import wrong_options
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import EngineError, EngineLost, RecipeError, SpanMismatch
from tests.general_checkpoints import GENERAL, make_checkpoint

from ..models.clips import heard_clip
from .conftest import Bench


def prompt_of(bench: Bench, *content: Any) -> EnginePrompt:
    chat = bench.policy.chat
    return lay_out(chat.layout, chat.prepared.extent, chat.media_format, [chat.render([user(*content)])])


def check(bench: Bench, prompt: EnginePrompt, limit: int = 4096) -> None:
    check_prompt(prompt, "r", bench.policy.vocab_size, limit, bench.policy.chat.media_format)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_ranges_cover_the_expansion_and_masks_the_pads(family: str, benches: Callable[[str], Bench]) -> None:
    bench = benches(family)
    prompt = prompt_of(bench, "see", bench.picture(1), bench.clip(2), "what?")
    check(bench, prompt)
    pads = bench.policy.chat.media_format.placeholders
    picture, video = prompt.media
    assert picture.mask is None
    assert {prompt.ids[i] for i in range(picture.start, picture.start + picture.length)} == {pads["picture"]}
    taking = video.mask or [True] * video.length
    assert (family == "qwen3_vl") == (video.mask is not None), "timestamps stand between the frames of Qwen3-VL alone"
    assert [prompt.ids[video.start + i] == pads["video"] for i in range(video.length)] == taking
    for placed in prompt.media:
        given = bench.policy.chat.prepared.get([placed.media])[0]
        fields = tower_fields(placed, given, bench.policy.chat.media_format)
        assert fields.keys() >= ({"pixel_values"} if placed is picture else {"pixel_values_videos", "video_grid_thw"})
        with pytest.raises(SpanMismatch, match="patches of a grid"):
            tower_fields(placed, replace(given, patches_PC=given.patches_PC[1:]), bench.policy.chat.media_format)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_5_omni", "qwen3_omni_moe"])
def test_seconds_of_a_frame_give_our_positions_by_the_other_formula(family: str, benches: Callable[[str], Bench]) -> None:
    bench = benches(family)
    media_format: Any = bench.policy.chat.media_format
    per_second = media_format.vision.tokens_per_second if family == "qwen2_5_vl" else media_format.positions_a_second
    for frames, seconds in ((4, 4.0), (5, 3.3), (8, 2.9), (6, 0.7)):
        placed = prompt_of(bench, bench.clip(frames, frames=frames, seconds=seconds)).media[0]
        given = bench.policy.chat.prepared.get([placed.media])[0]
        held = tower_fields(placed, given, media_format)["second_per_grid_ts"].item()
        ids_T = torch.tensor(media_format.expand(given.extent).ids)
        steps = media_format.positions(ids_T, [given.extent])[0].unique().tolist()
        factor = held * per_second
        assert sorted({int(k * factor) for k in range(given.extent.grid[0])}) == steps


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_sound_is_its_mel_frames(family: str, benches: Callable[[str], Bench]) -> None:
    bench = benches(family)
    prompt = prompt_of(bench, "hear", bench.tone(1, 1.3), "what?")
    check(bench, prompt)
    (placed,) = prompt.media
    assert placed.mask is None
    given = bench.policy.chat.prepared.get([placed.media])[0]
    fields = tower_fields(placed, given, bench.policy.chat.media_format)
    assert torch.equal(fields["input_audio_features"], given.patches_PC.T)
    assert fields["audio_feature_lengths"].tolist() == [len(given.patches_PC)]
    with pytest.raises(SpanMismatch, match="mel frames"):
        tower_fields(placed, replace(given, patches_PC=given.patches_PC[1:]), bench.policy.chat.media_format)


def test_a_sound_of_qwen2_audio_is_padded_as_its_encoder_wants(benches: Callable[[str], Bench]) -> None:
    bench = benches("qwen2_audio")
    for seconds in (0.5, 1.3, 30.0):
        (placed,) = prompt_of(bench, "hear", bench.tone(1, seconds), "what?").media
        given = bench.policy.chat.prepared.get([placed.media])[0]
        fields = tower_fields(placed, given, bench.policy.chat.media_format)
        assert fields["input_features"].shape == (1, given.patches_PC.shape[1], 3000)
        assert int(fields["feature_attention_mask"].sum()) == given.extent.grid[0] == round(100 * seconds)
        with pytest.raises(SpanMismatch, match="mel frames"):
            tower_fields(placed, replace(given, patches_PC=given.patches_PC[1:]), bench.policy.chat.media_format)


class StandInProcessor:
    """vLLM's processor of a model that shows a picture by ``ids``."""

    info = SimpleNamespace(parse_mm_data=lambda shown: shown)

    def __init__(self, *ids: int) -> None:
        self._ids = list(ids)

    def __call__(self, prompt: list[int], shown: dict[str, list[Any]]) -> dict[str, Any]:
        assert prompt == [5]
        mask = torch.tensor([token == 7 for token in self._ids])
        place = SimpleNamespace(offset=0, length=len(self._ids), is_embed=mask)
        return {
            "prompt_token_ids": self._ids,
            "mm_placeholders": {"image": [place]},
            "mm_kwargs": {"image": [shown["image"][0].size]},
        }


def test_a_medium_that_vllm_writes_in_other_tokens_is_refused() -> None:
    ids, picture = [1, 2, 6, 7, 8, 7, 9, 3], torch.zeros(4, 3, 3, dtype=torch.uint8)
    medium = {"modality": "image", "placeholder": 5, "start": 2, "length": 5, "mask": [False, True, False, True, False]}
    assert _processed(StandInProcessor(0, 6, 7, 8, 7, 9), medium, ids, picture) == (3, 4), "text at the ends may differ"
    for other in ([6, 7, 7, 9], [6, 7, 8, 8, 7, 9], [6, 7, 4, 7, 9]):
        with pytest.raises(EngineError, match="other tokens"):
            _processed(StandInProcessor(*other), medium, ids, picture)


def test_a_model_that_vllm_does_not_list_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = make_checkpoint("granite", tmp_path / "granite"), version_of("0.32.0", on_cpu=True)
    for module in (recipe_checks, engine_module):
        monkeypatch.setattr(module, "installed_version", lambda: found)
    monkeypatch.setattr(recipe_checks, "_source", lambda *parts: tmp_path / parts[-1])
    model = {"path": str(folder)}
    list(look_at(recipe_of(model=model)))  # without its source nothing can be looked up: vLLM will say it
    (tmp_path / "registry.py").write_text(
        '_TEXT_GENERATION_MODELS = {"Olmo2ForCausalLM": ("olmo2", "Olmo2ForCausalLM")}\n'
        '_EMBEDDING_MODELS = {"GraniteForCausalLM": ("granite", "GraniteForCausalLM")}\n'
    )
    with pytest.raises(RecipeError, match="GraniteForCausalLM"):
        list(look_at(recipe_of(model=model)))
    with pytest.raises(RecipeError, match="GraniteForCausalLM"):
        VllmEngine(load_policy(str(folder), store=MediaStore(), device="cpu"))
    (tmp_path / "registry.py").write_text(
        '_MULTIMODAL_MODELS = {"GraniteForCausalLM": ("granite", "GraniteForCausalLM")}\n'
    )
    list(look_at(recipe_of(model=model)))


def test_a_video_with_its_sound_is_refused(benches: Callable[[str], Bench]) -> None:
    bench = benches("qwen2_5_omni")
    with pytest.raises(EngineError, match="with its sound"):
        prompt_of(bench, heard_clip(bench.policy.chat.store, 1), "what?")


def test_a_request_that_would_end_vllm_is_refused(benches: Callable[[str], Bench]) -> None:
    bench = benches("qwen3_vl")
    prompt = prompt_of(bench, bench.picture(1), "what?")
    (placed,) = prompt.media
    check(bench, prompt)
    with pytest.raises(EngineError, match="raise the engine's max_context"):
        check(bench, prompt, len(prompt.ids))
    with pytest.raises(EngineError, match="no id of a vocabulary"):
        check(bench, replace(prompt, ids=(*prompt.ids, bench.policy.vocab_size)))
    with pytest.raises(EngineError, match="no id of a vocabulary"):
        check(bench, replace(prompt, ids=(*prompt.ids, 1.0)))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="placeholder without a medium"):
        check(bench, replace(prompt, media=()))
    with pytest.raises(EngineError, match="is empty"):
        check(bench, EnginePrompt((), ()))
    with pytest.raises(SpanMismatch, match="placeholders"):
        check(bench, replace(prompt, media=(replace(placed, start=placed.start - 1, runs=((placed.start - 1, 1),)),)))
    with pytest.raises(SpanMismatch, match="overlap"):
        check(bench, replace(prompt, media=(placed, placed)))


def test_weights_are_pushed_under_their_published_names() -> None:
    embed, experts = torch.zeros(4, 2), torch.arange(12.0).reshape(1, 4, 3)
    tensors: dict[str, Tensor] = {
        "model.language_model.embed_tokens.weight": embed,
        "model.language_model.layers.0.self_attn.q_proj.base_layer.weight": torch.ones(2, 2),
        "model.language_model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(1, 2),
        "model.language_model.layers.0.mlp.experts.gate_up_proj": experts,
        "model.language_model.rotary_emb.inv_freq": torch.ones(3),
    }
    parameters = [name for name in tensors if "inv_freq" not in name]
    tied = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    sent = published(tensors, parameters, tied=tied, turned=True)
    assert sent.aliases == {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    assert sent.tensors.keys() == {
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.0.self_attn.q_proj.weight",
        "model.language_model.layers.0.mlp.experts.gate_up_proj",
    }
    assert torch.equal(sent.tensors["model.language_model.layers.0.mlp.experts.gate_up_proj"], experts.transpose(1, 2))
    assert published(tensors, parameters).aliases == {}
    assert published(tensors, parameters[1:], tied=tied).aliases == {}, "the embeddings have not changed"
    thinker = published(tensors, parameters, tied=tied, under="thinker.")
    assert thinker.aliases == {"thinker.lm_head.weight": "thinker.model.language_model.embed_tokens.weight"}
    assert thinker.tensors.keys() == {f"thinker.{name}" for name in sent.tensors}
    assert torch.equal(thinker.tensors["thinker.model.language_model.layers.0.mlp.experts.gate_up_proj"], experts)
    with pytest.raises(EngineError, match="lack 1 parameters of the model, lm_head"):
        published(tensors, [*parameters, "lm_head.weight"])


@pytest.mark.parametrize("name", ["gemma3", "qwen2_audio", "qwen3_next"])
def test_where_transformers_renames_weights_are_pushed_as_it_saves_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "installed_version", lambda: version_of("0.32.0", on_cpu=True))
    folder = make_tiny(name, tmp_path) if name in FAMILIES else make_checkpoint(name, tmp_path)
    engine = VllmEngine(load_policy(str(folder), store=MediaStore(), device="cpu"))
    tensors = engine._policy.tensors()
    sent = published(tensors, engine._saved, tied=engine._tied, model=engine._renamed_model)
    every = sent.tensors | {name: sent.tensors[of] for name, of in sent.aliases.items()}
    stored = load_file(folder / "model.safetensors")
    assert every.keys() - stored.keys() == ({"language_model.lm_head.weight"} if name == "gemma3" else set())
    for own, tensor in stored.items():
        assert torch.equal(tensor, every[own]), own


def test_a_push_carries_whole_layers_of_what_may_have_changed() -> None:
    layers = {
        f"layers.{i}.{part}.weight": nn.Parameter(torch.ones(2), requires_grad=i == 1) for i in range(3) for part in "qk"
    }
    changes = ChangedWeights()
    assert changes.select(layers, list(layers)) == {*layers}, "all of it at first"
    changes.note(layers, list(layers))
    assert changes.select(layers, list(layers)) == {"layers.1.q.weight", "layers.1.k.weight"}, "what learns, always"
    with torch.no_grad():
        layers["layers.2.q.weight"].add_(1)
    assert {layer_of(name) for name in changes.select(layers, list(layers))} == {"layers.1", "layers.2"}
    changes.forget()
    assert changes.select(layers, list(layers)) == {*layers}


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", "qwen2_5_vl", "qwen3", "qwen2_5_omni", "qwen3_omni_moe", "qwen3_5", "qwen2_audio", "idefics3", "granite"],
)
def test_probes_tell_right_log_probs_from_wrong_ones(family: str, benches: Callable[[str], Bench], tmp_path: Path) -> None:
    if family in GENERAL:
        policy = load_policy(str(make_checkpoint(family, tmp_path)), store=MediaStore(), device="cpu")
    else:
        policy = benches(family).policy
    probes = make_probes(policy)
    assert [probe.modality for probe in probes] == ["text", *policy.chat.media_format.placeholders]
    for probe in probes:
        check_prompt(probe.prompt, "probe", policy.vocab_size, 512, policy.chat.media_format)
        written = [token for token in range(policy.vocab_size) if token not in policy.chat.forbidden_ids][:3]
        given_T, written_N = policy_logprobs(policy, probe, written)
        answer = {"tokens": written, "logprobs": written_N.tolist(), "scores": [None, *given_T.tolist()]}
        refuse_apart({probe.modality: difference(policy, probe, answer)}, 1e-6, "at start")
        refuse_apart({probe.modality: difference(policy, probe, answer | {"scores": None})}, 1e-6, "at start")
        answer["logprobs"] = (written_N - 8).tolist()
        with pytest.raises(EngineLost, match=rf"{probe.modality} probe.*at start.*parity_bound"):
            refuse_apart({probe.modality: difference(policy, probe, answer)}, 1e-3, "at start")
    with pytest.raises(EngineLost, match="text"):
        refuse_apart({"text": Difference(float("nan"), float("nan"))}, 1.0, "at start")


def test_versions_differ_by_a_small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = version_of("0.25.1", on_cpu=False), version_of("0.32.0+cpu", on_cpu=False)
    assert (old.tells_weight_versions, old.switches) == (False, ())
    assert (new.tells_weight_versions, new.on_cpu) == (True, True)
    assert dict(new.switches) == {"mm_device_do_normalize": False}, "patches are normalised once"
    assert len(old.sentences()) == 2
    with pytest.raises(EngineError, match="too old"):
        version_of("0.11.2", on_cpu=False)

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(recipe_checks, "version", absent)
    with pytest.raises(EngineError, match=r"not installed: pip install 'sensorium\[vllm\]'"):
        installed_version()


def test_options_that_cannot_be_are_refused() -> None:
    check_vllm_options({"max_rows": 4, "engine_args": {"swap_space": 0}})
    wrong = {"max_rows": 0, "gpu_share": 1.5, "push": "carrier pigeon", "engine_args": {"logprobs_mode": "raw_logprobs"}}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            check_vllm_options({name: value})
    with pytest.raises(ValueError, match="engine_args"):
        check_vllm_options({"engine_args": {1: 2}})
    for name in ("parity_bound", "start_s", "reply_s", "gpu_share"):  # nan would pass every parity, 1e30 overflow a clock
        for number in (float("nan"), float("inf"), 1e30):
            with pytest.raises(ValueError, match=name):
                check_vllm_options({name: number})
    for number in (float("nan"), 1e30):
        with pytest.raises(ValueError, match="patience_s"):
            check_native_options({"patience_s": number})
    for option, value in (("eager", "no"), ("eager", [1]), ("max_context", 64.5), ("parity_bound", "0.1")):
        assert wrong_options("engine", "vllm", {option: value})[0] == option, (option, value)
        assert wrong_options("engine", "vllm", {option: None}) == ("", "")


@pytest.fixture
def have_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_checks, "installed_version", lambda: version_of("0.32.0", on_cpu=True))


EAGER = {"engine": "vllm", "schedule": "eager"}
ACROSS = {"schedule": {"name": "asynchronous"}, "algorithm": {"correction": {"weights": "token"}}}


def recipe_of(**sections: Any) -> Recipe:
    given = {
        "name": "r",
        "steps": 1,
        "model": {"path": "tiny:qwen3_vl"},
        "tasks": {"train": [{"source": "shapes"}]},
        "rollout": EAGER,
    }
    return Recipe.model_validate({**given, "rewards": {"terms": [{"name": "exact"}]}, **sections})


@pytest.mark.usefixtures("have_vllm")
@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"rollout": {"engine": "vllm", "schedule": "lockstep"}}, "schedule: eager"),
        ({"rollout": {**EAGER, "top_p": 0.9}}, "top_p and rollout.top_k"),
        ({"rollout": {**EAGER, "engine": {"name": "vllm", "options": {"push": "ipc"}}}}, "on a CPU use file"),
        ({"rollout": {**EAGER, "engine": {"name": "vllm", "options": {"restarts": -1}}}}, "restarts is -1"),
        ({"model": {"path": "tiny:internvl"}}, "family 'internvl'"),
        ({"model": {"path": "tiny:qwen3_5", "dtype": "float32"}}, "model.dtype: bfloat16"),
        ({"model": {"path": "tiny:qwen3_5", "dtype": "bfloat16", "lora": {"rank": 4}}}, "take no adapters"),
        ({"model": {"path": "tiny:qwen2_audio", "lora": {"rank": 4}}}, "takes no adapters"),
        ({"model": {"path": "tiny:qwen2_5_omni", "lora": {"rank": 4, "groups": ["vision"]}}}, "names 'vision'"),
        ({"model": {"path": "tiny:qwen3_vl", "lora": {"rank": 4, "groups": ["head"]}}}, "names 'head'"),
        ({"model": {"path": "tiny:qwen3_vl", "lora": {"rank": 513}}}, "rank 512 at most"),
        (
            {"rollout": {**EAGER, "engine": {"name": "vllm", "options": {"restarts": 1}}}, **ACROSS},
            "in the middle of changing",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_at_the_dry_run(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        list(look_at(recipe_of(**sections)))


@pytest.mark.usefixtures("have_vllm")
def test_what_is_different_with_vllm_is_told_at_the_dry_run() -> None:
    lora = {"path": "tiny:qwen3_vl", "lora": {"rank": 4, "groups": ["language", "vision"]}}
    told = " ".join(look_at(recipe_of(model=lora)))
    assert "vLLM 0.32.0 for CPUs" in told
    assert "does not repeat bit for bit" in told
    assert "enable_tower_connector_lora" in told
    assert "whole blocks" in " ".join(look_at(recipe_of(model={"path": "tiny:qwen3_5", "dtype": "bfloat16"})))


ARGUMENTS = """
class EngineArgs:
    seed: int = ModelConfig.seed
    enforce_eager: bool = False
    quantization: QuantizationMethods | str | None = None
    limit_mm_per_prompt: dict[str, int] = field()

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool | None = False

class Other:
    no_argument: int = 3
"""


def test_arguments_are_held_against_those_that_vllm_declares(tmp_path: Path) -> None:
    source = tmp_path / "arg_utils.py"
    source.write_text(ARGUMENTS)
    fitting = {"seed": None, "enforce_eager": True, "quantization": object(), "limit_mm_per_prompt": {"image": 1}}
    assert check_arguments({**fitting, "enable_log_requests": False}, source) == ""
    wrong = {"enforce_eagr": "did you mean 'enforce_eager'", "no_argument": "no argument", "seed": "type of it is: int"}
    for name, told in wrong.items():
        with pytest.raises(ValueError, match=told):
            check_arguments({name: True}, source)
    source.write_text("")
    assert "were not checked" in check_arguments({"seed": 1}, source)
    assert "were not checked" in check_arguments({"seed": 1}, tmp_path / "none.py")


@pytest.mark.usefixtures("have_vllm")
def test_the_dry_run_checks_arguments_of_vllm_or_says_that_it_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"name": "vllm", "options": {"engine_args": {"enforce_eagr": True}}}
    recipe = recipe_of(rollout={"engine": engine, "schedule": "eager"})
    monkeypatch.setattr(recipe_checks, "find_spec", lambda name: None)
    assert "engine_args were not checked" in " ".join(look_at(recipe))
    monkeypatch.setattr(recipe_checks, "argument_types", lambda source: {"enforce_eager": "bool"})
    monkeypatch.setattr(recipe_checks, "_source", lambda *_: Path(__file__))
    with pytest.raises(RecipeError, match=r"engine_args: vLLM has no argument 'enforce_eagr'; .* \(vLLM 0\.32\.0 is inst"):
        list(look_at(recipe))


def test_bfloat16_is_refused_where_the_cpu_would_be_killed_by_it() -> None:
    for machine, features in (("aarch64", {"fp", "asimd", "bf16"}), ("x86_64", {"avx2"})):
        refuse_dtype("bfloat16", on_cpu=True, features=frozenset(features), machine=machine)
    refuse_dtype("bfloat16", on_cpu=False, features=frozenset(), machine="aarch64")
    with pytest.raises(RecipeError, match="SIGILL"):
        refuse_dtype("bfloat16", on_cpu=True, features=frozenset(["fp"]), machine="aarch64")


def test_the_cause_of_a_death_is_found_in_the_log() -> None:
    log = """(Worker pid=7) ERROR [multiproc.py:1] AttributeError: 'Config' object has no attribute 'norm_topk_prob'
(EngineCore pid=6) ERROR [core.py:2] Exception: WorkerProc initialization failed due to an exception.
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
RuntimeError: Engine core initialization failed. See root cause above."""
    assert cause_in(log) == "AttributeError: 'Config' object has no attribute 'norm_topk_prob'"
    assert cause_in("INFO all is well") == ""


def test_a_tower_with_adapters_is_shown_one_kind_at_a_time() -> None:
    gate, shown = OneKindAtATime(), []

    async def show(kind: Any, turns: int) -> None:
        async with gate.showing(kind):
            shown.append(f"{kind} in")
            for _ in range(turns):
                await asyncio.sleep(0)
            shown.append(f"{kind} out")

    async def everyone() -> None:
        first = asyncio.ensure_future(show("picture", 20))
        await asyncio.sleep(0)
        dropped = asyncio.ensure_future(show("video", 1))
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.gather(show("video", 3), show("picture", 5), show(None, 0), show("video", 9), first)

    asyncio.run(everyone())
    assert shown.index("None out") < shown.index("picture out"), "text alone waits for nothing"
    assert [one.split()[0] for one in shown if "None" not in one] == ["picture"] * 4 + ["video"] * 4


def test_how_weights_get_there_follows_from_where_learner_and_engine_are() -> None:
    options = completed_vllm({})
    assert backend_of(options, "cpu", own_device=False) == FILE
    assert backend_of(options, "cuda", own_device=False) == SHARED
    two = options | {"tensor_parallel": 2}
    assert backend_of(two, "cuda", own_device=False) == FILE, "one of its GPUs is the learner's too"
    assert backend_of(options, "cuda", own_device=True) == BROADCAST
    assert backend_of(options | {"push": "broadcast"}, "cpu", own_device=False) == BROADCAST


class BrokenActor:
    """An actor whose push fails; it remembers why it was ended."""

    lost: EngineLost | None = None

    def ask(self, message: Any, limit_s: float) -> Any:
        raise EngineError("no room")

    def fail(self, why: EngineLost) -> None:
        self.lost = why


def test_an_engine_whose_push_failed_is_lost(benches: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be left paused, and requests would wait for ever."""
    monkeypatch.setattr(engine_module, "installed_version", lambda: version_of("0.32.0", on_cpu=True))
    policy, actor = benches("qwen3_vl").policy, BrokenActor()
    engine = engine_module.VllmEngine(policy)
    assert not engine.capabilities.deterministic
    engine._sender = RequestSender(policy.chat, version_of("0.32.0", on_cpu=True), actor, 64)  # type: ignore[arg-type]
    with pytest.raises(EngineLost, match="push of weights of version 3 into vLLM failed: no room"):
        engine.update_weights(policy, 3)
    assert actor.lost is not None
    monkeypatch.setattr(engine, "_actor", actor)
    monkeypatch.setattr(engine, "restart", lambda: setattr(engine, "_actor", "another"))
    monkeypatch.setattr(engine, "_restarts_left", 1)
    with pytest.raises(EngineLost, match="of version 4"):  # this one fails as well: so it was pushed to
        engine.update_weights(policy, 4)
    assert engine._actor == "another"


class SilentHost:
    """Starts a process that takes every message and never answers."""

    pid, alive = 1, True

    def start(self, *_: object, **__: object) -> tuple["SilentHost", list[socket.socket]]:
        self.theirs, ours = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        return self, list(ours)

    def end(self, after_s: float = 0.0) -> None:
        for one in self.theirs:
            one.close()

    def ending(self) -> str:
        return "was killed"

    def log_text(self) -> str:
        return ""


def test_who_waits_for_vllm_to_start_is_told_when_it_is_closed() -> None:
    host = SilentHost()
    actor = ActorProcess(host, Path("vllm.log"), {})  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(actor.ask, {"do": "start"}, 600.0)
        assert host.theirs[0].recv(8), "it was asked"
        actor.close()
        with pytest.raises(EngineLost, match="closed before it answered"):
            start.result(600)


def test_who_waits_for_a_response_of_a_vllm_that_hangs_is_told() -> None:
    """Its core is stopped: nothing is answered, and nothing ends."""
    version = version_of("0.32.0", on_cpu=True)
    actor = ActorProcess(SilentHost(), Path("vllm.log"), {})  # type: ignore[arg-type]
    sender = RequestSender(None, version, actor, 64, look_s=0.02)  # type: ignore[arg-type]

    async def both() -> list[Any]:
        asked = [sender.sample(EnginePrompt((1,), ()), {}, Sampling()) for _ in range(2)]
        return await asyncio.gather(*asked, return_exceptions=True)

    for error in asyncio.run(both()):
        assert isinstance(error, EngineLost)
        assert "did not answer 'look' within 0.02 s and was ended" in str(error)


class Heard:
    """Where an actor's answers go."""

    def __init__(self) -> None:
        self.message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def send(self, message: Any) -> None:
        self.message.set_result(message)


class DeadCore:
    """vLLM's front end when its core was killed: it knows, and what it was asked before is never answered."""

    errored, dead_error = True, RuntimeError("EngineDeadError")

    async def reset_encoder_cache(self) -> None:
        await asyncio.Event().wait()


def test_an_answer_that_died_with_vllms_core_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.engines.vllm.actor.LOOK_S", 0.01)

    async def asked() -> Any:
        actor = Actor(heard := Heard())  # type: ignore[arg-type]
        actor._engine = DeadCore()
        actor.take({"id": 7, "do": "reset"})
        return await asyncio.wait_for(heard.message, 60)

    answer = asyncio.run(asked())
    assert answer["id"] == 7
    assert answer["kind"] == "EngineLost"
    assert "vLLM ended in the middle of its work" in answer["error"]


def test_a_response_that_a_stop_string_ends_says_which_weights_wrote_what(benches: Callable[[str], Bench]) -> None:
    chat = benches("qwen3").policy.chat
    a, b = (chat.respond(letter, "").tokens[0] for letter in "ab")

    class Parts:
        """Sends a token of each version, and never ends."""

        def submit(self, message: Any, part: Any) -> tuple[int, Future[Any]]:
            for token, version in ((a, 3), (a, 3), (b, 4), (a, 5)):
                part({"tokens": [token], "logprobs": [-1.0], "version": version})
            return 0, Future()

        def tell(self, message: Any) -> None:
            assert message["do"] == "cancel"

    sender = RequestSender(chat, version_of("0.32.0", on_cpu=True), Parts(), 64)  # type: ignore[arg-type]
    answer = asyncio.run(sender.sample(EnginePrompt((1,), ()), {}, Sampling(), StopStrings(("b",))))
    assert answer["tokens"] == [a, a, b]
    assert answer["versions"] == [[3, 0, 2], [4, 2, 3]]
