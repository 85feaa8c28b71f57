"""A tiny checkpoint loaded twice: as a policy in parts, and by transformers alone, which is the oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensorium.models.attention import MaskedAttention
from sensorium.models.policy import Policy
from sensorium.models.rendering import TEMPLATE_KINDS
from sensorium.models.segment_layout import Placement, placements
from sensorium.vocabulary.content import Media, Message
from sensorium.vocabulary.episode import Segment
from tests.families import FAMILY_ROWS

from .clips import clip, decoded, noise, stock_inputs, tone


@dataclass
class Pair:
    """A policy and the same checkpoint as transformers loads it."""

    policy: Policy
    stock: Any
    folder: Path

    def picture(self, seed: int, width: int = 64, height: int = 64) -> Media:
        """A picture of noise in the policy's store."""
        return noise(self.policy.chat.store, seed, width, height)

    def clip(self, seed: int, frames: int = 4, width: int = 56, height: int = 56, seconds: float = 4.0) -> Media:
        """A video of noise in the policy's store."""
        return clip(self.policy.chat.store, seed, frames, width, height, seconds)

    def tone(self, seed: int, seconds: float = 0.5) -> Media:
        """A sound in the policy's store; not so short that the library's numbers for it vary."""
        return tone(self.policy.chat.store, seed, max(seconds, FAMILY_ROWS[self.policy.family].shortest_s))

    def medium(self, seed: int, width: int = 64, height: int = 64) -> Media:
        """A picture, or a sound of a family that sees none: of another length for each size of a picture."""
        if "picture" in self.policy.chat.modalities:
            return self.picture(seed, width, height)
        return self.tone(seed, (width + height) / 100)

    def inputs(self, messages: Sequence[Message]) -> dict[str, Tensor]:
        """What the checkpoint's own processor makes of a conversation that asks for an answer."""
        return processed(self.policy, messages)

    def want(self, inputs: dict[str, Tensor]) -> Tensor:
        """Logits [T, V] of one row by the stock model."""
        return self.stock(**inputs, use_cache=False).logits[0].float()

    def got(self, segments: Sequence[Segment]) -> Tensor:
        """Logits [T, V] of a thread by the parts."""
        ids_T, positions_3T, placed = row(self.policy, segments)
        hidden_1TH = self.policy.language(ids_T[None], positions_3T[:, None], MaskedAttention(), placed)
        return self.policy.logits(hidden_1TH[0])


def plain(policy: Policy, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as transformers takes it."""

    def block(item: Any) -> dict[str, Any]:
        if not isinstance(item, Media):
            return {"type": "text", "text": item.text}
        if item.kind == "picture":
            return {"type": "image", "image": decoded(policy.chat.store, item)}
        return {"type": TEMPLATE_KINDS[item.kind]}

    if policy.chat.processor is None:
        return [{"role": message.role, "content": message.text} for message in messages]
    return [{"role": message.role, "content": [block(item) for item in message.content]} for message in messages]


def processed(policy: Policy, messages: Sequence[Message], generate: bool = True) -> dict[str, Tensor]:
    """The checkpoint's own ``apply_chat_template`` with tokens and pixels; video and sound go through the processor."""
    owner = policy.chat.processor if policy.chat.processor is not None else policy.chat.tokenizer
    conversation = plain(policy, messages)
    media = [item for message in messages for item in message.media]
    alone = policy.family == "llava_onevision"  # each picture as the only one
    if alone or FAMILY_ROWS[policy.family].by_turn is not str or any(item.kind != "picture" for item in media):
        text = owner.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generate)
        if policy.chat.media_format.own_marks:
            # As transformers 4.57 does: the steps of a video replace the template's marks as well.
            text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
        return stock_inputs(policy, FAMILY_ROWS[policy.family].by_turn(text), media)
    made = owner.apply_chat_template(
        conversation, tokenize=True, return_dict=True, add_generation_prompt=generate, return_tensors="pt"
    )
    return dict(made)


def row(policy: Policy, segments: Sequence[Segment]) -> tuple[Tensor, Tensor, list[Placement]]:
    """Segments laid end to end: ids, positions that go on, and where the features go."""
    layouts = [policy.chat.layout(segment) for segment in segments]
    features = policy.encode(slot.media for layout in layouts for slot in layout.slots)
    positions, placed, start, begin = [], [], 0, 0
    for layout in layouts:
        positions.append(layout.positions_3T + begin)
        placed += placements(layout, features, 0, start)
        start += len(layout)
        begin += layout.advance
    return torch.cat([layout.ids_T for layout in layouts]), torch.cat(positions, dim=1), placed


def close(got: Tensor, want: Tensor, bound: float = 1e-5) -> None:
    """Equal within a bound relative to the largest value."""
    assert got.shape == want.shape
    worst = float((got - want).detach().abs().max() / want.detach().abs().max())
    assert worst <= bound, f"relative difference {worst:.2e}"
