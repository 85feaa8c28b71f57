"""A checkpoint that cannot be used is one paragraph that names it, the cause and the way out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sensorium.data.media_store import MediaStore
from sensorium.models.checkpoint_path import find_checkpoint
from sensorium.models.load import check_checkpoint, find_device, load_policy
from sensorium.models.tiny import make_tiny
from sensorium.models.weight_files import INDEX
from sensorium.recipe.model_shape import read_shape
from sensorium.recipe.schema import ModelSection
from sensorium.vocabulary.errors import ModelError, RecipeError
from tests.families import make_published


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2_5_vl", tmp_path_factory.mktemp("whole"))


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def load(model: Path) -> object:
    return load_policy(str(model), store=MediaStore(), device="cpu")


def refused(model: Path) -> str:
    with pytest.raises(ModelError) as error:
        load(model)
    assert str(model) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("left", [0, 4, 100, 0.5])
def test_a_weight_file_cut_short_is_said_to_be_so(left: float, model: Path) -> None:
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: int(left if left != 0.5 else len(data) // 2)])
    assert "cut short or damaged" in refused(model)


@pytest.mark.parametrize("left", [0, 4, 100])
def test_the_plan_of_a_damaged_checkpoint_is_refused_and_not_a_traceback(left: int, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(RecipeError, match=r"weight file there is damaged.*download the checkpoint again"):
        read_shape(str(model))


def test_a_header_that_claims_to_be_huge_is_not_read(model: Path) -> None:
    (model / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(RecipeError, match=r"header of model\.safetensors"):
        read_shape(str(model))


def test_weights_of_other_shapes_than_the_config_says_are_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["intermediate_size"] *= 2
    (model / "config.json").write_text(json.dumps(config))
    said = refused(model)
    assert "weights and config.json disagree on 6 shapes" in said
    assert "[128, 256] in the weights and [128, 512] by the config" in said


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors"])
def test_a_quantized_checkpoint_is_refused_with_what_to_use(method: str, model: Path) -> None:
    change(model / "config.json", quantization_config={"quant_method": method, "bits": 4})
    said = refused(model)
    assert f"is quantized ({method}), which is not supported" in said
    assert "model.lora" in said


def test_fp8_weights_are_refused_unless_plain_numbers_are_asked_for(model: Path) -> None:
    """Blocks of 128 x 128 with a scale each, as Qwen's FP8 checkpoints have them."""
    weights, before = {}, load_file(model / "model.safetensors")
    for name, tensor in before.items():
        weights[name] = tensor
        if name.startswith("model.layers.") and name.endswith("proj.weight"):
            blocks = tensor.unflatten(0, (-1, min(128, len(tensor)))).unflatten(2, (-1, 128))
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            weights[name] = (blocks / scales).view_as(tensor).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    change(model / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert "is quantized (fp8), which is not supported" in (said := refused(model))
    assert "set model.dequantize: true" in said
    with pytest.raises(ModelError, match=r"is quantized \(fp8\)"):
        check_checkpoint(ModelSection(path=str(model)))
    assert check_checkpoint(ModelSection(path=str(model), dequantize=True)) == []
    policy = load_policy(str(model), store=MediaStore(), device="cpu", dequantize=True)
    policy.save(model / "saved")
    assert "quantization_config" not in json.loads((model / "saved" / "config.json").read_text())
    after = load_file(model / "saved" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == torch.float32
        rounding = 0.07 if f"{name}_scale_inv" in weights else 0.0
        assert ((after[name] - tensor).abs() <= rounding * tensor.abs().max()).all(), name
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(after[name], weights[name].float() * weights[f"{name}_scale_inv"])


def test_a_broken_config_is_named(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "cannot load the checkpoint" in refused(model)
    with pytest.raises(RecipeError, match=r"config\.json or a weight file there is damaged"):
        read_shape(str(model))


def test_a_chat_template_in_the_tokenizers_config_alone_is_taken(model: Path) -> None:
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    change(model / "tokenizer_config.json", chat_template=template)
    processor = json.loads((model / "processor_config.json").read_text())
    assert "chat_template" not in processor
    load(model)
    change(model / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ModelError, match="no chat template"):
        load(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_refused_before_weights_are_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ModelError, match=r"this torch .* was built without CUDA.*'auto' or 'cpu'.*docs/start/gpu\.md"):
        find_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ModelError, match=r"model\.device is 'cuda', but torch finds no CUDA device.*'auto' or 'cpu'"):
        find_device("cuda")
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no CUDA device"):
        load_policy(str(model), store=MediaStore(), device="cuda")


def test_a_path_below_a_folder_that_is_here_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "something").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"'runs/somethink': there is no such folder; did you mean 'runs/something'\?"):
        find_checkpoint("runs/somethink")


def test_a_checkpoint_that_brings_code_is_refused_and_nobody_is_asked(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    (model / "own.py").write_text("raise SystemExit('it ran')")
    change(model / "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})
    assert "Python code" in refused(model)
    assert "[y/N]" not in "".join(capfd.readouterr())


def test_weights_that_are_no_safetensors_are_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(2)}, model / "pytorch_model.bin")
    assert "no weights as safetensors" in refused(model)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    source = make_published("Qwen2.5-VL-7B", tmp_path)
    shards = sorted(source.glob("model-*.safetensors"))
    shards[1].unlink()
    said = refused(source)
    assert f"lacks 1 of {len(shards)} weight files: {shards[1].name}" in said


def test_a_shard_cut_short_is_named(tmp_path: Path) -> None:
    source = make_published("Qwen2.5-VL-7B", tmp_path)
    shard = sorted(source.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-2])
    assert f"{shard.name}' is cut short or damaged" in refused(source)


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    model = make_published("Qwen3-0.6B", tmp_path)
    index = model / INDEX
    index.write_text(index.read_text().replace("model-00001", "../published/model-00001"))
    assert "names '../published/model-00001-of-" in refused(model)


def test_a_header_whose_places_do_not_fit_is_refused(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"F64"', 1))
    assert "its header gives " in refused(model)


def test_a_model_larger_than_memory_says_so_before_it_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.models.load.free_memory", lambda: 1000)
    assert "GiB are free in the memory of this machine; training takes more" in refused(model)


def test_a_long_load_is_announced(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sensorium.models.load.LONG_LOAD", 1000)
    load(model)
    assert f"GiB of weights from {model}" in capsys.readouterr().err
