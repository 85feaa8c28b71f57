"""Which versions of transformers and torch were tried, and how a family is held to the stock model with any other.

A family computes with parts of transformers' classes, which change between versions. With those in ``TRIED`` the tests pass
(``make versions`` runs some with the oldest and the newest), and nothing is checked. With any other, before a checkpoint is
loaded, a tiny model of its family is asked about a small picture or sound, which takes a second or two::

    the rendered question, by us and by the stock processor        the same tokens
    its logits, by our parts and by the stock model                within BOUND of the largest
    the gradients of what both can train, of all logits at once    each within BOUND of its size
"""

from __future__ import annotations

import warnings
from contextlib import closing
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from sensorium.data.media_store import MediaStore
from sensorium.data.sound import encode_wav
from sensorium.recipe.family_facts import FAMILIES, FamilyFacts
from sensorium.vocabulary.content import Media, Message, Text
from sensorium.vocabulary.errors import ModelError

if TYPE_CHECKING:
    from sensorium.models.chat_processor import ChatProcessor

TRIED = {
    "transformers": ("5.15.1", "5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.21.1", "5.22.2", "5.23.0"),
    "torch": ("2.11.0", "2.13.0"),
}
# Model types that write answers and that the oldest of them lacks, by the first that has them.
FIRST_WITH = {
    "5.16": ("cohere_compass", "glm5_next", "qwen4_exp", "step3p7"),
    "5.17": ("fun_asr_nano", "hy_v4", "kimi_linear"),
    "5.18": ("hyperclovax_vision_v2", "minicpmv4_7", "nemotron_h_omni"),
    "5.20": ("bailing_hybrid", "beam", "kolibri1", "molmo2", "moss_transcribe_diarize", "muse_spark", "unlimited_ocr"),
    "5.21": ("flint", "minicpm_ocr"),
    "5.22": ("mistral_large4", "nemo_speechlm"),
    "5.23": ("dots3_note", "granite_docling", "inkling2", "internlm3", "iquestcoder", "lfm3", "lfm3_vl"),
}
SECOND = 16000  # samples: Qwen3-Omni's stock code gives shorter sounds other numbers
BOUND = 1e-3  # rounding gives 5e-5 where states are recurrent, and less elsewhere
SCALE = 0.15  # of the tiny model's weights: a wrong position or a lost feature shows in its logits


def untried() -> tuple[str, ...]:
    """The packages here whose version was not tried, each with its version."""
    return tuple(f"{package} {found}" for package, tried in TRIED.items() if (found := _installed(package)) not in tried)


@lru_cache
def _installed(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:  # imported from where no installer put it
        return "of an unknown version"


def first_with(model_type: str) -> str:
    """The first version of transformers with a type of models that the oldest one lacks; empty for others."""
    return next((first for first, several in FIRST_WITH.items() if model_type in several), "")


def check_versions(family: str) -> None:
    """With versions that were not tried, refuse a family that is not what the stock model is. Warns once of what agrees."""
    if (unknown := untried()) and family in FAMILIES:
        _compare(family, " and ".join(unknown))


@lru_cache
def _compare(family: str, unknown: str) -> None:
    try:
        found = deviations(family)
        wrong = [f"its {what} are off by {off:.2g} (bound {BOUND:g})" for what, off in found.items() if not off <= BOUND]
        problem, cause = "; ".join(wrong), None
    except Exception as error:  # whatever a changed library raises
        problem, cause = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}", error
    if problem:
        newest = " ".join(f"'{package}=={tried[-1]}'" for package, tried in TRIED.items() if package in unknown)
        raise ModelError(
            f"{unknown} was not tried with this version of Sensorium, so a tiny {family} was compared with its stock "
            f"model: {problem}. Install the newest that was tried: pip install {newest}."
        ) from cause
    agrees = ", ".join(f"{what} to {off:.1g}" for what, off in found.items())
    tried = ", ".join(f"{package} {', '.join(versions)}" for package, versions in TRIED.items())
    warnings.warn(
        f"{unknown} was not tried with this version of Sensorium. A tiny {family} agrees with its stock model: {agrees}. "
        f"Tried were {tried}.",
        stacklevel=4,
    )


def deviations(family: str) -> dict[str, float]:
    """How far a tiny model's tokens, logits and gradients are from its stock model's, relative to the largest."""
    import torch

    from sensorium.models.attention import MaskedAttention
    from sensorium.models.checkpoint_path import model_class, quiet
    from sensorium.models.load_chat import chat_processor_of, config_at
    from sensorium.models.policy import Policy
    from sensorium.models.segment_layout import placements
    from sensorium.models.tiny import make_tiny

    facts, store = FAMILIES[family], MediaStore()
    parts = {"": facts.text, "vision_": facts.vision, "audio_": facts.audio}
    sizes: dict[str, Any] = {
        f"{part}initializer_range": SCALE for part, known in parts.items() if "initializer_range" in known
    }
    with TemporaryDirectory(prefix="sensorium-versions-") as name, torch.random.fork_rng(devices=[]), quiet():
        checkpoint = config_at(name, str(make_tiny(family, Path(name), **sizes)))
        load: Any = partial(model_class(checkpoint.config).from_pretrained, name, dtype=torch.float32)
        ours, stock = load(attn_implementation=checkpoint.adapter_class.attention).eval(), load().eval()
        chat = chat_processor_of(checkpoint, store, None, 1 << 20)
    with closing(chat.decoder):
        content, inputs = _question(chat, facts)
        layout = chat.layout(chat.render([Message("user", content)]))
        if inputs["input_ids"].tolist() != [layout.ids_T.tolist()]:
            return {"rendered tokens": 1.0}
        with torch.enable_grad():
            policy = Policy(chat, checkpoint.adapter_class(ours), ours)
            placed = placements(layout, policy.encode(slot.media for slot in layout.slots))
            hidden_1TH = policy.language(layout.ids_T[None], layout.positions_3T[:, None], MaskedAttention(), placed)
            logits = [policy.logits(hidden_1TH[0]), stock(**inputs, use_cache=False).logits[0].float()]
            weights_TV = torch.randn(logits[1].shape, generator=torch.Generator().manual_seed(0))
            for one_TV in logits:
                (one_TV * weights_TV).sum().backward()
    wanted = {name: weight.grad for name, weight in stock.named_parameters() if weight.grad is not None}
    least = 1e-4 * max(float(gradient.norm()) for gradient in wanted.values())  # what is smaller is mostly rounding
    gradients = [
        float((weight.grad - wanted[name]).norm()) / max(float(wanted[name].norm()), least)
        if weight.grad is not None
        else inf
        for name, weight in ours.named_parameters()
        if name in wanted
    ]
    found_TV, wanted_TV = (one_TV.detach() for one_TV in logits)
    off = float((found_TV - wanted_TV).abs().max() / wanted_TV.abs().max())
    return {"logits": off, "gradients": max(gradients)}


def _question(chat: ChatProcessor, facts: FamilyFacts) -> tuple[tuple[Text | Media, ...], dict[str, Any]]:
    """A question about noise to see and to hear: the content of our message, and the stock model's inputs."""
    random, store, text = np.random.default_rng(0), chat.store, "What is it?"
    content: list[Text | Media] = []
    blocks: list[dict[str, str]] = []
    given: dict[str, Any] = {}
    if facts.vision:
        picture, data = Image.fromarray(random.integers(0, 255, (56, 84, 3), dtype=np.uint8)), BytesIO()
        picture.save(data, "PNG")
        content.append(store.put(data.getvalue(), "picture", "noise.png"))
        given["images"] = [picture]
        blocks.append({"type": "image"})
    if facts.audio:
        samples = (
            random.integers(-9999, 9999, SECOND).astype(np.float32) / 32768
        )  # a file of 16 bits holds them as they are
        content.append(store.put(encode_wav(samples), "sound", "noise.wav"))
        given["audio"] = [samples]
        blocks.append({"type": "audio"})
    owner: Any = chat.processor or chat.tokenizer
    asked = [*blocks, {"type": "text", "text": text}] if chat.processor else text
    prompt = owner.apply_chat_template([{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True)
    return (*content, Text(text)), dict(owner(text=[prompt], return_tensors="pt", **given))
