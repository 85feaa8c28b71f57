"""The processors of the tiny checkpoints: transformers' own classes, with sizes that fit towers this small."""

from importlib import import_module
from typing import Any

from transformers import PreTrainedTokenizerFast

from sensorium.models.number_words import require_number_words
from sensorium.models.tiny_tokenizer import TEMPLATES
from sensorium.recipe.tiny_sizes import Sizes

# The least and the most pixels of a picture, and of a frame.
MIN_PIXELS, MAX_PIXELS, MAX_FRAME_PIXELS = 28 * 28, 1024 * 28 * 28, 256 * 28 * 28
MAX_TILES = 6
QWEN_KEYS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
OMNI_KEYS = {
    "image_token_index": "<|IMAGE|>", "video_token_index": "<|VIDEO|>", "audio_token_index": "<|AUDIO|>",
    "vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>",
}  # fmt: skip
OMNI3_KEYS = QWEN_KEYS | {
    "audio_token_id": "<|audio_pad|>", "audio_start_token_id": "<|audio_start|>", "audio_end_token_id": "<|audio_end|>",
}  # fmt: skip
TOKEN_KEYS = {
    "qwen2_5_vl": QWEN_KEYS,
    "qwen3_vl": QWEN_KEYS,
    "qwen3_vl_moe": QWEN_KEYS,
    "qwen2_5_omni": OMNI_KEYS,
    "qwen3_omni_moe": OMNI3_KEYS,
    "internvl": {"image_token_id": "<IMG_CONTEXT>"},
    "smolvlm": {"image_token_id": "<image>"},
    "llava_onevision": {"image_token_index": "<image>", "video_token_index": "<video>"},
}
"""The keys by which the config of a family names its special tokens."""


PUBLISHED_PIXELS = {
    "qwen2_5_vl": ((3136, 12845056), (3136, 12845056)),
    "qwen3_vl": ((65536, 16777216), (4096, 25165824)),
    "qwen3_vl_moe": ((65536, 16777216), (4096, 25165824)),
    "qwen2_5_omni": ((3136, 12845056), (100352, 602112)),
    "qwen3_omni_moe": ((3136, 12845056), (100352, 786432)),
}
"""The least and most pixels of a picture, and of a frame (Qwen3-VL: a clip), of the families' published checkpoints."""
PUBLISHED_SOUND_S = 300
"""Seconds that the published checkpoint of Qwen2.5-Omni hears at most."""


def take_published_sizes(family: str, processor: Any) -> None:
    """Let a tiny checkpoint's processor take media as large and as long as the family's published checkpoints do."""
    for part, (least, most) in zip(("image_processor", "video_processor"), PUBLISHED_PIXELS[family], strict=True):
        getattr(processor, part).size = {"shortest_edge": least, "longest_edge": most}
    if family == "qwen2_5_omni":
        extractor = processor.feature_extractor
        extractor.chunk_length, extractor.n_samples = PUBLISHED_SOUND_S, PUBLISHED_SOUND_S * extractor.sampling_rate


def tiny_processor(family: str, tokenizer: PreTrainedTokenizerFast, config: Any) -> Any:
    """The processor of a tiny checkpoint with towers."""
    import sensorium.models.torchvision_fix  # noqa: F401  (before the image processors import torchvision)

    library: Any = import_module("transformers")
    given = {"tokenizer": tokenizer, "chat_template": TEMPLATES[family]}
    if family == "internvl":
        return _tiled(library, given, config)
    if family == "llava_onevision":
        return _grids_of_tiles(library, given, config)
    if family == "smolvlm":
        return _rows_of_tiles(library, given, config)
    return _qwen(family, library, given, config)


def _tiled(library: Any, given: dict[str, Any], config: Any) -> Any:
    """InternVL's: pictures of several tiles, frames of one."""
    side, patch = config.vision_config.image_size[0], config.vision_config.patch_size[0]
    size = {"height": side, "width": side}
    return library.InternVLProcessor(
        image_processor=library.GotOcr2ImageProcessor(size=size, max_patches=MAX_TILES),
        video_processor=library.InternVLVideoProcessor(size=size),
        image_seq_length=int(side // patch * config.downsample_ratio) ** 2,
        **given,
    )


def _grids_of_tiles(library: Any, given: dict[str, Any], config: Any) -> Any:
    """LLaVA-OneVision's: grids of up to four tiles."""
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    size, grids = {"height": side, "width": side}, config.image_grid_pinpoints
    return library.LlavaOnevisionProcessor(
        image_processor=library.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grids),
        video_processor=library.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=(side // patch) ** 2,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        **given,
    )


def _rows_of_tiles(library: Any, given: dict[str, Any], config: Any) -> Any:
    """SmolVLM2's: two tiles on the longer side."""
    require_number_words()
    vision = config.vision_config
    sizes = {"size": {"longest_edge": 2 * vision.image_size}, "max_image_size": {"longest_edge": vision.image_size}}
    return library.SmolVLMProcessor(
        image_processor=library.SmolVLMImageProcessor(**sizes),
        video_processor=library.SmolVLMVideoProcessor(**sizes),
        image_seq_len=(vision.image_size // vision.patch_size // config.scale_factor) ** 2,
        **given,
    )


def _qwen(family: str, library: Any, given: dict[str, Any], config: Any) -> Any:
    """Pictures and frames of any size, in patches."""
    new = family.startswith("qwen3")
    look: Sizes = {"patch_size": config.vision_config.patch_size}
    if new:
        look |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    # Qwen3-VL's video processor counts the pixels of the whole clip, the others those of a frame.
    whole = family.startswith("qwen3_vl")
    clip = {"shortest_edge": MIN_PIXELS, "longest_edge": (16 if whole else 1) * MAX_FRAME_PIXELS}
    video_class = library.Qwen3VLVideoProcessor if whole else library.Qwen2VLVideoProcessor
    picture = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    given |= {
        "image_processor": library.Qwen2VLImageProcessor(size=picture, **look),
        "video_processor": video_class(size=clip, cap_pixels_per_frame=False, **look),
    }
    if "omni" in family:
        mels = config.audio_config.num_mel_bins
        given["feature_extractor"] = library.WhisperFeatureExtractor(feature_size=mels, return_attention_mask=True)
        return (library.Qwen3OmniMoeProcessor if new else library.Qwen2_5OmniProcessor)(**given)
    return (library.Qwen3VLProcessor if new else library.Qwen2_5_VLProcessor)(**given)
