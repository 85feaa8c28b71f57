"""What is missing where a checkpoint is of no known family: one paragraph by its config, before anything is loaded."""

from typing import Any

from sensorium.models.model_classes import own_config
from sensorium.recipe.names import table
from sensorium.vocabulary.errors import nearest

KNOWN_LAYERS = ("qwen2", "qwen3", "llama", "mistral")
"""Language models whose layers engine and learner compute as they stand."""

REASONS = {
    "gemma3": "the tokens of one of its pictures see each other both ways, so that no chunk of a prompt, cached prefix or "
    "packed row may end inside a picture, and five of six layers see the last 1024 tokens only. Neither the engine's "
    "prefix cache nor the learner's shared prompts compute that, and leaving it out would train another model (its logits "
    "move by more than 2). Use Qwen2.5-VL, Qwen3-VL, InternVL3 or SmolVLM2",
}
"""Families that were looked at and are refused, with the reason."""


def unknown_type(model_type: str) -> str:
    """Why a checkpoint cannot be loaded whose ``model_type`` not even transformers knows."""
    from transformers import __version__

    return (
        f"its config.json names the model type '{model_type}', which transformers {__version__} does not know, so neither "
        f"its layers nor its towers are to be had{nearest(model_type, list(table('family')))} If the model type is right, "
        "a newer transformers may know it; a family of it would then have to be written (docs/families.md)."
    )


def missing_family(model_type: str, config: Any | None) -> str:
    """Why a checkpoint cannot be loaded, and what would have to be written for it."""
    if model_type in REASONS:
        return f"no adapter for model type '{model_type}': {REASONS[model_type]}."
    named = nearest(model_type, list(table("family")))
    if config is None:
        return f"no adapter for model type '{model_type}'{named}"
    own = own_config(config)
    towers = [kind for kind, key in TOWERS.items() if hasattr(own, key)]
    text = own.get_text_config()
    obstacles = list(_obstacles(text))
    if obstacles:
        return f"no adapter for model type '{model_type}'{named} Its language model has {' and '.join(obstacles)}, which " \
            "engine and learner do not compute, so that a family alone would not help."  # fmt: skip
    if not towers:
        return (
            f"no adapter for model type '{model_type}'{named} It is a model of text: if its layers are those of "
            f"{', '.join(KNOWN_LAYERS)}, register it with TextModel (docs/families.md)."
        )
    known = "" if text.model_type in KNOWN_LAYERS else ", if its layers are built as Qwen's are"
    return (
        f"no adapter for model type '{model_type}'{named} Engine and learner can compute its language model "
        f"({text.model_type}){known}. What is missing is how its {' and '.join(towers)} become tokens, positions and "
        "features: a media format and a family, about a hundred lines. docs/families.md shows how, by InternVL."
    )


TOWERS = {"pictures": "vision_config", "sounds": "audio_config"}


def _obstacles(text: Any) -> "list[str]":
    found = []
    kinds = set(getattr(text, "layer_types", None) or ())
    if "sliding_attention" in kinds or "chunked_attention" in kinds:
        found.append("layers that see a window of the text only")
    if any("linear" in kind or "mamba" in kind or "conv" in kind for kind in kinds):
        found.append("layers without attention over all tokens")
    return found
