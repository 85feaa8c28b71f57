"""Similarity by vision models of local folders: DreamSim's ensemble, against what it is made of."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from sensorium.models.picture_similarity import dreamsim_similarity
from sensorium.vocabulary.errors import RecipeError

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]


def test_dreamsims_ensemble_is_read_from_a_folder_of_models(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    shape = {"image_size": 224, "patch_size": 56}
    transformers.ViTModel(transformers.ViTConfig(**small, **shape)).save_pretrained(tmp_path / "both/dino")
    vision = transformers.CLIPVisionConfig(**small, **shape, projection_dim=8)
    transformers.CLIPVisionModelWithProjection(vision).save_pretrained(tmp_path / "both/clip")
    for name in ("dino", "clip"):
        transformers.ViTImageProcessor(image_mean=MEAN, image_std=STD).save_pretrained(tmp_path / "both" / name)
    ensemble = dreamsim_similarity(str(tmp_path / "both"))
    black, other = np.zeros((32, 32, 3), np.uint8), np.random.default_rng(0).integers(0, 255, (64, 32, 3), np.uint8)
    assert ensemble.score(other, other) == pytest.approx(1.0)
    mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
    pixels = ((torch.zeros(3, 224, 224) - mean) / std)[None]
    dino = transformers.ViTModel.from_pretrained(tmp_path / "both/dino").eval()
    clip = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "both/clip").eval()
    with torch.inference_mode():
        token = dino(pixels, output_hidden_states=True).hidden_states[-1][0, 0]
        joined = torch.cat([clip(pixels).image_embeds[0], token])
        wanted = joined / joined.norm() - (joined / joined.norm()).mean()
        assert torch.allclose(ensemble.embed(black), wanted, atol=1e-5)
    assert 0 <= ensemble.score(black, other) < 1
    (tmp_path / "own" / "dino_vitb16_lora").mkdir(parents=True)
    (tmp_path / "own" / "clip_vitb16_pretrain.pth.tar").touch()
    with pytest.raises(RecipeError, match="Merge each LoRA"):
        dreamsim_similarity(str(tmp_path / "own"))
