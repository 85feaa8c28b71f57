"""Pairs of a policy and its oracle, made once per session."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from sensorium.data.media_store import MediaStore
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.family_facts import FAMILIES

from .stock_pair import Pair


def parts_of(family: str) -> list[str]:
    """The prefixes of a tiny model's parts in its overrides."""
    kind = FAMILIES[family]
    parts = {"": kind.vision and kind.text, "vision_": kind.vision, "audio_": kind.audio}
    return [prefix for prefix, part in parts.items() if "initializer_range" in part]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Pairs by family and options, each made once."""
    made: dict[Any, Pair] = {}

    def pair(family: str, dtype: str = "float32", **overrides: Any) -> Pair:
        key = (family, dtype, *sorted((name, str(value)) for name, value in overrides.items()))
        if key not in made:
            # Weights large enough that a wrong position or a lost feature shows in the logits.
            sizes = {f"{part}initializer_range": 0.15 for part in parts_of(family)}
            folder = make_tiny(family, tmp_path_factory.mktemp(family), seed=1, **sizes, **overrides)
            loader = AutoModelForImageTextToText if FAMILIES[family].vision else AutoModelForCausalLM
            stock = loader.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
            made[key] = Pair(load_policy(str(folder), store=MediaStore(), dtype=dtype, device="cpu"), stock, folder)
        return made[key]

    return pair
