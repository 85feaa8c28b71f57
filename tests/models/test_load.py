"""A model path becomes a policy, or one clear sentence."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniThinkerForConditionalGeneration

from sensorium.data.media_store import MediaStore
from sensorium.models.attention import IMPLEMENTATION
from sensorium.models.load import find_device, load_policy
from sensorium.models.load_chat import family_of
from sensorium.models.published_layout import common_name
from sensorium.models.tiny import make_tiny
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.registry import register, table
from sensorium.recipe.schema import LoraSection
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("qwen2", tmp_path / "model")


def load(path: str | Path, **options: str) -> object:
    return load_policy(str(path), store=MediaStore(), device="cpu", **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_of_each_family_is_made_and_its_family_found(family: str) -> None:
    policy = load_policy(f"tiny:{family}", store=MediaStore(), device="cpu")
    assert policy.family == family
    kind = FAMILIES[family]
    seen = {"picture", "video"} if kind.vision else set()
    assert policy.chat.modalities == {"text"} | seen | ({"sound"} if kind.audio else set())
    assert policy.dtype == torch.float32
    assert policy.device == torch.device("cpu")
    assert policy.version == 0
    assert policy.chat.render([user("Hello")]).tokens


def test_the_thinker_is_taken_out_of_a_whole_omni_checkpoint(tmp_path: Path) -> None:
    thinker = make_tiny("qwen2_5_omni", tmp_path / "thinker", tie_word_embeddings=False)
    whole = tmp_path / "whole"
    shutil.copytree(thinker, whole)
    config = json.loads((thinker / "config.json").read_text())
    Qwen2_5OmniConfig(thinker_config=config).save_pretrained(whole)
    weights = load_file(thinker / "model.safetensors")
    named = {f"thinker.{name}": tensor for name, tensor in weights.items()}
    save_file(named | {"talker.codec_head.weight": torch.zeros(2, 2)}, whole / "model.safetensors", {"format": "pt"})
    policy = load_policy(str(whole), store=MediaStore(), device="cpu")
    assert policy.family == "qwen2_5_omni"
    assert type(policy.model) is Qwen2_5OmniThinkerForConditionalGeneration
    weights = {common_name(name): tensor for name, tensor in weights.items()}  # files have the names of transformers 5.15
    assert all(torch.equal(tensor, weights[common_name(name)]) for name, tensor in policy.model.state_dict().items())
    assert (
        policy.model.config._attn_implementation != policy.model.config.text_config._attn_implementation == IMPLEMENTATION
    )

    policy.save(tmp_path / "saved")
    again = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(tensor, weights[common_name(name)]) for name, tensor in again.state_dict().items())
    assert load_policy(str(tmp_path / "saved"), store=MediaStore(), device="cpu").chat.modalities == policy.chat.modalities


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/no/such/folder", "there is no such folder"),
        ("./missing", "there is no such folder"),
        ("package:shapez", "no such shipped model"),
        ("tiny:qwen2_5_v", "did you mean 'qwen2_5_vl'"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(path: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        load(path)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


def test_a_hub_id_goes_to_the_hub_and_its_failure_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"model\.path 'nobody/nothing': it is no folder here.*HF_HUB_OFFLINE is set"
    ) as refused:
        load("nobody/nothing")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("config", ["Gemma3Config", "Idefics3Config", "Gemma2Config", "GraniteConfig"])
def test_a_family_without_an_adapter_runs_on_the_general_path(config: str) -> None:
    made = getattr(transformers, config)()
    assert family_of(made.model_type, config=made) == "general"


@pytest.mark.parametrize(
    ("config", "says"), [("MllamaConfig", "cross-attention"), ("T5Config", "encoder"), ("ViTConfig", "no class")]
)
def test_what_not_even_the_general_path_can_run_is_refused_by_its_config(config: str, says: str) -> None:
    made = getattr(transformers, config)()
    with pytest.raises(ModelError, match=f"'{made.model_type}'.*{says}"):
        family_of(made.model_type, config=made)


def test_a_family_of_ones_own_is_found_by_name(folder: Path) -> None:
    register("family", "my_family", "sensorium.models.families.text:TextModel")
    try:
        assert load(folder, family="my_family").family == "my_family"  # type: ignore[attr-defined]
    finally:
        del table("family")["my_family"]


def test_a_checkpoint_that_lacks_weights_is_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights .*: model\.norm\.weight"):
        load(folder)


def test_a_checkpoint_without_a_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        load(folder)


def test_sliding_windows_are_refused_rather_than_ignored(tmp_path: Path) -> None:
    make_tiny("qwen2", tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ModelError, match="sliding-window"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("qwen2", {"attention_dropout": 0.1}, r"attention_dropout \(config\.json\) has dropout 0\.1.*set it to 0"),
        ("qwen3_vl", {"text_config": {"attention_dropout": 0.05}}, r"attention_dropout \(config\.json, text_config\)"),
        ("qwen2_5_vl", {"vision_config": {"hidden_dropout": 0.5}}, r"hidden_dropout \(config\.json, vision_config\)"),
    ],
)
def test_dropout_in_a_config_is_refused(family: str, changes: dict, says: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=says):
        load(tmp_path)


def test_dropout_in_a_module_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen2ForCausalLM

    build = Qwen2ForCausalLM.__init__

    def with_dropout(self: Qwen2ForCausalLM, config: object) -> None:
        build(self, config)  # type: ignore[arg-type]
        self.model.late = torch.nn.Dropout(0.2)

    monkeypatch.setattr(Qwen2ForCausalLM, "__init__", with_dropout)
    with pytest.raises(ModelError, match=r"module model\.late has dropout 0\.2"):
        load(folder)


def test_unknown_dtypes_and_devices_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="did you mean 'bfloat16'"):
        load(folder, dtype="bfloat")
    with pytest.raises(ModelError, match="unknown device 'gpu'"):
        find_device("gpu")


def test_models_are_loaded_by_several_threads_at_once(folder: Path) -> None:
    start = threading.Barrier(4, timeout=60)

    def work(_: int) -> object:
        start.wait()
        return load(folder)

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(work, range(4)))) == 4
    load(folder)


def test_a_checkpoint_of_several_files_is_the_same_model_adapters_added_in(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(str(folder), store=MediaStore(), device="cpu", lora=LoraSection(rank=2))
    assert policy.adapters is not None
    with torch.no_grad():
        for parameter in policy.adapters.parameters.values():
            parameter.add_(0.1)
    policy.save(tmp_path / "one")
    monkeypatch.setattr("sensorium.models.policy.SHARD_BYTES", 200_000)
    policy.save(tmp_path / "several")
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 1
    one, several = (load_policy(str(tmp_path / n), store=MediaStore(), device="cpu").tensors() for n in ("one", "several"))
    assert one.keys() == several.keys()
    assert all(torch.equal(tensor, several[name]) for name, tensor in one.items())


def test_weights_without_a_place_are_refused_unless_they_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"value_head.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights of the checkpoint have no place .*: value_head\.weight"):
        load(folder)
    load_policy(str(folder), store=MediaStore(), device="cpu", unused_weights=("value_head.",))


def test_a_config_with_fewer_layers_than_the_weights_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}))
    with pytest.raises(
        ModelError, match=r"12 weights .* have no place .* fewer layers .*: model\.layers\.1 \(12 weights\)\. Use"
    ):
        load(folder)
