"""A video with its sound inside (``use_audio_in_video``): tokens, positions and logits are those of stock transformers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.models.load_chat import load_chat_processor
from sensorium.models.prepared_media import Extent
from sensorium.vocabulary.content import Message, assistant, user
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import MediaError, ModelError

from .clips import heard_clip
from .stock_pair import Pair, close, row
from .test_parts import thread
from .test_rope_positions import media_format, picture, sound, square

Pairs = Callable[..., Pair]
Runs = list[tuple[str, int]]


def conversation(pair: Pair, case: str) -> list[Message]:
    store = pair.policy.chat.store
    if case == "a clip":
        return [user("Look", heard_clip(store), "what?")]
    if case == "a longer sound":
        return [user(heard_clip(store, sound_s=6.5), "what?")]
    if case == "a shorter sound":
        return [user(heard_clip(store, sound_s=2.9), "what?")]
    if case == "two seconds a step":
        return [user(heard_clip(store, fps=1), "what?")]
    if case == "four frames a second, a part of it":
        return [user(heard_clip(store, fps=4, start=0.5, end=3.5), "what?")]
    if case == "pictures, sounds and two clips in turns":
        first = user(pair.picture(1), heard_clip(store), pair.tone(1, 0.7), "What?")
        return [first, assistant("red"), user(pair.tone(2, 0.3), "and", heard_clip(store, 1), pair.picture(2), "now?")]
    assert case == "nothing between two clips"
    return [user(heard_clip(store), heard_clip(store, 1))]


CASES = (
    "a clip", "a longer sound", "a shorter sound", "two seconds a step", "four frames a second, a part of it",
    "pictures, sounds and two clips in turns", "nothing between two clips",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "case"),
    [("qwen2_5_omni", case) for case in CASES]
    + [("qwen3_omni_moe", case) for case in CASES if "part" not in case],  # fractions of positions are cut here
)
def test_tokens_positions_and_logits_are_those_of_the_stock_model(pairs: Pairs, family: str, case: str) -> None:
    pair = pairs(family)
    messages = conversation(pair, case)
    inputs = pair.inputs(messages)
    segments = thread(pair.policy, messages)
    ids_T, positions_3T, _ = row(pair.policy, segments)
    assert ids_T.tolist() == inputs["input_ids"][0].tolist()
    positions_3BT, _ = pair.stock.get_rope_index(
        inputs["input_ids"], inputs.get("image_grid_thw"), inputs["video_grid_thw"], inputs["attention_mask"], True,
        inputs["feature_attention_mask"].sum(-1), inputs["video_second_per_grid"],
    )  # fmt: skip
    assert torch.equal(positions_3T, positions_3BT[:, 0])
    with torch.no_grad():
        close(pair.got(segments), pair.want(inputs))


def told(omni: Any, video: Extent, heard: Extent) -> tuple[Runs, list[Any]]:
    """The tokens of a clip behind 3 of text, and the positions of everything."""
    ids, _, _ = omni.interleave(replace(video, has_sound=True), heard)
    names = {token: kind for kind, token in omni.placeholders.items()}
    runs: Runs = []
    for token in ids[1:-1]:
        if runs and runs[-1][0] == names[token]:
            runs[-1] = (names[token], runs[-1][1] + 1)
        else:
            runs.append((names[token], 1))
    ids_T = torch.tensor([1, 1, 1, 2, *ids, 2, 1, 1])
    positions_3T = omni.positions(ids_T, [replace(video, has_sound=True), heard])
    found: list[Any] = [positions_3T[0, :5].tolist()]
    start = 5
    for _, count in runs:
        axes = [sorted(set(axis)) for axis in positions_3T[:, start : start + count].tolist()]
        found.append((axes[0], (axes[1][0], axes[1][-1]), (axes[2][0], axes[2][-1])))
        start += count
    return runs, [*found, positions_3T[0, start:].tolist()]


def line(first: int, last: int) -> tuple[list[int], tuple[int, int], tuple[int, int]]:
    return list(range(first, last + 1)), (first, last), (first, last)


def steps(*times: int) -> tuple[list[int], tuple[int, int], tuple[int, int]]:
    """Steps of 2 x 2 tokens in a block that begins at 4."""
    return list(times), (4, 5), (4, 5)


@pytest.mark.parametrize(
    ("seconds", "grid", "mel", "runs", "positions"),
    [
        (1.0, 4, 400, "V8 A50 V8 A50", [square([4, 29]), line(4, 53), steps(54, 79), line(54, 103), [104, 104, 105, 106]]),
        (1.0, 4, 290, "V8 A50 V8 A22", [square([4, 29]), line(4, 53), steps(54, 79), line(54, 75), [76, 76, 77, 78]]),
        (1.0, 4, 650, "V8 A50 V8 A112", [square([4, 29]), line(4, 53), steps(54, 79), line(54, 165), [166, 166, 167, 168]]),
        (0.7, 5, 350, "V12 A50 V8 A37", [square([4, 21, 39]), line(4, 53), steps(56, 74), line(54, 90), [91, 91, 92, 93]]),
    ],
)  # fmt: skip
def test_measured_vectors(seconds: float, grid: int, mel: int, runs: str, positions: list[Any]) -> None:
    """By transformers 4.57 and 5.17."""
    omni = media_format("Qwen2.5-Omni-7B", "qwen2_5_omni")
    found, where = told(omni, Extent("video", (grid, 4, 4), seconds_per_frame=seconds / 2), sound(mel))
    assert " ".join(f"{'A' if kind == 'sound' else 'V'}{count}" for kind, count in found) == runs
    assert where == [[0, 1, 2, 3, 3], *positions]


def test_qwen3_omni_merges_token_by_token_and_shares_no_marks() -> None:
    """By transformers 4.57 and 5.17 and by vLLM."""
    omni = load_chat_processor("tiny:qwen3_omni_moe", store=MediaStore()).media_format
    found, where = told(omni, Extent("video", (2, 4, 4), seconds_per_frame=0.5), sound(200))
    assert found == [("video", 4), ("sound", 13), ("video", 4), ("sound", 13)]
    at = square([5])
    assert where == [[0, 1, 2, 3, 4], at, line(5, 17), ([18], *at[1:]), line(18, 30), [31, 32, 33, 34]]


def test_what_follows_comes_after_the_last_chunk_even_where_an_earlier_one_reaches_further() -> None:
    omni = media_format("Qwen2.5-Omni-7B", "qwen2_5_omni")
    _, where = told(omni, Extent("video", (1, 4, 120), seconds_per_frame=0.5), sound(100))
    assert where[-1] == [29, 29, 30, 31]


def test_frames_further_apart_than_the_sound_is_cut_are_refused_with_the_way_out(pairs: Pairs) -> None:
    chat = pairs("qwen2_5_omni").policy.chat
    slow = heard_clip(chat.store, 5, frames=2)
    errors = chat.prepare([slow])
    assert list(errors) == [slow]
    assert "heard-5.mp4" in str(errors[slow])
    assert "4.00 s" in str(errors[slow])
    assert "fps: 2" in str(errors[slow])


def test_a_clip_without_a_sound_track_is_refused(pairs: Pairs) -> None:
    chat = pairs("qwen2_5_omni").policy.chat
    frames = np.zeros((16, 56, 56, 3), np.uint8)
    mute = chat.store.put(encode_clip(frames, 4.0), "video", "mute.mp4", VideoParameters(use_audio_in_video=True))
    errors = chat.prepare([mute])
    assert isinstance(errors[mute], MediaError)
    assert "mute.mp4" in str(errors[mute])
    assert "has no audio track" in str(errors[mute])


def test_a_family_that_does_not_hear_refuses_it(pairs: Pairs) -> None:
    chat = pairs("qwen2_5_vl").policy.chat
    with pytest.raises(ModelError, match=r"use_audio_in_video"):
        chat.render([user(heard_clip(chat.store), "what?")])


def test_a_picture_stands_for_itself_among_clips() -> None:
    omni = media_format("Qwen2.5-Omni-7B", "qwen2_5_omni")
    ids = [1, 2, *omni.expand(picture(1, 4, 4)).ids, 2, 1]
    assert omni.positions(torch.tensor(ids), [picture(1, 4, 4)])[0].tolist() == [0, 1, 2, 2, 2, 2, 4, 5]
