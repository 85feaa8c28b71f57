"""Similarity by what a vision model makes of two pictures: DINO- and DreamSim-style terms, loaded from a local folder."""

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sensorium.vocabulary.errors import RecipeError

Pixels = NDArray[np.uint8]
Pooling = Literal["mean", "first"]


class EmbeddingSimilarity:
    """A model of a folder (``config.json``, safetensors, ``preprocessor_config.json``), by transformers' AutoModel.

    ``pooling`` is the mean of the last hidden states, scored (1 + cosine) / 2 as VAGEN does with DINOv2, or the first of
    them (the class token), scored by the cosine itself, not below 0, as DreamSim's distance is 1 less the cosine.
    """

    def __init__(self, path: str, pooling: Pooling, device: str = "cpu") -> None:
        if not (Path(path) / "config.json").is_file():
            raise RecipeError(f"svg: '{path}' is no folder of a vision model: it has no config.json.")
        self._processor, self._model = _loaded(Path(path), device)
        self.pooling, self.device = pooling, torch.device(device)
        self._lock = threading.Lock()

    def score(self, target: Pixels, drawn: Pixels) -> float:
        """How alike two pictures are, from 0 to 1. They are embedded one by one, so the score is the same in any batch."""
        with self._lock, torch.inference_mode():
            wanted, found = (self._embedded(picture) for picture in (target, drawn))
            cosine = float(torch.nn.functional.cosine_similarity(wanted, found, dim=0))
        if self.pooling == "mean":
            return min(1.0, max(0.0, (1.0 + cosine) / 2.0))
        return min(1.0, max(0.0, cosine))

    def _embedded(self, picture: Pixels) -> Any:
        pixels = self._processor(images=np.array(picture), return_tensors="pt")["pixel_values"]
        hidden = self._model(pixel_values=pixels.to(self.device)).last_hidden_state[0].float()
        return hidden.mean(0) if self.pooling == "mean" else hidden[0]


class EnsembleSimilarity:
    """DreamSim's ensemble: a folder of folders, each a vision model (DINO, CLIP, OpenCLIP) with its LoRA merged into it.

    Of a CLIP model the projected embedding counts, of others the class token of the last layer, before the final norm. They
    are joined, divided by their length, their mean taken away; the score is the cosine, not below 0.
    """

    SIDE = 224

    def __init__(self, folders: Sequence[Path], device: str = "cpu") -> None:
        self._members = [_loaded(folder, device) for folder in folders]
        self.device = torch.device(device)
        self._lock = threading.Lock()

    def score(self, target: Pixels, drawn: Pixels) -> float:
        """How alike two pictures are, from 0 to 1."""
        with self._lock, torch.inference_mode():
            wanted, found = (self._embedded(picture) for picture in (target, drawn))
            return min(1.0, max(0.0, float(torch.nn.functional.cosine_similarity(wanted, found, dim=0))))

    def _embedded(self, picture: Pixels) -> torch.Tensor:
        from PIL import Image

        resized = Image.fromarray(np.array(picture)).convert("RGB").resize((self.SIDE, self.SIDE), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(resized)).to(self.device).permute(2, 0, 1).float() / 255
        parts = []
        for processor, model in self._members:
            mean, std = (torch.tensor(each, device=self.device)[:, None, None] for each in _moments(processor))
            seen = model(pixel_values=((pixels - mean) / std)[None], output_hidden_states=True)
            projected = getattr(seen, "image_embeds", None)
            parts.append((seen.hidden_states[-1][0, 0] if projected is None else projected[0]).float())
        joined = torch.cat(parts)
        joined = joined / joined.norm()
        return joined - joined.mean()


def _moments(processor: Any) -> tuple[list[float], list[float]]:
    """The mean and deviation of colours that a model was trained with."""
    return list(processor.image_mean), list(processor.image_std)


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
def mean_similarity(path: str, device: str = "cpu") -> EmbeddingSimilarity:
    """The model of a folder for the term ``dino``, loaded once in a process and shared by all episodes."""
    return EmbeddingSimilarity(path, "mean", device)


@lru_cache(maxsize=4)
def dreamsim_similarity(path: str, device: str = "cpu") -> EmbeddingSimilarity | EnsembleSimilarity:
    """The term ``dreamsim``: one model, or an ensemble, loaded once in a process and shared by all episodes."""
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
        return EmbeddingSimilarity(path, "first", device)
    return EnsembleSimilarity(members, device)
