"""Qwen3.5, dense or with experts: three of four layers are gated delta nets, the others have gated attention.

Pictures and videos are Qwen3-VL's without deepstack. Templates begin an answer with ``<think>``, or with empty thoughts
where ``enable_thinking`` is false, and leave the thoughts of earlier turns out unless ``preserve_thinking`` is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from sensorium.models.families.qwen2_5_vl import PARTS, ROPE, SHOWN, TOKEN_KEYS, VISION, Qwen25VL
from sensorium.models.families.qwen3_vl import (
    EXPERTS,
    Qwen3VLMedia,
    deepstack_tower,
    interpolation_tables,
    tiny_processor,
)
from sensorium.models.family import MediaFormat
from sensorium.recipe.family_facts import TEXT, DeferredModule, FamilyFacts, Sizes

if TYPE_CHECKING:
    import torch

    from sensorium.models import delta_net
    from sensorium.models.families.qwen2_5_vl import MakeTables
else:
    torch, delta_net = DeferredModule("torch"), DeferredModule("sensorium.models.delta_net")

HYBRID: Sizes = TEXT | {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
}  # fmt: skip
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 64}

THOUGHTFUL_TURNS = (
    "{% set roles = messages | map(attribute='role') | list %}"
    "{% set last = roles[::-1].index('user') if 'user' in roles else 0 %}"
    "{% for message in messages %}{% set content %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
    "{% if block.type == 'image' %}" + SHOWN["image"] + "{% elif block.type == 'video' %}" + SHOWN["video"] + ""
    "{% elif block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}{% endif %}{% endset %}"
    "{% if message.role == 'assistant' and loop.revindex0 > last and '</think>' in content and not preserve_thinking %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)


def lasting_states(model: Any) -> None:
    """Let the states of a tiny model last: fresh ones forget all but the last token, so nothing would depend on them."""
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            with torch.no_grad():
                parameter.copy_(torch.linspace(0.01, 1.0, len(parameter)).log())


class Qwen35(Qwen25VL):
    """The adapter of ``Qwen3_5ForConditionalGeneration``."""

    facts: ClassVar[FamilyFacts] = FamilyFacts(
        "Qwen3_5",
        HYBRID,
        THOUGHTFUL_TURNS,
        VISION | {"patch_size": 16, "num_position_embeddings": 64},
        token_keys=TOKEN_KEYS,
        words="seconds",
        processor=tiny_processor,
        before_saving=lasting_states,
        published_pixels=((65536, 16777216), (4096, 25165824)),
        tensors=lambda config: deepstack_tower(config["vision_config"]),
        parts=PARTS,
        tables=("pos_embed",),
        names=("qwen3.5",),
        query_norm=True,
        query_gate=True,
        vllm=True,
    )
    media_format: ClassVar[type[MediaFormat]] = Qwen3VLMedia
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = Qwen25VL.groups

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        delta_net.hand_over_states(self.language_model)

    def tables(self) -> MakeTables:
        """The index tables of a tower with learned, interpolated positions."""
        return interpolation_tables(self.core.visual)


class Qwen35Moe(Qwen35):
    """The adapter of ``Qwen3_5MoeForConditionalGeneration``."""

    facts: ClassVar[FamilyFacts] = replace(Qwen35.facts, prefix="Qwen3_5Moe", text=HYBRID | SHARED_EXPERT, names=())
