"""With gradient checkpointing a tower keeps little for its backward, and its gradients are the same bits."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_blocks_of_a_tower_are_recomputed(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    store = MediaStore()
    policy = load_policy(str(tmp_path), store=store)
    pixels = np.random.default_rng(0).integers(0, 255, (112, 112, 3), dtype=np.uint8)
    picture = store.put(encode_png(pixels), "picture")
    kept, gradients = {}, {}
    for recompute in (False, True):
        policy.checkpoint_gradients(recompute)
        seen: dict[int, int] = {}

        def note(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            features = policy.encode([picture])[picture]
        kept[recompute] = sum(seen.values())
        policy.model.zero_grad()
        features.embeds_NH.square().sum().backward()
        gradients[recompute] = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    assert kept[True] < 0.7 * kept[False]
    assert gradients[True].keys() == gradients[False].keys()
    assert all(torch.equal(gradient, gradients[False][name]) for name, gradient in gradients[True].items())
