from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sensorium.models.tiny import make_tiny
from tests.families import SENSING, make_short, wide_weights


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints with weights large enough for logits of several units."""
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {family: wide_weights(family, 0.15, "", "vision") for family in SENSING}
    return {family: make_short(family, folder / family, **given) for family, given in sizes.items()}


@pytest.fixture(scope="session")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for bfloat16, which a CPU without instructions for it computes a thousand times slower."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "fullatt_block_indexes": [0]}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    given = sizes | {f"vision_{key}": value for key, value in tower.items()} | {"rope_parameters": rope}
    return make_tiny(
        "qwen2_5_vl", tmp_path_factory.mktemp("smallest"), num_key_value_heads=1, initializer_range=0.15, **given
    )


@pytest.fixture(autouse=True)
def _one_thread_and_deterministic() -> Iterator[None]:
    """Models this small are faster on one thread; tests that mean two say so."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)
