"""The general path among hostile checkpoints and media: a refusal names its cause, and one item's fault is that item's."""

import json
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3NextForCausalLM

from sensorium.data.media_store import MediaStore
from sensorium.data.sound import encode_wav
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Sampling
from sensorium.models.load import check_checkpoint, load_policy
from sensorium.models.load_chat import load_chat_processor
from sensorium.recipe.schema import LoraSection, ModelSection
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import MediaError, ModelError, RecipeError
from tests.engines.conftest import ask, generate
from tests.general_checkpoints import GENERAL, make_checkpoint

POSITIONS = 48


@pytest.fixture
def learned(tmp_path: Path) -> Path:
    """A GPT-2: its positions are rows of a table."""
    folder = make_checkpoint("granite", tmp_path / "gpt2")
    (folder / "model.safetensors").unlink()
    ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    none = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "summary_first_dropout": 0}
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=POSITIONS,
            n_embd=32,
            n_layer=2,
            n_head=2,
            initializer_range=0.2,
            eos_token_id=ids,
            **none,
        )
    ).save_pretrained(folder)
    return folder


def test_a_response_that_fills_the_context_leaves_the_others_of_its_batch_alone(learned: Path) -> None:
    policy = load_policy(str(learned), store=MediaStore())
    prompts = [policy.chat.render([user("a " * count)]) for count in (14, 2, 2)]
    sampling = Sampling(max_new_tokens=2 * POSITIONS, stop_tokens=False)
    requests = [ask(str(i), [prompt], sampling, order=(i, 0, 0), key=i) for i, prompt in enumerate(prompts)]
    found = generate(NativeEngine(policy), *requests)
    assert [len(prompt.tokens) + len(one.segment.tokens) for prompt, one in zip(prompts, found, strict=True)] == [
        POSITIONS
    ] * 3
    alone = [generate(NativeEngine(policy), request)[0].segment.tokens for request in requests]
    assert [one.segment.tokens for one in found] == alone


def test_a_sound_shorter_than_a_window_of_its_processor_is_a_fault_of_that_sound(tmp_path: Path) -> None:
    chat = load_chat_processor(str(make_checkpoint("phi4_multimodal", tmp_path / "phi")), store=MediaStore())
    short = chat.store.put(encode_wav(np.zeros(10, dtype=np.float32)), "sound", "short.wav")
    with pytest.raises(MediaError, match=r"^short\.wav"):
        chat.layout(chat.render([user(short, "what?")]))


def test_a_chat_template_that_does_not_compile_is_refused(learned: Path) -> None:
    (learned / "chat_template.jinja").write_text("{% for m in %}")
    with pytest.raises(ModelError, match=r"^model\.path .*line 1"):
        load_policy(str(learned), store=MediaStore())


def test_a_text_model_that_computes_padding_gets_no_padded_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is what keeps padding out of the states of its delta nets."""
    forward = Qwen3NextForCausalLM.forward

    @wraps(forward)
    def unmasked(*given: Any, attention_mask: Any = None, **more: Any) -> Any:
        return forward(*given, **more)

    folder = str(make_checkpoint("qwen3_next", tmp_path / "next"))
    assert load_policy(folder, store=MediaStore()).chat.media_format.company == "any"  # type: ignore[attr-defined]
    monkeypatch.setattr(Qwen3NextForCausalLM, "forward", unmasked)
    assert load_policy(folder, store=MediaStore()).chat.media_format.company == "alone"  # type: ignore[attr-defined]


def test_layers_that_peft_refuses_to_adapt_are_an_error_of_their_key(tmp_path: Path) -> None:
    """Of this mixture peft adapts what stands for whole experts, or what has nothing to do with them."""
    folder = str(make_checkpoint("qwen3_next", tmp_path / "next"))
    for modules in (("shared_expert.up_proj",), ("shared_expert.up_proj", "shared_expert.gate_proj")):
        with pytest.raises(RecipeError, match=r"model\.lora"):
            load_policy(folder, store=MediaStore(), lora=LoraSection(rank=2, modules=modules))
    taken = load_policy(folder, store=MediaStore(), lora=LoraSection(rank=2, modules=("q_proj", "out_proj")))
    assert taken.adapters is not None


@pytest.mark.parametrize("name", ["bert", "mamba", "rwkv", "openai-gpt"])
def test_what_cannot_go_on_from_a_cache_is_refused_by_the_dry_run_too(name: str, tmp_path: Path) -> None:
    folder = str(make_checkpoint(name, tmp_path / name))
    for look in (lambda: check_checkpoint(ModelSection(path=folder)), lambda: load_policy(folder, store=MediaStore())):
        with pytest.raises(ModelError, match=GENERAL[name].refused) as caught:
            look()
        assert "Use " in str(caught.value), "a way out"


@pytest.mark.parametrize("name", ["gpt2", "qwen3_next"])
def test_layers_that_have_no_adapters_are_refused_by_the_dry_run_too(name: str, tmp_path: Path) -> None:
    folder, lora = str(make_checkpoint(name, tmp_path / name)), LoraSection(rank=2)
    said = []
    for look in (
        lambda: check_checkpoint(ModelSection(path=folder, lora=lora)),
        lambda: load_policy(folder, store=MediaStore(), lora=lora),
    ):
        with pytest.raises(RecipeError) as caught:
            look()
        said.append(str(caught.value))
    assert said[0] == said[1]
    if name == "gpt2":
        assert "model.lora.rank to 0" in said[0]
    else:
        named = tuple(said[0].partition("modules: [")[2].partition("]")[0].split(", "))
        taken = LoraSection(rank=2, modules=named)
        assert check_checkpoint(ModelSection(path=folder, lora=taken)) == []
        assert load_policy(folder, store=MediaStore(), lora=taken).adapters is not None


def test_a_part_that_the_model_has_not_cannot_be_frozen(tmp_path: Path) -> None:
    folder = str(make_checkpoint("gemma3", tmp_path / "gemma"))
    with pytest.raises(RecipeError, match=r"'audio'.*vision"):
        check_checkpoint(ModelSection(path=folder, freeze=("audio",)))
    assert check_checkpoint(ModelSection(path=folder, freeze=("vision",))) == []


def test_a_config_that_names_no_token_of_pictures_does_not_quietly_make_a_model_of_text(tmp_path: Path) -> None:
    folder = make_checkpoint("mistral3", tmp_path / "mistral")
    config = json.loads((folder / "config.json").read_text())
    config["image_token_id" if "image_token_id" in config else "image_token_index"] = -1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="image_token_id"):
        load_chat_processor(str(folder), store=MediaStore())
