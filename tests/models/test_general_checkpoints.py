"""The tiny checkpoints of foreign families are complete: what they are shown changes what they say."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from sensorium.models.family import group_of
from sensorium.models.general_path import module_groups
from sensorium.recipe.shape import read_shape
from tests.general_checkpoints import GENERAL, VOXTRAL_SOUND, make_checkpoint, model_class, tokenizer_of

TRAINED = [name for name, row in GENERAL.items() if not row.refused]


def picture(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    """Large blocks of a few colours, which no resizing evens out."""
    blocks = np.random.default_rng(seed).integers(0, 255, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def sound(seed: int, seconds: float = 0.5) -> np.ndarray:
    times = np.arange(round(16000 * seconds)) / 16000
    pitches = np.random.default_rng(seed).uniform(100, 4000, (3, 1))
    return (0.2 * np.sin(2 * np.pi * pitches * times).sum(0)).astype(np.float32)


def last_log_probs(model: Any, owner: Any, shown: dict[str, Any], question: str) -> torch.Tensor:
    content = [*({"type": kind} for kind in shown), {"type": "text", "text": question}]
    template = owner.chat_template or owner.tokenizer.chat_template
    text = owner.apply_chat_template(
        [{"role": "user", "content": content}], chat_template=template, add_generation_prompt=True, tokenize=False
    )
    media = {{"image": "images"}.get(kind, kind): [medium] for kind, medium in shown.items()}
    inputs = owner(text=[text], **media, return_tensors="pt")
    inputs.pop("labels", None)
    with torch.inference_mode():
        return model(**inputs, use_cache=False).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("name", TRAINED)
def test_a_tiny_checkpoint_loads_and_what_it_is_shown_changes_the_answer(name: str, tmp_path: Path) -> None:
    row, folder = GENERAL[name], make_checkpoint(name, tmp_path)
    loader = model_class(AutoConfig.from_pretrained(folder))
    model, found = loader.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation=row.attention
    )
    assert not any(found.values())
    owner = (AutoProcessor if row.processor else AutoTokenizer).from_pretrained(folder)
    make = {"image": picture, "audio": sound}
    model.eval()
    for kind in row.shown or (None,):  # a text model is shown nothing
        shown = [{kind: make[kind](seed)} if kind else {} for seed in (1, 2)]
        before = last_log_probs(model, owner, shown[0], "what colour?")
        assert before.max() - before.min() > 3
        assert (last_log_probs(model, owner, shown[0], "where?") - before).abs().max() > 0.02
        if kind:
            assert (last_log_probs(model, owner, shown[1], "what colour?") - before).abs().max() > 0.02


@pytest.mark.parametrize("name", ["minicpmv4_6", "ovis2", "qwen2_vl"])
def test_the_plan_counts_weights_and_linear_layers_by_the_groups_of_the_model(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path)
    config = AutoConfig.from_pretrained(folder)
    model = model_class(config).from_pretrained(folder)
    groups, counts = module_groups(model), Counter[str]()
    for weight, values in model.named_parameters():
        counts[group_of(weight, groups)] += values.numel()
    shape = read_shape(str(folder))
    assert shape is not None
    assert {group: count for group, count in shape.parameters.items() if count} == counts
    linears = Counter(
        group_of(f"{name}.weight", groups)
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and part is not model.get_output_embeddings()
    )
    assert Counter(layer.group for layer in shape.linears if layer.group == "vision") == {"vision": linears["vision"]}


@pytest.mark.parametrize("name", GENERAL)
def test_a_template_asks_for_answers_and_leaves_them_as_they_were_written(name: str) -> None:
    tokenizer = tokenizer_of(GENERAL[name])

    def text(messages: list[dict[str, str]], asked: bool) -> str:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=asked, tokenize=False)

    question, answer = {"role": "user", "content": "where?"}, {"role": "assistant", "content": "up"}
    for lead in ("", " "):
        if text([question, answer, question], True).startswith(f"{text([question], True)}{lead}up"):
            break
    else:
        pytest.fail(f"{name}: {text([question, answer, question], True)!r}")
    ids = tokenizer(text([question, answer], False), add_special_tokens=False)["input_ids"]
    assert tokenizer.eos_token_id in ids[-2:]


def test_the_refused_ones_lack_what_their_rows_name(tmp_path: Path) -> None:
    if find_spec("torchaudio") is None:
        with pytest.raises(ImportError, match=GENERAL["granite_speech"].refused):
            AutoProcessor.from_pretrained(make_checkpoint("granite_speech", tmp_path / "granite"))
    owner = AutoProcessor.from_pretrained(make_checkpoint("voxtral", tmp_path / "voxtral"))
    assert owner.tokenizer.convert_ids_to_tokens(VOXTRAL_SOUND) == "[AUDIO]"
    with pytest.raises(ValueError, match="AUDIO"):
        owner(text="[AUDIO]", audio=sound(1))
