"""A model without weights: its config, and its modules on torch's meta device for the functions that live on them."""

import threading
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch

LOADING = threading.Lock()
"""While transformers builds a model it changes torch for the whole process: two threads would spoil each other's."""


class Skeleton:
    """``config`` is the model's own; ``model`` is built when it is first asked for, in milliseconds and without memory."""

    def __init__(self, model_class: Any, config: Any) -> None:
        self.config = deepcopy(getattr(config, "thinker_config", config))  # a loaded model's own is changed by its towers
        self._model_class = model_class

    @cached_property
    def model(self) -> Any:
        """The model's modules, none of whose parameters have values."""
        with LOADING, torch.device("meta"):
            return builder_of(self._model_class)(self.config)


def builder_of(model_class: Any) -> Any:
    """What builds a model of a config alone: an auto class and a class of its own call it by two names."""
    return getattr(model_class, "from_config", None) or model_class._from_config


def model_class(config: Any) -> Any:
    """The transformers class that a checkpoint is loaded as."""
    import transformers

    if hasattr(config, "thinker_config"):  # a whole Qwen2.5-Omni: what speaks is left aside
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration
    return transformers.AutoModelForImageTextToText if has_towers(config) else transformers.AutoModelForCausalLM


def has_towers(config: Any) -> bool:
    """Whether a model takes more than text."""
    return hasattr(config, "vision_config") or hasattr(config, "thinker_config")
