"""Media become what the checkpoint's own processors make of them; what they would cut or cannot take is refused."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.data.sound import DecodedAudio, encode_wav
from sensorium.models.prepared_media import Extent
from sensorium.models.preprocessors import SoundPreprocessor, sound_tokens
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.decoding import AudioParameters
from sensorium.vocabulary.errors import MediaError
from tests.data.clips import middle
from tests.families import FAMILY_ROWS, HEARING

from .clips import clip, stock_inputs
from .stock_pair import Pair

Pairs = Callable[..., Pair]
HEARD = Media("sound", "0" * 64, "a.wav")


def heard(samples: np.ndarray) -> DecodedAudio:
    seconds = len(samples) / 16000
    return DecodedAudio(samples.astype(np.float32), 16000, seconds, 0.0, seconds)


@settings(max_examples=25)
@given(length=st.integers(321, 40000), seed=st.integers(0, 99), quiet=st.booleans())
def test_a_sound_has_the_numbers_of_the_extractor_at_full_length(pairs: Pairs, length: int, seed: int, quiet: bool) -> None:
    extractor = pairs("qwen2_5_omni").policy.chat.processor.feature_extractor
    samples = np.random.default_rng(seed).normal(size=length) * (0.0 if quiet else 0.1)
    (prepared,) = SoundPreprocessor(extractor)([(HEARD, heard(samples))])
    whole = extractor([samples], sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="pt")
    frames = int(whole["attention_mask"].sum())
    assert prepared.extent.grid == (frames, 1, 1)
    torch.testing.assert_close(prepared.patches_PC, whole["input_features"][0, :, :frames].T, rtol=0, atol=1e-5)


@given(frames=st.integers(3, 3000))
def test_tokens_of_a_sound_are_those_that_the_model_counts(pairs: Pairs, frames: int) -> None:
    tower = pairs("qwen2_5_omni").policy.adapter.towers["sound"].module
    assert sound_tokens(frames) == int(tower._get_feat_extract_output_lengths(torch.tensor(frames))[1])


@pytest.mark.parametrize("family", [family for family in HEARING if not FAMILY_ROWS[family].shortest_s])
def test_sounds_that_would_be_cut_or_vanish_are_refused(pairs: Pairs, family: str) -> None:
    policy = pairs(family).policy

    def put(seconds: float, parameters: AudioParameters | None = None) -> Media:
        return policy.chat.store.put(encode_wav(np.zeros(round(seconds * 16000))), "sound", "a.wav", parameters)

    with pytest.raises(MediaError, match=r"a\.wav: the sound lasts 30\.5 s.*no more than 30 s"):
        policy.encode([put(30.5)])
    assert len(policy.encode([put(30.5, AudioParameters(end=30.0))])) == 1
    with pytest.raises(MediaError, match=r"a\.wav: 20 ms are too short"):
        policy.chat.layout(policy.chat.render([user(put(0.02), "What?")]))
    with pytest.raises(MediaError, match=r"a\.wav: decoded at 8000 Hz"):
        policy.encode([put(1.0, AudioParameters(sample_rate=8000))])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen2_5_omni"])
def test_a_clip_of_one_frame_shows_it_for_two(pairs: Pairs, family: str) -> None:
    policy = pairs(family).policy
    once = clip(policy.chat.store, 7, frames=1)
    layout = policy.chat.layout(policy.chat.render([user(once, "What?")]))
    assert layout.slots[0].count == len(policy.encode([once])[once].embeds_NH) == 4


def test_the_same_file_sampled_otherwise_is_another_medium(pairs: Pairs) -> None:
    policy = pairs("qwen3_vl").policy
    four = clip(policy.chat.store, 8, frames=4)
    two = replace(four, parameters=middle(frames=2))
    features = policy.encode([four, two])
    assert [len(features[item].embeds_NH) for item in (four, two)] == [8, 4]
    layouts = [policy.chat.layout(policy.chat.render([user(item, "What?")])) for item in (four, two)]
    assert [layout.slots[0].count for layout in layouts] == [8, 4]
    assert len(layouts[0].slots[0].runs) == 2, "one run of tokens after each timestamp"


def test_the_omni_processor_s_own_frame_sizes_hold_unless_the_checkpoint_allows_less(pairs: Pairs) -> None:
    """With a video processor like the published one, the library's processor overrides its sizes; so do we."""
    from sensorium.models.families.qwen2_5_omni import frame_size

    policy = pairs("qwen2_5_omni").policy
    processor = policy.chat.processor
    stated = processor.video_processor.size
    assert frame_size(processor) == {"shortest_edge": stated["shortest_edge"], "longest_edge": stated["longest_edge"]}
    media = clip(policy.chat.store, 9, frames=2)
    text = "<|vision_bos|><|VIDEO|><|vision_eos|>"
    try:
        processor.video_processor.size = {"shortest_edge": 3136, "longest_edge": 12845056}
        usual = frame_size(processor)
        made = processor(text=[text], videos=[torch.zeros(2, 56, 56, 3, dtype=torch.uint8)], return_tensors="pt")
    finally:
        processor.video_processor.size = stated
    assert usual == {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
    assert int(made["video_grid_thw"].prod()) == 2 * 2 * 144, "enlarged to 128 tokens at least"
    assert int(stock_inputs(policy, text, [media])["video_grid_thw"].prod()) == 16


@given(
    parts=st.integers(1, 40), whole=st.integers(1, 40), frames=st.integers(2, 12), family=st.sampled_from(["vl", "omni"])
)
def test_frames_stand_at_the_seconds_they_were_taken_at(
    pairs: Pairs, parts: int, whole: int, frames: int, family: str
) -> None:
    """Whatever the rate, fractions count, in float32 as in training."""
    policy = pairs(f"qwen2_5_{family}").policy
    seconds = whole / parts
    extent = Extent("video", (-(-frames // 2), 4, 4), tuple((i + 0.5) * seconds for i in range(frames)), seconds)
    pads = policy.chat.media_format.expand(extent).ids
    start = policy.model.config.vision_start_token_id
    ids_T = torch.tensor([1, start, *pads, policy.model.config.vision_end_token_id, 1])
    times = policy.chat.media_format.positions(ids_T, [extent])[0, 2 : 2 + len(pads) : 4] - 2
    exact = Fraction(2 * whole, parts)
    a_second = 25 if family == "omni" else policy.model.config.vision_config.tokens_per_second
    want = [float(exact * a_second * i) for i in range(extent.grid[0])]
    assert all(w - 1 - 1e-3 < t <= w + 1e-3 for t, w in zip(times.tolist(), want, strict=True))
    step, rate = np.float32(float(exact)), np.float32(a_second)
    assert times.tolist() == [int(np.float32(i) * step * rate) for i in range(len(want))]
