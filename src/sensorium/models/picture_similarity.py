"""Similarity by what a vision model makes of two pictures: DINO- and DreamSim-style terms, loaded from a local folder."""

import threading
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
        from transformers import AutoImageProcessor, AutoModel

        if not (Path(path) / "config.json").is_file():
            raise RecipeError(f"svg: '{path}' is no folder of a vision model: it has no config.json.")
        try:
            local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
            self._processor = AutoImageProcessor.from_pretrained(path, **local)
            self._model = AutoModel.from_pretrained(path, use_safetensors=True, **local).eval().to(device)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise RecipeError(f"svg: the vision model of '{path}' cannot be loaded: {error}") from error
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


@lru_cache(maxsize=4)
def mean_similarity(path: str, device: str = "cpu") -> EmbeddingSimilarity:
    """The model of a folder for the term ``dino``, loaded once in a process and shared by all episodes."""
    return EmbeddingSimilarity(path, "mean", device)


@lru_cache(maxsize=4)
def first_token_similarity(path: str, device: str = "cpu") -> EmbeddingSimilarity:
    """The model of a folder for the term ``dreamsim``, loaded once in a process and shared by all episodes."""
    return EmbeddingSimilarity(path, "first", device)
