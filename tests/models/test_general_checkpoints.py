"""The tiny checkpoints of foreign families are what the plan counts, and their templates ask for answers.

That stock classes load them and see what is shown: test_general_families.py.
"""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoProcessor

from sensorium.models.family import group_of
from sensorium.models.general_path import module_groups
from sensorium.recipe.model_shape import read_shape
from tests.general_checkpoints import GENERAL, VOXTRAL_SOUND, make_checkpoint, model_class, tokenizer_of


def sound(seed: int, seconds: float = 0.5) -> np.ndarray:
    times = np.arange(round(16000 * seconds)) / 16000
    pitches = np.random.default_rng(seed).uniform(100, 4000, (3, 1))
    return (0.2 * np.sin(2 * np.pi * pitches * times).sum(0)).astype(np.float32)


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
