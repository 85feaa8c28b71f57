"""The published shapes, by their config.json, with Qwen's token ids; built on the meta device they cost no memory."""

from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .templates import QWEN2_5_OMNI, QWEN2_5_VL, QWEN3_VL

FIRST_SPECIAL = 151643
NAMES = (
    *("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start"),
    *("quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
)
SPECIALS = [f"<|{name}|>" for name in NAMES]
IDS = {name: FIRST_SPECIAL + i for i, name in enumerate(SPECIALS)}
# Qwen2.5-Omni renames some of them.
OMNI_NAMES = {
    "object_ref_start": "AUDIO", "object_ref_end": "audio_bos", "box_start": "audio_eos", "vision_start": "vision_bos",
    "vision_end": "vision_eos", "image_pad": "IMAGE", "video_pad": "VIDEO",
}  # fmt: skip
OMNI_SPECIALS = [f"<|{OMNI_NAMES.get(name, name)}|>" for name in NAMES]
OMNI_ATTRIBUTES = {
    "audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>", "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
}  # fmt: skip


def qwen2_5_text(**sizes: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    return sizes | {"rope_parameters": rope, "max_position_embeddings": 128000}


def qwen3_text(**sizes: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    return sizes | {"rope_parameters": rope, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144}


def qwen2_5_vision(out: int) -> dict[str, Any]:
    return {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "out_hidden_size": out,
    }  # fmt: skip


def qwen3_vision(out: int, large: bool = False) -> dict[str, Any]:
    sizes: dict[str, Any] = (
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
        if large
        else {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
    )
    return sizes | {"num_heads": 16, "patch_size": 16, "num_position_embeddings": 2304, "out_hidden_size": out}


def whisper(out: int) -> dict[str, Any]:
    return {
        "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "num_mel_bins": 128,
        "n_window": 100, "output_dim": out,
    }  # fmt: skip


# name: (class prefix, family, text, vision, tied, billions of parameters as published)
SHAPES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], bool, float]] = {
    "Qwen2.5-VL-3B": (
        "Qwen2_5_VL", "qwen2_5_vl",
        qwen2_5_text(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
                     num_key_value_heads=2, vocab_size=151936),
        qwen2_5_vision(2048), True, 3.75,
    ),
    "Qwen2.5-VL-7B": (
        "Qwen2_5_VL", "qwen2_5_vl",
        qwen2_5_text(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                     num_key_value_heads=4, vocab_size=152064),
        qwen2_5_vision(3584), False, 8.29,
    ),
    "Qwen2-Audio-7B": (  # its config.json leaves the other sizes to the defaults of transformers
        "Qwen2Audio", "qwen2_audio",
        {"intermediate_size": 11008, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "vocab_size": 156032,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {}, False, 8.40,
    ),
    "Qwen2.5-Omni-7B": (
        "Qwen2_5OmniThinker", "qwen2_5_omni",
        qwen2_5_text(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                     num_key_value_heads=4, vocab_size=152064),
        {key: value for key, value in qwen2_5_vision(3584).items() if key != "tokens_per_second"}, False, 8.93,
    ),
    "Qwen3-VL-2B": (
        "Qwen3VL", "qwen3_vl",
        qwen3_text(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
                   num_key_value_heads=8),
        qwen3_vision(2048), True, 2.13,
    ),
    "Qwen3-VL-4B": (
        "Qwen3VL", "qwen3_vl",
        qwen3_text(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                   num_key_value_heads=8),
        qwen3_vision(2560), True, 4.44,
    ),
    "Qwen3-VL-30B-A3B": (
        "Qwen3VLMoe", "qwen3_vl_moe",
        qwen3_text(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
                   num_experts_per_tok=8, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4),
        qwen3_vision(2048, large=True), False, 31.1,
    ),
}  # fmt: skip


def meta_config(name: str) -> Any:
    """The published config."""
    prefix, family, text, vision, tied, _ = SHAPES[name]
    config_class = getattr(transformers, f"{prefix}Config")
    text = text | {"eos_token_id": IDS["<|im_end|>"], "pad_token_id": None, "bos_token_id": None}
    if not vision:
        encoder = {key: size for key, size in whisper(0).items() if key not in ("n_window", "output_dim")}
        return config_class(text_config=text, audio_config=encoder | {"max_source_positions": 1500})
    more: dict[str, Any] = {"image_token_id": IDS["<|image_pad|>"], "video_token_id": IDS["<|video_pad|>"]}
    if family == "qwen2_5_omni":  # whose config has Qwen's ids by default
        more = {"audio_config": whisper(text["hidden_size"])}
    return config_class(
        text_config=text,
        vision_config=vision,
        **more,
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
        tie_word_embeddings=tied,
    )


def meta_model(name: str) -> Any:
    """The published shape without memory."""
    with torch.device("meta"):
        model = getattr(transformers, f"{SHAPES[name][0]}ForConditionalGeneration")(meta_config(name))
    model.generation_config.eos_token_id = [IDS["<|im_end|>"], IDS["<|endoftext|>"]]
    return model


def published_processor(name: str) -> Any:
    """The published image sizes; a tokenizer of single bytes that has Qwen's special tokens where Qwen has them."""
    omni, audio = "Omni" in name, "Audio" in name
    core = Tokenizer(models.BPE(_vocabulary(), []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = OMNI_SPECIALS if omni or audio else SPECIALS
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=OMNI_ATTRIBUTES if omni or audio else [],
    )
    if audio:  # the template that transformers has for it is the published one
        extractor = transformers.WhisperFeatureExtractor(feature_size=128)
        return transformers.Qwen2AudioProcessor(feature_extractor=extractor, tokenizer=tokenizer)
    if omni:
        return transformers.Qwen2_5OmniProcessor(
            image_processor=transformers.Qwen2VLImageProcessor(size={"shortest_edge": 3136, "longest_edge": 12845056}),
            video_processor=transformers.Qwen2VLVideoProcessor(size={"shortest_edge": 3136, "longest_edge": 12845056}),
            feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=300),
            tokenizer=tokenizer,
            chat_template=QWEN2_5_OMNI,
        )
    if name.startswith("Qwen2.5"):
        image = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 3136, "longest_edge": 12845056})
        video, template, processor = transformers.Qwen2VLVideoProcessor(), QWEN2_5_VL, transformers.Qwen2_5_VLProcessor
    else:
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        image = transformers.Qwen2VLImageProcessor(
            patch_size=16, size={"shortest_edge": 65536, "longest_edge": 16777216}, **half
        )
        video, template, processor = transformers.Qwen3VLVideoProcessor(), QWEN3_VL, transformers.Qwen3VLProcessor
    return processor(image_processor=image, video_processor=video, tokenizer=tokenizer, chat_template=template)


def _vocabulary() -> dict[str, int]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    filler = (f"unused {i}" for i in range(FIRST_SPECIAL - len(letters)))
    return {token: i for i, token in enumerate([*letters, *filler])}
