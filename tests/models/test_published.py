"""Expansion and positions of the published shapes equal the processor's and the model's, on whole conversations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.families.qwen2_5_vl import WRITTEN_TOKENS
from sensorium.models.policy import Policy
from sensorium.recipe.registry import resolve
from sensorium.vocabulary.content import Message, assistant, user

from .clips import clip, noise, tone
from .published import IDS, SHAPES, meta_model, published_processor
from .stock_pair import Pair, processed

RENAMED = ("qwen2_5_omni", "qwen2_audio")  # families whose tokenizer has media where others have boxes


@pytest.fixture(scope="module", params=SHAPES)
def policy(request: pytest.FixtureRequest) -> Policy:
    family = SHAPES[request.param][1]
    model, processor = meta_model(request.param), published_processor(request.param)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert billions == pytest.approx(SHAPES[request.param][5], rel=0.005), "the shape is not the published one"
    adapter, store = resolve("family", family), MediaStore()
    media_format = adapter.media_format(model.config, processor)
    vocab_size, ends = model.config.get_text_config().vocab_size, model.generation_config.eos_token_id
    chat = ChatProcessor(family, media_format, processor.tokenizer, processor, store, vocab_size=vocab_size, end_ids=ends)
    return Policy(chat, adapter(model), model)


def test_expansion_and_positions_are_those_of_the_whole_conversation(policy: Policy) -> None:
    show = Pair(policy, None, Path()).medium
    first, second = show(1, 300, 500), show(2, 700, 260)
    messages = [user("Look", first, "and", second, "which?"), assistant("red"), user(show(3, 90, 40), "again", first)]
    ids_T = assert_whole(policy, messages)
    assert int((ids_T == policy.chat.media_format.placeholders[first.kind]).sum()) > 300


def test_videos_and_sounds_expand_as_the_processor_says(policy: Policy) -> None:
    if "video" not in policy.chat.modalities:
        pytest.skip("a family that only hears: the test above is about its sounds")
    store = policy.chat.store
    heard = [tone(store, 1, 2.2)] if "sound" in policy.chat.modalities else []
    messages = [
        user(clip(store, 1, 5, 112, 168, 10.0), *heard, "which?"),
        assistant("red"),
        user(noise(store, 3, 90, 40), clip(store, 2, 4, 168, 112, 8.0), *heard, "again"),
    ]
    ids_T = assert_whole(policy, messages)
    assert int((ids_T == policy.chat.media_format.placeholders["video"]).sum()) > 100


def test_boxes_are_written_and_read_as_text(policy: Policy) -> None:
    if policy.family in RENAMED:
        pytest.skip("it has these ids for its media")
    box = [IDS["<|box_start|>"], *policy.chat.tokenizer("(1,2)")["input_ids"], IDS["<|box_end|>"], IDS["<|im_end|>"]]
    zeros = [0.0] * len(box)
    assert policy.chat.written(box, zeros, zeros, "a").text == "<|box_start|>(1,2)<|box_end|>"


def assert_whole(policy: Policy, messages: list[Message]) -> torch.Tensor:
    """A conversation of three messages, turn by turn, has the tokens and positions of the whole; returns the tokens."""
    answer = policy.chat.respond("red", "a")
    segments = [policy.chat.render(messages[:1]), answer, policy.chat.extend(messages[2:], after=answer)]
    layouts = [policy.chat.layout(segment) for segment in segments]
    inputs = processed(policy, messages)
    ids_T = torch.cat([layout.ids_T for layout in layouts])
    assert ids_T.tolist() == inputs["input_ids"][0].tolist()
    start, got = 0, []
    for layout in layouts:
        got.append(layout.positions_3T + start)
        start += layout.advance
    assert torch.equal(torch.cat(got, dim=1), whole_positions(policy, inputs))
    for layout, segment in zip(layouts, segments, strict=True):
        shown = {span.index for span in segment.media}
        pairs = zip(layout.ids_T[layout.ends_S].tolist(), segment.tokens, strict=True)
        assert all(expanded == stored for i, (expanded, stored) in enumerate(pairs) if i not in shown)
    return ids_T


def whole_positions(policy: Policy, inputs: dict[str, Any]) -> torch.Tensor:
    """The model's own positions [3, T] of the whole conversation; those it was trained with where the library errs."""
    if "position_ids" in inputs:
        return inputs["position_ids"][:, 0]
    if not hasattr(policy.model, "get_rope_index") and not hasattr(policy.model.model, "get_rope_index"):
        return torch.arange(inputs["input_ids"].shape[1]).expand(3, -1)
    grids = {key: inputs.get(key) for key in ("image_grid_thw", "video_grid_thw")}
    if "sound" in policy.chat.modalities:
        mask = inputs.get("feature_attention_mask")
        found, _ = policy.model.get_rope_index(
            inputs["input_ids"],
            **grids,
            attention_mask=inputs["attention_mask"],
            audio_seqlens=None if mask is None else mask.sum(-1),
            second_per_grids=inputs.get("video_second_per_grid"),
        )
    else:
        found, _ = policy.model.model.get_rope_index(
            inputs["input_ids"],
            inputs["mm_token_type_ids"],
            **grids,
            second_per_grid_ts=inputs.get("second_per_grid_ts"),
        )
    return found[:, 0]


def test_qwens_own_ids_stop_and_are_forbidden(policy: Policy) -> None:
    assert policy.chat.stop_ids == (IDS["<|im_end|>"], IDS["<|endoftext|>"])
    written = set() if policy.family in RENAMED else {IDS[name] for name in WRITTEN_TOKENS}
    assert set(IDS.values()) - written <= {*policy.chat.forbidden_ids, *policy.chat.stop_ids}
    assert not written & set(policy.chat.forbidden_ids)
    assert set(range(IDS["<|video_pad|>"] + 1, policy.vocab_size)) <= set(policy.chat.forbidden_ids)
    names = [name for group in policy.groups().values() for name in group]
    assert sorted(names) == sorted(name for name, _ in policy.model.named_parameters())
