"""A model is the same by what it is, not by where it lies."""

from pathlib import Path

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.models.checkpoint_path import identity
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny


def load(folder: Path, dtype: str = "float32") -> str:
    return identity(load_policy(str(folder), store=MediaStore(), device="cpu", dtype=dtype))


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_omni"])
def test_the_same_model_elsewhere_is_the_same_and_any_change_is_another(family: str, tmp_path: Path) -> None:
    made = make_tiny(family, tmp_path / "made")
    policy = load_policy(str(made), store=MediaStore(), device="cpu")
    first = identity(policy)
    policy.save(tmp_path / "saved")
    assert load(tmp_path / "saved") == load(made) == first
    assert load(made, "bfloat16") != first
    with torch.no_grad():
        next(iter(policy.model.parameters())).view(-1)[-1] += 1e-3
    assert identity(policy) != first
    template = made / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    assert load(made) != first
