"""What turns messages and media into tokens and positions is loaded without weights, and says what the whole model says."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sensorium.models.load_chat import load_chat_processor
from sensorium.recipe.family_facts import FAMILIES
from sensorium.vocabulary.content import Message, system, user
from sensorium.vocabulary.errors import ModelError

from .stock_pair import Pair

Pairs = Callable[..., Pair]


def shown(pair: Pair) -> Message:
    """A question with a medium of every kind that the family takes."""
    makers = {"picture": pair.picture, "video": pair.clip, "sound": pair.tone}
    media = [make(1) for kind, make in makers.items() if kind in pair.policy.chat.modalities]
    return user("Look", *media, "and say what it is.")


@pytest.mark.parametrize("family", FAMILIES)
def test_without_any_weight_file_everything_is_as_with_the_weights(pairs: Pairs, family: str, tmp_path: Path) -> None:
    pair = pairs(family)
    folder = tmp_path / "small files"
    shutil.copytree(pair.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    assert not list(folder.glob("*.safetensors"))
    whole = pair.policy.chat
    alone = load_chat_processor(str(folder), store=whole.store)
    for name in ("family", "modalities", "vocab_size", "stop_ids", "forbidden_ids", "append_only"):
        assert getattr(alone, name) == getattr(whole, name), name
    question = shown(pair)
    answer = alone.respond("red", "a", 7)
    assert answer == whole.respond("red", "a", 7)
    head = alone.render([system("be brief")], generate=False)
    segments = [alone.render([question]), answer, alone.extend([question], after=answer)]
    assert [head, *segments] == [
        whole.render([system("be brief")], generate=False),
        whole.render([question]),
        answer,
        whole.extend([question], after=answer),
    ]
    assert alone.render_after_head([question]) == whole.render_after_head([question])
    for segment in segments:
        got, want = alone.layout(segment), whole.layout(segment)
        assert torch.equal(got.ids_T, want.ids_T)
        assert torch.equal(got.positions_3T, want.positions_3T)
        assert (got.slots, got.advance) == (want.slots, want.advance)


def test_what_it_ends_on_is_what_the_loaded_model_ends_on(pairs: Pairs) -> None:
    for family in ("qwen2", "qwen2_5_omni"):
        pair = pairs(family)
        ends = pair.policy.model.generation_config.eos_token_id
        assert set(ends if isinstance(ends, list) else [ends]) <= set(pair.policy.chat.stop_ids)


def test_a_damaged_tokenizer_is_named_and_not_the_weights_that_are_not_there(pairs: Pairs, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(pairs("qwen2").folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load the checkpoint") as refused:
        load_chat_processor(str(folder), store=pairs("qwen2").policy.chat.store)
    assert "safetensors" not in str(refused.value)
