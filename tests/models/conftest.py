"""Pairs of a policy and its oracle, made once per session."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.family_facts import FAMILIES
from tests.families import stock_class, wide_weights

from .stock_pair import Pair


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Pairs by family and options, each made once."""
    made: dict[Any, Pair] = {}

    def pair(family: str, dtype: str = "float32", **overrides: Any) -> Pair:
        key = (family, dtype, *sorted((name, str(value)) for name, value in overrides.items()))
        if key not in made:
            # Weights large enough that a wrong position or a lost feature shows in the logits.
            sizes = wide_weights(family, 0.15, "", "vision", "audio") if FAMILIES[family].has_towers else {}
            folder = make_tiny(family, tmp_path_factory.mktemp(family), seed=1, **sizes, **overrides)
            stock = stock_class(family).from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
            made[key] = Pair(load_policy(str(folder), store=MediaStore(), dtype=dtype, device="cpu"), stock, folder)
        return made[key]

    return pair
