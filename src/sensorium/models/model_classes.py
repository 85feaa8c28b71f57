"""The transformers class that a checkpoint is loaded as, and how one is built of a config."""

import threading
from copy import deepcopy
from typing import Any

LOADING = threading.Lock()
"""While transformers builds a model it changes torch for the whole process: two threads would spoil each other's."""


def own_config(config: Any) -> Any:
    """The config of the model that is trained, as a copy: a loaded model's own is changed by its towers."""
    return deepcopy(getattr(config, "thinker_config", config))


def builder_of(model_class: Any) -> Any:
    """The function that builds a model from a config; auto classes and model classes name it differently."""
    return getattr(model_class, "from_config", None) or model_class._from_config


def model_class(config: Any) -> Any:
    """The transformers class that a checkpoint is loaded as."""
    import transformers

    if config.model_type.startswith("qwen3_omni_moe"):
        return transformers.Qwen3OmniMoeThinkerForConditionalGeneration
    if hasattr(config, "thinker_config"):  # a whole Qwen2.5-Omni: what speaks is left aside
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration
    return transformers.AutoModelForImageTextToText if has_towers(config) else transformers.AutoModelForCausalLM


def concrete_class(config: Any) -> Any:
    """The same class by its own name, where ``model_class`` is one that chooses by the config."""
    chosen = model_class(config)
    mapping = getattr(chosen, "_model_mapping", None)
    return chosen if mapping is None else mapping[type(config)]


def has_towers(config: Any) -> bool:
    """Whether a model takes more than text."""
    return hasattr(config, "vision_config") or hasattr(config, "thinker_config")
