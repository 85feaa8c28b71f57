"""Similarity of two pictures by a vision model: DINO- and DreamSim-style terms, loaded from a local folder."""

import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sensorium.vocabulary.errors import RecipeError

Pixels = NDArray[np.uint8]
SIDE = 224


class PictureSimilarity:
    """Scores how alike two pictures are, from 0 to 1: the cosine of what ``embed`` makes of them, not below 0.

    ``shifted``: (1 + cosine) / 2 instead.
    """

    def __init__(self, embed: Callable[[Pixels], Tensor], *, shifted: bool = False) -> None:
        self.embed, self._shifted = embed, shifted
        self._lock = threading.Lock()

    def score(self, target: Pixels, drawn: Pixels) -> float:
        """How alike two pictures are. They are embedded one by one, so the score is the same in any batch."""
        with self._lock, torch.inference_mode():
            wanted, found = self.embed(target), self.embed(drawn)
            cosine = float(torch.nn.functional.cosine_similarity(wanted, found, dim=0))
        return min(1.0, max(0.0, (1.0 + cosine) / 2.0 if self._shifted else cosine))


def _single(path: str, pooling: Literal["mean", "first"], device: str) -> PictureSimilarity:
    """By a model of a folder (``config.json``, safetensors, ``preprocessor_config.json``).

    ``pooling``: the mean of the last hidden states, shifted as VAGEN does with DINOv2, or the first of them (the class
    token), by the cosine itself, as DreamSim's distance is 1 - cosine.
    """
    if not (Path(path) / "config.json").is_file():
        raise RecipeError(f"svg: '{path}' is no folder of a vision model: it has no config.json.")
    processor, model = _loaded(Path(path), device)

    def embed(picture: Pixels) -> Tensor:
        pixels = processor(images=np.array(picture), return_tensors="pt")["pixel_values"]
        hidden = model(pixel_values=pixels.to(device)).last_hidden_state[0].float()
        return hidden.mean(0) if pooling == "mean" else hidden[0]

    return PictureSimilarity(embed, shifted=pooling == "mean")


def _loaded(folder: Path, device: str) -> tuple[Any, Any]:
    """The image processor and the vision model of a folder, from safetensors; of CLIP the tower with its projection."""
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, CLIPVisionModelWithProjection

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        clip = AutoConfig.from_pretrained(folder, **local).model_type in ("clip", "clip_vision_model")
        kind: Any = CLIPVisionModelWithProjection if clip else AutoModel
        model = kind.from_pretrained(folder, use_safetensors=True, **local).eval().to(device)
        return AutoImageProcessor.from_pretrained(folder, **local), model
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise RecipeError(f"svg: the vision model of '{folder}' cannot be loaded: {error}") from error


@lru_cache(maxsize=4)
def mean_similarity(path: str, device: str = "cpu") -> PictureSimilarity:
    """The term ``dino``: the model of a folder, loaded once in a process and shared by all episodes."""
    return _single(path, "mean", device)


@lru_cache(maxsize=4)
def dreamsim_similarity(path: str, device: str = "cpu") -> PictureSimilarity:
    """The term ``dreamsim``: one model, or an ensemble, loaded once in a process and shared by all episodes.

    DreamSim's ensemble is a folder of folders, each a vision model (DINO, CLIP, OpenCLIP) with its LoRA merged into it. A
    CLIP model gives its projected embedding, others the class token of the last layer, before the final norm. They are
    joined and divided by their length, and their mean is subtracted.
    """
    folder = Path(path)
    members = sorted(each.parent for each in folder.glob("*/config.json"))
    if (folder / "config.json").is_file() or not members:
        own = sorted(each.name for each in folder.glob("*") if each.name.endswith(("_lora", ".pth", ".pth.tar")))
        if own:
            raise RecipeError(
                f"svg: '{path}' holds DreamSim's own checkpoints ({', '.join(own[:3])}), pickles for its own code. "
                "Merge each LoRA into its model and save it in transformers' form (save_pretrained, with a "
                "preprocessor_config.json): a folder with one folder for each model is read as the ensemble, a single "
                "vision model (such as DINOv2) as it is."
            )
        return _single(path, "first", device)
    models = [_loaded(member, device) for member in members]

    def embed(picture: Pixels) -> Tensor:
        resized = Image.fromarray(np.array(picture)).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(resized)).to(device).permute(2, 0, 1).float() / 255
        parts = []
        for processor, model in models:
            moments = (list(processor.image_mean), list(processor.image_std))
            mean, std = (torch.tensor(each, device=device)[:, None, None] for each in moments)
            seen = model(pixel_values=((pixels - mean) / std)[None], output_hidden_states=True)
            projected = getattr(seen, "image_embeds", None)
            parts.append((seen.hidden_states[-1][0, 0] if projected is None else projected[0]).float())
        joined = torch.cat(parts)
        joined = joined / joined.norm()
        return joined - joined.mean()

    return PictureSimilarity(embed)
