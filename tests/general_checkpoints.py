"""Tiny checkpoints of families that Sensorium has no adapter for: what a user would have on disk, random, in half a second.

``GENERAL`` has a row for each: its special tokens, how its chat template writes turns, its processor and its config. The
numbers that must agree between processor and model (tokens of a picture, patch and merge sizes) are the row's business.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sensorium.models.torchvision_fix  # noqa: F401  isort: skip  (before the image processors import torchvision)
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from sensorium.models.tiny import ANSWERS, PAD, QUESTIONS, TAGS, tiny_tokenizer
from sensorium.models.weight_files import saving_weights
from sensorium.recipe.family_facts import FamilyFacts
from tests.tiny_models import kept_copy

LONGEST = 4096


@dataclass(frozen=True)
class Turns:
    """How a chat template writes turns. ``bos`` begins a conversation; ``answer`` is also the generation prompt.

    ``system``: None where the template writes the system's text at the head of the user's first turn.
    """

    bos: str = ""
    system: tuple[str, str] | None = ("<|im_start|>system\n", "<|im_end|>\n")
    user: tuple[str, str] = ("<|im_start|>user\n", "<|im_end|>\n")
    answer: tuple[str, str] = ("<|im_start|>assistant\n", "<|im_end|>\n")

    def template(self, shown: Mapping[str, str]) -> str:
        """The Jinja template, with what it writes for media of each kind ("image", "audio")."""
        media = "".join(f"{{%- elif part.type == '{kind}' -%}}{{{{ {text!r} }}}}" for kind, text in shown.items())
        show = (
            "{%- macro show(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
            f"{{%- if part.type == 'text' -%}}{{{{ part.text }}}}{media}{{%- endif -%}}"
            "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
        )
        roles = {"user": self.user, "assistant": self.answer} | ({"system": self.system} if self.system else {})
        turns = "".join(
            f"{{%- if message.role == '{role}' -%}}{{{{ {opening!r} + head + show(message.content) + {closing!r} }}}}"
            "{%- endif -%}".replace("head +", "head.text +" if role == "user" and not self.system else "")
            for role, (opening, closing) in roles.items()
        )
        folded = (
            "{%- if message.role == 'system' -%}{%- set head.text = show(message.content) + '\n\n' -%}"
            "{%- else -%}{%- set head.text = '' -%}{%- endif -%}"
        )
        prompt = f"{{%- if add_generation_prompt -%}}{{{{ {self.answer[0]!r} }}}}{{%- endif -%}}"
        return (
            f"{show}{{{{ {self.bos!r} }}}}{{%- set head = namespace(text='') -%}}{{%- for message in messages -%}}"
            f"{turns}{'' if self.system else folded}{{%- endfor -%}}{prompt}"
        )


CHATML = Turns()
GEMMA = Turns(
    "<bos>",
    None,
    ("<start_of_turn>user\n", "<end_of_turn>\n"),
    ("<start_of_turn>model\n", "<end_of_turn>\n"),
)
MISTRAL = Turns("<s>", ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("[INST]", "[/INST]"), ("", "</s>"))
IDEFICS = Turns(
    "<|im_start|>",
    ("System: ", "<end_of_utterance>\n"),
    ("User:", "<end_of_utterance>\n"),
    ("Assistant:", "<end_of_utterance>\n"),
)
PHI = Turns("", ("<|system|>", "<|end|>"), ("<|user|>", "<|end|>"), ("<|assistant|>", "<|end|>"))
PREFIX = Turns("", ("", ""), ("", "<bos>"), ("", "<eos>"))
COHERE = Turns(
    "<bos>",
    *((f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>", "<|END_OF_TURN_TOKEN|>") for role in ("SYSTEM", "USER", "CHATBOT")),
)


@dataclass(frozen=True)
class General:
    """A family. ``config`` gets the ids of the row's tokens by their text, ``processor`` the tokenizer and the template.

    ``tokens``: special tokens by the name of the tokenizer's attribute; ``more``: others. ``shown``: what the template
    writes for a picture or a sound. ``attention``: the implementation under which the stock model is one function.
    ``pieces``: the class of its tokenizer, where that is not byte-level BPE. ``refused``: what its refusal names, where it
    cannot be trained here. ``alike``: kinds of media that its stock tower takes in one size only in a call.
    ``one_turn``: whether its processor or its attention takes one turn only.
    """

    config: Callable[[Callable[[str], int]], dict[str, Any]]
    processor: Callable[[Any, str], Any] | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    shown: Mapping[str, str] = field(default_factory=dict)
    turns: Turns = CHATML
    attention: str = "sdpa"
    pieces: Any = None
    refused: str = ""
    alike: tuple[str, ...] = ()
    one_turn: bool = False


def text(**more: Any) -> dict[str, Any]:
    """Sizes of a tiny language model."""
    return {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": LONGEST, **more,
    }  # fmt: skip


def vision(**more: Any) -> dict[str, Any]:
    """Sizes of a tiny vision tower: pictures of 16 x 16 in patches of 4."""
    return {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
        "patch_size": 4, **more,
    }  # fmt: skip


def siglip(**more: Any) -> dict[str, Any]:
    return vision(model_type="siglip_vision_model", **more)


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
GLOBAL_LAST = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
DELTA = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
DELTA_SIZES = {
    "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": DELTA,
}  # fmt: skip
T = transformers


def _gemma3(ids: Callable[[str], int]) -> dict[str, Any]:
    return {
        "model_type": "gemma3", "mm_tokens_per_image": 4, "image_token_index": ids("<image_soft_token>"),
        "boi_token_index": ids("<start_of_image>"), "eoi_token_index": ids("<end_of_image>"), "vision_config": siglip(),
        "text_config": text(head_dim=8, sliding_window=8, query_pre_attn_scalar=8, layer_types=WINDOWS),
    }  # fmt: skip


def _gemma4(mask: str | None) -> Callable[[Callable[[str], int]], dict[str, Any]]:
    def config(ids: Callable[[str], int]) -> dict[str, Any]:
        return {
            "model_type": "gemma4", "audio_config": None, "image_token_id": ids("<|image|>"),
            "video_token_id": ids("<|video|>"), "audio_token_id": ids("<|audio|>"), "boi_token_id": ids("<|image>"),
            "eoi_token_id": ids("<image|>"), "boa_token_id": ids("<|audio>"), "eoa_token_index": ids("<audio|>"),
            "text_config": text(
                head_dim=8, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=1024,
                num_kv_shared_layers=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2,
                use_bidirectional_attention=mask,
            ),
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
                "num_key_value_heads": 4, "patch_size": 4, "pooling_kernel_size": 3, "position_embedding_size": 64,
            },
        }  # fmt: skip

    return config


def _glm4v(ids: Callable[[str], int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    return {
        "model_type": "glm4v", "image_token_id": ids("<|image|>"), "video_token_id": ids("<|video|>"),
        "image_start_token_id": ids("<|begin_of_image|>"), "image_end_token_id": ids("<|end_of_image|>"),
        "video_start_token_id": ids("<|begin_of_video|>"), "video_end_token_id": ids("<|end_of_video|>"),
        "text_config": text(rope_parameters=rope),
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "image_size": 28, "patch_size": 7,
            "out_hidden_size": 32,
        },
    }  # fmt: skip


def _minicpm(ids: Callable[[str], int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 0, 0], "partial_rotary_factor": 0.25}
    return {
        "model_type": "minicpmv4_6", "image_token_id": ids("<|image_pad|>"), "video_token_id": ids("<|video_pad|>"),
        "insert_layer_id": 1, "image_size": 32, "text_config": text(
            model_type="qwen3_5_text", rope_parameters=rope, **DELTA_SIZES
        ),
        "vision_config": vision(num_hidden_layers=3, image_size=32, insert_layer_id=1),
    }  # fmt: skip


OVIS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


def _ovis2(ids: Callable[[str], int]) -> dict[str, Any]:
    return {
        "model_type": "ovis2", "hidden_size": 32, "image_token_id": ids("<IMG_ATOM>"),
        "visual_indicator_token_ids": [ids(token) for token in OVIS], "text_config": text(model_type="qwen2"),
        "vision_config": vision(vocab_size=64, hidden_stride=1),
    }  # fmt: skip


def _phi4(ids: Callable[[str], int]) -> dict[str, Any]:
    return {
        "model_type": "phi4_multimodal", **text(original_max_position_embeddings=LONGEST, num_hidden_layers=2),
        "vision_config": vision(  # whose processor writes 256 tokens for each half of any picture
            num_attention_heads=1, image_size=448, crop_size=448, patch_size=14, image_token_id=ids("<|image|>")
        ),
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_blocks": 2, "nemo_conv_channels": 16,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "input_size": 80, "time_reduction": 8,
            "audio_token_id": ids("<|audio|>"),
        },
    }  # fmt: skip


def _granite_speech(ids: Callable[[str], int]) -> dict[str, Any]:
    return {
        "model_type": "granite_speech", "audio_token_index": ids("<|audio|>"), "has_lora_adapter": False,
        "window_size": 15, "downsample_rate": 5, "text_config": text(model_type="granite"),
        "encoder_config": {
            "input_dim": 160, "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "dim_head": 8, "output_dim": 4,
            "context_size": 20, "max_pos_emb": 32, "feedforward_mult": 2,
        },
        "projector_config": {
            "model_type": "blip_2_qformer", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "encoder_hidden_size": 32, "cross_attention_frequency": 1,
        },
    }  # fmt: skip


def _voxtral(ids: Callable[[str], int]) -> dict[str, Any]:
    return {
        "model_type": "voxtral", "audio_token_id": ids("[AUDIO]"), "text_config": text(model_type="llama", head_dim=8),
        "audio_config": {
            "model_type": "voxtral_encoder", "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_source_positions": 1500, "num_mel_bins": 128,
        },
    }  # fmt: skip


def _kimi(ids: Callable[[str], int]) -> dict[str, Any]:
    experts = {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    return {
        "model_type": "kimi_k25", "image_token_id": ids("<|media_pad|>"), "video_token_id": ids("<|video_pad|>"),
        "projection_hidden_size": 32, "tie_word_embeddings": False,
        "text_config": text(model_type="deepseek_v3", num_key_value_heads=4, **experts) | {"num_key_value_heads": 4},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 7,
            "pos_emb_height": 8, "pos_emb_width": 8,
        },
    }  # fmt: skip


def _gemma4_processor(tokenizer: Any, template: str) -> Any:
    sizes = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    return T.Gemma4Processor(
        T.Gemma4AudioFeatureExtractor(), T.Gemma4ImageProcessor(**sizes), tokenizer, T.Gemma4VideoProcessor(**sizes),
        chat_template=template, image_seq_length=70,
    )  # fmt: skip


class _Files:
    """A processor whose class cannot be made here, as the files of a published one."""

    def __init__(self, tokenizer: Any, **files: dict[str, Any]) -> None:
        self._tokenizer, self._files = tokenizer, files

    def save_pretrained(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)
        for name, content in self._files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))


def _granite_processor(tokenizer: Any, template: str) -> Any:
    """Which needs torchaudio."""
    names = {"processor_class": "GraniteSpeechProcessor", "feature_extractor_type": "GraniteSpeechFeatureExtractor"}
    return _Files(tokenizer, preprocessor_config=names, processor_config={**names, "audio_token": "<|audio|>"})


GEMMA4_TOKENS = {
    "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
    "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip
GEMMA_TURNS = ("<bos>", "<start_of_turn>", "<end_of_turn>")
COHERE_TURNS = (
    "<bos>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
)  # fmt: skip
MISTRAL_TURNS = ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")

VOXTRAL_SOUND = 24  # the id that its processor has written into it

GENERAL: dict[str, General] = {
    "gemma3": General(
        _gemma3,
        lambda tokenizer, template: T.Gemma3Processor(
            T.Gemma3ImageProcessor(size=square(16)), tokenizer, chat_template=template, image_seq_length=4
        ),
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        GEMMA_TURNS,
        {"image": "<start_of_image>"},
        GEMMA,
        pieces=T.GemmaTokenizer,
    ),
    "gemma4": General(
        _gemma4(None),
        _gemma4_processor,
        GEMMA4_TOKENS,
        ("<|video|>", *GEMMA_TURNS),
        {"image": "<|image|>"},
        GEMMA,
        pieces=T.GemmaTokenizer,
    ),
    "gemma4_vision": General(
        _gemma4("vision"),
        _gemma4_processor,
        GEMMA4_TOKENS,
        ("<|video|>", *GEMMA_TURNS),
        {"image": "<|image|>"},
        GEMMA,
        pieces=T.GemmaTokenizer,
    ),
    "glm4v": General(
        _glm4v,
        lambda tokenizer, template: T.Glm4vProcessor(
            T.Glm4vImageProcessor(patch_size=7, size={"shortest_edge": 14 * 14 * 2, "longest_edge": 28 * 28 * 2}),
            tokenizer,
            T.Glm4vVideoProcessor(patch_size=7),
            chat_template=template,
        ),
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        {"image": "<|begin_of_image|><|image|><|end_of_image|>"},
    ),
    "mistral3": General(
        lambda ids: {
            "model_type": "mistral3",
            "image_token_index": ids("[IMG]"),
            "spatial_merge_size": 2,
            "text_config": text(model_type="mistral", head_dim=8, sliding_window=None),
            "vision_config": vision(model_type="pixtral", image_size=32, head_dim=8),
        },
        lambda tokenizer, template: T.PixtralProcessor(
            T.PixtralImageProcessor(patch_size=square(8), size={"longest_edge": 32}),
            tokenizer,
            patch_size=4,
            spatial_merge_size=2,
            chat_template=template,
        ),
        more=("[IMG]", "[IMG_BREAK]", "[IMG_END]", *MISTRAL_TURNS),
        shown={"image": "[IMG]"},
        turns=MISTRAL,
    ),
    "minicpmv4_6": General(
        _minicpm,
        lambda tokenizer, template: T.MiniCPMV4_6Processor(
            T.MiniCPMV4_6ImageProcessor(patch_size=4, scale_resolution=32, max_slice_nums=4),
            T.MiniCPMV4_6VideoProcessor(patch_size=4, scale_resolution=32),
            tokenizer,
            chat_template=template,
        ),
        {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "image_start_token": "<image>",
            "image_end_token": "</image>",
            "slice_start_token": "<slice>",
            "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>",
            "image_id_end_token": "</image_id>",
        },
        shown={"image": "<|image_pad|>"},
        alike=("image",),
    ),
    "ovis2": General(
        _ovis2,
        lambda tokenizer, template: T.Ovis2Processor(
            T.Ovis2ImageProcessor(size=square(16), crop_to_patches=True, max_patches=4),
            tokenizer,
            chat_template=template,
            image_seq_length=16,
        ),
        more=("<image>", "<IMG_ATOM>", *OVIS),
        shown={"image": "<image>\n"},
    ),
    "idefics3": General(
        lambda ids: {
            "model_type": "idefics3",
            "image_token_id": ids("<image>"),
            "scale_factor": 2,
            "text_config": text(model_type="llama"),
            "vision_config": vision(),
        },
        lambda tokenizer, template: T.Idefics3Processor(
            T.Idefics3ImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
            tokenizer,
            image_seq_len=4,
            chat_template=template,
        ),
        more=(
            "<image>",
            "<fake_token_around_image>",
            "<global-img>",
            "<end_of_utterance>",
            *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
        ),
        shown={"image": "<image>"},
        turns=IDEFICS,
    ),
    "paligemma2": General(
        lambda ids: {
            "model_type": "paligemma",
            "image_token_index": ids("<image>"),
            "projection_dim": 32,
            "hidden_size": 32,
            "text_config": text(model_type="gemma2", head_dim=8, query_pre_attn_scalar=8, sliding_window=LONGEST),
            "vision_config": siglip(vision_use_head=False, projection_dim=32),
        },
        lambda tokenizer, template: T.PaliGemmaProcessor(
            _with_length(T.SiglipImageProcessor(size=square(16)), 16), tokenizer, chat_template=template
        ),
        {"image_token": "<image>"},
        ("<bos>", "<eos>"),
        {"image": "<image>"},
        PREFIX,
        "eager",
        T.GemmaTokenizer,
        one_turn=True,
    ),
    "phi4_multimodal": General(
        _phi4,
        lambda tokenizer, template: T.Phi4MultimodalProcessor(
            T.Phi4MultimodalImageProcessor(dynamic_hd=1),
            T.Phi4MultimodalFeatureExtractor(),
            tokenizer,
            chat_template=template,
        ),
        {"image_token": "<|image|>", "audio_token": "<|audio|>"},
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        {"image": "<|image|>", "audio": "<|audio|>"},
        PHI,
        "eager",
        alike=("audio",),
    ),
    "granite_speech": General(
        _granite_speech,
        _granite_processor,
        {"audio_token": "<|audio|>"},
        shown={"audio": "<|audio|>"},
        refused="torchaudio",
    ),
    "voxtral": General(
        _voxtral,
        lambda tokenizer, template: T.VoxtralProcessor(T.WhisperFeatureExtractor(feature_size=128), tokenizer),
        more=(*MISTRAL_TURNS, *(f"<SPECIAL_{i}>" for i in range(9, VOXTRAL_SOUND)), "[AUDIO]"),
        shown={"audio": "[AUDIO]"},
        turns=MISTRAL,
        refused="mistral",
    ),
    "aya_vision": General(
        lambda ids: {
            "model_type": "aya_vision",
            "image_token_index": ids("<|IMG_PATCH|>"),
            "downsample_factor": 2,
            "alignment_intermediate_size": 64,
            "vision_config": siglip(),
            "text_config": text(model_type="cohere2", head_dim=8, sliding_window=8, layer_types=GLOBAL_LAST),
        },
        lambda tokenizer, template: T.AyaVisionProcessor(
            T.GotOcr2ImageProcessor(size=square(16), crop_to_patches=True, max_patches=4),
            tokenizer,
            patch_size=4,
            img_size=16,
            downsample_factor=2,
            chat_template=template,
        ),
        more=(
            *("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL"),
            *(f"TILE_{i}" for i in range(1, 5)),
            *COHERE_TURNS,
        ),
        shown={"image": "<image>"},
        turns=COHERE,
    ),
    "llava_next": General(
        lambda ids: {
            "model_type": "llava_next",
            "image_token_index": ids("<image>"),
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
            "text_config": text(model_type="mistral", head_dim=8, sliding_window=None),
            "vision_config": vision(model_type="clip_vision_model", num_hidden_layers=3, projection_dim=32),
        },
        lambda tokenizer, template: T.LlavaNextProcessor(
            T.LlavaNextImageProcessor(
                size={"shortest_edge": 16}, crop_size=square(16), image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]]
            ),
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        ),
        more=("<image>", *MISTRAL_TURNS),
        shown={"image": "<image>\n"},
        turns=MISTRAL,
        pieces=T.LlamaTokenizer,
    ),
    "glmasr": General(
        lambda ids: {
            "model_type": "glmasr",
            "audio_token_id": ids("<|pad|>"),
            "text_config": text(model_type="llama", head_dim=8),
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_mel_bins": 128,
            },
        },
        lambda tokenizer, template: T.GlmAsrProcessor(
            T.WhisperFeatureExtractor(feature_size=128), tokenizer, chat_template=template
        ),
        {"audio_token": "<|pad|>"},
        ("<|begin_of_audio|>", "<|end_of_audio|>"),
        {"audio": "<|begin_of_audio|><|pad|><|end_of_audio|>"},
        one_turn=True,
    ),
    "kimi_k25": General(
        _kimi,
        lambda tokenizer, template: T.Kimi_K25Processor(
            T.Kimi_K25ImageProcessor(patch_size=7, size={"max_height": 56, "max_width": 56}, max_patches=16),
            tokenizer,
            T.Kimi_K25VideoProcessor(patch_size=7, size={"max_height": 56, "max_width": 56}),
            chat_template=template,
        ),
        {"image_token": "<|media_pad|>", "video_token": "<|video_pad|>"},
        ("<|media_begin|>", "<|media_content|>", "<|media_end|>"),
        {"image": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"},
    ),
    "qwen2_vl": General(
        lambda ids: {
            "model_type": "qwen2_vl",
            "image_token_id": ids("<|image_pad|>"),
            "video_token_id": ids("<|video_pad|>"),
            "vision_start_token_id": ids("<|vision_start|>"),
            "vision_end_token_id": ids("<|vision_end|>"),
            "text_config": text(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}),
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 7,
            },
        },
        lambda tokenizer, template: T.Qwen2VLProcessor(
            T.Qwen2VLImageProcessor(patch_size=7, size={"shortest_edge": 14 * 14 * 2, "longest_edge": 28 * 28 * 2}),
            tokenizer,
            T.Qwen2VLVideoProcessor(patch_size=7),
            chat_template=template,
        ),
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        ("<|vision_start|>", "<|vision_end|>"),
        {"image": "<|vision_start|><|image_pad|><|vision_end|>"},
    ),
    "llava": General(
        lambda ids: {
            "model_type": "llava",
            "image_token_index": ids("<image>"),
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "image_seq_length": 16,
            "text_config": text(model_type="llama", head_dim=8),
            "vision_config": vision(model_type="clip_vision_model", num_hidden_layers=3, projection_dim=32),
        },
        lambda tokenizer, template: T.LlavaProcessor(
            T.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=square(16)),
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        ),
        more=("<image>", *MISTRAL_TURNS),
        shown={"image": "<image>\n"},
        turns=MISTRAL,
        pieces=T.LlamaTokenizer,
    ),
    "lfm2_vl": General(
        lambda ids: {
            "model_type": "lfm2_vl",
            "image_token_id": ids("<image>"),
            "projector_hidden_size": 64,
            "text_config": text(
                model_type="lfm2", layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False
            ),
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "patch_size": 4,
                "num_patches": 64,
                "vision_use_head": False,
            },
        },
        lambda tokenizer, template: T.Lfm2VlProcessor(
            T.Lfm2VlImageProcessor(
                encoder_patch_size=4, tile_size=32, size=square(32), min_image_tokens=4, max_image_tokens=16, max_tiles=4
            ),
            tokenizer,
            chat_template=template,
        ),
        {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
        {"image": "<image>"},
    ),
    "qwen3_next": General(
        lambda ids: {
            "model_type": "qwen3_next",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 1,
            **text(**DELTA_SIZES),
        }
    ),
    "gemma3_text": General(
        lambda ids: {
            "model_type": "gemma3_text",
            **text(head_dim=8, sliding_window=8, query_pre_attn_scalar=8, layer_types=WINDOWS),
        },
        more=GEMMA_TURNS,
        turns=GEMMA,
        pieces=T.GemmaTokenizer,
    ),
    "olmo2": General(lambda ids: {"model_type": "olmo2", **text()}),
    "granite": General(lambda ids: {"model_type": "granite", **text()}),
    "gpt2": General(
        lambda ids: {
            "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST, "attn_pdrop": 0,
            "embd_pdrop": 0, "resid_pdrop": 0, "summary_first_dropout": 0,
        }
    ),
    "bert": General(lambda ids: {"model_type": "bert", **text()}, refused="is_decoder"),
    "mamba": General(lambda ids: {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}, refused="keys"),
    "rwkv": General(lambda ids: {"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 2}, refused="keys"),
    "openai-gpt": General(
        lambda ids: {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 2, "n_head": 4}, refused="keys"
    ),
}  # fmt: skip


def _with_length(processor: Any, length: int) -> Any:
    processor.image_seq_length = length
    return processor


def tokenizer_of(row: General) -> PreTrainedTokenizerFast:
    """A tokenizer with the row's special tokens that knows the words of the shipped tasks."""
    specials = dict.fromkeys([*row.tokens.values(), *row.more])
    closing = row.turns.answer[1].strip()
    template = row.turns.template(row.shown)
    bos = next((token for token in ("<bos>", "<s>") if token in specials), None)
    if row.pieces:
        return _pieces(row, ["<unk>", PAD, *specials], template, bos_token=bos, eos_token=closing)
    names = dict(row.tokens) or {"turn_end_token": closing}
    others = tuple(token for token in specials if token not in names.values())
    made = tiny_tokenizer(FamilyFacts("", {}, template, tokens=names, more_tokens=others, closing=closing))
    made.bos_token = bos
    return made


def _pieces(row: General, specials: list[str], template: str, **more: Any) -> PreTrainedTokenizerFast:
    """As SentencePiece's, with a token for each byte; words are trained as pieces with the mark of a space before them."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("[\u2581 ]"), behavior="merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=["\n", *map(chr, range(33, 127))], show_progress=False)
    words = ["\n\n", "\n\n\n", "\n\n\n\n"] * 8 + ANSWERS.split() * 8 + [f"\u2581{word}" for word in QUESTIONS.split() * 8]
    trained.train_from_iterator(words, trainer)
    learned = json.loads(trained.to_str())["model"]
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    made = row.pieces(
        vocab={name: i for i, name in enumerate(names)}, merges=[tuple(pair) for pair in learned["merges"]],
        unk_token="<unk>", pad_token=PAD, extra_special_tokens=[*specials[2:]], chat_template=template,
        model_specific_special_tokens=dict(row.tokens), model_max_length=LONGEST, **more,
    )  # fmt: skip
    made.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return made


def make_checkpoint(name: str, folder: Path, seed: int = 0, std: float = 0.15, **sizes: Any) -> Path:
    """Write a random checkpoint of a row of ``GENERAL`` and return its folder. ``sizes``: keys of the text config."""
    asked = repr((name, seed, std, sorted(sizes.items())))
    return kept_copy(asked, folder, lambda made: write_checkpoint(GENERAL[name], made, seed, std, **sizes))


def write_checkpoint(row: General, folder: Path, seed: int = 0, std: float = 0.15, **sizes: Any) -> Path:
    """The same of any row."""
    tokenizer = tokenizer_of(row)
    template = row.turns.template(row.shown)
    owner = row.processor(tokenizer, template) if row.processor else tokenizer
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = row.config(tokenizer.convert_tokens_to_ids)
    for part in (settings, settings.get("text_config", settings)):
        part |= {"vocab_size": len(tokenizer), **special}
    settings.get("text_config", settings).update(sizes)
    config = AutoConfig.for_model(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:  # large enough that a wrong position or a lost picture shows in the logits
                    parameter.normal_(0, std)
    model.generation_config = T.GenerationConfig(**special)
    with saving_weights(folder):
        model.save_pretrained(folder)
    owner.save_pretrained(folder)
    return folder


def model_class(config: Any) -> Any:
    """transformers' own Auto class of a checkpoint."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    return T.AutoModelForMultimodalLM if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING else T.AutoModelForCausalLM
