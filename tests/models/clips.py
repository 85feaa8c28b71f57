"""Small real media for tests, and what the checkpoint's own processors make of them."""

import io
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sensorium.data.decoder import decode
from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import DecodedAudio, encode_wav
from sensorium.data.video import DecodedVideo
from sensorium.models.families.qwen2_5_omni import frame_size
from sensorium.models.policy import Policy
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import VideoParameters
from tests.data.clips import middle
from tests.families import FAMILY_ROWS

from .trained_positions import with_trained_positions


def noise(store: MediaStore, seed: int, width: int = 64, height: int = 64) -> Media:
    """A picture of noise, kept in a store."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return store.put(data.getvalue(), "picture", f"noise-{seed}.png")


def clip(store: MediaStore, seed: int, frames: int = 4, width: int = 56, height: int = 56, seconds: float = 4.0) -> Media:
    """A video of so many seconds, each sampled frame another noise in large blocks (which survive the codec)."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 255, (frames, height // 14, width // 14, 3), dtype=np.uint8)
    shown = small.repeat(14, axis=1).repeat(14, axis=2)
    data = encode_clip(shown, fps=frames / seconds)
    return store.put(data, "video", f"clip-{seed}.mp4", middle(frames=frames))


def tone(store: MediaStore, seed: int, seconds: float = 0.5) -> Media:
    """A sound of a few sines."""
    rng = np.random.default_rng(seed)
    times = np.arange(round(seconds * 16000)) / 16000
    waves = sum(np.sin(2 * np.pi * pitch * times + 1) for pitch in rng.uniform(100, 4000, 3))
    return store.put(encode_wav((waves * rng.uniform(0.1, 0.3)).astype(np.float32)), "sound", f"tone-{seed}.wav")


def decoded(store: MediaStore, media: Media) -> Any:
    """A medium as the media package decodes it."""
    return store.picture(media) if media.kind == "picture" else decode(store, media)


def heard_clip(store: MediaStore, seed: int = 0, seconds: float = 4.0, sound_s: float | None = None, **asked: Any) -> Media:
    """A video of noise, 8 frames a second, that is shown with its sound inside."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 255, (round(8 * seconds), 4, 5, 3), dtype=np.uint8).repeat(14, axis=1).repeat(14, axis=2)
    samples = rng.uniform(-0.4, 0.4, round(16000 * (sound_s or seconds))).astype(np.float32)
    data = encode_clip(frames, 8.0, samples)
    return store.put(data, "video", f"heard-{seed}.mp4", VideoParameters(use_audio_in_video=True, **asked))


def shown(policy: Policy, media: Sequence[Media], kind: str) -> list[Any]:
    """The decoded media of one kind, in order, those that are heard with videos among them."""
    return [decoded(policy.chat.store, part) for item in whole(policy, media) for part in item.parts if part.kind == kind]


def whole(policy: Policy, media: Sequence[Media]) -> list[Media]:
    """Media as the model is shown them, of messages or of segments; the latter list a video's sound again behind it."""
    resolved = [policy.chat.shown(item) for item in media]
    return [item for i, item in enumerate(resolved) if not i or resolved[i - 1].sound != item]


def processor_inputs(policy: Policy, media: Sequence[Media]) -> dict[str, Any]:
    """The arguments that hand media to the checkpoint's own processor as frames and samples, with their times."""
    pictures = shown(policy, media, "picture")
    videos: list[DecodedVideo] = shown(policy, media, "video")
    sounds: list[DecodedAudio] = shown(policy, media, "sound")
    given: dict[str, Any] = {}
    if pictures:
        given["images"] = pictures
    if videos:
        given["videos"] = [torch.tensor(video.frames) for video in videos]
        told = [
            {
                "total_num_frames": round(video.duration_s * video.source_fps),
                "fps": video.source_fps,
                "frames_indices": video.indices.tolist(),
            }
            for video in videos
        ]
        given["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": told}
        if "sound" in policy.chat.modalities:
            # The omni processor has one rate for all videos, and sizes of its own unless told.
            given["videos_kwargs"] = {"fps": 1 / videos[0].seconds_per_frame, "size": frame_size(policy.chat.processor)}
        if any(item.sound is not None for item in media):
            given["videos_kwargs"] |= {"do_sample_frames": False}
            given |= heard_with(policy, media)
        asked = [item.parameters for item in whole(policy, media)]
        if any(isinstance(one, VideoParameters) and one.sampling != "middle" for one in asked):
            given["videos_kwargs"]["do_resize"] = False
    if sounds:
        given["audio"] = [sound.samples for sound in sounds]
    return given


def heard_with(policy: Policy, media: Sequence[Media]) -> dict[str, Any]:
    """How the omni processor learns that sounds belong to videos; since transformers 5.23, which of them."""
    if not hasattr(policy.chat.processor, "load_audio_from_video"):
        return {"use_audio_in_video": True}
    parts = [(item, part) for item in whole(policy, media) for part in item.parts]
    videos = [item for item, part in parts if part.kind == "video"]
    sources = [videos.index(item) if item in videos else None for item, part in parts if part.kind == "sound"]
    return {"load_audio_from_video": True, "audio_from_video_indices": sources}


def stock_inputs(policy: Policy, text: str, media: Sequence[Media]) -> dict[str, Tensor]:
    """Tokens and media of a rendered conversation, as the checkpoint's own processor makes them."""
    if policy.family == "smolvlm":
        return told_one_by_one(policy, text, media)
    if policy.family == "llava_onevision":
        return seen_one_by_one(policy, text, media)
    made = dict(policy.chat.processor(text=[text], **processor_inputs(policy, media), return_tensors="pt"))
    videos: list[DecodedVideo] = shown(policy, media, "video")
    if "sound" in policy.chat.modalities and videos:
        made["video_second_per_grid"] = torch.tensor([2 * video.seconds_per_frame for video in videos])
    made.pop("video_metadata", None)
    if FAMILY_ROWS[policy.family].shortest_s and "input_features" in made:
        made |= heard_alone(policy, shown(policy, media, "sound"))
    if any(item.sound is not None for item in media):
        made["use_audio_in_video"] = True  # type: ignore[assignment]
    return with_trained_positions(policy.model.config, made)


def seen_one_by_one(policy: Policy, text: str, media: Sequence[Media]) -> dict[str, Tensor]:
    """LLaVA-OneVision's processor over each medium by itself: of several in a prompt it shows base views only."""
    processor = policy.chat.processor
    tiles, sizes, films = [], [], []
    for item in media:
        (seen,) = shown(policy, [item], item.kind)
        if item.kind == "picture":
            token, mark, made = (
                processor.image_token,
                "\0",
                processor(text=[processor.image_token], images=[seen], return_tensors="pt"),
            )
            tiles.append(made["pixel_values"][0])
            sizes.append(made["image_sizes"][0])
        else:
            settings = {"do_sample_frames": False}
            token, mark = processor.video_token, "\1"
            made = processor(text=[token], videos=[torch.tensor(seen.frames)], videos_kwargs=settings, return_tensors="pt")
            films.append(made["pixel_values_videos"])
        text = text.replace(token, mark * made["input_ids"].shape[1], 1)
    text = text.replace("\0", processor.image_token).replace("\1", processor.video_token)
    inputs = dict(processor.tokenizer(text, return_tensors="pt"))
    if tiles:
        padded = torch.nn.utils.rnn.pad_sequence(tiles, batch_first=True)
        inputs |= {"pixel_values": padded, "image_sizes": torch.stack(sizes)}
    return inputs | ({"pixel_values_videos": torch.cat(films)} if films else {})


def told_one_by_one(policy: Policy, text: str, media: Sequence[Media]) -> dict[str, Tensor]:
    """SmolVLM2's processor over each medium by itself, and its tokenizer over the whole: it takes no mixture of kinds."""
    processor, tiles = policy.chat.processor, []
    for item in media:
        (seen,) = shown(policy, [item], item.kind)
        if item.kind == "picture":
            token, given = processor.image_token, {"images": [[seen]]}
        else:
            told = {
                "total_num_frames": round(seen.duration_s * seen.source_fps), "fps": seen.source_fps,
                "frames_indices": seen.indices.tolist(), "duration": round(seen.seconds_per_frame * len(seen.frames), 3),
            }  # fmt: skip
            settings = {"do_sample_frames": False, "video_metadata": [told]}
            token, given = processor.video_token, {"videos": [[torch.tensor(seen.frames)]], "videos_kwargs": settings}
        made = processor(text=[token], **given, return_tensors="pt")
        tiles.append(made["pixel_values"])
        before, _, after = text.partition(token)
        gap = " " if item.kind == "video" and not before.endswith(" ") else ""  # on purpose; see docs/guides/families.md
        expanded = processor.tokenizer.decode(made["input_ids"][0]).replace(processor.image_token, "\0")
        text = before + gap + expanded + after
    ids = processor.tokenizer(text.replace("\0", processor.image_token), return_tensors="pt")
    return {**ids, **({"pixel_values": torch.cat(tiles, dim=1)} if tiles else {})}


def heard_alone(policy: Policy, sounds: Sequence[DecodedAudio]) -> dict[str, Tensor]:
    """Mel frames of sounds, each computed by itself: together the library pads them, which changes their ends."""
    extractor = policy.chat.processor.feature_extractor
    alone = [
        extractor([sound.samples], sampling_rate=16000, padding=True, truncation=False, return_tensors="pt")
        for sound in sounds
    ]
    frames = [made["input_features"][0].T for made in alone]
    lengths = torch.tensor([len(one) for one in frames])
    padded = torch.nn.utils.rnn.pad_sequence(frames, batch_first=True).transpose(1, 2)
    return {
        "input_features": padded,
        "feature_attention_mask": (torch.arange(padded.shape[-1]) < lengths[:, None]).long(),
    }


def row_inputs(policy: Policy, ids_T: Tensor, media: Sequence[Media]) -> dict[str, Tensor]:
    """What the stock model needs for a row of expanded tokens that shows these media, in order."""
    inputs: dict[str, Tensor] = {"input_ids": ids_T[None], "attention_mask": torch.ones_like(ids_T)[None]}
    tokens = policy.chat.media_format.placeholders
    if media:
        inputs |= media_inputs(policy, tuple(media))
    if policy.family.startswith("qwen") and tokens and "sound" not in policy.chat.modalities:
        inputs["mm_token_type_ids"] = ((ids_T == tokens["picture"]).int() + 2 * (ids_T == tokens["video"]).int())[None]
    if policy.family == "glm4v":
        inputs["mm_token_type_ids"] = torch.tensor(policy.chat.processor.create_mm_token_type_ids([ids_T.tolist()]))
    return with_trained_positions(policy.model.config, inputs)


@lru_cache(maxsize=64)  # the answers of a group are about the same media
def media_inputs(policy: Policy, media: tuple[Media, ...]) -> dict[str, Tensor]:
    """What the stock model needs for media, whatever text they stand in."""
    tokens = policy.chat.media_format.placeholders
    if FAMILY_ROWS[policy.family].one_length == "processor" and len(media) > 1:
        return {"pixel_values": torch.cat([media_inputs(policy, (item,))["pixel_values"] for item in media])}
    names = {kind: policy.chat.tokenizer.convert_ids_to_tokens(token) for kind, token in tokens.items()}
    text = "".join(
        names[item.kind] if item.sound is None else f"<|vision_bos|>{names[item.kind]}<|vision_eos|>"
        for item in whole(policy, media)
    )
    made = stock_inputs(policy, text, media)
    return {key: value for key, value in made.items() if not key.endswith("_ids") and key != "attention_mask"}
