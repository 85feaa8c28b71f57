"""The tensors of towers that are transformers' own, by name and shape, told from a config alone."""

from collections.abc import Callable, Iterator
from typing import Any

Shapes = Iterator[tuple[str, list[int]]]


def tower_tensors(config: dict[str, Any]) -> dict[str, list[int]] | None:
    """The tensors of a tower and its projector; None for a family whose towers are counted otherwise."""
    tell = FAMILIES.get(config.get("model_type", ""))
    return None if tell is None else dict(tell(config, config["vision_config"], config["text_config"]))


def _internvl(config: dict[str, Any], vision: dict[str, Any], text: dict[str, Any]) -> Shapes:
    hidden, at, size, patch = (
        vision["hidden_size"],
        "vision_tower",
        _first(vision["image_size"]),
        _first(vision["patch_size"]),
    )
    yield f"{at}.embeddings.cls_token", [1, 1, hidden]
    yield f"{at}.embeddings.position_embeddings", [1, (size // patch) ** 2 + 1, hidden]
    yield from _affine(f"{at}.embeddings.patch_embeddings.projection", [hidden, 3, patch, patch])
    for i in range(vision["num_hidden_layers"]):
        layer = f"{at}.encoder.layer.{i}"
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{layer}.attention.{name}.weight", [hidden, hidden]
            if vision.get("attention_bias"):
                yield f"{layer}.attention.{name}.bias", [hidden]
        yield from _affine(f"{layer}.attention.projection_layer", [hidden, hidden])
        for name in ("q_norm", "k_norm") if vision.get("use_qk_norm") else ():
            yield f"{layer}.attention.{name}.weight", [hidden]
        for name in ("lambda_1", "lambda_2"):
            yield f"{layer}.{name}", [hidden]
        for name in ("layernorm_before", "layernorm_after"):
            yield f"{layer}.{name}.weight", [hidden]
            if vision.get("norm_type") != "rms_norm":
                yield f"{layer}.{name}.bias", [hidden]
        yield from _affine(f"{layer}.mlp.fc1", [vision["intermediate_size"], hidden])
        yield from _affine(f"{layer}.mlp.fc2", [hidden, vision["intermediate_size"]])
    if not vision.get("use_mean_pooling", True):
        yield from _affine(f"{at}.layernorm", [hidden])
    shuffled = round(hidden / config.get("downsample_ratio", 0.5) ** 2)
    yield from _affine("multi_modal_projector.layer_norm", [shuffled])
    yield from _affine("multi_modal_projector.linear_1", [text["hidden_size"], shuffled])
    yield from _affine("multi_modal_projector.linear_2", [text["hidden_size"]] * 2)


def _smolvlm(config: dict[str, Any], vision: dict[str, Any], text: dict[str, Any]) -> Shapes:
    yield from _siglip("vision_model", vision)
    shuffled = vision["hidden_size"] * config.get("scale_factor", 2) ** 2
    yield "connector.modality_projection.proj.weight", [text["hidden_size"], shuffled]


def _llava_onevision(config: dict[str, Any], vision: dict[str, Any], text: dict[str, Any]) -> Shapes:
    yield from _siglip("vision_tower", vision)
    layers = config.get("vision_feature_layer", -1)
    seen = vision["hidden_size"] * (1 if isinstance(layers, int) else len(layers))
    yield "image_newline", [text["hidden_size"]]
    yield from _affine("multi_modal_projector.linear_1", [text["hidden_size"], seen])
    yield from _affine("multi_modal_projector.linear_2", [text["hidden_size"]] * 2)


def _siglip(at: str, vision: dict[str, Any]) -> Shapes:
    hidden, wide, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    yield f"{at}.embeddings.position_embedding.weight", [(vision["image_size"] // patch) ** 2, hidden]
    yield from _affine(f"{at}.embeddings.patch_embedding", [hidden, 3, patch, patch])
    for i in range(vision["num_hidden_layers"]):
        layer = f"{at}.encoder.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _affine(f"{layer}.self_attn.{name}", [hidden, hidden])
        yield from _affine(f"{layer}.layer_norm1", [hidden])
        yield from _affine(f"{layer}.layer_norm2", [hidden])
        yield from _affine(f"{layer}.mlp.fc1", [wide, hidden])
        yield from _affine(f"{layer}.mlp.fc2", [hidden, wide])
    yield from _affine(f"{at}.post_layernorm", [hidden])


def _affine(name: str, weight: list[int]) -> Shapes:
    """A weight and its bias."""
    yield f"{name}.weight", weight
    yield f"{name}.bias", weight[:1]


def _first(value: int | list[int]) -> int:
    return value if isinstance(value, int) else value[0]


FAMILIES: dict[str, Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], Shapes]] = {
    "internvl": _internvl,
    "llava_onevision": _llava_onevision,
    "smolvlm": _smolvlm,
}
