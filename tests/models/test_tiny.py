"""Tiny checkpoints are real ones: they load with the library's own classes, offline, and behave like their family."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import sensorium.models.torchvision_fix  # noqa: F401
from sensorium.data.media_store import MediaStore
from sensorium.models.checkpoint_path import find_checkpoint
from sensorium.models.load_chat import load_chat_processor
from sensorium.models.tiny import TAGS, make_tiny, special_tokens
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.model_shape import read_shape
from sensorium.vocabulary.errors import ModelError, RecipeError
from tests.families import FAMILY_ROWS, SEEING, SENSING, stock_class


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_tiny(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.mark.parametrize("family", SEEING)
def test_a_picture_and_a_question_go_through_the_stock_classes(folders: dict[str, Path], family: str) -> None:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folders[family])
    model = AutoModelForImageTextToText.from_pretrained(folders[family])
    assert model.config.model_type.removesuffix("_thinker") == family
    picture = {"type": "image", "image": Image.new("RGB", (84, 84), "red")}
    messages = [{"role": "user", "content": [picture, {"type": "text", "text": "What colour is it?"}]}]
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
    )
    assert int((inputs.input_ids == model.config.image_token_id).sum()) == FAMILY_ROWS[family].picture_tokens
    logits = model(**inputs).logits.detach()
    assert logits.shape[-1] >= len(processor.tokenizer)
    assert logits.isfinite().all()
    assert float(logits.std()) > 0.1


@pytest.mark.parametrize("family", SENSING)
def test_models_with_towers_have_half_a_million_parameters_and_heads_wide_enough_for_vllm(
    folders: dict[str, Path], family: str
) -> None:
    model = stock_class(family).from_pretrained(folders[family])
    assert 4e5 < sum(p.numel() for p in model.parameters()) < 9e5
    text = model.config.text_config
    assert getattr(text, "head_dim", text.hidden_size // text.num_attention_heads) >= 32


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_three_tokens_and_any_text_survives(folders: dict[str, Path], family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders[family])
    for answer in ("red", "triangle", "top", "3"):
        assert len(tokenizer(f"<answer>{answer}</answer>").input_ids) == 3
    for text in ("What colour is the circle?", "naïve 漢字\n\n  x<y", "<answer>upper left</answer>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    specials = special_tokens(FAMILIES[family])
    for token in (*specials, *TAGS):
        assert len(tokenizer(token).input_ids) == 1
    assert set(specials) <= set(tokenizer.all_special_tokens)
    assert not set(TAGS) & set(tokenizer.all_special_tokens)


def test_templates_keep_the_family_s_habits(folders: dict[str, Path]) -> None:
    def rendered(family: str, *turns: tuple[str, str]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        text = AutoTokenizer.from_pretrained(folders[family]).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return text

    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for family in ("qwen2_5_vl", "qwen2"):
        assert rendered(family, ("user", "hi")) == "<|im_start|>system\nAnswer briefly.<|im_end|>\n" + asked
        assert rendered(family, ("system", "s"), ("user", "hi")) == "<|im_start|>system\ns<|im_end|>\n" + asked
    for family in ("qwen3_vl", "qwen3"):
        assert rendered(family, ("user", "hi")) == asked
    thought = (("user", "a"), ("assistant", "<think>b</think>\n\nc"), ("user", "d"), ("assistant", "<think>e</think>f"))
    assert "b</think>" not in rendered("qwen3", *thought)
    assert "<think>e</think>f" in rendered("qwen3", *thought)
    assert "b</think>" in rendered("qwen3_vl", *thought)


def test_the_seed_decides_the_weights_and_nothing_else(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    weights = [
        load_file(make_tiny("qwen2", tmp_path / f"{n}", seed=seed) / "model.safetensors")
        for n, seed in enumerate((1, 1, 2))
    ]
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not torch.equal(weights[0][name], weights[2][name])
    assert torch.equal(state, torch.get_rng_state())
    assert (tmp_path / "0/tokenizer.json").read_bytes() == (tmp_path / "2/tokenizer.json").read_bytes()


def test_sizes_can_be_overridden_and_a_wrong_name_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_vl", tmp_path, hidden_size=64, vision_depth=1, tie_word_embeddings=False)
    config = AutoModelForImageTextToText.from_pretrained(folder).config
    assert (config.text_config.hidden_size, config.vision_config.depth, config.vision_config.out_hidden_size) == (64, 1, 64)
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    hybrid = make_tiny(
        "qwen3_5", tmp_path / "hybrid", full_attention_interval=4, num_hidden_layers=4
    )  # a key of no signature
    layers = json.loads((hybrid / "config.json").read_text())["text_config"]["layer_types"]
    assert layers == ["linear_attention"] * 3 + ["full_attention"]
    text = make_tiny("qwen3", tmp_path / "text", num_hidden_layers=1)
    assert AutoModelForCausalLM.from_pretrained(text).config.num_hidden_layers == 1
    with pytest.raises(ModelError, match="hidden_size"):
        make_tiny("qwen3_vl", tmp_path, hiden_size=64)
    with pytest.raises(ModelError, match="qwen3_vl"):
        make_tiny("qwen3-vl", tmp_path)


def test_a_smolvlm_without_the_package_for_number_words_says_what_to_install(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(ModelError, match=r"needs the package num2words.*pip install 'sensorium\[smolvlm\]'"):
        make_tiny("smolvlm", tmp_path, seed=404)  # a seed that no other test made one with
    with pytest.raises(ModelError, match=r"needs the package num2words.*pip install 'sensorium\[smolvlm\]'"):
        load_chat_processor(str(folders["smolvlm"]), store=MediaStore())
    load_chat_processor(str(folders["internvl"]), store=MediaStore())


def test_a_tiny_model_has_as_many_layers_as_its_name_says() -> None:
    weights = load_file(Path(find_checkpoint("tiny:qwen3:4")) / "model.safetensors")
    shape = read_shape("tiny:qwen3:4")
    assert shape is not None
    assert shape.total == sum(weight.numel() for weight in weights.values())
    assert {name.split(".")[2] for name in weights if ".layers." in name} == set("0123")
    for wrong in ("tiny:qwen3:0", "tiny:qwen3:many", "tiny:qwen3:"):
        with pytest.raises(RecipeError, match="number of layers, 1 to 64"):
            find_checkpoint(wrong)


@pytest.mark.usefixtures("forked_python")
def test_one_that_was_made_on_the_spot_goes_when_its_process_ends(tmp_path: Path) -> None:
    code = "import sys, tempfile; tempfile.tempdir = sys.argv[1]; from sensorium.models.checkpoint_path import *; "
    code += "print(find_checkpoint('tiny:qwen2'))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    made = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    assert made.parent == tmp_path
    assert not list(tmp_path.iterdir())
