"""The general path's inputs are those of the checkpoint's own processor, and its check finds what cannot be trained."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import BlipConfig, Qwen2_5_VLModel

from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Sampling
from sensorium.models.general_media import GeneralMedia, Join, find_join, video_metadata
from sensorium.models.general_path import check_general
from sensorium.models.load import build_policy, load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import MediaError, ModelError
from tests.general_checkpoints import General, make_checkpoint, square, text, vision, write_checkpoint

from ..engines.conftest import ask, generate
from .clips import noise


def opened(name: str, folder: Path, **sizes: Any) -> Policy:
    return load_policy(str(make_checkpoint(name, folder, **sizes)), store=MediaStore(), family="general")


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "idefics3", "qwen3_next"])
def test_rows_of_unequal_lengths_and_media_compute_what_each_computes_alone(name: str, tmp_path: Path) -> None:
    policy = opened(name, tmp_path)
    general, chat = policy.general, policy.chat
    assert general is not None
    shown = [(noise(chat.store, seed, 30 * seed, 50),) if "picture" in chat.modalities else () for seed in (1, 3)]
    prompts = [chat.render([user(*shown[0], "what?")]), chat.render([user("where is it?")])]
    prompts.append(chat.render([user(*shown[1], "which", *shown[0], "is left?")]))
    rows = [general.row(chat, [prompt]) for prompt in prompts]
    with torch.no_grad():
        both = general.call({**general.inputs(chat, rows, "right"), "use_cache": False}).logits
        for row, logits in zip(rows, both, strict=True):
            alone = general.call({**general.inputs(chat, [row], "right"), "use_cache": False}).logits[0]
            assert (logits[: len(row)] - alone).abs().max() <= 1e-5 * alone.abs().max()


def test_what_attends_to_later_tokens_is_refused_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"on its cache .* at token \d+"):
        opened("gemma3_text", tmp_path, use_bidirectional_attention=True)


def test_a_turn_that_later_pictures_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = opened("gemma3", tmp_path)
    tower = policy.model.get_image_features
    owner = policy.model.model

    def averaged(pixel_values: Tensor, **more: Any) -> Any:
        made = owner.__class__.get_image_features(owner, pixel_values, **more)
        made.pooler_output = made.pooler_output + made.pooler_output.mean(0, keepdim=True)
        return made

    assert tower is not None
    monkeypatch.setattr(owner, "get_image_features", averaged)
    with pytest.raises(ModelError, match=r"a second picture changes .* at token \d+"):
        check_general(policy)


def test_no_placeholder_of_any_kind_is_ever_sampled(tmp_path: Path) -> None:
    policy = opened("ovis2", tmp_path)
    names = ("<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_END>", "<IMG_GRID>")
    assert set(policy.chat.tokenizer.convert_tokens_to_ids(list(names))) <= set(policy.chat.forbidden_ids)


def test_a_sound_that_a_processor_drops_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"sound.*mistral_common"):
        opened("voxtral", tmp_path)


def test_a_template_that_asks_for_no_answer_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path / "tiny")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().split("{% if add_generation_prompt %}")[0])
    with pytest.raises(ModelError, match="add_generation_prompt"):
        load_policy(str(folder), store=MediaStore())


def test_a_model_whose_text_holds_no_media_as_tokens_is_refused_as_another_kind() -> None:
    processor = SimpleNamespace(chat_template="{{ messages }}", image_processor=object())
    with pytest.raises(ModelError, match=r"another kind.*BLIP.*docs/guides/families\.md"):
        GeneralMedia(BlipConfig(), processor)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_axis_along_which_media_are_put_together_is_found(axis: int) -> None:
    shapes = [[2, 3, 4], [2, 3, 4]]
    shapes[1][axis] = 5
    one, other = (torch.rand(shape) for shape in shapes)
    assert find_join(one, other, torch.cat([one, other], axis)) == Join(axis)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fill", [0, 1])
def test_what_smaller_media_are_filled_up_with_is_found(fill: int, axis: int) -> None:
    """Idefics 2 has the pictures of a text along the second axis."""
    one, other = torch.rand(1, 2, 5), torch.rand(1, 4, 3)
    both = torch.full((2, 4, 5), float(fill))
    both[0, :2], both[1, :, :3] = one[0], other[0]
    one, other, both = (x.transpose(0, axis) for x in (one, other, both))
    assert find_join(one, other, both) == Join(axis, fill)
    assert find_join(one, other, both + 1) is None


def minimax(folder: Path) -> Path:
    """A checkpoint whose linear layers have states in its cache that are not copied or left out with their rows."""
    layers = {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16, "num_local_experts": 4}
    return write_checkpoint(General(lambda _: {"model_type": "minimax", **text(head_dim=8), **layers}), folder)


def test_a_cache_that_cannot_be_forked_is_made_again_for_each_answer(tmp_path: Path) -> None:
    policy = load_policy(str(minimax(tmp_path / "tiny")), store=MediaStore())
    chat, general = policy.chat, policy.general
    assert general is not None
    assert any("several answers" in note for note in general.notes)
    engine, prompts = NativeEngine(policy), [chat.render([user(words)]) for words in ("a?", "where is it?")]
    sampling = [Sampling(max_new_tokens=3 + 4 * i, stop_tokens=False) for i in range(3)]
    requests = [
        ask(f"{p}/{i}", [prompt], kind, order=(p, i, 0), key=3 * p + i)
        for p, prompt in enumerate(prompts)
        for i, kind in enumerate(sampling)
    ]
    found = generate(engine, *requests)
    assert engine.counters.prefills == len(requests)
    for request, response in zip(requests, found, strict=True):
        tokens, row = response.segment.tokens, general.row(chat, [*request.context, response.segment])
        with torch.no_grad():
            logits = general.call({**general.inputs(chat, [row], "right"), "use_cache": False}).logits[0]
        logits[:, [*chat.forbidden_ids, *chat.stop_ids]] = -torch.inf
        wanted = logits.log_softmax(-1)[len(row) - len(tokens) - 1 : -1][range(len(tokens)), list(tokens)]
        assert (wanted - torch.tensor(response.segment.logprobs)).abs().max() < 1e-4


def test_a_copy_in_another_process_computes_as_the_checked_model(tmp_path: Path) -> None:
    """Which rows and media are computed together, and whether prompts are shared, is found by the check alone."""
    folder = str(minimax(tmp_path / "tiny"))
    policy = load_policy(folder, store=MediaStore())
    policy.save_description(tmp_path / "described")
    copy = build_policy(str(tmp_path / "described"), store=MediaStore(), family="general", dtype="float32", device="cpu")
    policy.chat.media_format.mixes, policy.chat.media_format.alike = False, frozenset({"video"})  # type: ignore[attr-defined]
    assert policy.general is not None
    assert copy.general is not None
    copy.general.trust(copy.chat, policy.general.checked(policy.chat))
    assert vars(copy.chat.media_format).items() >= {"company": "alone", "mixes": False, "forks": False}.items()
    assert copy.general.checked(copy.chat) == policy.general.checked(policy.chat)


def test_videos_of_one_size_leave_pictures_of_any_size(tmp_path: Path) -> None:
    """LLaVA-NeXT-Video puts together videos of one length and size alone."""
    points, cut = [[16, 16], [16, 32], [32, 16]], {"size": {"shortest_edge": 16}, "crop_size": square(16)}

    def config(ids: Callable[[str], int]) -> dict[str, Any]:
        return {
            "model_type": "llava_next_video", "image_token_index": ids("<image>"), "video_token_index": ids("<video>"),
            "image_grid_pinpoints": points, "spatial_pool_stride": 2, "text_config": text(model_type="llama", head_dim=8),
            "vision_config": vision(model_type="clip_vision_model"),
        }  # fmt: skip

    def processor(tokenizer: Any, template: str) -> Any:
        return transformers.LlavaNextVideoProcessor(
            transformers.LlavaNextVideoVideoProcessor(**cut),
            transformers.LlavaNextImageProcessor(**cut, image_grid_pinpoints=points),
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        )

    tokens = {"image_token": "<image>", "video_token": "<video>"}
    row = General(config, processor, tokens, shown={"image": "<image>", "video": "<video>"})
    policy = load_policy(str(write_checkpoint(row, tmp_path / "tiny")), store=MediaStore())
    chat, general = policy.chat, policy.general
    assert general is not None
    assert len([note for note in general.notes if "one size" in note]) == 1
    pictures = [noise(chat.store, seed, 30 * seed, 50) for seed in (1, 3)]
    prompts = [chat.render([user(*pictures, "which?")]), chat.render([user(pictures[1], "what?")])]
    rows = [general.row(chat, [prompt]) for prompt in prompts]
    general.refuse_unequal(chat, rows[0])
    assert list(general.batches(chat, rows, 1000)) == [[0, 1]]
    shown = [clip(chat.store, seed, 2 + seed, 56, 84) for seed in (1, 3)]
    clips = general.row(chat, [chat.render([user(*shown, "which?")])])
    with pytest.raises(MediaError, match="one size"):
        general.refuse_unequal(chat, clips)


def test_pictures_and_videos_that_fail_together_are_padded_among_their_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("qwen2_5_vl", tmp_path / "tiny")
    forward = Qwen2_5_VLModel.forward

    @wraps(forward)
    def apart(self: Any, *given: Any, pixel_values: Any = None, pixel_values_videos: Any = None, **more: Any) -> Any:
        if pixel_values is not None and pixel_values_videos is not None:
            raise ValueError("one kind")
        return forward(self, *given, pixel_values=pixel_values, pixel_values_videos=pixel_values_videos, **more)

    monkeypatch.setattr(Qwen2_5_VLModel, "forward", apart)
    policy = load_policy(str(folder), store=MediaStore(), family="general")
    media_format: Any = policy.chat.media_format
    assert (media_format.mixes, media_format.company) == (False, "any")
    chat, general = policy.chat, policy.general
    assert general is not None
    shown = [noise(chat.store, 1, 56, 56), clip(chat.store, 1, 4, 56, 56)]
    rows = [general.row(chat, [chat.render([user(medium, "what?")])]) for medium in shown]
    assert list(general.batches(chat, rows, 1000)) == [[0], [1]]


def clip(store: MediaStore, seed: int, frames: int, width: int, height: int) -> Media:
    """Large blocks that change; every second frame of four a second is shown."""
    blocks = np.random.default_rng(seed).integers(0, 255, (2 * frames, 2, 2, 3), dtype=np.uint8)
    shown = blocks.repeat(height // 2, 1).repeat(width // 2, 2)
    return store.put(encode_clip(shown, 4.0), "video", f"{seed}.mp4", VideoParameters(frames=frames))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_videos_are_what_the_processor_and_the_stock_model_make_of_them(family: str, tmp_path: Path) -> None:
    """Two turns, each with a video, are sampled; one forward over the thread gives the same log-probs."""
    folder = make_tiny(family, tmp_path / "tiny", seed=1, initializer_range=0.15)
    policy = load_policy(str(folder), store=MediaStore(), family="general")
    chat, general = policy.chat, policy.general
    assert general is not None
    frames = 4 if family == "internvl" else 6  # its processor takes videos of one length
    clips = [clip(chat.store, 1, 4, 56, 84), clip(chat.store, 2, frames, 84, 56)]
    context = [chat.render([user("which", clips[0], "is it?")])]
    decoded_clip = chat.decoder.get(context[0].media[0].media)
    clock = video_metadata(decoded_clip)
    assert [index / clock.fps for index in clock.frames_indices] == pytest.approx(decoded_clip.times_s.tolist())
    made = chat.processor(
        text=[chat.tokenizer.decode(context[0].tokens)],
        videos=[torch.from_numpy(decoded_clip.frames.transpose(0, 3, 1, 2).copy())],
        video_metadata=[video_metadata(decoded_clip)],
        do_sample_frames=False,
        return_tensors="pt",
    )
    sampling = Sampling(temperature=0.8, max_new_tokens=6, stop_tokens=False)
    for turn in range(2):
        request = ask("talk", context, sampling, order=(0, 0, turn), key=turn)
        context.append(generate(NativeEngine(policy), request)[0].segment)
        if turn == 0:
            context.append(chat.extend([user("and", clips[1])], after=context[-1]))
    row = general.row(chat, context)
    ids, first = made["input_ids"][0].tolist(), made["input_ids"].shape[1]
    assert row.ids_T[:first].tolist() == ids
    with torch.no_grad():
        stock = policy.model(**made).logits[0].log_softmax(-1)
        logits = general.call({**general.inputs(chat, [row], "right"), "use_cache": False}).logits[0]
    assert (logits[:first].log_softmax(-1) - stock).abs().max() < 1e-4
    logits[:, [*chat.forbidden_ids, *chat.stop_ids]] = -torch.inf
    logs = (logits / 0.8).log_softmax(-1)
    for place in (1, 3):
        start = sum(len(chat.layout(segment)) for segment in context[:place])
        tokens = context[place].tokens
        wanted = logs[start - 1 : start - 1 + len(tokens)][range(len(tokens)), list(tokens)]
        assert (wanted - torch.tensor(context[place].logprobs)).abs().max() < 1e-4


def test_videos_that_the_stock_forward_cannot_compute_leave_pictures_alone(tmp_path: Path) -> None:
    folder = make_tiny("glm4v", tmp_path / "tiny")
    policy = load_policy(str(folder), store=MediaStore(), family="general")
    assert {"picture", "text"} == policy.chat.modalities
    assert policy.general is not None
    assert any("video" in note for note in policy.general.notes)
    with pytest.raises(ModelError, match="cannot take video"):
        policy.chat.render([user(clip(policy.chat.store, 1, 4, 56, 56), "what?")])
